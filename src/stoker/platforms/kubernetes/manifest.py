"""YAML of objects, as every parser reads it: kubectl's knows YAML 1.1, PyYAML less of it."""

import re
from collections.abc import Mapping, Sequence

import yaml

from stoker.records import Json

# Texts that every version of YAML reads as texts.
_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*$")
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


class _Dumper(yaml.SafeDumper):
    """Quotes what a parser could take for a number, a date or a truth value."""

    def ignore_aliases(self, data: object) -> bool:
        # Not every reader knows them.
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'"
    if not text.replace("\n", "").isprintable():
        # Only this style has escapes.
        style = '"'
    elif _PLAIN.match(text) and text.lower() not in _WORDS:
        style = ""
    elif "\n" in text:
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def manifest(
    objects: Sequence[Mapping[str, Json]], *, notes: Mapping[str, str] | None = None
) -> str:
    """Returns the objects as YAML, one document each, with `notes` by their kind as comments."""
    documents = []
    for document in objects:
        words = (notes or {}).get(str(document.get("kind")), "")
        comment = "".join(f"# {line}\n" for line in words.splitlines())
        written = yaml.dump(
            document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
        )
        documents.append(comment + written)
    return "---\n".join(documents)
