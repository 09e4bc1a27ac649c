"""Files in which training processes report their steps, and which loaders they read.

At the end the leader's launcher reads them: were batches taken from the feed, and if not, why?
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.feed import why_unfed as sentences
from stoker.feed.timeline import FILE as TIMELINE_FILE
from stoker.feed.timeline import MeasuredStep, read_timeline, steps_in, timeline_ranks
from stoker.feed.training_steps import has_no_step, read_timelines
from stoker.feed.why_unfed import WhyUnfed
from stoker.feed.wire.protocol import Progress
from stoker.records.training import UNHELPED

# By process, because a rank's launcher and helpers have its number, too.
_FILE = "loading-{pid}.json"
_MAX_REASONS = 3


class Unfed(msgspec.Struct, frozen=True):
    """File in which a rank tells its launcher why it takes no batches from data hosts.

    Attributes:
        text: Why, in words; empty: its Python has no stoker, see `Loading`.
        settle_seconds: How long another loader may take this back.
    """

    rank: int
    text: str = ""
    settle_seconds: float = 0.0
    python: str = ""
    version: str = ""
    problem: str = ""

    @property
    def words(self) -> str:
        if self.text:
            return self.text
        why = sentences.no_stoker(
            self.python, version=self.version, problem=self.problem, own=sys.executable
        )
        return f"the training takes no batches from its data hosts: {why.words}"


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """What a process with torch trained on.

    Attributes:
        optimizer_steps: None: compiled ones were not counted.
        is_fed: A loader of stoker's was made or read under the data group.
        epochs: Epochs over loaders of stoker's that were begun, and not in their middle.
        seen: Class of a loader of torch's that was read without stoker; empty: none was.
        own: Loader classes of libraries whose modules were imported.
        made: File and line at which the first loader of torch's was made; empty: none was.
        made_here: Why the trainer made batches of loaders without help, or hosts made none.
        refused: Of these, why loaders cannot be sent.
        python: Interpreter without stoker, or that stoker does not reach; empty: it has stoker.
        version: Its version.
        problem: What its import of stoker raised; empty: it ignores PYTHONPATH.
        options: With which it ignores PYTHONPATH.
    """

    optimizer_steps: int | None = 0
    has_optimizer: bool = False
    is_fed: bool = False
    epochs: int = 0
    seen: str = ""
    own: tuple[str, ...] = ()
    made: str = ""
    made_here: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    python: str = ""
    version: str = ""
    problem: str = ""
    options: tuple[str, ...] = ()

    @property
    def why_unfed(self) -> WhyUnfed:
        if self.python and not self.problem:
            return sentences.no_startup(self.python, options=self.options)
        if self.python:
            return sentences.no_stoker(
                self.python, version=self.version, problem=self.problem, own=sys.executable
            )
        if self.seen:
            return sentences.torchs_loader(self.seen)
        if self.own:
            return sentences.own_loader(self.own)
        if self.made and not self.epochs:
            return sentences.never_read(self.made)
        return sentences.no_loader()

    def write(self, output: Path, *, pid: int) -> None:
        path = output / _FILE.format(pid=pid)
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_bytes(msgspec.json.encode(self))
            path.with_suffix(".new").replace(path)


def read_loadings(output: Path) -> list[Loading]:
    loadings = []
    for path in sorted(output.glob(_FILE.format(pid="*"))):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            loadings.append(msgspec.json.decode(path.read_bytes(), type=Loading))
    return loadings


def discard_loadings(output: Path) -> None:
    for path in output.glob(_FILE.format(pid="*")):
        path.unlink(missing_ok=True)


def counted_steps(
    output: Path, timelines: Mapping[int, Sequence[MeasuredStep]], progress: Mapping[int, Progress]
) -> int | None:
    """Returns the steps of a run: batches of the training's loaders, else steps of an optimizer.

    0 only where a loader or an optimizer was there and did nothing; None: unknown.
    """
    num_batches = [steps_in(steps) for steps in timelines.values()]
    num_batches += [report.steps for report in progress.values()]
    if any(num_batches):
        return max(num_batches)
    loadings = read_loadings(output)
    # None: a compiled step counts none.
    optimizer_steps = [loading.optimizer_steps for loading in loadings]
    if any(optimizer_steps):
        return max(count or 0 for count in optimizer_steps)
    if None in optimizer_steps or any(loading.seen for loading in loadings):
        return None
    is_idle = has_no_step(output) or any(loading.has_optimizer for loading in loadings)
    return 0 if is_idle else None


def why_unfed(output: Path, progress: Mapping[int, Progress]) -> str:
    """Returns why no batch of a run came through the feed; empty: one did, or there was no step."""
    # Enough for most runs, and quicker than reading the timelines of days.
    if any(report.steps for report in progress.values()):
        return ""
    loadings = read_loadings(output)
    timelines = read_timelines(output)
    is_fed = any(loading.is_fed for loading in loadings)
    if timelines and is_fed:
        return ""
    if is_fed and any(loading.epochs for loading in loadings):
        why = sentences.empty_loader()
    elif counted_steps(output, timelines, progress) == 0:
        # Nothing was missed: a training run that was resumed after its last epoch.
        return ""
    else:
        # From the process that trained, or read something.
        clearest = max(
            loadings,
            key=lambda loading: (
                bool(loading.seen),
                bool(loading.own),
                loading.optimizer_steps or 0,
                bool(loading.made),
                bool(loading.python),
            ),
            default=Loading(),
        )
        why = clearest.why_unfed
    return f"{UNHELPED}: {why.words}"


def batches_by_host(progress: Mapping[int, Progress]) -> dict[str, int]:
    """Returns the batches that each data host made and a rank used."""
    counts = Counter[str]()
    for report in progress.values():
        for host in report.feed.hosts if report.feed else ():
            if not host.is_local:
                counts[host.host] += host.batches
    return counts


def all_batches(output: Path, progress: Mapping[int, Progress]) -> int:
    """Returns the batches of all loaders that the ranks took, wherever they were made.

    Of ranks on other hosts, whose timelines are there, those that they reported.
    """
    counts = Counter[int]()
    for rank, report in progress.items():
        counts[rank] = max(report.steps, report.feed.taken if report.feed else 0)
    for rank in timeline_ranks(output):
        rows = read_timeline(output / TIMELINE_FILE.format(rank=rank))
        counts[rank] = max(counts[rank], steps_in(rows))
    return counts.total()


def why_refused(output: Path, progress: Mapping[int, Progress]) -> str:
    """Returns why no data host made a batch: loaders cannot be sent; empty: another reason, or one
    did."""
    reasons = [reason for loading in read_loadings(output) for reason in loading.refused]
    return _made_here_words(reasons, progress)


def why_unhelped(output: Path, progress: Mapping[int, Progress]) -> str:
    """Returns why the trainer made all batches of a run that succeeded; empty: it did not."""
    reasons = [reason for loading in read_loadings(output) for reason in loading.made_here]
    return _made_here_words(reasons, progress)


def _made_here_words(reasons: Sequence[str], progress: Mapping[int, Progress]) -> str:
    distinct = list(dict.fromkeys(reasons))
    if not distinct or any(batches_by_host(progress).values()):
        return ""
    return f"{UNHELPED}: {sentences.made_here(distinct[:_MAX_REASONS]).words}"
