"""The lines of code that the pages show."""

import re
from collections.abc import Iterator


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
