"""YAML with comments: each key with the sentences that belong to it in front."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from stoker.records import Json

_WIDTH = 96


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value, or with entries of its own. Without a key: comments only.

    A note that begins with blanks is a line to copy: it is not wrapped.
    """

    key: str
    value: Json
    notes: tuple[str, ...] = ()
    children: "tuple[Entry, ...]" = ()


def render(entries: Sequence[Entry], *, indent: int = 0) -> str:
    """The entries as YAML; at the outer level an empty line stands before each comment."""
    blocks: list[str] = []
    for entry in entries:
        if entry.notes and indent == 0 and blocks:
            blocks.append("")
        blocks += [line for note in entry.notes for line in _comment(note, indent)]
        if entry.key:
            blocks += _lines(entry, indent)
    return "\n".join(blocks)


def _lines(entry: Entry, indent: int) -> list[str]:
    margin = " " * indent
    if entry.children:
        return [f"{margin}{entry.key}:", render(entry.children, indent=indent + 2)]
    value = _plain(entry.value)
    is_flat = isinstance(value, list) and not any(isinstance(i, list | dict) for i in value)
    # A list of words stands on the key's line, all else under it.
    text = yaml.safe_dump(
        value if is_flat else {entry.key: value},
        sort_keys=False,
        allow_unicode=True,
        width=_WIDTH - indent - len(entry.key),
        default_flow_style=is_flat,
    )
    first, *rest = text.rstrip("\n").split("\n")
    if is_flat:
        return [f"{margin}{entry.key}: {first}", *(f"{margin}  {line}" for line in rest)]
    return [margin + line for line in (first, *rest)]


def _plain(value: object) -> object:
    """Lists and dicts instead of tuples and mappings, which YAML's safe dumper does not know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _comment(note: str, indent: int) -> list[str]:
    margin = " " * indent + "# "
    if note.startswith(" "):
        return [margin + note]
    words = " ".join(note.split())
    return textwrap.wrap(
        words,
        width=_WIDTH + 2,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
