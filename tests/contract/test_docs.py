"""The documents agree with the product: commands, parameters, links and prices that they name."""

import ast
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from stoker.catalog import load_catalog
from stoker.cli.parser import app
from support.pages import code_lines

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import make_notebook  # noqa: E402

import pictures  # noqa: E402

FOLDERS = ("docs", "configs", "components", "pipelines", "containers", "examples")
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
PAGES = [page for page in PAGES if page.parent.name != "reference"]
DOCUMENTS = sorted([ROOT / "README.md", *PAGES])
CODE = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.*")]
SOURCES = sorted([ROOT / "CONTRIBUTING.md", *CODE])
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
COMMANDS |= {f"step {name}": step for name, step in COMMANDS["step"].commands.items()}


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def commands(text: str) -> Iterator[list[str]]:
    """Yields the words after `stoker` of every command in code blocks, and in the running text."""
    spans = re.findall(r"`(stoker [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*code_lines(text), *spans]:
        if not re.match(r"stoker [a-z]", line):
            continue
        words = shlex.split(line.replace("\\|", "|"), comments=True)[1:]
        yield list(itertools.takewhile(lambda word: word != ">", words))


@pytest.mark.parametrize("file", DOCUMENTS, ids=named)
def test_every_command_in_the_documents_exists(file):
    for words in commands(file.read_text()):
        verb, *rest = itertools.takewhile(lambda word: word != "--", words)
        if verb == "step" and rest:
            verb = f"step {rest.pop(0)}"
        # `stoker upload|start`: one of several verbs.
        for name in verb.split("|"):
            assert name in COMMANDS, f"{named(file)}: stoker {name}"
            known = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
            for word in rest:
                flag = word.strip("[]").partition("=")[0]
                if flag.startswith("--"):
                    assert flag in {*known, "--help"}, f"{named(file)}: stoker {name} {flag}"


def anchors(text: str) -> set[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#{1,6} (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("file", DOCUMENTS, ids=named)
def test_links_of_a_document_lead_somewhere_and_its_python_parses(file):
    text = file.read_text()
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in [*pictures, *re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)]:
        # `make docs` makes the reference.
        if not re.search(r"://|^mailto:|(^|/)reference/", target):
            assert (file.parent / target).exists(), f"{named(file)}: {target}"
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
        page = file.parent / target if target else file
        if page.suffix == ".md" and page.parent.name != "reference":
            assert anchor in anchors(page.read_text()), f"{named(file)}: {target}#{anchor}"
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        ast.parse(block)
    # Whatever has that name on PyPI is not stoker: a checkout or a wheel is installed.
    assert not re.search(r"pip install (-\S+ )*['\"]?stoker\b", text)


def test_the_tutorials_notebook_is_the_page():
    made = make_notebook.notebook(make_notebook.PAGE.read_text())
    assert make_notebook.NOTEBOOK.read_text() == made, "run python docs/make_notebook.py"


def test_every_file_of_the_project_that_a_text_names_is_there():
    name = re.compile(r"\b(?:tests|src|benchmarks|docs)/[\w./-]+\.\w+")
    # Other projects have folders of these names, too.
    address = re.compile(r"https?://[^\s)]+")
    missing = [
        f"{named(file)}: {found}"
        for file in [*DOCUMENTS, *SOURCES]
        for found in name.findall(address.sub("", file.read_text()))
        if not (ROOT / found).exists() and not found.startswith("docs/reference/")
    ]
    assert missing == []


def test_the_prices_in_the_guide_are_those_of_the_catalog():
    catalog = load_catalog("sagemaker")
    text = (ROOT / "docs" / "sagemaker.md").read_text()
    listed = re.findall(r"^\| `(ml\.[\w.-]+)` \| ([\d.]+) \|", text, flags=re.MULTILINE)
    assert listed
    for name, price in listed:
        instance = catalog.get(name)
        assert instance.usd_per_hour == pytest.approx(float(price), abs=0.0005), name
        assert str(instance.priced_on) in text


README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", pictures.pictures(), ids=lambda file: file.name)
def test_a_picture_and_its_caption_are_what_the_committed_results_make(file):
    assert file.read_text() == pictures.pictures()[file], "run python benchmarks/pictures.py"


def test_the_caption_says_day_machine_and_command_and_that_workers_sleep():
    document = pictures.results()
    caption = " ".join(README.partition("</picture>")[2].split("## What next")[0].split())
    assert f"`{document['command']}` of {document['date'][:10]}" in caption
    assert document["machine"].partition(",")[0] in caption
    assert "Workers sleep" in caption
    assert "share one machine" in caption


def test_a_stranger_finds_the_two_commands():
    first, _, contributing = README.partition("## Contributing")
    assert "    make run\n" in first.partition("## ")[0]
    assert "    make test\n" in contributing


def test_it_is_read_in_three_minutes():
    text = re.sub(r"<picture>.*?</picture>", "", README, flags=re.DOTALL)
    assert len(text.split()) <= 600
