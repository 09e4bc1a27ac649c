"""Writes docs/tutorial.ipynb from docs/tutorial.md, so that page and notebook cannot differ.

    python docs/make_notebook.py            after a change of the page
    python docs/make_notebook.py --run      first runs the page's commands, and takes their output

Run it on a quiet machine, with `stoker` on the PATH, and put the day into the page.

A block with a title becomes a cell that writes that file, a `console` block a cell that runs its
commands and holds the page's output, everything else text.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```\n', re.DOTALL | re.MULTILINE)

Cell = dict[str, object]


def notebook(page: str) -> str:
    """Returns the notebook of a page, as the text of its file."""
    cells = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(_cells(page))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _cells(page: str) -> Iterator[Cell]:
    text_from = 0
    for block in _BLOCK.finditer(page):
        language, title, content = block.groups()
        if title is None and language != "console":
            continue
        yield from _text(page[text_from : block.start()])
        text_from = block.end()
        if title is not None:
            yield _code(f"%%writefile {title}\n{content}")
        else:
            lines = content.splitlines()
            typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            shown = [line for line in lines if not line.startswith("$ ")]
            yield _code("%%bash\n" + "\n".join(typed), shown="\n".join(shown))
    yield from _text(page[text_from:])


def with_fresh_outputs(page: str) -> str:
    """Returns the page with what its commands say now, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:

        def fresh(block: re.Match[str]) -> str:
            language, title, content = block.groups()
            if title is not None:
                Path(folder, title).write_text(content, encoding="utf-8")
            elif language == "console":
                typed = [line for line in content.splitlines() if line.startswith("$ ")]
                said = "".join(f"{line}\n{_output_of(line[2:], folder)}" for line in typed)
                return f"```console\n{said}```\n"
            return block[0]

        return _BLOCK.sub(fresh, page)


def _output_of(command: str, folder: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def _text(markdown: str) -> Iterator[Cell]:
    if markdown.strip():
        source = markdown.strip().splitlines(keepends=True)
        yield {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(source: str, *, shown: str = "") -> Cell:
    output = {"name": "stdout", "output_type": "stream", "text": shown.splitlines(keepends=True)}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [output] if shown else [],
        "source": source.rstrip().splitlines(keepends=True),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        PAGE.write_text(with_fresh_outputs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
