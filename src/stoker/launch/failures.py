"""Why a training failed: the rank that failed first, in words, and output/failure.

A rank that fails leaves torchelastic's error file (TORCHELASTIC_ERROR_FILE): its exception hook in
`startup` writes it, or torch's `record`. `torchrun` keeps that of the rank that failed first.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.failure_reasons import (
    is_of_another,
    reason_of_failure,
    said_in,
    shortened,
    without_events,
)
from stoker.launch.process import Ending
from stoker.logs import EventName, Log
from stoker.records import write_text

ERROR_FILE = "error.json"
# SageMaker shows the first 1024 characters of output/failure as the job's FailureReason.
FAILURE_CHARACTERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank's failure as its error file says it; `raised` is empty if it left none."""

    rank: int
    raised: str
    traceback: str


def read_failure(output: Path) -> RankFailure | None:
    try:
        said = json.loads((output / ERROR_FILE).read_bytes())["message"]
        more = said["extraInfo"]
        return RankFailure(
            rank=int(more.get("rank", 0)),
            raised=str(said["message"]),
            traceback=str(more["py_callstack"]),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def failure_of(ending: Ending, *, host: str, output: Path) -> str:
    """Returns why a host's command failed: a line with the cause, then its last output."""
    head = f"{ending.killed_for_memory}\n" if ending.killed_for_memory else ""
    failure = read_failure(output)
    who = f"rank {failure.rank}" if failure else "the training command"
    # A process that started others knows only that one of them failed; their output says why.
    if failure and failure.raised and not is_of_another(failure.raised):
        cause = said_in(failure.traceback.splitlines()) or failure.raised
        return f"{head}{who} on {host}: {cause}\n{failure.traceback}"
    lines = without_events(ending.stderr.splitlines())
    reason = reason_of_failure(lines, who=f"{who} on {host}", exit_code=ending.exit_code)
    words = "\n".join(lines)[-2000:].strip()
    return f"{head}{reason}\n{words}".rstrip()


def write_failure(base_dir: Path, failure: str, log: Log) -> None:
    """Writes output/failure, which the service shows as the job's reason; an error is logged."""
    text = shortened(failure, most=FAILURE_CHARACTERS)
    try:
        write_text(base_dir / "output" / "failure", text)
    except UsageError as err:
        # Other hosts must learn of the end even if this disk is full.
        log.event(EventName.RECORD_WRITE_FAILED, text=err.what)
