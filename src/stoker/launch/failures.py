"""Failures of ranks: what each of them wrote, and which of several was the first cause.

When one rank fails, the others fail a moment later because it is gone. Which of them is seen first
is chance, so that a failure that only says "my peer is gone" never counts as the cause while there
is another one.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.logs import parse_line
from stoker.platforms.processes import ended_words
from stoker.records.training import cause_of

# What gloo, NCCL, torch's store and a pipe say when a peer is gone.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|broken pipe|socket closed|peer|"
    r"DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)
# SIGTERM to the ranks that are left, and SIGABRT of NCCL's watchdog.
_ENDED_BY_OTHERS = (143, 134)
_FILE = "failure-rank{rank}.json"


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What the exception hook of a rank wrote."""

    rank: int
    host: str = ""
    type: str = ""
    message: str = ""
    traceback: str = ""

    def text(self) -> str:
        """The failure in words: one line, then the traceback."""
        return f"rank {self.rank} on {self.host}: {self.type}: {self.message}\n{self.traceback}"


def words_of_end(who: str, *, exit_code: int, stderr: str) -> str:
    """How a command ended that left no error of its own: one line with the cause, then its words.

    Args:
        who: Such as `the training command on algo-1`.
        exit_code: As a shell counts.
        stderr: The end of what it wrote there, between it lines of stoker's own log.
    """
    lines = [line for line in stderr.splitlines() if parse_line(line) is None]
    words = "\n".join(lines)[-2000:].strip()
    signal_number = exit_code - 128
    if 0 < signal_number < 65:
        first = f"{who} ended with {ended_words(-signal_number)}"
    else:
        said = cause_of(_traceback_in(words) or words.rpartition("\n")[2])
        if words.startswith("error:"):
            said = cause_of(words)
        first = f"{who} ended with exit code {exit_code}" + (f": {said}" if words else "")
    return first + (f"\n{words}" if words else "")


def _traceback_in(text: str) -> str:
    """The last traceback in a text, with what comes behind it; empty: there is none."""
    start = text.rfind("Traceback (most recent call last)")
    return text[start:] if start >= 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """A rank that ended badly; exit_code as a shell counts."""

    rank: int
    exit_code: int
    failure: RankFailure | None

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        if self.failure is None:
            return self.exit_code in _ENDED_BY_OTHERS
        return says_peer_is_gone(f"{self.failure.type}: {self.failure.message}")


def says_peer_is_gone(text: str) -> bool:
    """Whether an error's words say that another process is gone."""
    return bool(_PEER_IS_GONE.search(text))


def first_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """The failure that caused the others; `ends` in the order in which they were seen."""
    return next((end for end in ends if not end.is_consequence), ends[0])


def read_failure(output: Path, rank: int) -> RankFailure | None:
    """What rank `rank` wrote to the folder `output`, if it wrote something legible."""
    try:
        text = (output / _FILE.format(rank=rank)).read_bytes()
        return msgspec.json.decode(text, type=RankFailure)
    except (OSError, msgspec.DecodeError):
        return None


def read_failures(output: Path) -> list[RankFailure]:
    """What all ranks of this host wrote, by rank."""
    ranks = sorted(
        int(found.group(1))
        for path in output.glob(_FILE.format(rank="*"))
        if (found := re.fullmatch(r"failure-rank(\d+)\.json", path.name))
    )
    return [failure for rank in ranks if (failure := read_failure(output, rank))]


def forget_failures(output: Path) -> None:
    """Deletes what an earlier attempt left in `output`."""
    for path in output.glob(_FILE.format(rank="*")):
        path.unlink(missing_ok=True)
    for path in output.glob(_CAUSE.format(rank="*")):
        path.unlink(missing_ok=True)


# Written by the elastic launcher: which rank failed first. With its number in the name, for the
# files of several hosts may come to lie in one folder.
_CAUSE = "failure-cause-rank{rank}.json"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The first failing rank of this host and its exit code."""

    rank: int
    exit_code: int


def read_cause(output: Path) -> Cause | None:
    """The first failing rank of this host, where torchrun said it."""
    for path in sorted(output.glob(_CAUSE.format(rank="*"))):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=Cause)
    return None


def write_cause(output: Path, cause: Cause) -> None:
    """Keeps which rank failed first, for the launcher."""
    output.mkdir(parents=True, exist_ok=True)
    (output / _CAUSE.format(rank=cause.rank)).write_bytes(msgspec.json.encode(cause))
