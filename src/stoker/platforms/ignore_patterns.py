"""The file `.stokerignore`: patterns, in the form of .gitignore, of what is not packed."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.errors import UsageError

IGNORE_FILE = ".stokerignore"
# `**/`, `/**` at the end, other stars, `?`, a class of characters, an escape, a character.
_TOKEN = re.compile(r"\*\*/|/\*\*$|\*+|\?|\[[!^]?\]?[^\]]*\]|\\.|.", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnorePattern:
    """A line of the file.

    Attributes:
        path: What paths match it.
        is_negated: The line begins with `!`: the path is packed.
        is_of_folders: The line ends in `/`.
    """

    path: re.Pattern[str]
    is_negated: bool
    is_of_folders: bool


@dataclass(frozen=True, slots=True)
class IgnorePatterns:
    """All lines; as in git, the last one that matches decides."""

    lines: Sequence[IgnorePattern]

    def decided(self, name: str, *, is_folder: bool = False) -> bool | None:
        """Returns whether a path is left out (True) or packed (False); None: no line says.

        A file in a folder that is left out cannot be brought back.
        """
        if not self.lines:
            return None
        for above in reversed(PurePosixPath(name).parents[:-1]):
            if self._of(str(above), is_folder=True):
                return True
        return self._of(name, is_folder=is_folder)

    def _of(self, name: str, *, is_folder: bool) -> bool | None:
        for line in reversed(self.lines):
            is_of_kind = is_folder or not line.is_of_folders
            if is_of_kind and line.path.fullmatch(name):
                return not line.is_negated
        return None


def read_patterns(folder: Path) -> IgnorePatterns:
    """Reads the file `.stokerignore` of a folder; without one there are no patterns."""
    file = folder / IGNORE_FILE
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return IgnorePatterns(())
    except OSError as err:
        raise UsageError(
            f"cannot read {file}: {err.strerror}", fix="check its permissions"
        ) from err
    return parse_patterns(text)


def parse_patterns(text: str) -> IgnorePatterns:
    """Returns the patterns of a text in the form of .gitignore."""
    return IgnorePatterns(tuple(_patterns(text.removeprefix("\ufeff").splitlines())))


def _patterns(lines: Sequence[str]) -> Iterator[IgnorePattern]:
    for line in lines:
        pattern = line.rstrip()
        if not pattern or pattern.startswith("#"):
            continue
        is_negated = pattern.startswith("!")
        pattern = pattern.removeprefix("!")
        # In `build/` the slash is no part of the path.
        path = pattern.rstrip("/")
        is_of_folders = path != pattern
        # A slash elsewhere ties the pattern to the top.
        depth = "" if "/" in path else "(?:.*/)?"
        expression = depth + _expression(path.removeprefix("/"))
        try:
            compiled = re.compile(expression, re.DOTALL)
        except re.error as err:
            raise UsageError(f"not a pattern: {line}", where=IGNORE_FILE, fix=str(err)) from None
        yield IgnorePattern(path=compiled, is_negated=is_negated, is_of_folders=is_of_folders)


def _expression(pattern: str) -> str:
    """Returns the regular expression of a pattern; `*` and `?` match no slash."""
    return "".join(_part(token) for token in _TOKEN.findall(pattern))


def _part(token: str) -> str:
    if token == "**/":
        return "(?:.*/)?"
    if token == "/**":
        return "/.*"
    if token.startswith("*"):
        return "[^/]*"
    if token == "?":
        return "[^/]"
    if token.startswith("[") and len(token) > 1:
        inside = token[1:-1].replace("\\", "\\\\")
        if inside[:1] in ("!", "^"):
            return f"[^{inside[1:]}]"
        return f"[{inside}]"
    if token.startswith("\\") and len(token) > 1:
        return re.escape(token[1:])
    return re.escape(token)
