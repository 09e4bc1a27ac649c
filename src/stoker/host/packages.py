"""Names and versions of the distributions that a Python has installed."""

import contextlib
import re
from importlib.metadata import Distribution, distributions

# The second in one block of lines with the first, as headers are.
_HEADERS = re.compile(r"^Name: *(.+?) *\n(?:.+\n)*?Version: *(.+?) *$", re.MULTILINE)


def packages_here() -> dict[str, str]:
    """Returns the versions of the distributions, without those whose files are damaged."""
    versions = {}
    for distribution in distributions():
        with contextlib.suppress(OSError, ValueError):
            name, version = name_and_version(distribution)
            versions[name] = version
    return versions


def name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Reads two headers of a distribution's metadata.

    Its own attributes take 0.3 ms each: they parse all of it, mostly a description.

    Raises:
        ValueError: It has no such headers, or is no text.
    """
    texts = map(distribution.read_text, ("METADATA", "PKG-INFO", ""))
    (name, version), *_ = _HEADERS.findall(next(filter(None, texts), ""))
    return name, version
