"""Runs a TensorFlow server until it gets a signal: what `engine: tf.data.service` runs.

As `task` it is a worker or parameter server: ParameterServerStrategy needs one for each task but
the chief, which is the training. As `dispatcher` or `worker` it belongs to the tf.data service.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

from stoker.errors import StokerError, UsageError
from stoker.host import machine

# With TensorFlow's 30 s and 200 s, a training run waits for minutes for a dead worker.
HEARTBEAT_MS = 1_000
WORKER_TIMEOUT_MS = 15_000
# The launcher starts workers once the dispatcher listens.
DISPATCHER_TIMEOUT_MS = 60_000


def main(arguments: Sequence[str]) -> int:
    """Serves until a signal; returns 2 without TensorFlow."""
    parser = argparse.ArgumentParser(prog="tf_server")
    roles = parser.add_subparsers(dest="role", required=True)
    task = roles.add_parser("task")
    task.add_argument("name", choices=("worker", "ps"))
    task.add_argument("index", type=int)
    task.add_argument("tasks", nargs="+", metavar="NAME=ADDRESS:PORT,...", help="of the cluster")
    dispatcher = roles.add_parser("dispatcher")
    dispatcher.add_argument("--port", type=int, required=True)
    worker = roles.add_parser("worker")
    worker.add_argument("--dispatcher", required=True, metavar="ADDRESS:PORT")
    worker.add_argument("--address", required=True, metavar="ADDRESS:PORT", help="of this worker")
    worker.add_argument("--cores", type=int, default=0, help="to keep to; 0: all")
    options = parser.parse_args(arguments)
    try:
        match options.role:
            case "dispatcher":
                _dispatch(port=options.port)
            case "worker":
                _work(options.dispatcher, address=options.address, cores=options.cores)
            case _:
                _serve_task(options.name, options.index, options.tasks)
    except StokerError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code
    return 0


def _serve_task(name: str, index: int, tasks: Sequence[str]) -> None:
    tensorflow = _tensorflow()
    parted = [task.partition("=") for task in tasks]
    cluster = {job: addresses.split(",") for job, _, addresses in parted}
    num_tasks = sum(map(len, cluster.values()))
    server = tensorflow.distribute.Server(
        cluster,
        job_name=name,
        task_index=index,
        protocol="grpc",
        config=tensorflow.compat.v1.ConfigProto(
            # On a host with few cores, steps that wait for each other would use all threads.
            inter_op_parallelism_threads=max(machine.usable_vcpus(), num_tasks + 1)
        ),
        start=True,
    )
    print(f"{name} {index} listens: {server.target}", flush=True)
    _await_signal()
    _end()


def _dispatch(*, port: int) -> None:
    service = _tensorflow().data.experimental.service
    server = service.DispatchServer(
        service.DispatcherConfig(port=port, worker_timeout_ms=WORKER_TIMEOUT_MS)
    )
    print(f"the dispatcher of tf.data service listens on port {port}", flush=True)
    _await_signal()
    print(f"the dispatcher ends with {server._num_workers()} workers", flush=True)
    _end()


def _work(dispatcher: str, *, address: str, cores: int) -> None:
    # TensorFlow starts one thread per core.
    if cores and hasattr(os, "sched_setaffinity"):
        # The last ones: a training run on this host tends to use the first.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    service = _tensorflow().data.experimental.service
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
    _await_signal()
    print(f"the worker ends with {server._num_tasks()} tasks", flush=True)
    _end()


def _tensorflow() -> ModuleType:
    """Returns the module tensorflow, restricted to the CPU.

    Raises:
        UsageError: If it is not installed.
    """
    # Its servers must not take memory of the accelerators.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        return importlib.import_module("tensorflow")
    except ImportError as err:
        raise UsageError(
            f"this engine needs TensorFlow: {err}",
            where=f"Python {sys.executable}",
            fix="install tensorflow or tensorflow-cpu on all hosts: see docs/engines.md",
        ) from None


def _await_signal() -> None:
    is_asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_asked.set())
    is_asked.wait()


def _end() -> None:
    """Ends this process, which TensorFlow's threads would keep alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
