"""A loader without workers shows what its loop changes, as under torch; else it is fed.

The script has replay buffers, curricula, transforms that are switched, samplers that follow the
loss or wait for the loop, caches, streams over a buffer; see tests/support/changing_script.py.
"""

import functools
import json

import pytest

from stoker.logs import parse_line
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "changing_script.py"
FED = {"frozen", "cache", "shown", "drawn", "endless", "epoch set", "appended between", "weights"}
FED |= {"stream frozen"}
# What the line names, of cases that are made in the trainer.
NAMED = {
    "replay list": "dataset.items changed",
    "replay deque": "dataset.items changed",
    "replay each fifth": "dataset.items changed",
    "replay full": "dataset.items[0] changed",
    "curriculum": "dataset.level changed",
    "global": "LEVEL changed",
    "class attribute": "ByClass.scale changed",
    "collate": "LEVEL changed",
    "tensor in place": "dataset.data changed",
    "ring": "dataset.values changed",
    "large ring": "dataset.values changed",
    "late ring": "dataset.values changed",
    "counting": "dataset.count changes as a batch is made",
    "heap": "sampler.sampler.urgent",
    "annealed": "dataset.transform._modules['1'].strength changed",
    "target network": "dataset.target._parameters['weight'] changed",
    "cleared cache": "looked_up changed",
    "rewritten file": "dataset.path changed",
    "environment": "os.environ['CHANGING_LEVEL'] changed",
    "registry": "OfRegistry.table changed",
    "memory map": "dataset.values is",
    "mined": "sampler.sampler.losses changed",
    "mined tensor": "sampler.sampler.losses changed",
    "todo": "sampler.sampler.todo changed",
    "queue": "sampler.sampler.source may wait",
    "generator": "sampler.sampler may wait",
    "event": "sampler.sampler may wait",
    "drawn in turns": "sampler and loop draw from random in turns",
    "drawn in turns by numpy": "sampler and loop draw from numpy.random in turns",
    "drawn in turns by torch": "sampler and loop draw from torch in turns",
    "stream buffer": "dataset.buffer changed",
    "stream later": "dataset.buffer changed",
    "stream queue": "dataset.source may wait",
}
# What a dataset itself changes, and caches that it fills: seen where the trainer makes batches.
ONLY_SEEN_HERE = {"counting", "cleared cache"}


@functools.cache
def expected(*cases):
    return run_script({"cases": cases, "loader": "torch"}, script=SCRIPT).finish()


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2) as running:
        running.wait_for_agents()
        yield running


def reasons(trainer):
    """Returns the texts of the lines that say why a loader is made in the trainer."""
    events = map(parse_line, trainer.errors.splitlines())
    return [event.values["text"] for event in events if event and event.event == "loader_made_here"]


@pytest.mark.parametrize("loader", ["torch", "stoker"])
def test_what_a_loop_changes_is_in_the_next_batch(cluster, loader):
    cases = [case for case in NAMED if loader == "torch" or case not in ONLY_SEEN_HERE]
    trainer = cluster.train(script=SCRIPT, cases=cases, loader=loader)
    assert trainer.finish() == expected(*cases)
    said = [text for text in reasons(trainer) if "until the end of this epoch" not in text]
    for text, case in zip(said, cases, strict=True):
        assert text.startswith(NAMED[case]), (case, text)


@pytest.mark.parametrize(
    ("case", "path"), [("switched late", "dataset.level"), ("transform", "dataset.transform")]
)
def test_what_changes_once_makes_one_epoch_in_the_trainer(cluster, case, path):
    trainer = cluster.train(script=SCRIPT, cases=[case], epochs=1)
    assert trainer.finish() == expected(case)[:1]
    (text,) = reasons(trainer)
    assert text.startswith(f"{path} changed between two batches")
    assert "until the end of this epoch" in text


@pytest.mark.parametrize("loader", ["torch", "stoker"])
def test_what_does_not_change_is_fed(cluster, loader):
    cases = sorted(FED)
    trainer = cluster.train(script=SCRIPT, cases=cases, loader=loader)
    assert trainer.finish() == expected(*cases)
    assert reasons(trainer) == []
    assert "agent_ready" in trainer.errors


# A sampler of torch only counts the dataset that it holds, also where it is not the loader's.
@pytest.mark.parametrize("case", ["makers", "makers, counted"])
@pytest.mark.parametrize(("loader", "num_here"), [("torch", 2), ("stoker", 0)])
def test_the_first_batches_are_made_in_the_trainer_and_the_others_fed(
    cluster, loader, num_here, case
):
    trainer = cluster.train(script=SCRIPT, cases=[case], loader=loader)
    makers = [line["first"] for line in trainer.finish()]
    assert [batch[0] for batch in makers[0]] == [1.0] * num_here + [0.0] * (8 - num_here)
    assert [batch[0] for batch in makers[1]] == [0.0] * 8


@pytest.mark.parametrize("case", ["frozen", "switched late"])
def test_a_worker_that_is_killed_changes_nothing(cluster, case):
    trainer = cluster.train(script=SCRIPT, cases=[case], pause_at=4, sleep=0.01)
    trainer.until("pause")
    cluster.kill_worker(0)
    trainer.go_on()
    assert trainer.finish() == expected(case)


def test_loaders_that_share_a_dataset_are_read_in_turns(cluster):
    for case in ("in turns", "in turns, changing"):
        trainer = cluster.train(script=SCRIPT, cases=[case])
        assert trainer.finish() == expected(case)
        assert bool(reasons(trainer)) == ("changing" in case)


def test_a_setting_of_seeds_by_torch_holds(cluster):
    feed = {"STOKER_FEED": json.dumps(cluster.settings | {"seeding": "torch"})}
    trainer = cluster.train(script=SCRIPT, cases=["curriculum"], env=feed)
    assert trainer.finish() == expected("curriculum")


def planned(*, start="fork", **given):
    """Starts the script without data hosts, where a plan gives each loader two workers."""
    workers = {"STOKER_WORKERS": json.dumps({"dnn": 2}), "STOKER_REPLACE_DATALOADER": "auto"}
    return run_script({"start": start, **given}, env=workers, script=SCRIPT)


# Of stoker's own loader: next to data hosts, above.
@pytest.mark.parametrize("loader", ["torch", pytest.param("stoker", marks=pytest.mark.soak)])
def test_what_a_loop_changes_is_in_the_next_batch_under_a_plans_workers(loader):
    cases = [case for case in NAMED if loader == "torch" or case not in ONLY_SEEN_HERE]
    trainer = planned(cases=cases, loader=loader)
    assert trainer.finish() == expected(*cases)
    said = [text for text in reasons(trainer) if "until the end of this epoch" not in text]
    # A plan gives a stream no workers.
    mapped = [case for case in cases if not case.startswith("stream")]
    for text, case in zip(said, mapped, strict=True):
        assert text.startswith(NAMED[case]), (case, text)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("case", "path"), [("switched late", "dataset.level"), ("transform", "dataset.transform")]
)
def test_what_changes_once_makes_one_epoch_in_the_trainer_under_a_plan(case, path, start):
    trainer = planned(cases=[case], epochs=1, start=start)
    assert trainer.finish() == expected(case)[:1]
    (text,) = reasons(trainer)
    assert text.startswith(f"{path} changed between two batches")
    assert "until the end of this epoch" in text


@pytest.mark.parametrize("loader", ["torch", "stoker"])
def test_what_does_not_change_has_a_plans_workers(loader):
    cases = sorted(FED)
    trainer = planned(cases=cases, loader=loader)
    assert trainer.finish() == expected(*cases)
    assert reasons(trainer) == []


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("case", ["makers", "makers, counted"])
@pytest.mark.parametrize(("loader", "num_here"), [("torch", 2), ("stoker", 0)])
def test_a_plans_workers_make_what_follows_the_first_batches(loader, num_here, case, start):
    makers = [line["first"] for line in planned(cases=[case], loader=loader, start=start).finish()]
    assert [batch[0] for batch in makers[0]] == [1.0] * num_here + [0.0] * (8 - num_here)
    assert [batch[0] for batch in makers[1]] == [0.0] * 8


def test_loaders_under_a_plan_that_share_a_dataset_are_read_in_turns():
    for case in ("in turns", "in turns, changing"):
        trainer = planned(cases=[case])
        assert trainer.finish() == expected(case)
        assert bool(reasons(trainer)) == ("changing" in case)


@pytest.mark.parametrize("case", ["queue", "generator", "event"])
def test_workers_of_a_plan_do_not_make_a_loader_wait_for_ever(case):
    trainer = planned(cases=[case], loader="stoker")
    assert trainer.finish() == expected(case)
    (text,) = reasons(trainer)
    assert text.startswith(NAMED[case])


ENDED = """
import json
import torch
from torch.utils.data import DataLoader
from stoker.feed import changes
from stoker.feed.replace import install

install(DataLoader)
rows = [torch.full((2,), float(number)) for number in range(16)]
for steps in (8, 3):
    loader = DataLoader(list(rows), batch_size=2)
    for number, _ in enumerate(loader, 1):
        if number == steps:
            break
    else:
        raise SystemExit("a loader has 8 batches")
    if steps == 8:
        for _ in loader:
            pass
    print(json.dumps({"steps": steps, "watches": len(changes._watches)}), flush=True)
"""


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_epoch_that_is_over_costs_other_loaders_nothing(cluster, is_planned, tmp_path):
    script = tmp_path / "ended.py"
    script.write_text(ENDED)
    if is_planned:
        workers = {"STOKER_WORKERS": json.dumps({"dnn": 2}), "STOKER_REPLACE_DATALOADER": "auto"}
        trainer = run_script({}, env=workers, script=str(script))
    else:
        trainer = cluster.train(script=str(script))
    assert [line["watches"] for line in trainer.finish()] == [0, 0]
