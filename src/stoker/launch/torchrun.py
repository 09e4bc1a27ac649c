"""torchrun in this process, so that the first failing rank and its exit code are known.

torchrun itself always exits with 1. `job_environment` composes the command line.
"""

import atexit
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Operators on tensors without data (torch.compile) take 45% of torch's import: 3.2 -> 1.8
    # CPU-seconds on an AMD EPYC, 2026-11-22. This process has no tensors; its ranks, other
    # processes, import all of torch.
    sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser, run

from stoker.failure_reasons import says_peer_is_gone

# Ended by SIGTERM, as torchrun ends the remaining ranks, or by SIGABRT, as NCCL's watchdog does.
_ENDED_BY_OTHERS = (-signal.SIGTERM, -signal.SIGABRT)


def main(arguments: list[str]) -> int:
    """Runs the ranks of this host; returns the exit code of the one that failed first."""
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    options = get_args_parser().parse_args(arguments)
    # PET_LOG_DIR: the user keeps them.
    kept = options.log_dir
    options.log_dir = kept or tempfile.mkdtemp(prefix="torchelastic-", dir=error_file.parent)
    try:
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as err:
        failures = sorted(err.failures.items(), key=lambda item: item[1].timestamp)
        causes = [item for item in failures if not _is_consequence(item[1])] or failures
        rank, failure = causes[0]
        _write(error_file, rank, failure)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as err:
        # From torchrun's handler of SIGTERM; the ranks have ended.
        return 128 + int(err.sigval)
    finally:
        # The ranks have ended. When another host's rank has failed too, the launcher's SIGTERM may
        # arrive now, and torchrun's handler would raise in the middle of the deletion.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not kept:
            shutil.rmtree(options.log_dir, ignore_errors=True)
    return 0


def _is_consequence(failure: ProcessFailure) -> bool:
    """Whether a rank only lost another; which of them torchrun sees first is chance."""
    said = failure.error_file_data.get("message")
    if isinstance(said, dict):
        return says_peer_is_gone(str(said.get("message")))
    return failure.exitcode in _ENDED_BY_OTHERS


def _write(error_file: Path, rank: int, failure: ProcessFailure) -> None:
    """Writes the rank's error file, with its rank, as that of this process."""
    said = failure.error_file_data.get("message")
    if not isinstance(said, dict):
        said = {"message": "", "extraInfo": {"py_callstack": ""}}
    said["extraInfo"]["rank"] = rank
    error_file.write_text(json.dumps({"message": said}), encoding="utf-8")


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
