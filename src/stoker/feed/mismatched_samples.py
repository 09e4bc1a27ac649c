"""Samples of a batch that are unlike each other, which most collate functions cannot put together.

No error of a collate function names a sample, so `feed.on_error` cannot leave one out. What can be
said is which one is of another type, shape or size than the first one of its batch.
"""

from collections.abc import Iterable, Mapping, Sequence

_MAX_DEPTH = 8


def first_unlike(samples: Iterable[object]) -> tuple[int, str] | None:
    """Returns the place of the first sample that is unlike the one at place 0, and how, in words.

    None: all are alike, or their own attributes raise.
    """
    try:
        listed = list(samples)
        for place, sample in enumerate(listed[1:], start=1):
            difference = _difference(listed[0], sample, depth=0)
            if difference:
                return place, difference
    except Exception:
        # Objects of the script.
        return None
    return None


def _difference(first: object, other: object, *, depth: int) -> str:
    """Returns how a value is unlike another one: `of shape (4,), not (3,)`; empty: it is not."""
    if type(first) is not type(other):
        return f"of type {type(other).__name__}, not {type(first).__name__}"
    shape = getattr(first, "shape", None)
    if shape is not None:
        shapes = tuple(shape), tuple(getattr(other, "shape", ()))
        return "" if shapes[0] == shapes[1] else f"of shape {shapes[1]}, not {shapes[0]}"
    if depth == _MAX_DEPTH or isinstance(first, str | bytes):
        return ""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return _mappings_difference(first, other, depth=depth)
    if isinstance(first, Sequence) and isinstance(other, Sequence):
        return _sequences_difference(first, other, depth=depth)
    return ""


def _mappings_difference(
    first: Mapping[object, object], other: Mapping[object, object], *, depth: int
) -> str:
    for key in first:
        if key not in other:
            return f"without {key!r}"
        difference = _difference(first[key], other[key], depth=depth + 1)
        if difference:
            return f"in {key!r} {difference}"
    return ""


def _sequences_difference(first: Sequence[object], other: Sequence[object], *, depth: int) -> str:
    if len(first) != len(other):
        return f"of {len(other)} parts, not {len(first)}"
    for number, pair in enumerate(zip(first, other, strict=True)):
        difference = _difference(*pair, depth=depth + 1)
        if difference:
            return f"in [{number}] {difference}"
    return ""
