"""Stretches of a batch: neighbouring samples that draw random numbers in a row, from one seed.

A batch has 32 of them at most, of one length but for the last one. To seed each sample would cost
more: 5 to 10 us for each generator that it draws from. What is made by several, begun again, or
stopped, begins and ends with a stretch. So what a sample draws follows from its batch and its place
there, whoever makes it.
"""

from stoker.records.workload import MAX_STRETCHES


def stretch_samples(size: int) -> int:
    """Returns how many samples a stretch has, of a batch of `size` samples."""
    return max(1, -(-size // MAX_STRETCHES))


def stretch_begin(place: int, *, size: int) -> int:
    """Returns the place where the stretch of a sample begins.

    Args:
        place: Of the sample in its batch.
        size: Samples of the batch.
    """
    return place - place % stretch_samples(size)


def next_stretch(place: int, *, size: int) -> int:
    """Returns the first place, from that one on, where a stretch begins; or one behind the batch.

    Args:
        place: In the batch.
        size: Samples of the batch.
    """
    step = stretch_samples(size)
    return -(-place // step) * step
