"""Indices of samples as people read them, whatever a sampler gives: numbers, tensors, names."""

from collections.abc import Sequence

# What an error shows: of a batch, and of one index, which may be a text of any length.
_MAX_SAMPLES = 64
_MAX_CHARACTERS = 100


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


def words_of_samples(index: object) -> str:
    """Returns the samples of a batch for an error, the first ones if they are many."""
    samples = indices_of(index)
    shown = [_short(sample) for sample in samples[:_MAX_SAMPLES]]
    if len(samples) > len(shown):
        shown.append(f"and {len(samples) - len(shown)} more")
    return ", ".join(shown)


def words_of_sample(index: object, place: int, *, is_lone: bool = False) -> str:
    """Returns one sample of a batch for an error.

    Args:
        index: What the sampler gave for the batch.
        place: Of the sample in it.
        is_lone: As for `index_at`.
    """
    return _short(index_at(index, place, is_lone=is_lone))


def _short(sample: object) -> str:
    return repr(sample)[:_MAX_CHARACTERS]
