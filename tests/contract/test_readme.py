import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import pictures  # noqa: E402

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


def test_the_first_screen_has_the_two_commands():
    assert "    make run\n    make test\n" in README.partition("## ")[0]
