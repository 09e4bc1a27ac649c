"""Loaders without workers: in step with the loop, fed ahead only where that is no difference.

torch makes nothing for them before it is asked, so each batch shows what the script has changed.
The first batches are made here, one by one (for stoker's own class on data hosts), and dataset and
sampler are compared before and after the script has control. If nothing changes, data hosts make
batches ahead from then on; until the first of them is ready the trainer makes them, as it does
alone. The comparison continues: after a change what was made ahead is discarded, and the trainer
makes the rest of the epoch from the same indices.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from torch.utils.data import DataLoader

from stoker.feed.bookkeeping import LoaderBooks
from stoker.feed.changes import Depth, Watch, forget, making, path_of_waiting
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.global_draws import both_samplers, changed_marks, is_torchs, marks
from stoker.feed.iterators import TrainerMaker
from stoker.feed.seeding import Numbered, Seeding
from stoker.feed.tolerance import OnError
from stoker.records import FeedSettings

# A replay buffer, a curriculum, a sampler that follows the loss change with the first step.
NUM_TRIED = 2
# A sampler of the script may read anything, and wait for it: fewer when its epoch ends before.
NUM_TRIED_OF_USERS = 64
# Attributes of torch's samplers for what they only count.
_COUNTED = ("data_source", "dataset")
# A change in the middle of one epoch may be the only one; after two the loader is not fed again.
MAX_CHANGED_EPOCHS = 2

# Why not ahead, as half a sentence.
NO_BATCH_AHEAD = "num_workers=0 means that no batch is made before it is asked for"

InStepPlace = Literal["fed", "tried", "here"]
Say = Callable[[str, str, bool], None]


class InStep:
    """One loader without workers, epoch by epoch.

    Attributes:
        place: fed: data hosts make batches ahead; tried: made here until it is known that the
            script changes nothing; here: made here until the end of the epoch.
    """

    def __init__(
        self,
        loader: "DataLoader[object]",
        books: LoaderBooks,
        *,
        seeding: Seeding,
        say: Say,
        on_error: OnError,
    ) -> None:
        """Args: say: Takes why a loader is made here, the path, and whether it is for good."""
        self._on_error: OnError = on_error
        self.place: InStepPlace = "fed"
        self._loader = loader
        self._books = books
        self._seeding: Seeding = seeding
        self._say = say
        self._maker: TrainerMaker | None = None
        self._parts, self._sampler = watches_of(loader)
        self._is_torchs = is_torchs(loader._index_sampler)
        self._is_settling = True
        self._num_looks_at_all = 0
        self._draws = _DrawnInTurns()

    def begin(self, *, is_stream: bool) -> None:
        """Begins an epoch; a stream has one order of batches, which cannot be tried first."""
        self.place = "fed" if is_stream or self._books.num_tried >= self._needed else "tried"
        self._is_settling = True
        self._draws.begin()
        # And once more, after what the script does with the last of them.
        is_new = self._books.num_tried < NUM_TRIED
        self._num_looks_at_all = NUM_TRIED + 1 if is_new else 0

    @property
    def _needed(self) -> int:
        """How many batches are made here first."""
        if self._sampler.has_users:
            return NUM_TRIED_OF_USERS
        # A script that asks for stoker's class wants its batches from data hosts.
        return 0 if reach_of(type(self._loader))[1] == "stoker" else NUM_TRIED

    def look(self) -> None:
        """Takes dataset and sampler as they are now for unchanged."""
        self._parts.look()
        self._sampler.look()

    def change(self) -> str:
        """Returns the path of what the script changed since the last batch; empty: nothing."""
        if self.place == "here":
            return ""
        is_first = self.place == "tried" or self._num_looks_at_all > 0
        self._num_looks_at_all -= 1
        depth: Depth = "all" if is_first else "near"
        return self._parts.changed(depth=depth) or self._sampler.changed(depth=depth)

    def was_fed(self) -> None:
        """Notes a batch for which the sampler was asked, and that is no trial."""
        self._books.num_tried += 1
        # torch's own samplers keep no state that moves.
        if not self._is_torchs and self._sampler.changed():
            self._sampler.rebase()

    def next_index(self, indices: Iterator[Numbered]) -> Numbered:
        """Returns the sampler's next index; notes whether it and the loop draw in turns."""
        if self.place == "tried" and self._sampler.has_users:
            return self._draws.next(indices)
        return next(indices)

    def make(self, numbered: Numbered) -> object:
        if self.place == "here":
            with making():
                return self._made(numbered)
        with making(self._parts, self._sampler):
            batch = self._made(numbered)
        self._judge()
        return batch

    def may_make_meanwhile(self, feed: FeedSettings) -> bool:
        """Returns whether the trainer makes batches as long as no data host is ready.

        Where a script asks for stoker's class, its data may be on the data hosts only.
        """
        is_stokers = reach_of(type(self._loader))[1] == "stoker"
        may_make = feed.until_ready == "make" and feed.unshippable != "error"
        return may_make and not is_stokers

    def make_meanwhile(self, numbered: Numbered) -> object:
        """Makes a batch before others do, once the first ones have shown that nothing is changed.

        What is filled or counted as it is made is no change of the script's.
        """
        with making(self._parts, self._sampler):
            batch = self._made(numbered)
        if self._parts.changed():
            self._parts.rebase()
        self._books.life.num_meanwhile += 1
        self.was_fed()
        return batch

    def _made(self, numbered: Numbered) -> object:
        if self._maker is None:
            self._maker = TrainerMaker(self._loader, self._seeding, on_error=self._on_error)
        return self._maker.make(numbered)

    def turn(self, path: str) -> None:
        """Makes the rest of the epoch here, as the script changed what is at `path`."""
        self._books.num_changes += 1 if self.place == "fed" else MAX_CHANGED_EPOCHS
        self.place = "here"
        self._books.num_tried = 0
        self._maker = None
        is_for_good = self._books.num_changes >= MAX_CHANGED_EPOCHS
        self._say_why(f"{path} changed between two batches", path, is_for_good=is_for_good)

    def stay(self) -> None:
        """Makes the rest of the epoch here, for a reason that others have said."""
        self.place = "here"

    def end(self) -> None:
        """Notes that the epoch is over, and nothing changed."""
        forget(self._parts, self._sampler)
        if self.place == "tried":
            self._books.num_tried = NUM_TRIED_OF_USERS

    def _judge(self) -> None:
        """Draws the consequences of a batch that was made as a trial."""
        path = self._parts.changed_in_making()
        if path:
            self.place = "here"
            self._say_why(f"{path} changes as a batch is made", path, is_for_good=True)
            return
        name = self._draws.in_turns
        if name:
            self.place = "here"
            self._say_why(
                f"sampler and loop draw from {name} in turns", "sampler", is_for_good=True
            )
            return
        if self._sampler.has_users and self._sampler.changed_in_making():
            # It uses up what the loop may have to fill again: the whole epoch shows it.
            self._is_settling = False
        self.look()
        self._books.num_tried += self._is_settling
        if self._books.num_tried >= self._needed and self._is_settling:
            self.place = "fed"

    def _say_why(self, what: str, path: str, *, is_for_good: bool) -> None:
        why = f"{what}, and {NO_BATCH_AHEAD}"
        self._say(why if is_for_good else f"{why}: until the end of this epoch", path, is_for_good)


class _DrawnInTurns:
    """Which of the process's random generators a sampler and the loop draw from in turns.

    What a sampler draws before its first index, as a whole order, is drawn before all else.
    """

    def __init__(self) -> None:
        self._after: Mapping[str, object] = {}
        self._by_sampler: set[str] = set()
        self._by_loop: set[str] = set()

    @property
    def in_turns(self) -> str:
        """The generator's name; empty: there is none."""
        return min(self._by_sampler & self._by_loop, default="")

    def begin(self) -> None:
        """Begins an epoch."""
        self._after = {}

    def next(self, indices: Iterator[Numbered]) -> Numbered:
        before = marks()
        numbered = next(indices)
        now = marks()
        if self._after:
            self._by_loop |= changed_marks(self._after, before)
            self._by_sampler |= changed_marks(before, now)
        self._after = now
        return numbered


def watches_of(loader: "DataLoader[object]") -> tuple[Watch, Watch]:
    """Returns what watches a loader's dataset with its collate function, and its sampler."""
    parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    # Asked here also while others make batches, so it changes then.
    apart = (*parts.values(), *_counted_only(loader._index_sampler))
    roots = {"sampler": loader._index_sampler}
    return Watch(parts), Watch(roots, apart=apart, is_near_only=True)


def _counted_only(sampler: object) -> list[object]:
    """Returns what torch's own samplers hold for its length alone, as a dataset made for them."""
    if not is_torchs(sampler):
        return []
    held = [getattr(part, name, None) for part in both_samplers(sampler) for name in _COUNTED]
    return [part for part in held if part is not None]


def what_waits(loader: "DataLoader[object]") -> str:
    """Returns the path of what a loader may wait for until the loop continues; empty: nothing."""
    parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    roots = {"sampler": loader._index_sampler}
    # A sampler knows the dataset, too, by a longer path.
    return path_of_waiting(roots, apart=tuple(parts.values())) or path_of_waiting(parts)
