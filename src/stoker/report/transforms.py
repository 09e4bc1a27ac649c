"""What loading a sample is made of, as rows of the report's table."""

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.records import TransformCost

# Parts with less than this share are left to the record.
_MIN_SHARE = 0.005
_MOST = 14


@dataclass(frozen=True, slots=True)
class TransformRow:
    """One part of loading; bytes are words, empty where they are not known."""

    name: str
    is_part: bool
    cpu_seconds: float
    share: float
    size: str
    samples: int


def transform_rows(transforms: Sequence[TransformCost]) -> list[TransformRow]:
    """The parts that are worth a row, in the record's order."""
    shown = [each for each in transforms if each.within is None or each.share >= _MIN_SHARE]
    return [
        TransformRow(
            name=each.name,
            is_part=each.within is not None,
            cpu_seconds=each.cpu_seconds,
            share=each.share,
            size=_size(each),
            samples=each.samples,
        )
        for each in shown[:_MOST]
    ]


def _size(cost: TransformCost) -> str:
    if cost.bytes_out is None:
        return ""
    made = _bytes(cost.bytes_out)
    return made if cost.bytes_in is None else f"{_bytes(cost.bytes_in)} → {made}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
