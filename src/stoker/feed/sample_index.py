"""Indices of samples as people read them, whatever a sampler gives: numbers, tensors, names."""

from collections.abc import Sequence


def shown_index(index: object) -> object:
    """Returns an index as plain numbers: the same for 3, numpy.int64(3) and tensor(3)."""
    # Without torch: processes of a data host that import none of it name samples, too.
    as_numbers: object = getattr(index, "tolist", None)
    if callable(as_numbers):
        numbers: object = as_numbers()
        return numbers
    if type(index) is tuple:
        return tuple(map(shown_index, index))
    if type(index) is list:
        return list(map(shown_index, index))
    return index


def indices_of(index: object) -> Sequence[object]:
    """Returns the indices of a batch's samples; one, if a sampler gave that for a sample alone."""
    shown = shown_index(index)
    return shown if isinstance(shown, list | tuple | range) else [shown]


def index_at(index: object, place: int, *, is_lone: bool = False) -> object:
    """Returns the index of one sample of a batch.

    Args:
        index: What the sampler gave for the batch.
        place: Of the sample in it.
        is_lone: The batch has this sample alone (`batch_size=None`), whose index may be a tuple.
    """
    indices = indices_of(index)
    if is_lone or place >= len(indices):
        return shown_index(index)
    return indices[place]
