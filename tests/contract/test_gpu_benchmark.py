"""What the GPU benchmark makes of decisions and of rows; it runs in tests/e2e."""

import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_honesty  # noqa: E402
from gpu_figures import Figure  # noqa: E402

GROUPS = [{"role": "dnn", "instance_type": "local.c4", "count": 1, "workers_per_host": 4}]


def plan(action, *, step, whole=None, feasible=True):
    predicted = {"step_seconds": step, "step_seconds_low": 0.9 * step}
    predicted |= {"step_seconds_high": 1.1 * step}
    if whole is not None:
        predicted |= {"whole_step_seconds": whole, "whole_step_seconds_low": 0.95 * whole}
        predicted |= {"whole_step_seconds_high": 1.05 * whole}
    return {"action": action, "groups": GROUPS, "predicted": predicted, "feasible": feasible}


def decision(chosen, *others, probable=None):
    return {"plan": chosen, "plans": [chosen, *others], "probable": probable}


def trial(name="starved"):
    case = next(case for case in gpu_honesty.CASES if case.name == name)
    return gpu_honesty._Trial(case, bench=_Cores())


class _Cores:
    cores = tuple(range(16))
    quarter = 4


def test_a_probable_plan_is_followed_where_nothing_is_sure():
    keep, hosts = plan("keep", step=0.16), plan("heterogeneous", step=0.05)
    assert gpu_honesty.followed_plan(decision(keep, probable=hosts)) is hosts
    assert gpu_honesty.followed_plan(decision(hosts, keep)) is hosts
    assert gpu_honesty.followed_plan(decision(keep)) is keep


def test_the_promise_is_of_whole_epochs_where_they_are_known():
    keep = plan("keep", step=0.16, whole=0.175)
    hosts = plan("heterogeneous", step=0.05, whole=0.066)
    found = gpu_honesty.promise(trial(), {}, decision(hosts, keep), hosts)
    assert found == pytest.approx((0.066 / 0.175, 0.95 * 0.066 / 0.175, 1.05 * 0.066 / 0.175))


def test_what_a_fix_saves_is_the_promise_where_todays_hosts_are_kept():
    keep = plan("keep", step=0.040)
    profile = {"fixes": [{"id": "pin_memory", "saves_seconds": 0.010}]}
    ratio, low, high = gpu_honesty.promise(trial("transfer"), profile, decision(keep), keep)
    assert ratio == pytest.approx(0.75)
    assert low < 0.75 < high


def test_of_sixteen_cores_a_training_has_four_and_the_others_are_data_hosts():
    found = trial()
    assert (found.today, found.workers) == ("local.c4", 4)
    assert (trial("GPU-bound").today, trial("GPU-bound").workers) == ("local.c16", 14)
    assert trial("no workers").workers == 0


def test_a_row_that_is_measured_takes_the_place_of_the_one_carried_over(tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text((BENCHMARKS / "results" / "gpu.json").read_text())
    rows = {gpu.key(row): (row, where) for row, where in gpu.read(file)}
    before = len(rows)
    carried = next(row for row, _ in rows.values() if row.group == "ingest")
    measured = replace(carried, stoker=2.0, is_carried_over=False)
    rows[gpu.key(measured)] = measured, {"date": "2027-01-01", "device": "a GPU"}
    gpu.write(file, [*rows.values()])
    assert len(gpu.read(file)) == before
    assert json.loads(file.read_text())["schema"] == gpu.SCHEMA
    text = gpu.markdown(gpu.read(file))
    assert "| 2 | " in text
    assert "2027-01-01 |" in text


def test_a_profile_that_asks_for_more_time_is_honest_and_promises_nothing():
    row = gpu_honesty._longer(gpu_honesty.CASES[0], "not enough was measured", seconds=60)
    assert row.is_honest
    assert row.verdict == "needs a longer budget"
    assert "needs a longer budget" in gpu_honesty.text(row)


def test_the_committed_figures_name_their_machine_and_date():
    for row, where in gpu.read(gpu.RESULTS):
        assert isinstance(row, Figure | gpu_honesty.Judged)
        assert str(where["date"]) >= "2026-11-26"
        assert where["device"]


def options(*words):
    return gpu.parsed(list(words))


def test_a_whole_run_takes_fifteen_minutes_and_has_the_cases_of_the_audit():
    cases = gpu.wanted(options())
    assert sum(gpu.expected_seconds(*case) for case in cases) <= gpu.SECONDS == 900
    asked = {"starved", "GPU-bound", "no workers", "too few workers", "torch.compile"}
    asked |= {"transfer", "neighbour", "Hugging Face", "Lightning"}
    assert {name for group, name in cases if group == "honesty"} == asked
    assert {group for group, _ in cases} == {"honesty", "ingest", "losses", "decoding"}
    # What is named runs, of whatever group.
    named = gpu.wanted(options("--case", "rand", "accumulation", "resnet50"))
    assert named == [
        ("honesty", "accumulation"),
        ("decoding", "rand"),
        ("neighbours", "resnet50"),
    ]
    assert gpu.wanted(options("--only", "to_device")) == [("to_device", "300 small tensors")]


HERE = {"device": "a GPU", "commit": "abc", "date": "2026-11-28T13:00:00+00:00"}


@pytest.mark.parametrize(
    ("measured", "is_done"),
    [
        ({}, True),
        ({"by": "honesty: transfer"}, False),
        ({"commit": "older"}, False),
        ({"device": "another GPU"}, False),
        ({"date": "2026-11-27T13:00:00+00:00"}, False),
    ],
    ids=["of this run", "another case", "another commit", "another GPU", "long ago"],
)
def test_a_part_goes_on_after_the_cases_of_the_parts_before(measured, is_done):
    row = Figure(group="ingest", case="19 MB", figure="GB/s into the device", stoker=1.0)
    place = {**HERE, "by": "ingest: 19 MB", "date": "2026-11-28T12:50:00+00:00", **measured}
    assert gpu.has_run("ingest", "19 MB", [(row, place)], here=HERE) == is_done


def test_rows_are_written_with_the_case_that_made_them_and_a_failure_keeps_the_others(tmp_path):
    file = tmp_path / "gpu.json"
    done = Figure(group="ingest", case="4.8 MB", figure="GB/s into the device", stoker=1.0)

    def made(bench, name):
        yield done
        if name == "broken":
            raise ValueError("no such thing")

    before = dict(gpu.MAKERS)
    gpu.MAKERS["ingest"] = (made, ("whole", "broken"))
    bench = types.SimpleNamespace(left=lambda: 60.0)
    try:
        fine, broken = (
            gpu.has_succeeded("ingest", name, bench, file=file, where=HERE)
            for name in ("whole", "broken")
        )
    finally:
        gpu.MAKERS.clear()
        gpu.MAKERS.update(before)
    assert (fine, broken) == (True, False)
    ((row, place),) = gpu.read(file)
    assert (row, place["by"], place["device"]) == (done, "ingest: whole", "a GPU")
    now = {**HERE, "date": place["date"]}
    assert gpu.has_run("ingest", "whole", gpu.read(file), here=now)
    assert not gpu.has_run("ingest", "broken", gpu.read(file), here=now)


@pytest.mark.parametrize("name", [case.name for case in gpu_honesty.CASES])
def test_a_case_has_a_name_that_a_workload_may_have(name):
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", gpu_honesty.run_name(name))
