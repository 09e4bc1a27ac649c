"""The README's first screen against what it was made from."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import pictures  # noqa: E402

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", pictures.pictures(), ids=lambda file: file.name)
def test_a_picture_is_what_the_committed_results_make(file: Path) -> None:
    assert file.read_text() == pictures.pictures()[file], "python benchmarks/pictures.py"
    assert f"docs/{file.name}" in README


def test_the_chart_is_told_in_words_with_the_day_the_machine_and_the_command() -> None:
    document = pictures.results()
    assert pictures.in_words(document) in README
    assert str(document["date"])[:10] in README
    assert document["command"] in README


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = README.partition("## ")[0]
    assert "    make run\n    make test\n" in first_screen
