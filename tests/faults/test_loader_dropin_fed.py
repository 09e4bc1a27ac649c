"""One real data group keeps what torch's DataLoader promises: see support/dropin_claims.py."""

import functools
import json
import re
import tempfile

import pytest

from support.cluster import Cluster, Trainer, run_script
from support.dropin_claims import CLAIMS, PINNED, SEEDED, VALUED, VALUES

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SCRIPT = "dropin_claims.py"
MIXES = [0, 2]
Found = dict[str, object]
# Whose loaders have workers by the `workers` of the script: next to a host, the others are asked
# for one mix.
MIXED = [name for name in CLAIMS if name not in PINNED]
# Where each mix of workers leaves the states of its loaders for the others, by seeding.
STATES = {seeding: tempfile.TemporaryDirectory() for seeding in ("batch", "sample", "torch")}


def found_by(lines: list[dict[str, object]]) -> Found:
    return {str(line["claim"]): line["found"] for line in lines}


@functools.cache
def started(kind: str, workers: int, names: tuple[str, ...], seeding: str) -> Trainer:
    given = {"kind": kind, "workers": workers, "only": list(names), "states": STATES[seeding].name}
    env = {"STOKER_FEED": json.dumps({"seeding": seeding})} if kind == "stoker" else {}
    return run_script(given, script=SCRIPT, env=env)


@functools.cache
def alone(kind: str, workers: int, names: tuple[str, ...], seeding: str = "batch") -> Found:
    return found_by(started(kind, workers, names, seeding).finish())


def asked(cluster: Cluster, names: list[str], *, local: int, seeding: str = "batch") -> Found:
    trainer = cluster.train(
        script=SCRIPT,
        kind="stoker",
        # A loader of the script has two local workers, too.
        pool=2 + 2 * cluster.agents,
        only=names,
        env={"STOKER_FEED": json.dumps(cluster.settings | {"seeding": seeding})},
        local=local,
        states=STATES[seeding].name,
    )
    return found_by(trainer.finish())


@pytest.fixture(scope="module")
def fed():
    """Returns what is found, by local workers (0 or 2) next to two hosts, and by seeding."""
    # They wait more than they work: side by side.
    started("torch", 2, tuple(CLAIMS), "batch")
    started("stoker", 2, tuple(CLAIMS), "batch")
    with Cluster(agents=2, workers=2) as cluster:
        cluster.wait_for_agents()
        found = {(0, "batch"): asked(cluster, [*SEEDED, *CLAIMS, *VALUED], local=0)}
        found[2, "batch"] = asked(cluster, [*SEEDED, *VALUED], local=2)
        for local in MIXES:
            found[local, "sample"] = asked(cluster, [*SEEDED], local=local, seeding="sample")
        names = ["draws_of_samples_and_collate"]
        found[1, "torch"] = asked(cluster, names, local=1, seeding="torch")
        for number in range(cluster.agents):
            assert "session_opened" in cluster.log_of(number).read_text()
    return found


@pytest.mark.parametrize("name", CLAIMS)
def test_what_torchs_loader_promises_holds_under_a_data_group(fed, name):
    expected = alone("torch", 2, tuple(CLAIMS))[name]
    assert "Traceback (most recent call last):\n" not in str(expected)
    assert fed[0, "batch"][name] == expected


@pytest.fixture(scope="module")
def mixed():
    with Cluster(agents=1, workers=2) as cluster:
        cluster.wait_for_agents()
        return asked(cluster, MIXED, local=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", MIXED)
def test_what_torchs_loader_promises_holds_with_local_workers_next_to_a_data_group(mixed, name):
    assert mixed[name] == alone("torch", 2, tuple(CLAIMS))[name]


# Without workers: contract/test_loader_dropin.py.
@pytest.mark.parametrize("name", CLAIMS)
def test_what_torchs_loader_promises_holds_with_workers_alone(name):
    assert alone("stoker", 2, tuple(CLAIMS))[name] == alone("torch", 2, tuple(CLAIMS))[name]


@pytest.mark.parametrize("workers", MIXES)
@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_kind_come_as_they_were_made(fed, kind, workers):
    expected, found = alone("torch", 0, tuple(VALUED))["values"], fed[workers, "batch"]["values"]
    assert found[kind] == expected[kind]


@pytest.mark.parametrize("workers", MIXES)
@pytest.mark.parametrize("name", [name for name in VALUED if name != "values"])
def test_what_comes_is_as_the_trainer_itself_makes_it(fed, name, workers):
    assert fed[workers, "batch"][name] == alone("torch", 0, tuple(VALUED))[name]


def test_with_torchs_seeding_no_two_workers_draw_the_same(fed):
    drawn = re.findall(r"\b0\.\d+", str(fed[1, "torch"]))
    # Three draws of each sample and of each batch, in two epochs.
    assert len(set(drawn)) == 2 * 3 * (24 + 8)


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("name", SEEDED)
def test_content_is_the_same_wherever_it_is_made(fed, name, seeding):
    expected = alone("stoker", 0, tuple(SEEDED), seeding)[name]
    assert "Traceback (most recent call last):\n" not in str(expected)
    for workers in MIXES:
        assert alone("stoker", workers, tuple(SEEDED), seeding)[name] == expected
        assert fed[workers, seeding][name] == expected
