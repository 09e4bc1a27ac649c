import io
import sys
from functools import partial
from pathlib import Path

import pytest

from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.records import (
    Constraints,
    Decision,
    Group,
    TrainingSize,
    Workload,
    groups_in_words,
)
from stoker.run.cost import bill, confirm, limit_words, parse_groups
from stoker.run.folders import run_dir_of
from support import builders, decisions, sample_records

CATALOG = load_catalog("sagemaker")
WORKLOAD = Workload(name="job", command=("true",), platform="sagemaker")


def dnn(instance_type, count=1):
    return [Group(name="dnn", role="dnn", instance_type=instance_type, count=count)]


def start(workload, groups, *, yes):
    confirm(workload, groups, catalog=CATALOG, decision=None, assume_yes=yes)


def decision() -> Decision:
    profile = builders.profile(
        "ml.p4d.24xlarge",
        step_seconds=0.192,
        accelerator_step_seconds=0.08,
        loader_cpu_seconds=16.0,
        global_batch_size=1024,
    )
    size = TrainingSize(steps=100_000)
    return decisions.decided(profile, training=size, allowed_instance_types=("ml.c5.18xlarge",))


def test_the_bill_names_price_promise_start_up_and_break_even():
    made = decision()
    assert made.action == "heterogeneous"
    lines = bill(WORKLOAD, made.plan.groups, catalog=CATALOG, decision=made)
    usd = CATALOG.usd_per_hour(made.plan.groups)
    assert f"${usd:.2f} per hour" in lines[0]
    assert f"${usd * 300 / 3600:.2f} (an estimate)" in lines[1]
    assert lines[2].startswith("predicted: ")
    assert "the whole training" in lines[2]
    ratio = made.plan.predicted.break_even_speedup
    assert f"break-even: a step is cheaper than today from {ratio:.2f}x on" in lines[3]
    # Groups of no plan get their price only.
    assert len(bill(WORKLOAD, dnn("ml.g5.xlarge"), catalog=CATALOG, decision=made)) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("\n", False), ("n\n", False)])
def test_a_person_at_a_terminal_is_asked(answer, goes_on, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    ask = partial(start, groups=dnn("ml.g5.xlarge"))
    if goes_on:
        ask(WORKLOAD, yes=False)
    else:
        with pytest.raises(UsageError, match="cancelled"):
            ask(WORKLOAD, yes=False)
    ask(WORKLOAD, yes=True)
    ask(sample_records.workload(), yes=False)


def test_a_run_that_should_cost_more_than_max_usd_is_not_started():
    made = decision()
    groups, promise = made.plan.groups, made.plan.predicted
    run_usd = promise.total_usd + promise.usd_per_hour * 300 / 3600

    def begin(usd: float, *, made: Decision | None = made, groups=groups):
        workload = Workload(
            name="job",
            command=("true",),
            platform="sagemaker",
            constraints=Constraints(max_usd=usd),
        )
        confirm(workload, groups, catalog=CATALOG, decision=made, assume_yes=True)
        return limit_words(workload)

    with pytest.raises(UsageError, match="is predicted to cost") as caught:
        begin(run_usd - 0.01)
    assert "constraints.max_usd" in caught.value.where
    assert f"ended at ${run_usd:,.2f}" in begin(run_usd)
    with pytest.raises(UsageError, match="a price is unknown"):
        begin(1.0, groups=dnn("ml.foo"))


def test_type_hosts_and_workers_are_read():
    data, dnn = "data=ml.c7i.8xlarge:2:30", "dnn=ml.g5.xlarge:1"
    groups = parse_groups([data, dnn], default_type=None)
    assert [(g.role, g.instance_type, g.count, g.workers_per_host) for g in groups] == [
        ("dnn", "ml.g5.xlarge", 1, None),
        ("data", "ml.c7i.8xlarge", 2, 30),
    ]
    dnn, _ = parse_groups(["dnn=1:0", "data=2:1"], default_type="local.c1")
    assert (dnn.instance_type, dnn.count, dnn.workers_per_host) == ("local.c1", 1, 0)
    assert groups_in_words(groups) == "dnn 1 x ml.g5.xlarge, data 2 x ml.c7i.8xlarge"


TEXTS = ["dnn", "dnn=", "dnn=a:b", "dnn=1:2:3", "dnn=-1", "dnn=local.c1", "dnn=t:1:2:3"]


@pytest.mark.parametrize(
    ("texts", "words"),
    # A data group needs workers, and each role stands there once.
    [
        *(([text], text) for text in TEXTS),
        (["dnn=1", "data=1:0"], "need workers"),
        (["data=1:1"], "dnn hosts are needed"),
        (["dnn=1", "dnn=1"], "dnn=1"),
        (["gpu=1"], "gpu=1"),
    ],
)
def test_anything_else_is_refused_with_the_text_named(texts, words):
    with pytest.raises(UsageError, match=words):
        parse_groups(texts, default_type="local.c1")


def test_runs_are_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_dir_of(WORKLOAD, name="mini-1") == Path("runs/mini-1")
    assert run_dir_of(WORKLOAD).parent == Path("runs")
