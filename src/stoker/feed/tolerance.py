"""What `feed.on_error` does where a dataset raises: a sample is skipped, or replaced.

Without it the script gets the error, and nothing is tried again (`trainer.answers`). Both wrap what
makes a batch: a dataset whose samples may be bad, and a collate function that takes them out. What
is done with a sample follows from the batch's seed, the sample's index and its place, so a batch
has the same bytes wherever it is made.
"""

import contextlib
import errno
import hashlib
import os
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import msgspec
import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from stoker.errors import StokerError, UsageError
from stoker.feed import why_unfed
from stoker.feed.interrupts import is_of_signal_handler
from stoker.feed.left_behind import Contained
from stoker.feed.lost_samples import ALL_SAMPLES, NO_SAMPLE, LostSample
from stoker.feed.mismatched_samples import first_unlike
from stoker.feed.process_state import ProcessState
from stoker.feed.sample_index import shown_index, words_of_sample
from stoker.feed.seeding import Seeder, index_bytes
from stoker.feed.why_unfed import Cause
from stoker.feed.wire.host_errors import (
    cause_on_host,
    class_name,
    errors_behind,
    text_of,
    words_of_error,
)
from stoker.feed.wire.protocol import BadSample
from stoker.host.memory_usage import memory_use
from stoker.pending_error import PendingError

OnError = Literal["raise", "skip", "replace"]

_MAX_ATTEMPTS = 8
_MAX_CHARACTERS = 200
# Of the host, not of a sample; a file that is not there is the sample's.
_HOST_NUMBERS = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.EAGAIN,
        errno.EIO,
        errno.ESTALE,
    )
)
_SAMPLE_CAUSES = (Cause.MISSING_FILE, Cause.NO_RIGHT)
# Of a host's memory: from there on its end is near.
_SHORT_SHARE = 0.9
# A dataset may limit the time of its samples by these.
_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


class SampleLostError(RuntimeError):
    """A sample was not made, as its process would not survive it.

    Attributes:
        error: As in LostSample.
    """

    def __init__(self, lost: LostSample) -> None:
        super().__init__(lost.text)
        self.error = lost.error


def _not_noted(place: int, attempt: int) -> None:
    """Notes nothing: no other process looks at this one's progress."""


def _not_looked_after(err: BaseException, place: int, attempt: int) -> None:
    """Does nothing: no other process can take this one's place."""


@dataclass(frozen=True, slots=True)
class MarkedSample:
    """What stands in the place of a bad sample until the batch is collated.

    Attributes:
        bad: What is known of it.
        sample: The one that replaces it, if `bad.replaced_by` names it.
    """

    bad: BadSample
    index: object
    sample: object = None


def check_on_error(dataset: object, on_error: OnError, *, is_map_style: bool) -> None:
    """Raises UsageError if bad samples of this dataset cannot be skipped or replaced."""
    name = type(dataset).__name__
    where = f"feed.on_error: {on_error}"
    if on_error != "raise" and not is_map_style:
        raise UsageError(
            f"bad samples of {name}, an iterable dataset, cannot be left out: after an error its "
            "iterator has ended",
            where=where,
            fix="catch the errors of single samples in its __iter__, or set feed.on_error: raise",
        )
    if on_error == "replace" and not hasattr(dataset, "__len__"):
        raise UsageError(
            f"bad samples of {name} cannot be replaced: it has no length to draw another one from",
            where=where,
            fix="give it __len__, or set feed.on_error: skip",
        )


def is_samples_fault(err: BaseException) -> bool:
    """Returns whether an error of a dataset is a sample's, not its host's, code's or script's."""
    try:
        return _is_samples_fault(err)
    except Exception:
        # Its own attributes raise: no library's does that for a host.
        return True


def _is_samples_fault(err: BaseException) -> bool:
    if isinstance(err, SampleLostError):
        return True
    # It ends the process, as with torch; from a handler it may be anything.
    if isinstance(err, SystemExit) or is_of_signal_handler(err, ignored=_TIMERS):
        return False
    side = why_unfed.of_worker("")
    for error in errors_behind(err):
        if isinstance(error, KeyboardInterrupt | StokerError | ImportError):
            return False
        why = cause_on_host(error, side, raised="")
        if why is not None and why.cause == Cause.OUT_OF_MEMORY:
            return not _is_short_of_memory()
        if isinstance(error, OSError) and error.errno in _HOST_NUMBERS:
            return False
        if why is not None and why.cause not in _SAMPLE_CAUSES:
            return False
    return True


def _is_short_of_memory() -> bool:
    """Returns whether memory is refused for want of it: not as a damaged head asks for terabytes.

    Linux kills rather than refuse what is not absurd, unless it is told not to.
    """
    use = memory_use()
    return use is not None and use.share > _SHORT_SHARE


def replacement(index: object, attempt: int, *, length: int, seed: bytes = b"") -> int:
    """Returns the index that replaces a bad one.

    Args:
        index: The bad one.
        attempt: How many were drawn before.
        length: Of the dataset.
        seed: Of the sample's place in its batch, so that each epoch draws another one.
    """
    drawn = hashlib.blake2b(index_bytes(index), key=seed, digest_size=8, person=b"stoker replace")
    drawn.update(struct.pack("<Q", attempt))
    return int.from_bytes(drawn.digest(), "little") % length


class ManySamples(Protocol):
    """A dataset that makes all samples of a batch in one call."""

    def __getitems__(self, indices: object, /) -> object: ...


def sample_of(dataset: object, index: object, *, makes_many: bool) -> object:
    """Returns one sample, also of a dataset that makes all of a batch in one call."""
    if makes_many:
        samples = cast("ManySamples", dataset).__getitems__([index])
        return next(iter(cast("Iterable[object]", samples)))
    sample: object = dataset[index]  # type: ignore[index]
    return sample


class _PutBack:
    """Has a bad sample leave this process as it was.

    Of the first ones it has only their folder left: they may have begun what the process goes on
    with. A class: contextlib's generator sets an error's traceback, which a frozen dataclass
    refuses.
    """

    __slots__ = ("_before", "_contained", "_has_made")

    def __init__(self) -> None:
        self._has_made = False
        self._before: ProcessState | None = None
        self._contained = Contained()

    def begin_batch(self) -> None:
        """Notes nothing: the script may change it within a batch."""

    def __enter__(self) -> None:
        state = ProcessState.of_this_process if self._has_made else ProcessState.folder
        self._before = state()
        self._contained.begin_batch()
        self._contained.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: object
    ) -> None:
        # Not kept until the next sample: it knows what the script has set.
        before, self._before = self._before, None
        self._contained.__exit__(kind, err, trace)
        if kind is None:
            self._has_made = True
        elif before is not None:
            before.put_back()


class TolerantDataset:
    """A dataset that gives a mark in the place of a sample that it cannot make.

    It has `__getitems__` if the dataset has it: if one call for all samples raises, they are made
    one by one.

    Args:
        dataset: Map-style; with `replace` it has a length.
        on_error: `skip` or `replace`.
        is_batched: Whether its loader has batches: `__getitems__` is for these alone.
        seeder: Of the batches; None: they are seeded as by torch.
        puts_back: Whether no other process can take this one's place: what a bad sample has changed
            in it is put back.

    Attributes:
        place: Of the next sample in its batch.
        indices: That `placed` has given of the last batch.
        lost: Samples of this batch that are not to be made, by place and attempt.
        note: Takes place (or ALL_SAMPLES, NO_SAMPLE) and attempt of what is made next.
        on_bad: Takes what a sample, or a call for all of them, has raised, with place and attempt:
            it may end this process, as later samples would be other ones in it.
    """

    def __init__(
        self,
        dataset: object,
        on_error: OnError,
        *,
        is_batched: bool = True,
        seeder: Seeder | None = None,
        puts_back: bool = False,
    ) -> None:
        self._dataset = dataset
        self._on_error = on_error
        self._seeder = seeder
        self._makes_many = is_batched and bool(getattr(dataset, "__getitems__", None))
        self.place = 0
        self.indices: list[object] = []
        self.lost: Mapping[tuple[int, int], LostSample] = {}
        self.note: Callable[[int, int], None] = _not_noted
        self.on_bad: Callable[[BaseException, int, int], None] = _not_looked_after
        self._contained = _PutBack() if puts_back else Contained()
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> object:
        if name == "__getitems__" and self._makes_many:
            return self._many
        raise AttributeError(name)

    def begin_batch(self) -> None:
        """Notes in which process a batch is made, and what runs there before its samples."""
        self._pid = os.getpid()
        self._contained.begin_batch()

    def __getitem__(self, index: object) -> object:
        try:
            return self.sample(index, attempt=0)
        # Panics of Rust libraries, for one, are no Exception.
        except BaseException as err:
            # A child that the sample forked must not go on as if it were this process.
            if os.getpid() != self._pid or not is_samples_fault(err):
                raise
            self._look_after(err, attempt=0)
            if self._on_error == "skip":
                self._end_stretch()
                return MarkedSample(_bad(index, err).at(self.place), index)
            return self.replaced(index, err)

    def placed(self, indices: Iterable[object]) -> Iterator[object]:
        """Yields the indices of a batch, whose samples are made in between."""
        self.indices = []
        for place, index in enumerate(indices):
            self.place = place
            self.indices.append(index)
            yield index

    def one_by_one(self, indices: Iterable[object]) -> list[object]:
        """Returns the samples of a batch, each seeded by its place: one call failed."""
        samples: list[object] = []
        for index in self.placed(indices):
            if self._seeder is not None:
                self._seeder.place_again(index, self.place)
            samples.append(self[index])
        return samples

    def replaced(self, index: object, err: BaseException) -> MarkedSample:
        """Returns the mark of a bad sample with the one that replaces it.

        That one is drawn, and seeded, by the place of the bad one. If it is bad, too, the next one
        begins at other random states: what it draws may be why.

        Raises:
            UsageError: If the index is no integer.
            Exception: The last error, if eight others are bad, too; the first one, if the dataset
                has no length to draw another one from. RuntimeError for what is no usual error.
        """
        if not _is_integer(index):
            raise UsageError(
                f"a bad sample has no integer as its index, so no other one can be drawn: {err}",
                where=f"feed.on_error, index {repr(index)[:_MAX_CHARACTERS]}",
                fix="set feed.on_error: skip with batches of single samples, or raise",
            ) from err
        bad = _bad(index, err).at(self.place)
        last = PendingError(_as_error(err))
        del err
        length = self._length()
        if length is None:
            raise last.take()
        seed = b""
        if self._seeder is not None:
            seed = self._seeder.place_again(index, self.place)
        for attempt in range(_MAX_ATTEMPTS):
            other = replacement(index, attempt, length=length, seed=seed)
            if self._seeder is not None:
                self._seeder.place_again(other, self.place, attempt=attempt)
            try:
                sample = self.sample(other, attempt=attempt + 1)
            except BaseException as error:
                if not is_samples_fault(error):
                    raise
                self._look_after(error, attempt=attempt + 1)
                last.keep(_as_error(error))
                continue
            # It knows this call, and so itself.
            last.drop()
            return MarkedSample(msgspec.structs.replace(bad, replaced_by=str(other)), index, sample)
        raise _not_replaced(last.take(), bad)

    def _length(self) -> int | None:
        try:
            return len(cast("Sized", self._dataset))
        except TypeError:
            return None

    def tried(self, index: object, *, place: int) -> None:
        """Makes the next sample of a stretch, for nothing."""
        self.place = place
        self._try(index, attempt=0)

    def alone(self, index: object, *, place: int, attempt: int) -> None:
        """Makes one sample of a batch, or one that would replace it, for nothing.

        It is seeded by its place.

        Args:
            index: Of the batch's sample.
            place: Of that.
            attempt: As in LostSample.
        """
        self.place = place
        seed = b""
        if self._seeder is not None:
            seed = self._seeder.place_again(index, place)
        if attempt:
            length = len(cast("Sized", self._dataset))
            index = replacement(index, attempt - 1, length=length, seed=seed)
            if self._seeder is not None:
                self._seeder.place_again(index, place, attempt=attempt - 1)
        self._try(index, attempt=attempt)

    def sample(self, index: object, *, attempt: int) -> object:
        """Returns one sample of the dataset, as it makes it."""
        lost = self.lost.get((self.place, attempt))
        if lost is not None:
            raise SampleLostError(lost)
        self.note(self.place, attempt)
        with self._contained:
            return sample_of(self._dataset, index, makes_many=self._makes_many)

    def _try(self, index: object, *, attempt: int) -> None:
        try:
            self.sample(index, attempt=attempt)
        except BaseException as err:
            if not is_samples_fault(err):
                raise
            self._look_after(err, attempt=attempt)
            # It is no death: so also where the batch is made, unless its text is one.
            _bad(index, err)
            self._end_stretch()

    def _end_stretch(self) -> None:
        if self._seeder is not None:
            self._seeder.end_stretch()

    def _many(self, indices: object) -> object:
        # As the sampler gave them.
        given = _kept(indices)
        if self.lost and isinstance(given, Iterable):
            # The call would make them.
            return self.one_by_one(given)
        try:
            self.note(ALL_SAMPLES, 0)
            # A generator raises as it is iterated over, which is not the collate function's fault.
            with self._contained:
                return _kept(cast("ManySamples", self._dataset).__getitems__(given))
        except BaseException as err:
            # Of a slice, for one, no samples are known.
            if not (isinstance(given, Iterable) and is_samples_fault(err)):
                raise
            self.on_bad(err, ALL_SAMPLES, 0)
            return self.one_by_one(given)

    def _look_after(self, err: BaseException, *, attempt: int) -> None:
        """Has it looked at what a bad sample has done to this process, if it was made here."""
        if type(err) is not SampleLostError:
            self.on_bad(err, self.place, attempt)


class TolerantCollate:
    """A collate function that takes bad samples out of a batch.

    Where all samples are bad, the first one is replaced: each rank has as many batches as before.

    Attributes:
        bad: The bad samples of the last batch.
        index: Returns what the sampler gave for the batch that is collated next.
    """

    def __init__(
        self,
        collate_fn: Callable[[object], object],
        dataset: TolerantDataset,
        *,
        is_batched: bool,
        seeder: Seeder | None = None,
    ) -> None:
        self._collate_fn = collate_fn
        self._dataset = dataset
        self._is_batched = is_batched
        self._seeder = seeder
        self.bad: tuple[BadSample, ...] = ()
        self.index: Callable[[], object] = tuple

    def __call__(self, samples: object) -> object:
        self.bad = ()
        if not self._is_batched:
            return self._collate_fn(self._lone(samples))
        # What one call makes may be a batch already; with bad samples it is a list.
        if not isinstance(samples, list):
            return self._collate_fn(samples)
        listed: list[object] = samples
        good = self._good(listed)
        try:
            return self._collate_fn(good)
        except Exception as err:
            self._advise(err, listed)
            raise

    def _good(self, samples: list[object]) -> list[object]:
        """Returns the samples without the bad ones, or with what replaces these."""
        marks = [sample for sample in samples if isinstance(sample, MarkedSample)]
        if not marks:
            return samples
        if len(marks) == len(samples) and not any(mark.bad.replaced_by for mark in marks):
            marks[0] = self._filled(marks[0])
        self.bad = tuple(mark.bad for mark in marks)
        left = iter(marks)
        good: list[object] = []
        for sample in samples:
            if not isinstance(sample, MarkedSample):
                good.append(sample)
                continue
            mark = next(left)
            if mark.bad.replaced_by:
                good.append(mark.sample)
        return good

    def _advise(self, err: Exception, samples: list[object]) -> None:
        """Notes on a collate function's error why no sample is left out, and which is unlike."""
        places = [at for at, sample in enumerate(samples) if not isinstance(sample, MarkedSample)]
        difference = first_unlike([samples[place] for place in places])
        words = "feed.on_error leaves out samples, and no errors of collate_fn"
        if difference is not None:
            at, how = difference
            first, other = (
                words_of_sample(self.index(), place) for place in (places[0], places[at])
            )
            words += f"; sample {other} is {how} as sample {first}"
        _note_on(err, words, fix="raise in __getitem__ for a sample that does not fit the others")

    def _lone(self, sample: object) -> object:
        if not isinstance(sample, MarkedSample):
            return sample
        mark = sample if sample.bad.replaced_by else self._filled(sample)
        self.bad = (mark.bad,)
        return mark.sample

    def _filled(self, mark: MarkedSample) -> MarkedSample:
        words = f"sample {mark.bad.index}: {mark.bad.error}: {mark.bad.text}"
        self._dataset.place = mark.bad.place
        # The original may not cross processes; and no variable here names one that is raised.
        filled = self._dataset.replaced(mark.index, RuntimeError(words))
        self._dataset.note(NO_SAMPLE, 0)
        if self._seeder is not None:
            # As if no sample had been made since.
            self._seeder.collation_again()
        bad = msgspec.structs.replace(mark.bad, replaced_by=filled.bad.replaced_by)
        return MarkedSample(bad, mark.index, filled.sample)


@dataclass(frozen=True, slots=True)
class ToleratedBatch:
    """A batch with its bad samples, on its way from a worker of this host.

    Attributes:
        worker: Its number; -1: it is not known.
    """

    batch: object
    bad: tuple[BadSample, ...]
    worker: int = -1

    def pin_memory(self) -> "ToleratedBatch":
        """Returns it with its batch pinned, as torch does with a batch."""
        pinned = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return ToleratedBatch(pinned, self.bad, self.worker)


class TorchCollate:
    """`TolerantCollate` for torch's own fetcher: the bad samples travel with the batch."""

    def __init__(self, collate: TolerantCollate) -> None:
        self._collate = collate

    def __call__(self, samples: object) -> object:
        batch = self._collate(samples)
        return ToleratedBatch(batch, self._collate.bad) if self._collate.bad else batch


class TorchsFetcher(Protocol):
    """Torch's fetcher of a map-style dataset."""

    dataset: object
    auto_collation: bool
    collate_fn: Callable[[object], object]
    fetch: Callable[[object], object]


def tolerate(fetcher: TorchsFetcher, on_error: OnError, *, seeder: Seeder | None) -> None:
    """Has torch's fetcher skip or replace bad samples; its batches may be ToleratedBatch."""
    if on_error == "raise":
        return
    is_batched = fetcher.auto_collation
    is_one_call = bool(getattr(fetcher.dataset, "__getitems__", None))
    fetcher.dataset = dataset = TolerantDataset(
        fetcher.dataset, on_error, is_batched=is_batched, seeder=seeder, puts_back=True
    )
    collate = TolerantCollate(fetcher.collate_fn, dataset, is_batched=is_batched, seeder=seeder)
    fetcher.collate_fn = TorchCollate(collate)
    fetch = fetcher.fetch

    def placed_fetch(index: object) -> object:
        dataset.begin_batch()
        dataset.place = 0
        collate.index = lambda: index
        if is_batched and not is_one_call:
            collate.index = lambda: dataset.indices
            return fetch(dataset.placed(cast("Iterable[object]", index)))
        return fetch(index)

    fetcher.fetch = placed_fetch


def _not_replaced(err: BaseException, bad: BadSample) -> BaseException:
    """Returns the error of the last sample that was drawn, which now says for which one."""
    words = (
        f"{_MAX_ATTEMPTS} samples were drawn in the place of sample {bad.index}, which cannot be "
    )
    words += f"made ({bad.error}: {bad.text}), and none of them can be made either"
    _note_on(err, words, fix="mend the dataset, or take its bad samples out: most of them are bad")
    return err


def _note_on(err: BaseException, words: str, *, fix: str) -> None:
    """Adds to an error what its traceback says behind its text, once."""
    note = f"{words}\ntry:   {fix}"
    # An error of the script's class may refuse attributes.
    with contextlib.suppress(Exception):
        if note not in getattr(err, "__notes__", ()):
            err.add_note(note)


def _kept(values: object) -> object:
    """Returns values as they are, or as a list if they may be iterated over only once."""
    if isinstance(values, Iterator):
        return list(values)
    return values


def _is_integer(index: object) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and not index.is_floating_point()
    return isinstance(index, int | np.integer)


def _cut(text: str) -> str:
    # A name of a file that is no Unicode could be neither sent nor written. And it reads the same
    # where another process cuts it again.
    return text[:_MAX_CHARACTERS].rstrip().encode("utf-8", "replace").decode()


def _as_error(err: BaseException) -> Exception:
    """Returns an error that ends the training run, and neither its epoch nor its process."""
    kind = type(err)
    if issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        return cast("Exception", err)
    error = RuntimeError(words_of_error(err))
    error.__cause__ = err
    return error


def lost_sample(err: BaseException, *, place: int, attempt: int) -> LostSample:
    """Returns a bad sample as one that another process does not make: it counts as it does here.

    Args:
        err: What it has raised.
        place: In its batch.
        attempt: As in LostSample.
    """
    return LostSample(place, attempt, _cut(class_name(err)), _cut(text_of(err)))


def _bad(index: object, err: BaseException) -> BadSample:
    text = text_of(err)
    try:
        shown = repr(shown_index(index))
    except Exception:
        shown = f"a {type(index).__name__} that cannot be shown"
    error = err.error if type(err) is SampleLostError else class_name(err)
    return BadSample(index=_cut(shown), error=_cut(error), text=_cut(text))
