"""Files in which training processes report their steps, and why data hosts made no batch.

Nothing fails where a training takes no batches from its data hosts, which would idle as long as it
lasts. Optimizer steps show that batches came: a log line says so after some of them. At the end the
leader's launcher reads the files: were batches taken from the feed, and if not, why?
"""

import atexit
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.environment import ProcessSettings, from_environment
from stoker.feed.bookkeeping import known_process
from stoker.feed.engine.run_messages import Progress
from stoker.feed.foreign_loaders import is_worker, own_loaders
from stoker.feed.timeline import MeasuredStep, steps_in, timeline_ranks
from stoker.logs import EventName, Log
from stoker.records.training import UNHELPED

# By process, because a rank's launcher and helpers have its number, too.
_FILE = "loading-{pid}.json"
_MAX_REASONS = 3
# A script may take some steps on batches of zeros before it reads its first one.
ENOUGH_STEPS = 20
_WRITE_SECONDS = 1.0
NOT_LOADED = (
    "no process of the command has loaded torch and stoker; install stoker in the Python that runs "
    "the script, and start it without -I, -E and -S"
)


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """What a process trained on.

    Attributes:
        made_here: Why the trainer made batches of loaders without help, or hosts made none.
        why: What else keeps batches of data hosts away; empty: nothing.
    """

    optimizer_steps: int = 0
    made_here: tuple[str, ...] = ()
    why: str = ""

    def write(self, output: Path, *, pid: int) -> None:
        path = output / _FILE.format(pid=pid)
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_bytes(msgspec.json.encode(self))
            path.with_suffix(".new").replace(path)


# ---- in a training process


@dataclass(slots=True)
class OptimizerWatch:
    """Counter of a process's optimizer steps; warns after some that it is not fed.

    Attributes:
        is_planned: There is a data group that should feed it.
    """

    settings: ProcessSettings
    log: Log
    is_planned: bool = True
    num_steps: int = 0
    write_at: float = 0.0

    def step(self, *_: object) -> None:
        if sys.modules["torch"].compiler.is_compiling():
            # A compiled program may do no more than this here: its steps are not counted.
            return
        self.num_steps += 1
        is_time = self.num_steps == ENOUGH_STEPS and self.is_planned
        # Of loaders of stoker that are made here a line each has said it already.
        if is_time and self.settings.rank == 0 and (why := self.why()):
            text = f"the training takes no batches from its data hosts: {why}"
            self.log.event(EventName.FEED_UNUSED, text=text)
        now = time.monotonic()
        if now >= self.write_at:
            # At once, for processes that leave by os._exit.
            self.write_at = now + _WRITE_SECONDS
            self.write()

    def write(self) -> None:
        if self.settings.output is None:
            return
        process = known_process()
        loading = Loading(
            optimizer_steps=self.num_steps,
            made_here=tuple(process.made_here) if process else (),
            why=self.why(),
        )
        loading.write(self.settings.output, pid=os.getpid())

    def why(self) -> str:
        """Returns why no batch comes from data hosts, as far as it is known; empty: one may."""
        process = known_process()
        if process is not None and process.timeline.whole.steps:
            return ""
        if not self.settings.replace_dataloader:
            return (
                "feed.replace_dataloader is false, and no batch of a loader of stoker's class was "
                "read; train with --replace-dataloader true, or import DataLoader from stoker"
            )
        what = "no batch of a loader of torch or stoker was read"
        if own_loaders():
            what = f"{' or '.join(own_loaders())} makes batches in its own way"
        return (
            f"{what}; give the library a loader of torch's or stoker's, or train without a data "
            "group"
        )


def install(_: object) -> None:
    """Has this process count its optimizer's steps, and write its report; torch is imported."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if is_worker():
        return
    settings = from_environment()
    log = Log(run=settings.run_id, host=settings.host)
    is_planned = settings.has_data_group and bool(settings.coordinator)
    watch = OptimizerWatch(settings, log, is_planned)
    pid = os.getpid()

    def at_exit() -> None:
        # A forked child inherits the handler, and must not write.
        if os.getpid() == pid:
            watch.write()

    if is_planned:
        # The launcher sees that the script's Python has stoker.
        watch.write()
    register_optimizer_step_pre_hook(watch.step)
    atexit.register(at_exit)


# ---- in the leader's launcher


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

    0 only where a loader was there and gave nothing; None: unknown.
    """
    num_batches = [*map(steps_in, timelines.values())]
    num_batches += [report.steps for report in progress.values()]
    steps = [loading.optimizer_steps for loading in read_loadings(output)]
    known = max(num_batches, default=0) or max(steps, default=0)
    return known or (0 if timeline_ranks(output) else None)


def why_unfed(output: Path, progress: Mapping[int, Progress]) -> str:
    """Returns why data hosts made no batch of a run; empty: they did, or there was no step."""
    if any(batches_by_host(progress).values()):
        return ""
    # The process that trained comes first.
    loadings = sorted(read_loadings(output), key=lambda loading: -loading.optimizer_steps)
    whys = [loading.why for loading in loadings if loading.why]
    made_here = dict.fromkeys(why for loading in loadings for why in loading.made_here)
    if made_here:
        why = f"the trainer made all batches: {'; '.join([*made_here][:_MAX_REASONS])}"
    elif any(report.steps for report in progress.values()) or (loadings and not whys):
        # Local workers made them all, which is what a plan may want; or nothing was missed: a
        # training run that was resumed after its last epoch.
        return ""
    else:
        why = whys[0] if whys else NOT_LOADED
    return f"{UNHELPED}: {why}"


def batches_by_host(progress: Mapping[int, Progress]) -> dict[str, int]:
    """Returns the batches that each data host made and a rank used."""
    counts = Counter[str]()
    for report in progress.values():
        for host in report.feed.hosts if report.feed else ():
            if not host.is_local:
                counts[host.host] += host.batches
    return counts


def all_batches(progress: Mapping[int, Progress]) -> int:
    """Returns the batches that the ranks took, wherever they were made, as they reported."""
    counts = [max(each.steps, each.feed.taken if each.feed else 0) for each in progress.values()]
    return sum(counts)
