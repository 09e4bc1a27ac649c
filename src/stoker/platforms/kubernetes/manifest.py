"""Objects as YAML that `kubectl apply` takes: documents in the order in which they are needed."""

import re
from collections.abc import Mapping, Sequence

import yaml

from stoker.records import Json

# Texts that no parser of any version of YAML takes for something else.
_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*$")
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


class _Dumper(yaml.SafeDumper):
    """Quotes whatever could be a number, a date or a truth to somebody: kubectl reads YAML 1.1."""

    def ignore_aliases(self, data: object) -> bool:
        """Objects stand there in full, however often they are used."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'"
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        style = ""
    elif "\n" in text and _is_block(text):
        style = "|"
    elif not text.isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_block(text: str) -> bool:
    lines = text.split("\n")
    return all(line.isprintable() and line == line.rstrip() for line in lines) and bool(lines[0])


_Dumper.add_representer(str, _text)


def manifest(
    objects: Sequence[Mapping[str, Json]], *, notes: Mapping[str, str] | None = None
) -> str:
    """The objects as YAML, one document each.

    Args:
        objects: In their order.
        notes: Words for those who read it, by the object's kind.
    """
    documents = []
    for document in objects:
        words = (notes or {}).get(str(document.get("kind")), "")
        comment = "".join(f"# {line}\n" for line in words.splitlines())
        documents.append(comment + _dump(document))
    return "---\n".join(documents)


def _dump(document: Mapping[str, Json]) -> str:
    written: str = yaml.dump(
        _plain(document),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=10**6,
    )
    return written


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
