"""Pages fit into a screen, say "a training run" where they mean one, and write shares as 12%."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What users read; benchmarks/README.md is mostly tables that the benchmarks write.
FOLDERS = "components", "configs", "containers", "docs", "examples", "tests/cluster"
DOCS = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
MAX_COLUMNS = 120
# Lines over the limit that a page still has. Only shrinks.
WIDE_LINES: dict[str, int] = {}
# What may follow: a training step is no training.
_COMPOUND = (
    "cluster code command config container data example framework host image input instance job "
    "loop operator phase plan process run samples script set step thread time toolkit type"
)
A_TRAINING = re.compile(
    r"\b(?:[Aa]n?|[Aa]nother|[Aa]ny|[Ee]ach|[Ee]very|failed|[Oo]ne|[Tt]his) training(?:'s)?\b(?!-)"
    rf"(?!\s(?:{'|'.join(_COMPOUND.split())})(?:e?s)?\b)|\b[Tt]rainings\b"
)
# Of source, examples and pages; names of variables count. Only shrinks.
MOST_TRAININGS = 0
# `12 %`: the report and the terminal write 12%, and so do pages. Not a remainder: `8 % 3`.
SPACED_PERCENT = re.compile("[\\d}][ \u00a0]%(?! *\\d)(?!})")


def named(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def wide_lines(text: str) -> list[str]:
    """Returns the lines that are too wide; addresses, pictures and outputs cannot be folded."""
    without_outputs = re.sub(r"(?ms)^```console\n.*?^```$", "", text)
    wide = (line for line in without_outputs.splitlines() if len(line) > MAX_COLUMNS)
    return [line for line in wide if "://" not in line and "<img" not in line]


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_no_line_of_a_page_is_wider_than_120_columns(page):
    wide = wide_lines(page.read_text())
    fix = f"python docs/make_reference.py {named(page)} folds its prose; make a list of a table"
    assert len(wide) <= WIDE_LINES.get(named(page), 0), f"{fix}: {wide[0][:80]}"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("A training that fails", True),
        ("of a training's loaders", True),
        ("two trainings of one run", True),
        ("this training.", True),
        ("a training step", False),
        ("a training run", False),
        ("another training job's name", False),
        ("the training failed", False),
        ("a training-set", False),
    ],
)
def test_a_training_as_a_noun_is_found(text, is_one):
    assert bool(A_TRAINING.search(text)) == is_one


def test_a_training_run_is_not_called_a_training():
    sources = sorted((ROOT / "src").rglob("*.py"))
    texts = (file.read_text() for file in [*sources, *DOCS])
    count = sum(len(A_TRAINING.findall(text)) for text in texts)
    assert count <= MOST_TRAININGS, "write a training run, or a job"


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_a_page_writes_shares_as_the_terminal_does(page):
    assert SPACED_PERCENT.findall(page.read_text()) == [], "write 12%, without a space"


def test_sources_write_shares_as_pages_do():
    sources = sorted((ROOT / "src").rglob("*.py"))
    spaced = [named(file) for file in sources if SPACED_PERCENT.search(file.read_text())]
    assert spaced == [], "write 12%, without a space"


# A highest number that nobody asked for makes a reader ask what happens beyond it.
NUMBERED_LIMIT = re.compile(r"\b0 (?:and|to) \d+\s+data hosts")


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_a_page_names_no_highest_number_of_data_hosts_without_a_reason(page):
    assert NUMBERED_LIMIT.findall(page.read_text()) == []


def test_sources_name_no_highest_number_of_data_hosts_without_a_reason():
    sources = sorted((ROOT / "src").rglob("*.py"))
    assert [named(file) for file in sources if NUMBERED_LIMIT.search(file.read_text())] == []
