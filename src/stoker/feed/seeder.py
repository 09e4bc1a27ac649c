"""What a process does before it makes a batch, so that the batch does not depend on the process.

Three things: the three global random states are set, and the generators that the dataset and the
collate function hold, and `get_worker_info()` tells the worker that torch's loader would have had
make the batch: number n is of worker n modulo the script's `num_workers`. So a dataset that makes a
generator of its own from `get_worker_info().seed` has the same one wherever it runs.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from torch.utils.data._utils import worker as torch_worker

from stoker.feed.held_generators import HeldGenerators, put_back
from stoker.feed.seeding import BATCH_WORDS, preserved_random_state, seed_batch, seed_place
from stoker.logs import Log
from stoker.settings import from_environment

if TYPE_CHECKING:
    import torch

# A batch in which a generator was made that was not there before is made again, with it seeded.
_MAX_TIMES = 4

_T = TypeVar("_T")


class Seeder:
    """Seeds the batches that this process makes, after the dataset is there.

    Args:
        roots: What makes the batches, by the names that paths of generators begin with.
        num_workers: Of the script, for `get_worker_info()`; None: there is to be none, as in the
            trainer's own process.
        warns: Says, once a path, what looks like a generator and cannot be seeded.
    """

    def __init__(
        self, roots: Mapping[str, object], *, num_workers: int | None, warns: bool = True
    ) -> None:
        self._dataset = roots["dataset"]
        self._num_workers = num_workers
        self._held = HeldGenerators(roots)
        self._warns = warns
        self._warned: set[str] = set()
        self._base_seed: int | None = None
        self._infos: dict[int, torch_worker.WorkerInfo] = {}
        self._tell()

    def make(self, words: Sequence[int], make: Callable[[], _T]) -> _T:
        """Returns what `make` does, with everything seeded for the batch of `words`.

        `make` is called again where the dataset has made a generator for itself meanwhile.
        """
        self._set_info(words)
        for _ in range(_MAX_TIMES - 1):
            self._seed_batch(words)
            try:
                made = make()
            except Exception:
                # It may have come of what was drawn.
                if not (self._held.has_changed() and self._has_new()):
                    raise
                continue
            if not (self._held.has_changed() and self._has_new()):
                return made
            del made
        self._seed_batch(words)
        return make()

    def place(self, words: Sequence[int], index: object, place: int) -> None:
        """Seeds for the sample at `place` of the batch."""
        digest = seed_place(words, index, place)
        if self._held.found:
            self._held.seed(digest)

    def each(self, words: Sequence[int], indices: Iterable[object]) -> Iterator[object]:
        """Yields the indices of a batch; all is seeded for each as it is asked for.

        At the end it is seeded for the batch: the collate function's draws belong to it.
        """
        for place, index in enumerate(indices):
            self.place(words, index, place)
            yield index
        self._seed_batch(words)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts all random states back at its end: the trainer's own draws do not move."""
        states = self._held.states() if self._held.found else ()
        try:
            with preserved_random_state():
                yield
        finally:
            put_back(states)

    def _seed_batch(self, words: Sequence[int]) -> None:
        digest = seed_batch(words[:BATCH_WORDS])
        if self._held.found:
            self._held.seed(digest)

    def _has_new(self) -> bool:
        is_new = self._held.look()
        self._tell()
        return is_new

    def _tell(self) -> None:
        """Warns of what cannot be seeded."""
        for path, what in self._held.out_of_reach.items() if self._warns else ():
            if path in self._warned:
                continue
            self._warned.add(path)
            settings = from_environment()
            Log(run=settings.run_id, host=settings.host).event(
                "generator_not_seeded",
                text=f"{path} ({what}) draws random numbers and cannot be seeded for each batch: "
                "batches depend on who makes them; hold a generator of random, NumPy or torch, or "
                "seed it in __getitem__ from torch.initial_seed()",
            )

    def _set_info(self, words: Sequence[int]) -> None:
        if self._num_workers is None:
            return
        base_seed, worker = words[0], words[3] % self._num_workers
        if base_seed != self._base_seed:
            self._base_seed = base_seed
            self._infos.clear()
        info = self._infos.get(worker)
        if info is None:
            info = self._infos[worker] = torch_worker.WorkerInfo(
                id=worker,
                num_workers=self._num_workers,
                seed=base_seed + worker,
                dataset=cast("torch.utils.data.Dataset[object]", self._dataset),
            )
        torch_worker._worker_info = info
