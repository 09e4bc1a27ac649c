"""What `feed.on_error` does where a dataset raises: a sample is skipped, or replaced.

Without it the script gets the error, and nothing is tried again. What is done with a sample follows
from the batch's seed, so a batch has the same bytes wherever it is made.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Literal, cast

import msgspec
from torch.utils.data._utils.pin_memory import pin_memory

from stoker.errors import StokerError, UsageError
from stoker.feed.engine.messages import NO_SAMPLE, BadSample
from stoker.feed.seeding import shown_index

OnError = Literal["raise", "skip", "replace"]

_MAX_ATTEMPTS = 8
_MAX_CHARACTERS = 200


def check_on_error(dataset: object, on_error: OnError, *, is_map_style: bool) -> None:
    """Raises UsageError if bad samples of this dataset cannot be skipped or replaced."""
    if on_error == "raise" or (
        is_map_style and (on_error == "skip" or hasattr(dataset, "__len__"))
    ):
        return
    kind = "" if is_map_style else ", an iterable dataset,"
    raise UsageError(
        f"bad samples of {type(dataset).__name__}{kind} cannot be treated so",
        where=f"feed.on_error: {on_error}",
        fix="catch the errors of single samples in the dataset: only samples of a map-style one "
        "can be skipped, and with __len__ replaced",
    )


@dataclass(frozen=True, slots=True)
class ToleratedBatch:
    """A batch with its bad samples, on its way to the loop."""

    batch: object
    bad: tuple[BadSample, ...]

    def pin_memory(self) -> "ToleratedBatch":
        """Returns it with its batch pinned, as torch does with a batch."""
        pinned = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return ToleratedBatch(pinned, self.bad)


class TolerantFetcher:
    """Makes batches as torch's fetcher does, without their bad samples or with others in place.

    Where all samples of a batch are bad, the first one is replaced: each rank has as many batches
    as before.

    Args:
        on_error: With `raise` the first error is the batch's, as with torch.
        is_batched: An index is a batch of them.
        note: Takes the place of what is made next, or NO_SAMPLE.

    Attributes:
        bad: The bad samples of the last batch.
    """

    def __init__(
        self,
        dataset: object,
        collate_fn: Callable[[object], object],
        on_error: OnError,
        *,
        is_batched: bool,
        note: Callable[[int], None] = lambda place: None,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._on_error = on_error
        self._is_batched = is_batched
        self._note = note
        # One call for all samples of a batch, as torch asks.
        many = getattr(dataset, "__getitems__", None) if is_batched else None
        self._many: Callable[[object], Iterable[object]] | None = many
        self.bad: tuple[BadSample, ...] = ()

    def fetch(self, index: object) -> object:
        self.bad = ()
        samples = self._batch(index) if self._is_batched else self._one_by_one([index])[0]
        self._note(NO_SAMPLE)
        return self._collate_fn(samples)

    def _batch(self, indices: object) -> object:
        if self._many is not None:
            try:
                samples = self._many(indices)
                # A generator raises as it is iterated over, which is not the collate function's
                # fault.
                return list(samples) if isinstance(samples, Iterator) else samples
            except Exception:
                if self._on_error == "raise":
                    raise
        return self._one_by_one(cast("list[object]", indices))

    def _one_by_one(self, indices: Iterable[object]) -> list[object]:
        good: list[object] = []
        bad: list[BadSample] = []
        for place, index in enumerate(indices):
            try:
                good.append(self._sample(index, place))
                continue
            except Exception as err:
                if self._on_error == "raise" or isinstance(err, StokerError):
                    raise
                one = _bad(index, err, place)
            if self._on_error == "replace":
                one = self._replaced(one, good)
            bad.append(one)
        if bad and not good:
            bad[0] = self._replaced(bad[0], good)
        self.bad = tuple(bad)
        return good

    def _replaced(self, bad: BadSample, good: list[object]) -> BadSample:
        """Adds another sample, and returns the bad one with its index.

        Raises the last error, if eight others are bad, too.
        """
        for attempt in range(_MAX_ATTEMPTS):
            # Drawn as the batch's other random numbers: the same wherever it is made.
            other = random.randrange(len(cast("Sized", self._dataset)))
            try:
                good.append(self._sample(other, bad.place))
                break
            except Exception:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
        return msgspec.structs.replace(bad, replaced_by=str(other))

    def _sample(self, index: object, place: int) -> object:
        self._note(place)
        if self._many is not None:
            return next(iter(self._many([index])))
        sample: object = self._dataset[index]  # type: ignore[index]
        return sample


def _bad(index: object, err: Exception, place: int) -> BadSample:
    return BadSample(
        place=place,
        index=_cut(repr(shown_index(index))),
        error=_cut(type(err).__name__),
        text=_cut(" ".join(str(err).split())),
    )


def _cut(text: str) -> str:
    # A name of a file that is no Unicode could be neither sent nor written.
    return text[:_MAX_CHARACTERS].rstrip().encode("utf-8", "replace").decode()


def samples_words(index: object, place: int = -1) -> str:
    """Returns the samples of a batch, or the one at a place, for an error."""
    shown = shown_index(index)
    if place >= 0 and isinstance(shown, list | tuple | range):
        shown = shown[place]
    text = repr(shown).strip("[]")
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
