"""The report's rows on the memory of a run's hosts."""

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.record_words import PROFILE_SAYS, memory_cause
from stoker.records import HostMemory, Profile, Training
from stoker.records.profile import NEAR_LIMIT
from stoker.units import count, percent, size

# More hosts are in training.json.
_MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A host's cells."""

    host: str
    used: str
    limit: str
    swapped: str
    waiting: str
    killed: str


@dataclass(frozen=True, slots=True)
class MemoryStory:
    """The report's figures on memory.

    Attributes:
        rows: The hosts, those nearest to their limit first.
        num_left_out: Hosts without a row.
        line: Whether memory was short, and why.
    """

    rows: tuple[MemoryRow, ...]
    num_left_out: int
    line: str


def memory_story(
    training: Training | None, *, profile: Profile | None, names: Mapping[str, str]
) -> MemoryStory | None:
    """Returns what the report says of memory; None: it was not looked at.

    Args:
        training: The run's record.
        profile: What a profile saw of the same script, if there is one.
        names: Shown names of hosts.
    """
    if training is None or not training.memory:
        return None
    nearest = sorted(training.memory, key=lambda host: -host.share)
    rows = [_row(host, names.get(host.host, host.host)) for host in nearest[:_MAX_ROWS]]
    cause = memory_cause(training, profile, names=names)
    line = f"No host came near its limit ({percent(NEAR_LIMIT)} of it)."
    if cause:
        short, _, advice = cause.partition(PROFILE_SAYS)
        line = f"Memory was short: {short}."
        if advice:
            line += f" The profile says what takes it: {advice}."
        if profile is None or not profile.memory_fixes:
            line += " stoker profile, with the same command, names what takes it."
    return MemoryStory(rows=tuple(rows), num_left_out=len(nearest) - len(rows), line=line)


def _row(host: HostMemory, name: str) -> MemoryRow:
    whose = "its own limit" if host.limited_by == "cgroup" else "the machine"
    waiting = "as many as set"
    if host.least_share < 1:
        waiting = f"lowered to {percent(host.least_share)} of feed.max_bytes"
    killed = "none"
    if host.kills:
        killed = count(host.kills, "process", "processes")
    swapped = "nothing"
    if host.swapped_bytes:
        swapped = size(host.swapped_bytes)
    return MemoryRow(
        host=name,
        used=f"{size(host.peak_bytes)} ({percent(host.share)})",
        limit=f"{size(host.limit_bytes)}, {whose}",
        swapped=swapped,
        waiting=waiting,
        killed=killed,
    )
