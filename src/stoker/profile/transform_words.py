"""What loading a sample is made of, as a short table. Pure."""

from collections.abc import Sequence

from stoker.records import TransformCost

_ROWS = 8
_NAME = 44
# Parts with less than this share are for the record only.
_MIN_SHARE = 0.01


def transform_table(transforms: Sequence[TransformCost]) -> list[str]:
    """At most eleven lines of 88 columns; none where nothing is known."""
    if not transforms:
        return []
    lines = [f"{'loading a sample, one worker':<{_NAME}}{'CPU ms':>9}{'share':>8}   {'bytes':>19}"]
    shown = [each for each in transforms if each.within is None or each.share >= _MIN_SHARE]
    lines += [_row(each) for each in shown[:_ROWS]]
    left = len(shown) - _ROWS
    if left > 0:
        lines.append(f"  and {left} more in the profile")
    return [line.rstrip() for line in lines]


def _row(cost: TransformCost) -> str:
    name = cost.name if cost.within is None else f"  {cost.name}"
    if len(name) > _NAME - 1:
        # The end of a long name tells more than its beginning.
        name = f"  ..{name[-(_NAME - 5) :]}"
    return (
        f"{name:<{_NAME}}{cost.cpu_seconds * 1e3:>9.3f}{cost.share:>8.0%}   {_bytes_of(cost):>19}"
    )


def _bytes_of(cost: TransformCost) -> str:
    if cost.bytes_out is None:
        return ""
    if cost.bytes_in is None:
        return _size(cost.bytes_out)
    return f"{_size(cost.bytes_in)} -> {_size(cost.bytes_out)}"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
