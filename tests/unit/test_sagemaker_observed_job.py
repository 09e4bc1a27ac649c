"""The load of a job that ran tells who is where, and suggests what to decide."""

from datetime import date

import msgspec
import pytest

from stoker.decide import explain as explain_decision
from stoker.errors import UsageError
from stoker.evaluate import evaluate
from stoker.platforms.sagemaker.load import HostLoad, point_seconds
from stoker.platforms.sagemaker.observed_job import ObservedJob
from stoker.profile import explain
from stoker.profile.combine import observed_profile
from stoker.records import Job, Observed, Profile, Training, read_json, write_json
from stoker.report.verdict import collect
from support import builders, decisions

DAY = 86400
SIZES = {"ml.g5.2xlarge": (8, 1)}


def job(**changes: object) -> ObservedJob:
    fields: dict[str, object] = {
        "name": "photos-1",
        "instance_type": "ml.g5.2xlarge",
        "loads": (
            HostLoad(host="algo-1", group="", cpu=0.97, gpu=0.41, memory=0.5),
            HostLoad(host="algo-2", group="", cpu=None, gpu=None, memory=None),
        ),
        "began_at": "2026-11-19T08:00:00.000Z",
        "minutes": 212.0,
        "point_seconds": 60,
        "is_running": False,
    }
    return ObservedJob(**{**fields, **changes})


def profile(cpu: float | None, gpu: float | None, kind: str = "ml.p4d.24xlarge") -> Profile:
    return builders.profile(kind, cpu_utilization=cpu, gpu_utilization=gpu)


@pytest.mark.parametrize(
    ("seconds", "age", "period"),
    [(3600, 3600, 60), (3600, 20 * DAY, 300), (3600, 100 * DAY, 3600), (5 * DAY, 20 * DAY, 600)],
)
def test_old_points_are_asked_for_as_coarsely_as_they_are_kept(seconds, age, period):
    assert point_seconds(seconds, age_seconds=age) == period


def test_the_profile_is_the_mean_of_the_hosts_and_keeps_each(tmp_path):
    made = observed_profile(job(minutes=4.0, is_running=True, point_seconds=300), sizes=SIZES)
    assert made.step is None
    assert made.observed == Observed(cpu_utilization=0.97, gpu_utilization=0.41, hosts=1)
    host = made.host
    assert (host.instance_type, host.vcpus, host.accelerators) == ("ml.g5.2xlarge", 8, 1)
    assert made.what["host_cpu"] == {"algo-1": 0.97, "algo-2": None}
    notes = " ".join(map(str, made.what["notes"]))
    for words in ("still running", "4 minutes only", "5 minutes", "no figures of algo-2"):
        assert words in notes
    file = tmp_path / "profile.json"
    write_json(file, made)
    assert "step" not in file.read_text().split('"what"')[0]
    assert read_json(file, Profile) == made
    with pytest.raises(UsageError, match="no step"):
        _ = made.timed_step


def test_the_words_name_the_hosts_and_what_is_not_known():
    text = explain(observed_profile(job(), sizes=SIZES))
    assert "probably CPU-bound" in text
    assert "No step was timed" in text
    assert "2 x ml.g5.2xlarge: vCPUs 97% busy" in text
    assert "CloudWatch has no figures of algo-2" in text
    assert max(map(len, text.splitlines())) <= 88


def test_what_is_not_known_of_a_load_is_said_in_words_and_no_gpus_are_made_up():
    text = explain(profile(0.9, None)).splitlines()[0]
    assert "vCPUs 90% busy, GPUs: load not known; that does not show" in text
    made = profile(0.9, None, "ml.c5.xlarge")
    without = msgspec.structs.replace(made, host=msgspec.structs.replace(made.host, accelerators=0))
    assert "GPU" not in explain(without).splitlines()[0]


@pytest.mark.parametrize("observed", [None, {}, {"hosts": 2}])
def test_a_profile_that_says_nothing_is_refused(tmp_path, observed):
    file = tmp_path / "profile.json"
    seen = "" if observed is None else f', "observed": {observed}'.replace("'", '"')
    head = '{"schema": "stoker.profile/v1", "host": {"instance_type": "ml.g5.xlarge"}'
    file.write_text(head + seen + "}")
    with pytest.raises(UsageError, match="a profile needs step or observed"):
        read_json(file, Profile)


def decision_of(made, *clusters, **more):
    return decisions.decided(made, extra_clusters=clusters, **more)


@pytest.mark.parametrize(
    ("cpu", "gpu", "suspect"),
    [
        (0.98, 0.41, "cpu"),
        (0.98, 0.95, "accelerator"),
        (0.2, 0.95, "accelerator"),
        (0.12, 0.3, "neither"),
        *((*load, "unknown") for load in ((0.75, 0.3), (0.98, 0.8), (0.98, None), (None, 0.4))),
    ],
)
def test_a_load_suggests_and_decide_promises_nothing_without_a_step(cpu, gpu, suspect):
    made = profile(cpu, gpu)
    assert made.observed.suspect == suspect
    found = decision_of(made)
    assert (found.action, found.bottleneck) == ("keep", "unexplained")
    assert [plan.predicted for plan in found.plans] == [None]
    assert {answer.answer for answer in found.path} == {"unknown"}
    assert found.advice[0].id == "profile"
    text = explain_decision(found)
    assert "No step was timed" in text
    assert "does not help" not in text
    assert " ms" not in text


def test_a_cpu_bound_load_is_told_what_a_data_host_would_have_to_bring():
    groups = builders.clusters("ml.p4d.24xlarge", "ml.c5.18xlarge", 2)
    found = decision_of(profile(0.98, 0.41), groups, today=date(2027, 3, 1))
    (pays,) = (advice.text for advice in found.advice if advice.id == "break-even")
    assert "ml.c7i.8xlarge" in pays
    # 1 + 1.7136 / 25.2513, prices of the table.
    assert "1.07x" in pays
    assert found.prices.stale
    for words in ("90 days", "named groups"):
        assert any(words in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "constraints", [{"max_data_hosts": 0}, {"allowed_instance_types": ("ml.p4d.24xlarge",)}]
)
def test_no_data_host_is_named_where_none_may_be_used(constraints):
    found = decision_of(profile(0.98, 0.41), **constraints)
    assert "break-even" not in [advice.id for advice in found.advice]


def test_with_a_step_and_its_load_decide_makes_plans_with_wide_bands():
    made = builders.profile(
        "ml.p4d.24xlarge", step_seconds=0.192, cpu_utilization=0.99, gpu_utilization=0.45
    )
    found = decision_of(made)
    assert (found.bottleneck, found.action) == ("cpu", "heterogeneous")
    best = next(p for p in found.plans if p.action == "heterogeneous" and p.predicted)
    assert best.predicted.step_seconds_high / best.predicted.step_seconds - 1 > 0.15
    assert any("utilization" in warning for warning in found.warnings)
    assert found.advice[0].id == "profile"


def test_evaluate_and_report_cope_with_a_profile_without_a_step():
    made = profile(0.98, 0.41)
    decision = decision_of(made)
    job = Job(platform="sagemaker", name="photos-1")
    training = Training(status="succeeded", groups=decision.plan.groups, job=job)
    workload = builders.workload()
    judged = evaluate(workload=workload, profile=made, decision=decision, training=training)
    assert judged.performance is None
    figures = collect(profile=made, decision=decision, training=training, evaluation=judged)
    assert (figures.baseline.seconds, figures.baseline.wait_share) == (None, None)
