"""The commands that the pages show, in their order."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Made from the product, which tests of the reference compare.
_MADE = ("reference",)
_PROGRAMS = "aws|curl|docker|export|git|kfp|kubectl|make|pip|printf|python|sed|stoker"
_COMMAND = re.compile(rf"({_PROGRAMS})\b(?!:)")


def pages() -> list[str]:
    """Returns the pages with commands, by their names in the checkout."""
    found = (file.relative_to(ROOT) for file in (ROOT / "docs").rglob("*.md"))
    kept = [str(page) for page in found if page.parts[1] not in _MADE]
    return ["README.md", *sorted(kept)]


def code_lines(text: str) -> Iterator[str]:
    """Yields lines of code blocks, continued lines as one; cuts off what comes after a command."""
    is_fenced, begun = False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            continue
        if not (is_fenced or line.startswith("    ")):
            begun = ""
            continue
        begun += line.strip().removesuffix("\\")
        if not line.endswith("\\"):
            yield re.split(r"\s{3,}|\s+#\s", begun)[0].removeprefix("$ ")
            begun = ""


def commands_of(page: str) -> list[str]:
    """Returns the commands in the code blocks of a page, without their prompts and comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.sub(r"(?ms)^```(python|yaml|json|text)[^\n]*\n.*?^```", "", text)
    return [line.strip() for line in code_lines(blocks) if _COMMAND.match(line)]


def command_of(page: str, start: str) -> str:
    """Returns the first command of a page that begins so; an AssertionError if there is none."""
    found = [command for command in commands_of(page) if command.startswith(start)]
    assert found, f"{page} has no command {start}"
    return found[0]
