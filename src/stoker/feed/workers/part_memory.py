"""Memory of a part of a batch, on its way from the worker that made it to one that collates.

It is a memfd, used once and without a name. Whichever process dies, it ends with its last
descriptor.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import numpy as np

from stoker.errors import ProtocolError
from stoker.feed.tolerance import MarkedSample
from stoker.feed.wire import codec
from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.protocol import BadSample
from stoker.feed.workers.pipe import Collate, part_memory


@dataclass(frozen=True, slots=True)
class EncodedSamples:
    """Samples of a batch, as they are written to memory.

    Attributes:
        bad: Those that were skipped or replaced.
        made_at: Monotonic seconds at which they were made, and not encoded yet.
    """

    num_samples: int
    encoded: codec.Encoded
    made_at: float
    bad: tuple[BadSample, ...] = ()

    @classmethod
    def of(cls, samples: list[object]) -> Self:
        """Encodes samples; raises ShippingError if they cannot go to another worker.

        Whatever is pickled may be another object afterwards, to what collate_fn compares it with.
        """
        made_at = time.monotonic()
        bad: list[BadSample] = []
        plain: list[object] = []
        for sample in samples:
            if isinstance(sample, MarkedSample):
                bad.append(sample.bad)
                plain.append(sample.sample)
            else:
                plain.append(sample)
        encoded = codec.encode(plain, allow_pickle=False, shares_arrays=True, keeps_gaps=True)
        return cls(len(samples), encoded, made_at, tuple(bad))


@contextlib.contextmanager
def memory_of(encoded: codec.Encoded) -> Iterator[tuple[int, ...]]:
    """Gives a descriptor of memory that holds a payload; none, if there is no payload."""
    if not encoded.nbytes:
        yield ()
        return
    descriptor = part_memory(encoded.nbytes, encoded.write_into)
    try:
        # Open until the message is sent: a worker's channel blocks until then.
        yield (descriptor,)
    finally:
        os.close(descriptor)


class PartsAsSamples:
    """The samples of a batch that was made in parts; closes the descriptors at its end."""

    def __init__(self, collation: Collate, descriptors: Sequence[int]) -> None:
        self._order = collation.order
        self._parts = collation.parts
        self._descriptors = tuple(descriptors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def read(self) -> list[object]:
        """Returns the samples, as views of the parts' memory.

        What is written to them is seen by nobody else, and not at the next call.
        """
        descriptors = iter(self._descriptors)
        samples: list[object] = []
        for part in self._parts:
            payload: Bytes1D | None = None
            if part.nbytes:
                # Copied on write: a collate function may change its samples.
                private = mmap.MAP_PRIVATE
                memory = mmap.mmap(next(descriptors), part.nbytes, flags=private)
                payload = np.frombuffer(memory, dtype=np.uint8)
            of_part = cast("list[object]", codec.decode(part.tree, payload, allow_pickle=False))
            if len(of_part) != part.num_samples:
                raise ProtocolError(f"a part of {part.num_samples} samples has {len(of_part)}")
            # The part before has its first ones as well.
            samples += of_part[part.skipped :]
        self._mark(samples)
        return samples

    def _mark(self, samples: list[object]) -> None:
        """Puts marks in the places of bad samples, as if they had been made here."""
        bad: dict[int, BadSample] = {}
        for part in self._parts:
            bad.update((one.place, one) for one in part.bad)
        if not bad:
            return
        index = cast("Sequence[object]", codec.unpack_value(self._order.index, allow_pickle=True))
        for place, one in bad.items():
            samples[place] = MarkedSample(one, index[place], samples[place])
