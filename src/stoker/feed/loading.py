"""Files in which training processes report their steps, and which loaders they read.

At the end the leader's launcher reads them: were batches taken from the feed, and if not, why?
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.feed.timeline import MeasuredStep, steps_in
from stoker.feed.training_steps import has_no_step, read_timelines
from stoker.feed.wire.protocol import Progress

# By process, because a rank's launcher and helpers have its number, too.
_FILE = "loading-{pid}.json"

_TORCHS = "train with --replace-dataloader true, or import DataLoader from stoker"
_OWN = "give the library a loader of torch's or stoker's, or train without a data group"


class Unfed(msgspec.Struct, frozen=True):
    """File in which a rank tells its launcher why it takes no batches from data hosts."""

    rank: int
    text: str


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """What a process with torch trained on.

    Attributes:
        optimizer_steps: None: compiled ones were not counted.
        is_fed: A loader of stoker's was made or read under the data group.
        epochs: Epochs over loaders of stoker's that were begun, and not in their middle.
        seen: Class of a loader of torch's that was read without stoker; empty: none was.
        own: Loader classes of libraries whose modules were imported.
    """

    optimizer_steps: int | None = 0
    has_optimizer: bool = False
    is_fed: bool = False
    epochs: int = 0
    seen: str = ""
    own: tuple[str, ...] = ()

    @property
    def why_unfed(self) -> str:
        if self.seen:
            return f"{self.seen} is read without stoker; {_TORCHS}"
        if self.own:
            return f"{' or '.join(self.own)} makes batches in its own way; {_OWN}"
        return f"no loader of torch or stoker was read; {_OWN}"

    def write(self, output: Path, *, pid: int) -> None:
        path = output / _FILE.format(pid=pid)
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_bytes(msgspec.json.encode(self))
            path.with_suffix(".new").replace(path)


def read_loadings(output: Path) -> list[Loading]:
    found = []
    for path in sorted(output.glob(_FILE.format(pid="*"))):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Loading))
    return found


def discard_loadings(output: Path) -> None:
    for path in output.glob(_FILE.format(pid="*")):
        path.unlink(missing_ok=True)


def counted_steps(
    output: Path, timelines: Mapping[int, Sequence[MeasuredStep]], progress: Mapping[int, Progress]
) -> int | None:
    """Returns the steps of a run: batches of the training's loaders, else steps of an optimizer.

    0 only where a loader or an optimizer was there and did nothing; None: unknown.
    """
    batches = [steps_in(steps) for steps in timelines.values()]
    batches += [report.steps for report in progress.values()]
    if any(batches):
        return max(batches)
    loadings = read_loadings(output)
    steps = [each.optimizer_steps for each in loadings]
    if any(steps):
        return max(count or 0 for count in steps)
    if None in steps or any(each.seen for each in loadings):
        return None
    is_idle = has_no_step(output) or any(each.has_optimizer for each in loadings)
    return 0 if is_idle else None


def why_unfed(output: Path, progress: Mapping[int, Progress]) -> str:
    """Returns why no batch of a run came through the feed; empty: one did, or there was no step."""
    # Enough for most runs, and quicker than reading the timelines of days.
    if any(report.steps for report in progress.values()):
        return ""
    loadings, timelines = read_loadings(output), read_timelines(output)
    is_fed = any(each.is_fed for each in loadings)
    if timelines and is_fed:
        return ""
    if is_fed and any(each.epochs for each in loadings):
        why = "a loader of stoker's was read and gave no batch; is its dataset empty?"
    elif counted_steps(output, timelines, progress) == 0:
        # Nothing was missed: a training that was resumed after its last epoch.
        return ""
    else:
        # From the process that trained, or read something.
        told = max(
            loadings,
            key=lambda each: (bool(each.seen), bool(each.own), each.optimizer_steps or 0),
            default=Loading(),
        )
        why = told.why_unfed
    return f"no batch came from its data hosts: {why}"
