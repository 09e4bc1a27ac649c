"""torchrun in this process, so that the first failing rank and its exit code are known.

torchrun itself always exits with 1. `job_environment` composes the command line.
"""

import json
import os
import signal
import sys
import types
from pathlib import Path

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
    try:
        run(get_args_parser().parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as err:
        failures = sorted(err.failures.items(), key=lambda item: item[1].timestamp)
        causes = [item for item in failures if not _is_consequence(item[1])] or failures
        rank, failure = causes[0]
        _write(rank, failure)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as err:
        # From torchrun's handler of SIGTERM; the ranks have ended.
        return 128 + int(err.sigval)
    return 0


def _is_consequence(failure: ProcessFailure) -> bool:
    """Whether a rank only lost another; which of them torchrun sees first is chance."""
    said = failure.error_file_data.get("message")
    if isinstance(said, dict):
        return says_peer_is_gone(str(said.get("message")))
    return failure.exitcode in _ENDED_BY_OTHERS


def _write(rank: int, failure: ProcessFailure) -> None:
    """Writes the rank's error file, with its rank, as that of this process."""
    said = failure.error_file_data.get("message")
    if not isinstance(said, dict):
        said = {"message": "", "extraInfo": {"py_callstack": ""}}
    said["extraInfo"]["rank"] = rank
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    file.write_text(json.dumps({"message": said}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
