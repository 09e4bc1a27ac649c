"""Kubernetes' quantities: 500m, 4, 7.5, 30Gi."""

from decimal import Decimal

_SUFFIXES = {
    "n": Decimal("0.000000001"),
    "u": Decimal("0.000001"),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def written(quantity: str | int | float) -> str:
    """The quantity as an object holds it."""
    return str(quantity)


def amount(quantity: str) -> Decimal:
    """The quantity as a number."""
    for suffix in (quantity[-2:], quantity[-1:]):
        if suffix in _SUFFIXES:
            return Decimal(quantity.removesuffix(suffix)) * _SUFFIXES[suffix]
    return Decimal(quantity)
