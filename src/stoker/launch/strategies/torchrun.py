"""torchrun in this process, so that the first failing rank and its exit code are known.

torchrun itself always exits with 1. `start` composes the command line.
"""

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import types
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Operators on tensors without data (torch.compile) take 45% of torch's import: 3.2 -> 1.8
    # CPU-seconds on an AMD EPYC, 2026-11-22. This process has no tensors; its ranks, other
    # processes, import all of torch.
    sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from stoker import environment
from stoker.launch.finish import RankEnd, first_cause, read_failure, write_cause


def main(arguments: list[str]) -> int:
    """Runs the ranks of this host; returns the exit code of the one that failed first."""
    output = environment.from_environment().output
    options = get_args_parser().parse_args(arguments)
    try:
        _run(options, output)
    except ChildFailedError as err:
        failures = sorted(err.failures.items(), key=lambda item: item[1].timestamp)
        ends = [
            RankEnd(
                rank=rank,
                exit_code=failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode,
                failure=read_failure(output, rank) if output else None,
            )
            for rank, failure in failures
        ]
        cause = first_cause(ends)
        if output:
            write_cause(output, cause.rank)
        return cause.exit_code
    except SignalException as err:
        # From torchrun's handler of SIGTERM; the ranks have ended.
        return 128 + int(err.sigval)
    return 0


def _run(options: Namespace, output: Path | None) -> None:
    """Runs the ranks, and deletes torchrun's log files after them."""
    if options.log_dir:
        # PET_LOG_DIR: the user keeps them.
        run(options)  # type: ignore[no-untyped-call]
        return
    options.log_dir = tempfile.mkdtemp(prefix="torchelastic-", dir=output)
    try:
        run(options)  # type: ignore[no-untyped-call]
    finally:
        # The ranks have ended. When another host's rank has failed too, the launcher's SIGTERM may
        # arrive now, and torchrun's handler would raise in the middle of the deletion.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shutil.rmtree(options.log_dir, ignore_errors=True)


def _leave(code: int) -> NoReturn:
    """Ends this process as Python does, but without the teardown of torch (0.5 CPU-seconds).

    The job waits for this process; its memory and sockets end with it anyway.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
