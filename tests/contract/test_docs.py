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
from stoker.cli.app import STEP_VERBS, VERBS, app_for
from stoker.cli.main import with_step
from stoker.parameters import parameters_of
from stoker.workload_file import read_workload
from support.examples import document
from support.pages import code_lines

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_notebook  # noqa: E402

FOLDERS = ("docs", "configs", "components", "pipelines", "containers", "examples")
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
DOCUMENTS = sorted([ROOT / "README.md", *PAGES])
CODE = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.*")]
SOURCES = sorted([ROOT / "CONTRIBUTING.md", *CODE])
COMMANDS = typer.main.get_command(app_for(*VERBS, *STEP_VERBS)).commands  # type: ignore[attr-defined]


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
        verb, *rest = with_step(list(itertools.takewhile(lambda word: word != "--", words)))
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
        if "://" not in target and not target.startswith("mailto:"):
            assert (file.parent / target).exists(), f"{named(file)}: {target}"
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
        page = file.parent / target if target else file
        if page.suffix == ".md":
            assert anchor in anchors(page.read_text()), f"{named(file)}: {target}#{anchor}"
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        ast.parse(block)
    # Whatever has that name on PyPI is not stoker: a checkout or a wheel is installed.
    assert not re.search(r"pip install (-\S+ )*['\"]?stoker\b", text)


def test_every_error_that_the_troubleshooting_quotes_is_one_of_stokers():
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## The feed")[2]
    quoted = re.findall(r"^- \*\*`([^`]+)`\*\*", page, flags=re.MULTILINE)
    assert len(quoted) >= 15
    texts = "\n".join(text for file in (ROOT / "src").rglob("*.py") for text in texts_in(file))
    parts = {part.strip() for words in quoted for part in words.split("...")}
    assert [part for part in sorted(parts) if part not in texts] == []


def texts_in(file: Path) -> Iterator[str]:
    """Yields the texts of a module, each as a whole; a value within one is cut out."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Constant(value=str()):
                yield node.value
            case ast.JoinedStr():
                parts = (part for part in node.values if isinstance(part, ast.Constant))
                yield "\n".join(str(part.value) for part in parts)


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
        if not (ROOT / found).exists()
    ]
    assert missing == []


def test_the_python_versions_of_the_package_are_those_that_tests_ran_on():
    text = (ROOT / "docs" / "compatibility.md").read_text()
    rows = text[text.index("| Python |") : text.index("| PyTorch |")]
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert re.findall(r"(?m)^\| (?:Python)? ?\| (3\.\d+) \|", rows) == declared


def test_the_table_of_parameters_is_that_of_the_pipeline():
    workload = read_workload(document("mnist-sagemaker.yaml"))
    text = (ROOT / "docs" / "sagemaker.md").read_text()
    table = text[text.index("| parameter | default") :].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert listed == [parameter.name for parameter in parameters_of(workload)]


def test_the_prices_in_the_guide_are_those_of_the_catalog():
    catalog = load_catalog("sagemaker")
    text = (ROOT / "docs" / "sagemaker.md").read_text()
    listed = re.findall(r"^\| `(ml\.[\w.-]+)` \| ([\d.]+) \|", text, flags=re.MULTILINE)
    assert listed
    for name, price in listed:
        instance = catalog.get(name)
        assert instance.usd_per_hour == pytest.approx(float(price), abs=0.0005), name
        assert str(instance.priced_on) in text
