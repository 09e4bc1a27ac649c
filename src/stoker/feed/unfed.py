"""Detection, by optimizer steps, of a training run that takes no batches from its data hosts.

Nothing fails then, and data hosts would idle as long as the training lasts. Optimizer steps show
that batches came: a log line says so at the first ones, and the run's record (`feed.loading`).
"""

import atexit
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch.utils.data
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.environment import RELEASED_FILE, ProcessSettings, from_environment, unfed_file
from stoker.feed import why_unfed as sentences
from stoker.feed.bookkeeping import MAKERS, TrainerProcess, known_process, this_process
from stoker.feed.data_worker import is_worker
from stoker.feed.foreign_loaders import own_loaders
from stoker.feed.rank_reports import Loading, Unfed
from stoker.logs import EventName, Log

_FEED = "stoker.feed.remote_iterators"
# A script may take some steps on batches of zeros before it reads its first one.
ENOUGH_STEPS = 20
# A loader that was refused may be read before the training's, as for a mean over the data.
_SETTLE_SECONDS = 10.0
_WRITE_SECONDS = 1.0
_UNFED = "the training takes no batches from its data hosts: {why}"

TorchLoader = torch.utils.data.DataLoader[object]


@dataclass(slots=True)
class OptimizerWatch:
    """Counter of a process's optimizer steps; warns at the first ones that it is not fed."""

    settings: ProcessSettings
    log: Log
    # Once it is known to train: no spawned worker or helper must take its place.
    process: Callable[[], TrainerProcess] = this_process
    # There is a data group that should feed it.
    is_planned: bool = True
    clock: Callable[[], float] = time.monotonic
    # The class of a loader of torch that was read, without stoker's iterators.
    seen: str = ""
    # File and line at which the first loader of torch was made.
    made: str = ""
    num_steps: int = 0
    is_compiled: bool = False
    _has_said: bool = field(default=False)
    _is_done: bool = field(default=False)
    _write_at: float = field(default=0.0)

    def step(self) -> None:
        if torch.compiler.is_compiling():
            # A compiled program may do no more than this here.
            self.is_compiled = True
            return
        self.num_steps += 1
        if self.is_planned and not self._is_done:
            self._look()
        now = self.clock()
        if now >= self._write_at:
            # At once, for processes that leave by os._exit.
            self._write_at = now + _WRITE_SECONDS
            self.write()

    def write(self) -> None:
        if self.settings.output is not None:
            self.loading().write(self.settings.output, pid=os.getpid())

    def loading(self) -> Loading:
        process = known_process()
        return Loading(
            optimizer_steps=self.num_steps or (None if self.is_compiled else 0),
            has_optimizer=bool(self.num_steps) or _has_optimizer(Optimizer),
            is_fed=self.is_fed() or bool(process and process.made_here),
            epochs=process.timeline.begun if process else 0,
            seen=self.seen,
            own=tuple(own_loaders()),
            made=self.made,
            made_here=tuple(process.made_here) if process else (),
            refused=tuple(process.refused) if process else (),
        )

    @staticmethod
    def is_fed() -> bool:
        # Only a loader of stoker that is made or read imports the feed.
        return _FEED in sys.modules

    def _look(self) -> None:
        reasons = _reasons_here()
        if self.is_fed() and not reasons:
            return
        # Of its loaders a line each has said it already.
        why = sentences.made_here(reasons) if reasons else self.loading().why_unfed
        text = _UNFED.format(why=why.words)
        is_enough = bool(reasons) or self.num_steps >= ENOUGH_STEPS
        may_say = self.seen or own_loaders() or is_enough
        if may_say and not (reasons or self._has_said):
            self._has_said = True
            if self.settings.rank == 0:
                self.log.event(EventName.FEED_UNUSED, text=text)
        if is_enough:
            self._is_done = True
            if self.settings.output is not None:
                _tell_launcher(self.process(), Unfed(self.settings.rank, text))


def say_made_here(process: TrainerProcess) -> None:
    """Tells the launcher that the trainer makes the batches of all loaders so far, before any step.

    It waits a moment for one that data hosts can serve, which takes the word back (`is_released`).
    """
    rank = process.settings.rank
    why = sentences.made_here(process.made_here)
    if process.settings.output is not None and not process.fed_loaders:
        text = _UNFED.format(why=why.words)
        _tell_launcher(process, Unfed(rank, text, settle_seconds=_SETTLE_SECONDS))


def _tell_launcher(process: TrainerProcess, word: Unfed) -> None:
    settings = process.settings
    assert settings.output is not None
    process.said_unfed = True
    path = settings.output / unfed_file(settings.rank)
    path.with_suffix(".new").write_bytes(msgspec.json.encode(word))
    path.with_suffix(".new").replace(path)


def _reasons_here() -> Sequence[str]:
    """Returns why the trainer makes the batches of all loaders; empty: data hosts serve one."""
    process = known_process()
    return () if process is None or process.fed_loaders else process.made_here


def _has_optimizer(kind: type[Optimizer]) -> bool:
    """Returns whether an optimizer of that class was made: the first one has its step hooked."""
    return getattr(kind.step, "hooked", False) or any(map(_has_optimizer, kind.__subclasses__()))


def install(dataloader_class: type[TorchLoader]) -> None:
    if is_worker():
        return
    settings = from_environment()
    watch = OptimizerWatch(
        settings,
        Log(run=settings.run_id, host=settings.host),
        is_planned=settings.has_data_group and bool(settings.coordinator),
    )
    _see_loaders(dataloader_class, watch)
    pid = os.getpid()

    def before_step(optimizer: Optimizer, arguments: object, keywords: object) -> None:
        watch.step()

    def at_exit() -> None:
        # A forked child inherits the handler, and must not write.
        if os.getpid() == pid:
            watch.write()

    register_optimizer_step_pre_hook(before_step)
    atexit.register(at_exit)


def _see_loaders(dataloader_class: type[TorchLoader], watch: OptimizerWatch) -> None:
    """Watches loaders that are read with torch's iterators; stoker's class has its own."""
    original: Callable[[TorchLoader], _BaseDataLoaderIter] = dataloader_class._get_iterator

    def _get_iterator(self: TorchLoader) -> _BaseDataLoaderIter:
        iterator = original(self)
        if not watch.seen and not type(iterator).__module__.startswith("stoker."):
            watch.seen = f"{type(self).__module__}.{type(self).__qualname__}"
        return iterator

    init = dataloader_class.__init__

    @functools.wraps(init)
    def noted(self: TorchLoader, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        watch.made = watch.made or _place_of_making()

    dataloader_class.__init__ = noted  # type: ignore[method-assign]
    # By its module `stoker.timed` knows whether a loader is timed already.
    _get_iterator.__module__ = original.__module__
    dataloader_class._get_iterator = _get_iterator  # type: ignore[method-assign]


def _place_of_making() -> str:
    """Returns file and line of the innermost call outside of torch and stoker."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        module, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
        if module not in MAKERS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_released(process: TrainerProcess) -> bool:
    """Returns whether the data hosts were released, to a rank that asks for a batch after all."""
    settings = process.settings
    if not process.said_unfed or settings.output is None:
        return False
    # The launcher writes its file, then looks for the ranks' again: one of the two sees the other.
    (settings.output / unfed_file(settings.rank)).unlink(missing_ok=True)
    return (settings.output / RELEASED_FILE).exists()
