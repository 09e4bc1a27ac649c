"""A training that takes no batches from its data hosts says so in its log, at its first steps.

Libraries have loaders of their own, and scripts forget the changed import: nothing fails then, and
data hosts would idle for as long as the training lasts. Optimizer steps tell that batches came.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch.utils.data
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.feed.own_loaders import own_loaders
from stoker.feed.process import TrainerProcess, Unfed, this_process
from stoker.logs import Log
from stoker.settings import RELEASED_FILE, ProcessSettings, from_environment, unfed_file

_FEED = "stoker.feed.remote_iterators"
# A script may take some steps on batches of zeros before it reads its first one.
ENOUGH_STEPS = 20

_REPLACE = "run it with `stoker train --replace-dataloader`, or import DataLoader from stoker"
_OWN = (
    "give the library a loader of stoker's or torch's (with --replace-dataloader), or train "
    "without a data group"
)

AnyLoader = torch.utils.data.DataLoader[object]


@dataclass(slots=True)
class UnfedWatch:
    """Counts the optimizer steps of a process that has not asked for a batch of the feed.

    Args:
        process: Returns it, once it is known to train: others (a worker that was spawned, a script
            next to the training) must not take its place.

    Attributes:
        seen: The class of a loader of torch that was read, without stoker's iterators.
    """

    settings: ProcessSettings
    log: Log
    process: Callable[[], TrainerProcess] = this_process
    seen: str = ""
    num_steps: int = 0
    _has_said: bool = field(default=False)

    def step(self) -> bool:
        """Counts an optimizer step; False: there is no more to watch."""
        if self.is_fed():
            return False
        self.num_steps += 1
        owns = own_loaders()
        if (self.seen or owns) and not self._has_said:
            self._say(owns)
        if self.num_steps < ENOUGH_STEPS:
            return True
        if not self._has_said:
            self._say(owns)
        self._leave_word(owns)
        return False

    @staticmethod
    def is_fed() -> bool:
        """Returns whether a loader of stoker was made or read here: only that imports the feed."""
        return _FEED in sys.modules

    def words(self, owns: list[str]) -> str:
        """Returns what is wrong, and what helps."""
        if self.seen:
            what, helps = f"{self.seen} is read without stoker", _REPLACE
        elif owns:
            what, helps = f"{' or '.join(owns)} makes batches in its own way", _OWN
        else:
            what, helps = "no loader of torch or stoker was read", _OWN
        return f"the training takes no batches from its data hosts: {what}; {helps}"

    def _say(self, owns: list[str]) -> None:
        self._has_said = True
        if self.settings.rank == 0:
            self.log.event("feed_not_asked", text=self.words(owns))

    def _leave_word(self, owns: list[str]) -> None:
        settings = self.settings
        if settings.output is None:
            return
        self.process().said_unfed = True
        word = Unfed(rank=settings.rank, text=self.words(owns))
        path = settings.output / unfed_file(settings.rank)
        path.with_suffix(".new").write_bytes(msgspec.json.encode(word))
        path.with_suffix(".new").replace(path)


def install(dataloader_class: type[AnyLoader]) -> None:
    """Watches this process, if it trains under a data group of stoker's feed."""
    if torch.utils.data.get_worker_info() is not None:
        return
    settings = from_environment()
    if not settings.has_data_group or not settings.coordinator:
        return
    watch = UnfedWatch(settings, Log(run=settings.run_id, host=settings.host))
    _see_loaders(dataloader_class, watch)

    def before_step(optimizer: Optimizer, arguments: object, keywords: object) -> None:
        if not watch.step():
            handle.remove()

    handle = register_optimizer_step_pre_hook(before_step)


def _see_loaders(dataloader_class: type[AnyLoader], watch: UnfedWatch) -> None:
    """Watches subclasses of torch's loader that keep its iterators; stoker's has its own."""
    original: Callable[[AnyLoader], _BaseDataLoaderIter] = dataloader_class._get_iterator

    def _get_iterator(self: AnyLoader) -> _BaseDataLoaderIter:
        kind = type(self)
        watch.seen = watch.seen or f"{kind.__module__}.{kind.__qualname__}"
        return original(self)

    dataloader_class._get_iterator = _get_iterator  # type: ignore[method-assign]


def is_released(process: TrainerProcess) -> bool:
    """Returns whether the data hosts are given back because no rank had asked for a batch.

    To be called by a rank that is about to ask for one after all.
    """
    settings = process.settings
    if not process.said_unfed or settings.output is None:
        return False
    # First the word is taken back, then the file is looked for. The launcher does the opposite: it
    # writes the file, and then looks at the words again. So one of the two sees the other.
    (settings.output / unfed_file(settings.rank)).unlink(missing_ok=True)
    return (settings.output / RELEASED_FILE).exists()
