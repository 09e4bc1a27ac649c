"""Parts of documents of unknown shape, for doubles: what is missing is empty."""

from collections.abc import Mapping
from decimal import Decimal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Document = Mapping[str, "Json"]

# Suffixes of Kubernetes' quantities.
_SUFFIXES = {
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)},
    **{name: Decimal(1000) ** -power for power, name in enumerate("mun", 1)},
}


def mapping(document: Json, *keys: str) -> Document:
    """Returns the mapping at the path `keys`."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}


def mappings(document: Json, *keys: str) -> list[Document]:
    """Returns the mappings in the list at the path `keys`."""
    return [item for item in _items(document, *keys) if isinstance(item, Mapping)]


def texts(document: Json, *keys: str) -> list[str]:
    """Returns the texts in the list at the path `keys`."""
    return [item for item in _items(document, *keys) if isinstance(item, str)]


def text(document: Json, *keys: str) -> str:
    """Returns the text at the path `keys`."""
    *parents, last = keys
    value = mapping(document, *parents).get(last)
    return value if isinstance(value, str) else ""


def number(document: Document, key: str, default: int = 0) -> int:
    value = document.get(key)
    return value if isinstance(value, int) else default


def name_of(document: Document) -> str:
    return text(document, "metadata", "name")


def amount(quantity: str) -> Decimal:
    """Returns one of Kubernetes' quantities as a number."""
    for suffix in (quantity[-2:], quantity[-1:]):
        if suffix in _SUFFIXES:
            return Decimal(quantity.removesuffix(suffix)) * _SUFFIXES[suffix]
    return Decimal(quantity)


def _items(document: Json, *keys: str) -> list[Json]:
    *parents, last = keys or ("",)
    items = mapping(document, *parents).get(last) if keys else document
    return [*items] if isinstance(items, list | tuple) else []
