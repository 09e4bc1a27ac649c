"""stoker.DataLoader keeps what torch's promises, alone and fed: see support/dropin_claims.py."""

import json
from pathlib import Path

import pytest

from support import dropin_claims
from support.dropin_claims import CLAIMS, PINNED, SEEDED, VALUED, VALUES
from support.keel import Alone, Job, Run

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SCRIPT = str(Path(dropin_claims.__file__))
# Without workers torch's loader draws in the trainer, and PINNED have workers of their own.
WITHOUT_WORKERS = [
    name for name in (*CLAIMS, *VALUED) if name not in {"own_random_state_of_the_trainer", *PINNED}
]
NUM_WORKERS = 2

Found = dict[str, object]


def found_in(out: str) -> Found:
    return {str(line["claim"]): line["found"] for line in map(json.loads, out.splitlines())}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What is found, by kind and workers: by torch's loader, by stoker's, and by data hosts."""
    folder, states = tmp_path_factory.mktemp("dropin"), tmp_path_factory.mktemp("states")

    def argv(kind: str, workers: int, names: object, **more: object) -> list[str]:
        # Each mix of workers leaves the states of its loaders for the others.
        given = {"kind": kind, "workers": workers, "only": list(names), **more}
        if kind == "stoker":
            given["states"] = str(states)
        return [SCRIPT, json.dumps(given)]

    def fed(run: Run, workers: int, names: object) -> Job:
        return run.start(*argv("stoker", workers, names, pool=NUM_WORKERS))

    data = f"data=local.c1:1:{NUM_WORKERS}"
    own = {"feed.lease_seconds": 30}
    with (
        Alone(folder / "alone") as alone,
        Run(folder / "stoker") as stokers,
        Run(folder / "fed", "dnn=local.c1:1", data, settings=own) as run,
    ):
        by_stoker = {
            2: stokers.start(*argv("stoker", 2, [*CLAIMS, *SEEDED])),
            0: stokers.start(*argv("stoker", 0, [*WITHOUT_WORKERS, *SEEDED])),
        }
        jobs = {("stoker", workers): job for workers, job in by_stoker.items()}
        outs = {
            ("torch", 2): alone.out(*argv("torch", 2, CLAIMS)),
            ("torch", 0): alone.out(*argv("torch", 0, WITHOUT_WORKERS)),
        }
        # One after the other: two trainings of one rank are not at one time.
        for workers, names in {0: [*SEEDED, *CLAIMS, *VALUED], 2: [*SEEDED, *VALUED]}.items():
            jobs["fed", workers] = fed(run, workers, names)
            jobs["fed", workers].finish()
        for kind, job in jobs.items():
            job.finish()
            outs[kind] = job.out
    return {kind: found_in(out) for kind, out in outs.items()}


def test_each_kind_of_value_was_seen(found):
    values = found["torch", 0]["values"]
    assert set(values) == set(VALUES)
    assert not [name for name, shown in values.items() if isinstance(shown, str)]


@pytest.mark.parametrize("name", CLAIMS)
def test_what_torchs_loader_promises_holds(found, name):
    expected = found["torch", 2][name]
    assert "Traceback (most recent call last):\n" not in str(expected)
    assert found["fed", 0][name] == expected
    assert found["stoker", 2][name] == expected


@pytest.mark.parametrize("name", WITHOUT_WORKERS)
def test_what_torchs_loader_promises_without_workers_holds(found, name):
    expected = found["torch", 0][name]
    assert "Traceback (most recent call last):\n" not in str(expected)
    assert found["stoker", 0][name] == expected


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_kind_come_as_they_were_made(found, kind):
    expected = found["torch", 0]["values"][kind]
    assert [found["fed", workers]["values"][kind] for workers in (0, 2)] == [expected] * 2


@pytest.mark.parametrize("name", [name for name in VALUED if name != "values"])
def test_what_comes_is_as_the_trainer_itself_makes_it(found, name):
    expected = found["torch", 0][name]
    assert [found["fed", workers][name] for workers in (0, 2)] == [expected] * 2


@pytest.mark.parametrize("name", SEEDED)
def test_content_is_the_same_wherever_it_is_made(found, name):
    expected = found["stoker", 0][name]
    assert "Traceback (most recent call last):\n" not in str(expected)
    places = [("stoker", 2), ("fed", 0), ("fed", 2)]
    assert [found[place][name] for place in places] == [expected] * 3
