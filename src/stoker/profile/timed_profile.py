"""The profile of a script whose batches are none of a DataLoader: what `stoker.timed` saw."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.feed.usage import read_usage
from stoker.launch.measure import FILE, MIN_STEPS
from stoker.profile.raw import RankResult
from stoker.records import Profile, read_json
from stoker.records.base import Value
from stoker.settings import PROFILE_ENDED_FILE

_TIMELINE = "timeline-rank0.csv"
NOTE = (
    "only the steps as they are: what makes the batches is not stoker's, so that neither a step "
    "with cached batches nor the cost of loading could be measured, and no plan is advised on it"
)
_CPU_NOTE = "the CPU is that of the script's own processes, with all they started"


def timed_profile(
    output: Path, ranks: Sequence[RankResult], *, what: Mapping[str, Value]
) -> Profile | None:
    """What is known by `stoker.timed`; None where a DataLoader was measured, or steps lack.

    Args:
        output: Folder of the leader, where its launcher left the profile.
        ranks: What the probe of DataLoaders found.
        what: Of the record.

    Raises:
        UsageError: If the launcher's file is malformed.
    """
    file = output / FILE
    if any(rank.accelerator for rank in ranks) or not file.exists():
        return None
    found = read_json(file, Profile)
    if not found.unmeasured:
        return None
    whole = {**found.what, **what, "notes": [NOTE, _CPU_NOTE]}
    whole = {name: value for name, value in whole.items() if name not in ("passive", "status")}
    return msgspec.structs.replace(found, what=whole)


def was_cut_off(output: Path) -> bool:
    """Whether the profile ended the leader's ranks: how others ended after that says nothing."""
    return (output / PROFILE_ENDED_FILE).exists()


def too_few(output: Path) -> str:
    """Why there is none, where the script uses `stoker.timed`; else nothing."""
    loaders = [own for usage in read_usage(output) for own in usage.loaders.values()]
    steps = [own.steps for own in loaders if own.is_elsewhere]
    if not steps or max(steps) >= MIN_STEPS:
        return ""
    return f"the script ended too soon: after {max(steps) + 1} batches of stoker.timed"


def keep_timed_timeline(output: Path, folder: Path) -> None:
    """Copies the steps to `folder`/baseline-timeline.csv."""
    if (output / _TIMELINE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(output / _TIMELINE, folder / "baseline-timeline.csv")
