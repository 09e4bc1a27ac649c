"""First and last batches of an epoch, made by several data hosts: who makes which samples, costs.

One host has the batch, or the local workers of this process, and collates it. Others make samples
of it as well, which this process passes on unopened. Who collates makes whatever does not come in
time, so nobody waits for a host that is lost, slow, or cannot make samples one by one.

Of the first batch the shares are known when it is asked for. The last ones were asked for long
before it is known which hosts run out of batches: these then make samples that are left of others.
"""

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stoker.feed.trainer.scheduler import Peer
from stoker.feed.wire.protocol import BatchPart, Places
from stoker.feed.workers.splitting import Patience, part_samples
from stoker.records.workload import MIN_SPLIT_SECONDS

# Last batches that the costs follow.
_MEMORY = 32
# As within a host (splitting): of what the samples cost more on their way.
_MIN_GAIN = 4.0
# Parts are encrypted for the host that collates with CURVE's cipher, on both sides (see sealing).
_PASSING_SECONDS_PER_BYTE = 0.8e-9


@dataclass(frozen=True, slots=True)
class BatchShares:
    """Which samples of a batch are made where; the rest is of the peer that collates.

    Attributes:
        part_samples: Samples of a part.
        places: By host.
    """

    part_samples: int
    places: Mapping[Peer, Places]

    @property
    def num_elsewhere(self) -> int:
        return sum(last - first for first, last in self.places.values())


def shares_of(
    size: int, *, collator: Peer, workers: Mapping[Peer, int], begin: int = 0
) -> BatchShares | None:
    """Returns the shares of a batch, whole parts in proportion to workers; None: only one has any.

    Args:
        size: Samples of the batch.
        workers: By peer, all that may make samples.
        begin: How many of its samples are made already, of which nobody has a share.
    """
    total = sum(workers.values())
    step = part_samples(size, num_workers=total)
    num_made = -(-begin // step)
    num_parts = -(-size // step) - num_made
    others = [host for host in workers if host != collator]
    places: dict[Peer, Places] = {}
    num_workers = first = 0
    for host in (collator, *others):
        num_workers += workers[host]
        last = min(size, step * (num_made + round(num_parts * num_workers / total)))
        if first < last:
            places[host] = first, last
        first = last
    places.pop(collator, None)
    if not places:
        return None
    return BatchShares(step, places)


class _Receipt(NamedTuple):
    """The bytes of a batch, and the seconds in which this process received them."""

    nbytes: int
    read_seconds: float


class BatchSharing:
    """A loader's shared batches: what one costs a worker, and its samples' way from host to host.

    Attributes:
        collators: Who collates those batches of the epoch that several hosts make.
        passed_on: Of these batches, the samples that went to it, by the host that made them.
    """

    def __init__(self) -> None:
        self.collators: dict[int, Peer] = {}
        self.passed_on: dict[int, Counter[str]] = {}
        self._batches: deque[float] = deque(maxlen=_MEMORY)
        self._receipts: deque[_Receipt] = deque(maxlen=_MEMORY)
        self._writing: deque[float] = deque(maxlen=_MEMORY)
        self._patience = Patience()

    def begin_epoch(self) -> None:
        self.collators.clear()
        self.passed_on.clear()

    def begin(self, batch_number: int, collator: Peer) -> None:
        self.collators[batch_number] = collator

    def count_passed_on(self, batch_number: int, host: str, num_samples: int) -> None:
        self.passed_on.setdefault(batch_number, Counter())[host] += num_samples

    @property
    def usual_seconds(self) -> float:
        """What a batch costs one worker, the median; 0: that is not known."""
        if not self._batches:
            return 0.0
        return statistics.median(self._batches)

    def add_batch(self, seconds: float, *, nbytes: int, read_seconds: float) -> None:
        """Adds a batch.

        Args:
            seconds: That one worker would take.
            read_seconds: In which its bytes were received, once the first of them was there.
        """
        self._batches.append(seconds)
        self._receipts.append(_Receipt(nbytes, read_seconds))
        self._patience.add_batch()
        if self._patience.is_over and self._writing:
            # Only the parts of a shared batch show what writing them costs.
            self._writing.clear()
            self._patience.lengthen()

    def add_part(self, part: BatchPart, *, nbytes: int) -> None:
        self._patience.mark_tried()
        if nbytes:
            self._writing.append(part.send_seconds / nbytes)

    def pays(self, *, fewer: float, share: float) -> bool:
        """Returns whether several hosts should make a batch; not as long as nothing is known.

        Args:
            fewer: By what part of its time in one worker the batch is there sooner.
            share: Of its samples, those that are made elsewhere.
        """
        seconds = self.usual_seconds
        return seconds >= MIN_SPLIT_SECONDS and fewer * seconds >= _MIN_GAIN * self._way(share)

    def _way(self, share: float) -> float:
        """Returns the seconds that a share of a batch takes to the host that collates."""
        received = sum(receipt.nbytes for receipt in self._receipts)
        if not received:
            return 0.0
        network = sum(receipt.read_seconds for receipt in self._receipts) / received
        writing = statistics.median(self._writing) if self._writing else 0.0
        of_byte = 2 * network + 2 * writing + _PASSING_SECONDS_PER_BYTE
        return share * received / len(self._receipts) * of_byte
