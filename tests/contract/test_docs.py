"""The documents against the product: commands, parameters, links and prices that they name."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from stoker.catalog import load_catalog
from stoker.cli.app import VERBS, app_for
from stoker.parameters import parameters_of
from stoker.settings import read_workload

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "configs", "components", "pipelines", "containers", "examples")
DOCUMENTS = sorted(
    [ROOT / "README.md", *(file for name in FOLDERS for file in (ROOT / name).rglob("*.md"))]
)
SOURCES = sorted(
    [ROOT / "CONTRIBUTING.md", *(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.*")]
)
COMMANDS = typer.main.get_command(app_for(*VERBS)).commands  # type: ignore[attr-defined]


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def code_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, continued lines as one; what stands behind a command is cut off."""
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


def commands(text: str) -> Iterator[list[str]]:
    """The words behind `stoker` of every command in code blocks, and in the running text."""
    spans = re.findall(r"`(stoker [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*code_lines(text), *spans]:
        if not re.match(r"stoker [a-z]", line):
            continue
        words = shlex.split(line.replace("\\|", "|"), comments=True)[1:]
        if ">" in words:
            words = words[: words.index(">")]
        yield words


@pytest.mark.parametrize("file", DOCUMENTS, ids=named)
def test_every_command_in_the_documents_exists(file: Path) -> None:
    for words in commands(file.read_text()):
        verb, rest = words[0], words[1:]
        # `stoker upload|start`: one of several verbs.
        for name in verb.split("|"):
            assert name in COMMANDS, f"{named(file)}: stoker {name}"
            if "--" in rest:
                rest = rest[: rest.index("--")]
            known = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
            for word in rest:
                flag = word.strip("[]").partition("=")[0]
                if flag.startswith("--"):
                    assert flag in {*known, "--help"}, f"{named(file)}: stoker {name} {flag}"


@pytest.mark.parametrize("file", DOCUMENTS, ids=named)
def test_every_link_within_the_repository_leads_somewhere(file: Path) -> None:
    text = file.read_text()
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in [*pictures, *re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)]:
        if "://" not in target and not target.startswith("mailto:"):
            assert (file.parent / target).exists(), f"{named(file)}: {target}"


def test_every_file_of_the_project_that_a_text_names_is_there() -> None:
    name = re.compile(r"\b(?:tests|src|benchmarks|docs)/[\w./-]+\.\w+")
    missing = [
        f"{named(file)}: {found}"
        for file in [*DOCUMENTS, *SOURCES]
        for found in name.findall(file.read_text())
        if not (ROOT / found).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("file", DOCUMENTS, ids=named)
def test_no_document_installs_stoker_from_an_index_that_does_not_have_it(file: Path) -> None:
    # Whatever has that name on PyPI is not stoker: a checkout or a wheel is installed.
    assert not re.search(r"pip install (-\S+ )*['\"]?stoker\b", file.read_text())


def test_the_python_versions_of_the_package_are_those_that_tests_ran_on() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    rows = text[text.index("| Python |") : text.index("| PyTorch |")]
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert re.findall(r"(?m)^\| (?:Python)? ?\| (3\.\d+) \|", rows) == declared


def test_the_table_of_parameters_is_that_of_the_pipeline() -> None:
    workload = read_workload(ROOT / "configs" / "mnist-sagemaker.yaml")
    text = (ROOT / "docs" / "sagemaker.md").read_text()
    table = text[text.index("| parameter | default") :].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert listed == [parameter.camel_name for parameter in parameters_of(workload)]


def test_the_prices_in_the_guide_are_those_of_the_catalog() -> None:
    catalog = load_catalog("sagemaker")
    text = (ROOT / "docs" / "sagemaker.md").read_text()
    listed = re.findall(r"^\| `(ml\.[\w.-]+)` \| ([\d.]+) \|", text, flags=re.MULTILINE)
    assert listed
    for name, price in listed:
        instance = catalog.get(name)
        assert instance.usd_per_hour == pytest.approx(float(price), abs=0.0005), name
        assert str(instance.priced_on) in text
