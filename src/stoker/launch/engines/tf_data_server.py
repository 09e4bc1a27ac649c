"""`python -m stoker.launch.engines.tf_data_server` runs a dispatcher or worker of tf.data."""

import argparse
import os
import sys
from collections.abc import Sequence

from stoker.errors import StokerError
from stoker.launch.engines.tensorflow import end, imported, until_asked

# TensorFlow's own 30 s and 200 s leave a training with a dead worker waiting for minutes.
HEARTBEAT_MS = 1_000
WORKER_TIMEOUT_MS = 15_000
# The launcher starts workers once the dispatcher listens.
DISPATCHER_TIMEOUT_MS = 60_000


def main(arguments: Sequence[str]) -> int:
    """Serves until it is asked to end; returns 2 without TensorFlow."""
    parser = argparse.ArgumentParser(prog="tf_data_server")
    roles = parser.add_subparsers(dest="role", required=True)
    dispatcher = roles.add_parser("dispatcher")
    dispatcher.add_argument("--port", type=int, required=True)
    worker = roles.add_parser("worker")
    worker.add_argument("--dispatcher", required=True, metavar="ADDRESS:PORT")
    worker.add_argument("--address", required=True, metavar="ADDRESS:PORT", help="of this worker")
    worker.add_argument("--cores", type=int, default=0, help="to keep to; 0: all")
    options = parser.parse_args(arguments)
    try:
        if options.role == "dispatcher":
            _dispatch(port=options.port)
        else:
            _work(options.dispatcher, address=options.address, cores=options.cores)
    except StokerError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code
    return 0


def _dispatch(*, port: int) -> None:
    service = imported().data.experimental.service
    server = service.DispatchServer(
        service.DispatcherConfig(port=port, worker_timeout_ms=WORKER_TIMEOUT_MS)
    )
    print(f"the dispatcher of tf.data service listens on port {port}", flush=True)
    until_asked()
    print(f"the dispatcher ends with {server._num_workers()} workers", flush=True)
    end()


def _work(dispatcher: str, *, address: str, cores: int) -> None:
    _keep_to(cores)
    service = imported().data.experimental.service
    server = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=dispatcher,
            worker_address=address,
            port=int(address.rpartition(":")[2]),
            heartbeat_interval_ms=HEARTBEAT_MS,
            dispatcher_timeout_ms=DISPATCHER_TIMEOUT_MS,
        )
    )
    print(f"a worker of tf.data service listens on {address}", flush=True)
    until_asked()
    print(f"the worker ends with {server._num_tasks()} tasks", flush=True)
    end()


def _keep_to(cores: int) -> None:
    """Keeps this process to that many cores: TensorFlow makes one thread for each core."""
    if cores and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        # The last ones: what trains next to it tends to begin with the first.
        os.sched_setaffinity(0, allowed[-cores:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
