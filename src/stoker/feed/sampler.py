"""A loader's index sampler, counted: how far an epoch is, of this process or a resumed one."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import cast

import torch
from torch.utils.data import DataLoader, _DatasetKind

from stoker.errors import UsageError
from stoker.feed import loader_state as snapshots
from stoker.feed.bad_samples import BadSamples
from stoker.feed.balance import BalancedSampler, SampleCosts, balanced
from stoker.feed.bookkeeping import LoaderBooks, LoaderState, Position, Rewind, RewoundGenerator
from stoker.feed.global_draws import GlobalDraws, is_torchs
from stoker.feed.interrupts import is_of_signal_handler
from stoker.feed.loader_state import (
    digest_with,
    generators_of,
    progress_of,
    replay_sampler,
    rewound_of,
)
from stoker.feed.seeding import Occurrences
from stoker.feed.stream_progress import StreamProgress
from stoker.pending_error import PendingError


class SamplerOrder:
    """A loader's index sampler as its iterators see it, with everything it gives counted.

    It lives as long as the loader's iterator, and `begin` starts each epoch. What iterates over it
    gets `_Draws`, which ask the real sampler through `draw`.

    Attributes:
        position: How far the epoch is.
        occurrences: How often the epoch has given each index, for the seeding `sample`; else None.
        keeps_stream: The loader has a `state_dict`, and its dataset is iterable.
        global_draws: What a sampler that is not torch's draws from the process's generators; None:
            a loader without workers, or torch's own sampler, which needs no look.
        keeps_draws: A resumed epoch's draw of a base seed stays, as in an epoch that begins.
    """

    def __init__(
        self, loader: "DataLoader[object]", books: LoaderBooks, *, is_inline: bool, is_fed: bool
    ) -> None:
        self._books = books
        self._is_inline = is_inline
        # Also where only this rank makes its batches itself: the other ones count on its part.
        self._costs = books.costs
        self._sampler: Iterable[object] = loader._index_sampler
        self._dealing: BalancedSampler | None = None
        if self._costs is not None:
            self._sampler = self._dealing = balanced(loader, self._costs)
        self._generator = loader.generator
        self._dataset = loader.dataset
        self._is_map_style = loader._dataset_kind == _DatasetKind.Map
        self._parts = snapshots.parts_of(loader)
        # A loader of torch's own class has no `state_dict`, so nobody can ask for its state.
        has_state = hasattr(loader, "state_dict")
        self._keeps_states = self._is_map_style and has_state
        self.keeps_stream = has_state and not self._is_map_style
        # The generators alone, and not the loader: finalizers hold this, and would keep it alive.
        self._rewound: list[RewoundGenerator] = []
        self._num_ahead = loader.num_workers * (loader.prefetch_factor or 2)
        self._has_workers = loader.num_workers > 0
        self.global_draws: GlobalDraws | None = None
        if is_fed and self._is_map_style:
            self._watch_draws(loader)
        self._keeps_ahead = bool(self._parts.stateful())
        # Counted where indices are handed out (`iterators`), not where they are drawn ahead.
        self.occurrences: Occurrences | None = None
        self._before_seed = torch.empty(0)
        self._draws_seed = False
        self.keeps_draws = False
        self.begin(again=False)

    def _watch_draws(self, loader: "DataLoader[object]") -> None:
        # torch's own draw their order at once, or from a generator that they have made.
        is_users = not is_torchs(loader._index_sampler)
        may_draw_ahead = is_users and not self._has_workers
        self._rewound = rewound_of(self._parts, with_globals=may_draw_ahead)
        if not is_users or not self._has_workers:
            return
        self.global_draws = GlobalDraws(
            self._sampler, num_ahead=self._num_ahead, are_seen=self._books.draws_as_asked
        )
        self._sampler = self.global_draws

    def begin(self, *, again: bool) -> None:
        """Begins an epoch, or resumes the one of a state that was loaded.

        Args:
            again: An iterator is used for a further epoch, as persistent workers are. As in torch,
                it keeps its base seed.
        """
        books = self._books
        last = books.position
        state = books.pending_state()
        if last is not None and books.loaded is None:
            last.cancel()
        stream = self._resumed_stream(state)
        # From here on the state is used: no later epoch begins from it again.
        books.loaded = None
        if self._costs is not None:
            self._begin_costs(self._costs, state)
        if books.bad is not None:
            _begin_bad(books.bad, state)
        self._draws_seed = False
        # With workers torch makes an iterator of the sampler twice, unless one is used again.
        self._iters_left = 2 if self._has_workers and not again else 1
        # Weak, because the iterator refers to this.
        self._last: weakref.ref[_Draws] | None = None
        if self.occurrences is not None:
            self.occurrences.clear()
        if state is not None:
            books.epochs = state["epoch"]
            books.keeps_seed = state["keeps_seed"]
            books.base_seed = state["base_seed"]
        position = Position(epoch=books.next_epoch(), is_inline=self._is_inline)
        if state is not None and state["begun"] is not None:
            position.resumed = state
            position.stream = stream
            position.first = state["num_yielded"]
            position.num_yielded = state["num_yielded"]
            position.num_handed = state["num_yielded"]
            position.base_seed = state["base_seed"]
        elif again:
            self._draws_seed = books.keeps_seed is False or books.base_seed is None
            position.base_seed = books.base_seed
        self.position = position
        books.position = position

    def _resumed_stream(self, state: LoaderState | None) -> StreamProgress | None:
        """Returns the place in an iterable dataset from which a state's epoch continues."""
        if state is None or state["begun"] is None or self._is_map_style:
            return None
        return progress_of(state["begun"], self._dataset, is_inline=self._is_inline)

    def _begin_costs(self, costs: SampleCosts, state: LoaderState | None) -> None:
        """Takes the costs by which the epoch is dealt: those of its state, or of all ranks."""
        if state is not None and "costs" in state:
            costs.load(state["costs"])
        elif state is not None:
            # Of a run that did not balance.
            costs.forget()
        if state is None or state["begun"] is None:
            assert self._dealing is not None
            costs.exchange(self._dealing.order_words(generators_of(self._parts)))

    @property
    def base_seed(self) -> int:
        return self.position.base_seed or 0

    def drew_base_seed(self, seed: int) -> None:
        books = self._books
        position = self.position
        is_kept = bool(books.keeps_seed) and books.base_seed is not None
        if (position.resumed is not None and not self.keeps_draws) or is_kept:
            # Undone, so that the script's next draws are as in the run that saved the state.
            position.base_seed = books.base_seed
            if self._generator is None:
                torch.set_rng_state(self._before_seed)
            else:
                self._generator.set_state(self._before_seed)
        else:
            position.base_seed = seed
            books.base_seed = seed

    def __len__(self) -> int:
        return len(cast("Sized", self._sampler))

    @property
    def is_asked_again(self) -> bool:
        return self._iters_left > 0

    def __iter__(self) -> Iterator[object]:
        # As many as torch makes: a sampler may draw whenever it is asked. The last one counts.
        last = None if self._last is None else self._last()
        if last is None or self._iters_left > 0:
            self._iters_left -= 1
            last = self._iterator()
            self._last = weakref.ref(last)
        return last

    def _iterator(self) -> "_Draws":
        position = self.position
        if self._rewound:
            position.rewind = Rewind(self._rewound, num_ahead=self._num_ahead)
        if position.resumed is not None and self._is_map_style:
            self._before_seed = self._seeding_state()
            return _Draws(self, position, iter(()))
        position.num_handed = position.first
        position.num_drawn = 0
        position.digest = ""
        position.is_drawn_out = False
        position.at_draw = None
        position.ahead.clear()
        if self._keeps_states:
            position.at_iter = snapshots.take(self._parts)
        iterator = iter(self._sampler)
        self._before_seed = self._seeding_state()
        if self._draws_seed:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            position.base_seed = self._books.base_seed = int(drawn.item())
        return _Draws(self, position, iterator)

    def draw(self, position: Position, iterator: Iterator[object]) -> object:
        if position.at_draw is None and self._keeps_states:
            position.at_draw = snapshots.take(self._parts, with_own=False)
        rewind = position.rewind
        if rewind is not None:
            rewind.before(position.num_drawn)
        try:
            index = next(iterator)
        except StopIteration:
            if rewind is not None and not position.is_drawn_out:
                rewind.after(position.num_drawn + 1, num_taken=position.num_yielded or 0)
            position.is_drawn_out = True
            raise
        digest = position.digest
        if self._keeps_states:
            digest = digest_with(index, before=digest)
        # Together: a signal's handler may raise between two lines, and the script may save after.
        position.num_drawn = position.num_drawn + 1
        position.digest = digest
        if self._keeps_ahead and self._is_map_style:
            position.ahead.append(index)
        if rewind is not None:
            rewind.after(position.num_drawn, num_taken=position.num_yielded or 0)
        if self.global_draws is not None:
            self._books.draws_as_asked = self.global_draws.are_seen
        return index

    def replay(self, position: Position) -> tuple[Iterator[object], deque[object]]:
        """Does `replay_sampler`; the global random states, which `load_state_dict` set, stay."""
        state = position.resumed
        assert state is not None
        begun = state["begun"]
        assert begun is not None
        # The sampler draws from the global states again, but the script's next draws must not move.
        here = snapshots.take(self._parts, with_own=False)
        try:
            iterator, ahead = replay_sampler(
                self._sampler,
                self._parts,
                begun,
                now=state["now"],
                occurrences=self.occurrences,
                epoch=self.position.epoch,
                rewind=position.rewind,
            )
            # Where the sampler draws while it is asked, the script's draws come next.
            snapshots.set_generators(self._parts, state["now"])
        except UsageError as err:
            if self._costs is not None or "costs" not in state:
                raise
            raise UsageError(
                "the state is of a loader whose samples were dealt to the ranks by cost "
                "(feed.balance), and this loader's are not",
                where=err.where,
                fix="resume with feed.balance: cost, data hosts and loader workers (num_workers), "
                "or save between epochs",
            ) from None
        finally:
            snapshots.set_globals(here)
        position.num_drawn = begun["num_drawn"]
        position.digest = begun["digest"]
        position.is_drawn_out = begun["is_drawn_out"]
        position.at_iter = begun["at_iter"]
        position.at_draw = begun["at_draw"]
        if self._keeps_ahead:
            position.ahead = deque(ahead)
        position.resumed = None
        return iterator, ahead

    def _seeding_state(self) -> torch.Tensor:
        """Returns the state of the generator from which torch draws an epoch's base seed."""
        if self._generator is None:
            return torch.get_rng_state()
        state: torch.Tensor = self._generator.get_state()
        return state


def _begin_bad(counts: BadSamples, state: LoaderState | None) -> None:
    if state is not None and "bad_samples" in state:
        counts.load(state["bad_samples"])
    if state is None or state["begun"] is None:
        counts.begin()


class _Draws:
    """Iterator over a `SamplerOrder`; like the sampler's own it may continue after an error."""

    def __init__(self, order: SamplerOrder, position: Position, iterator: Iterator[object]) -> None:
        self._order = order
        self._position = position
        self._iterator = iterator
        self._ahead: deque[object] = deque()
        self._error = PendingError()

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        position = self._position
        if position.resumed is not None and position.stream is None:
            self._iterator, self._ahead = self._order.replay(position)
        draws = self._order.global_draws
        if position.rewind is not None and draws is None:
            # As far as torch's loader would have drawn: `Rewind` undoes draws, and makes none.
            self._keep_up(1 + (position.num_yielded or 0) + position.rewind.num_ahead)
        if self._ahead:
            index = self._ahead.popleft()
        elif self._error.is_there:
            raise self._error.take()
        else:
            index = self._order.draw(position, self._iterator)
        position.num_handed += 1
        return index

    def _keep_up(self, num_drawn: int) -> None:
        """Draws up to `num_drawn` of the epoch; an error comes after what was drawn before it."""
        while not self._error.is_there and self._position.num_drawn < num_drawn:
            try:
                self._ahead.append(self._order.draw(self._position, self._iterator))
            except StopIteration:
                # A new one: the traceback of the original would keep the iterator.
                self._error.keep(StopIteration())
            except Exception as err:
                if is_of_signal_handler(err):
                    raise
                self._error.keep(err)


def yielded(position: Position, num_here: int | None) -> None:
    """Records how many batches the script got of an epoch since this process began or resumed it.

    Args:
        position: The epoch's.
        num_here: The batches; None: not known, as they come out of order.
    """
    position.num_yielded = None if num_here is None else position.first + num_here
    position.resumed = None
    ahead = position.ahead
    # Kept: what was drawn and not yielded, and the last one yielded, which may be held back.
    while ahead and len(ahead) > position.num_drawn - (position.num_yielded or 0) + 1:
        ahead.popleft()
