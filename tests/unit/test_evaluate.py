import re

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.evaluate import (
    evaluate,
    judged_again,
    lost_training,
    metadata_names,
    model_metadata,
    model_quality,
)
from stoker.records import (
    Channel,
    Constraints,
    Decision,
    Gate,
    Group,
    Job,
    Measured,
    Plan,
    Predicted,
    Prices,
    TakenElsewhere,
    Training,
    Workload,
    to_json,
)
from stoker.words import evaluation_table, evaluation_words
from support import builders, sample_records

DNN = builders.group("dnn", workers_per_host=1)
DATA = builders.group("data", workers_per_host=1)


def _workload(*gates):
    return Workload(name="job", command=("python", "train.py"), gate=gates)


def _predicted(step, usd_per_hour):
    return Predicted(
        step_seconds=step,
        step_seconds_low=step * 0.9,
        step_seconds_high=step * 1.1,
        limit="cpu",
        second_limit="accelerator",
        second_limit_seconds=0.0,
        accelerator_utilization=0.5,
        usd_per_hour=usd_per_hour,
        usd_per_1000_steps=step * usd_per_hour * 1000 / 3600,
        speedup=0.06 / step,
        cost_change=0.0,
    )


def _decision(sha=None):
    keep = Plan(action="keep", groups=(DNN,), predicted=_predicted(0.06, 0.05))
    chosen = Plan(
        action="heterogeneous",
        groups=(DNN, DATA),
        remote_share=0.7,
        predicted=_predicted(0.03, 0.1),
    )
    return Decision(
        workload_sha256=sha,
        bottleneck="cpu",
        action="heterogeneous",
        plan=chosen,
        plans=(chosen, keep),
        prices=Prices(source="nominal"),
        objective="time",
        constraints=Constraints(),
    )


def _profile(sha=None):
    return builders.profile(workload_sha256=sha, step_seconds=0.06, global_batch_size=64)


def _training(
    *, status="succeeded", step=0.033, usd=None, steps=100, groups=(DNN, DATA), sha=None, **metrics
):
    measured = Measured(
        step_seconds=step,
        wait_seconds=0.0,
        compute_seconds=step,
        samples_per_second=2000,
        steps=steps,
        usd_per_1000_steps=usd,
    )
    return Training(
        workload_sha256=sha,
        status=status,
        groups=groups,
        measured=measured,
        metrics=metrics,
        job=Job(platform="local", name="r1"),
    )


def _evaluate(training, *gates, **records):
    known = {"workload": _workload(*gates), "profile": _profile(), "decision": _decision()}
    return evaluate(**{**known, "training": training, **records})


def _performance(training):
    found = _evaluate(training).performance
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("gate", "value", "passed"),
    [
        (Gate(metric="m", min=0.9), 0.9, True),
        (Gate(metric="m", min=0.9), 0.89, False),
        (Gate(metric="m", max=2.0), 2.0, True),
        (Gate(metric="m", max=2.0), 2.1, False),
        (Gate(metric="m", min=1.0, max=2.0), 1.5, True),
        (Gate(metric="m", min=1.0, max=2.0), 0.5, False),
    ],
)
def test_gate_holds_between_its_bounds(gate, value, passed):
    evaluation = _evaluate(_training(m=value), gate)
    assert evaluation.passed is passed
    assert evaluation.gates[0].passed is passed
    assert evaluation.gates[0].value == value


def test_metric_that_was_not_reported_fails_its_gate():
    evaluation = _evaluate(_training(loss=0.1), Gate(metric="accuracy", min=0.9))
    assert not evaluation.passed
    assert (evaluation.gates[0].value, evaluation.gates[0].passed) == (None, False)
    assert "not reported" in evaluation_table(evaluation)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metric_that_is_no_number_fails_its_gate(value):
    evaluation = _evaluate(_training(m=value), Gate(metric="m", min=0.9))
    assert not evaluation.passed
    to_json(evaluation)


def test_one_failed_gate_fails_the_whole():
    gates = (Gate(metric="a", min=0.5), Gate(metric="b", min=0.5))
    evaluation = _evaluate(_training(a=0.6, b=0.4), *gates)
    assert not evaluation.passed
    assert [gate.passed for gate in evaluation.gates] == [True, False]


def test_metrics_are_told_in_the_form_that_studio_shows():
    training = _training(accuracy=0.97, rmse=0.5, loss=float("nan"))
    assert model_quality(training) == {
        "multiclass_classification_metrics": {
            "accuracy": {"value": 0.97, "standard_deviation": "NaN"}
        },
        "regression_metrics": {"rmse": {"value": 0.5, "standard_deviation": "NaN"}},
    }


def test_a_models_metadata_names_job_image_inputs_and_decision_as_the_registry_takes_them():
    channels = {"train": Channel(uri="s3://b/t/"), "my-data": Channel(uri="s3://b/" + "d" * 400)}
    workload = msgspec.structs.replace(_workload(), channels=channels)
    what = {
        "job_arn": "arn:job",
        "input_train": "s3://b/t/",
        "input_train_version": "sha256:1 of 2",
        "input_my-data": "s3://b/(" + "d" * 400,
    }
    training = msgspec.structs.replace(_training(), what=what)
    decided = _decision()
    metadata = model_metadata(workload, training, decided)
    assert list(metadata) == list(metadata_names(workload))
    assert metadata["training_job"] == "arn:job"
    assert metadata["image_digest"] == "not known"
    assert metadata["input_train"] == "s3://b/t/ sha256:1 of 2"
    assert decided.plan.action in metadata["decided"]
    allowed = re.compile(r"[\w .:/=+@-]{1,256}")
    assert all(allowed.fullmatch(value) for value in metadata.values())


@pytest.mark.parametrize(
    ("champion", "passed"), [(0.95, True), (0.956, False), (None, True), (0.1, True)]
)
def test_gate_holds_a_model_against_the_one_in_use(champion, passed):
    known = None if champion is None else {"m": champion}
    gate = Gate(metric="m", min_champion=-0.005)
    record = _evaluate(_training(m=0.95), gate, champion=known)
    assert record.passed is passed
    assert record.gates[0].min == (None if champion is None else pytest.approx(champion - 0.005))
    told = evaluation_table(record)
    assert ("no model is in use yet" in told) == (champion is None)
    assert ("of the model in use" in told) == (champion is not None)
    assert all(len(line) <= 88 for line in told.splitlines())


def test_model_in_use_that_did_not_report_a_gates_metric_fails_it():
    record = _evaluate(
        _training(m=0.95), Gate(metric="m", min=0.5, min_champion=-0.005), champion={"loss": 0.1}
    )
    assert not record.passed
    assert record.reason == "gate failed: m is 0.95, and the model in use has not reported it"
    assert "the model in use has not reported it" in evaluation_table(record)


def test_model_that_passed_is_judged_again_by_its_gates_offsets():
    gates = (Gate(metric="m", min=0.5, min_champion=-0.01), Gate(metric="n", max=0.2))
    first = _evaluate(_training(m=0.95, n=0.1), *gates)
    assert first.passed
    assert judged_again(first, champion={"m": 0.96}).passed
    behind = judged_again(first, champion={"m": 0.97})
    assert not behind.passed
    assert behind.reason == (
        "gate failed: m is 0.95, asked for at least 0.96 (the model in use has 0.97)"
    )
    failed = _evaluate(_training(m=0.4, n=0.1), *gates)
    assert not judged_again(failed, champion={"m": 0.1}).passed


def test_the_stricter_of_two_bounds_counts():
    gate = Gate(metric="loss", max=0.5, max_champion=0.1)
    assert gate.against(0.2).max == pytest.approx(0.3)
    assert gate.against(0.9).max == 0.5
    assert gate.against(None).max == 0.5


def test_training_that_did_no_step_is_no_new_model():
    nothing = Measured(
        step_seconds=0, wait_seconds=0, compute_seconds=0, samples_per_second=0, steps=0
    )
    training = msgspec.structs.replace(_training(m=1.0), measured=nothing)
    evaluation = _evaluate(training, Gate(metric="m", min=0.9))
    assert evaluation.gates[0].passed
    assert not evaluation.passed
    assert "did no step" in evaluation.reason
    # Where nothing was measured it is not known.
    unknown = msgspec.structs.replace(training, measured=None)
    assert _evaluate(unknown, Gate(metric="m", min=0.9)).passed


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_training_that_did_not_succeed_has_not_passed(status):
    evaluation = _evaluate(_training(status=status, m=1.0), Gate(metric="m", min=0.9))
    assert evaluation.gates[0].passed
    assert not evaluation.passed
    assert evaluation_table(evaluation).splitlines()[0] == evaluation.reason


def test_a_training_that_was_stopped_by_hand_is_refused_in_words():
    evaluation = _evaluate(_training(status="stopped", m=1.0), Gate(metric="m", min=0.9))
    assert evaluation.reason == "the training was stopped after 100 steps"


def test_promise_is_held_against_the_outcome():
    performance = _performance(_training(step=0.033))
    assert performance.baseline.step_seconds == 0.06
    assert performance.predicted.step_seconds == 0.03
    assert performance.prediction_error == pytest.approx(0.1)
    assert performance.speedup == pytest.approx(0.06 / 0.033)


def test_run_is_not_held_against_a_step_that_another_machine_took():
    # The profile is a workstation's: what it took there, 0.5 s, is nobody's baseline.
    taken = TakenElsewhere(
        profiled_on="local.c2",
        taken_as="local.c1",
        cpu_speed=2.0,
        cpu_speed_source="given",
        accelerator_step_source="cpu",
    )
    decision = msgspec.structs.replace(_decision(), taken_elsewhere=taken)
    performance = _evaluate(
        _training(step=0.03),
        profile=builders.profile("local.c2", step_seconds=0.5),
        decision=decision,
    ).performance
    assert performance.baseline.step_seconds == 0.06
    assert performance.speedup == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("step", "is_inside", "words"), [(0.033, True, "inside the"), (0.0331, False, "OUTSIDE the")]
)
def test_every_outcome_is_said_to_be_inside_or_outside_of_its_band(step, is_inside, words):
    evaluation = _evaluate(_training(step=step))
    assert evaluation.performance.is_inside_band is is_inside
    assert f"{words} band of 27.0 ms to 33.0 ms" in evaluation_table(evaluation)
    assert f"{words} band" in evaluation_words(evaluation)


def test_a_faster_step_on_the_same_hosts_is_no_gain():
    # Other programs that ran at the time of the profile have ended, say.
    evaluation = _evaluate(_training(step=0.03, groups=(DNN,)))
    assert evaluation.performance.action == "keep"
    words = "2.00 times as fast as in the profile on the same hosts: the machine's load or speed"
    assert words in evaluation_table(evaluation)
    assert words in evaluation_words(evaluation)
    same = _evaluate(_training(step=0.058, groups=(DNN,)))
    assert "1.03 times as fast as in the profile on the same hosts: no gain by stoker" in (
        evaluation_words(same)
    )


def test_cost_is_measured_or_follows_from_the_plans_price():
    priced = _performance(_training(step=0.033, usd=0.002))
    derived = _performance(_training(step=0.033))
    assert priced.measured.usd_per_1000_steps == 0.002
    assert derived.measured.usd_per_1000_steps == pytest.approx(0.033 * 0.1 / 3.6)
    assert derived.cost_change == pytest.approx((0.033 * 0.1) / (0.06 * 0.05) - 1)


def test_run_of_another_cluster_is_not_held_against_the_plan():
    other = Group(name="data", role="data", instance_type="local.c1", count=2)
    performance = _performance(_training(groups=(DNN, other)))
    assert performance.predicted is None
    assert performance.prediction_error is None
    assert performance.cost_change is None


def test_run_of_todays_cluster_is_held_against_keep():
    performance = _performance(_training(groups=(DNN,), step=0.066))
    assert performance.predicted.step_seconds == 0.06
    assert performance.prediction_error == pytest.approx(0.1)


def test_no_steps_means_no_performance():
    assert _evaluate(_training(steps=0)).performance is None
    assert _evaluate(_training(step=0.0)).performance is None


@pytest.mark.parametrize("kind", ["profile", "decision", "training"])
def test_record_of_another_workload_is_refused(kind):
    workload, foreign = _workload(), "f" * 64
    own = workload.digest()
    with pytest.raises(UsageError, match=f"the {kind} was made for another workload"):
        evaluate(
            workload=workload,
            profile=_profile(foreign if kind == "profile" else own),
            decision=_decision(foreign if kind == "decision" else None),
            training=_training(sha=foreign if kind == "training" else own),
        )


def test_records_of_this_workload_and_hand_made_ones_are_taken():
    workload = _workload()
    evaluation = evaluate(
        workload=workload,
        profile=_profile(workload.digest()),
        decision=_decision(None),
        training=_training(sha=workload.digest()),
    )
    assert evaluation.passed
    assert evaluation.workload_sha256 == workload.digest()


def test_text_gives_verdict_gates_and_three_step_times():
    text = evaluation_table(_evaluate(_training(m=0.97), Gate(metric="m", min=0.9)))
    lines = text.splitlines()
    assert lines[0] == "passed: 1 of 1 gates held"
    assert "0.97" in lines[1]
    assert "at least 0.9" in lines[1]
    assert lines[2].split(maxsplit=1) == ["step", "$ per 1000 steps"]
    assert [line.split()[0] for line in lines[3:6]] == ["baseline", "predicted", "measured"]
    assert "1.82 times as fast" in lines[-2]
    assert lines[-1].strip() == (
        "the step is 10.0% longer than predicted, inside the band of 27.0 ms to 33.0 ms"
    )
    assert max(map(len, lines)) <= 88


def test_a_training_that_left_no_record_is_judged_as_failed():
    workload = _workload(Gate(metric="accuracy", min=0.9))
    decision = sample_records.decision()
    lost = lost_training(workload, msgspec.structs.replace(decision, workload_sha256=None))
    assert lost.status == "failed"
    assert lost.groups == decision.plan.groups
    profile = msgspec.structs.replace(sample_records.profile(), workload_sha256=None)
    judged = evaluate(
        workload=workload,
        profile=profile,
        decision=msgspec.structs.replace(decision, workload_sha256=None),
        training=lost,
    )
    assert not judged.passed
    assert "failed" in judged.reason


def test_the_reason_names_each_gate_that_failed_with_value_and_bound():
    workload = _workload(
        Gate(metric="accuracy", min=0.99), Gate(metric="loss", max=0.1), Gate(metric="f1", min=0.5)
    )
    training = msgspec.structs.replace(
        sample_records.training(), workload_sha256=None, metrics={"accuracy": 0.95, "loss": 0.05}
    )
    judged = evaluate(
        workload=workload,
        profile=msgspec.structs.replace(sample_records.profile(), workload_sha256=None),
        decision=msgspec.structs.replace(sample_records.decision(), workload_sha256=None),
        training=training,
    )
    assert judged.reason == (
        "gate failed: accuracy is 0.95, asked for at least 0.99; "
        "f1 was not reported, asked for at least 0.5"
    )


def test_where_nobody_is_billed_a_step_costs_cpu_seconds_and_no_dollars():
    decision = _decision()
    promised = {"local.c1": 1, "local.c2": 2}

    def with_cores(plan):
        cores = sum(promised[group.instance_type] * group.count for group in plan.groups)
        return msgspec.structs.replace(
            plan,
            predicted=msgspec.structs.replace(
                plan.predicted, cpu_seconds=cores * plan.predicted.step_seconds
            ),
        )

    nominal = msgspec.structs.replace(
        decision,
        plan=with_cores(decision.plan),
        plans=tuple(with_cores(plan) for plan in decision.plans),
        prices=Prices(source="nominal", purchase="nominal"),
    )
    judged = _evaluate(_training(step=0.033, usd=0.002), decision=nominal)
    assert judged.performance.measured.usd_per_1000_steps is None
    assert judged.performance.measured.cpu_seconds == pytest.approx(2 * 0.033)
    assert judged.performance.cost_change == pytest.approx(2 * 0.033 / 0.06 - 1)
    text = evaluation_table(judged)
    assert "$" not in text
    assert "10% more CPU-seconds per step" in text
