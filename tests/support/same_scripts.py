"""A script prints the same under `stoker train` as alone; where its batches come from is known.

`tests/keel_changed.json` has what the redesign changed: scripts that data hosts fed before, and why
they are not fed now.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.keel import Alone, Run

TESTS = Path(__file__).parents[1]
CHANGED: dict[str, str] = json.loads((TESTS / "keel_changed.json").read_text())


def kept_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with Alone(tmp_path_factory.mktemp("alone") / "run") as alone:
        yield alone


def run_of(tmp_path_factory: pytest.TempPathFactory, *groups: str, **settings: object) -> Run:
    return Run(tmp_path_factory.mktemp("keel") / "run", *groups, **settings)


def holds_for(
    name: str,
    run: Run,
    alone: Alone,
    argv: list[str] | None = None,
    *,
    is_cold: bool = False,
    has_data_hosts: bool = True,
    **files: str,
) -> None:
    words = argv or ["train.py"]
    expected = alone.out(*words, is_cold=is_cold, **files)
    job = run.start(*words, is_cold=is_cold, **files)
    assert job.end() == 0, job.errors[-3000:]
    assert job.out == expected
    assert job.is_fed == (has_data_hosts and name not in CHANGED), CHANGED.get(name)
