"""Samples that ended or blocked a worker: how its pool tells the next worker of them.

`workers.crashes` finds such a sample; the worker that makes its batch after that leaves it out.
"""

import msgspec

# In the place of a sample that a process makes: all of the batch, in one call; none.
ALL_SAMPLES = -1
NO_SAMPLE = -2


class SampleInWork(msgspec.Struct, frozen=True):
    """The sample that a worker makes now.

    Attributes:
        place: In its batch; ALL_SAMPLES: one call makes all of them.
        seconds: Since it was begun.
        is_lone: Its batch has no other one (`batch_size=None`).
    """

    place: int
    seconds: float
    is_lone: bool = False


class LostSample(msgspec.Struct, frozen=True):
    """A sample that ends or blocks the process that makes it: it counts as one that raises.

    Attributes:
        place: In its batch.
        attempt: 0: the sample itself; above: the one drawn at that attempt to replace it.
        error: Stands for the class of an exception.
        text: What became of the process.
    """

    place: int
    attempt: int
    error: str
    text: str
