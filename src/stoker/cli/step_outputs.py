"""Each component publishes metrics, and parameters for later steps, next to its record."""

import json
from collections.abc import Mapping

import msgspec

from stoker.cli.delivery import Told
from stoker.cli.executor_output import MAX_PARAMETER_BYTES
from stoker.records import (
    Decision,
    Evaluation,
    Group,
    Profile,
    Training,
    Workload,
    to_document,
)

DECIDE_PARAMETERS = frozenset({"action", "where"})
TRAIN_PARAMETERS = frozenset({"status", "training"})
EVALUATE_PARAMETERS = frozenset({"passed"})

# Twice as long once it stands as a text in JSON, which is how Kubeflow carries it.
_MAX_RECORD_BYTES = MAX_PARAMETER_BYTES // 2
_MAX_FAILURE = 2000


def told_of_profile(record: Profile) -> Told:
    """Returns seconds of a step, its parts, and how busy the hosts were, as far as known."""
    step, observed = record.step, record.observed
    timed = (
        {
            "step_seconds": step.step_seconds,
            "wait_seconds": step.wait_seconds,
            "accelerator_step_seconds": step.accelerator_step_seconds,
            "loader_cpu_seconds": step.loader_cpu_seconds,
        }
        if step
        else {}
    )
    loads = (
        {
            "cpu_utilization": observed.cpu_utilization,
            "gpu_utilization": observed.gpu_utilization,
        }
        if observed
        else {}
    )
    return Told(metrics=_known({**timed, **loads}))


def told_of_decision(record: Decision, workload: Workload) -> Told:
    """Returns the chosen plan's promise; what to do, and where its training runs."""
    promise = record.plan.predicted
    metrics = {} if promise is None else to_document(promise)
    return Told(
        parameters={"action": record.action, "where": where(record, workload)},
        metrics={name: value for name, value in metrics.items() if isinstance(value, float | int)},
    )


def where(decision: Decision, workload: Workload) -> str:
    """Returns `pod`: in a pipeline step's pod, which is a host of today's type; else `job`."""
    if workload.cluster is None:
        return "job"
    groups = decision.plan.groups
    today = workload.cluster.dnn.instance_type
    alone = len(groups) == 1 and groups[0].count == 1
    return "pod" if alone and _bare(groups[0]) == today.removeprefix("ml.") else "job"


def told_of_training(record: Training) -> Told:
    """Returns the script's metrics, and steps as they were; the record, for the next step."""
    measured = record.measured
    steps = (
        {}
        if measured is None
        else {
            "step_seconds": measured.step_seconds,
            "wait_seconds": measured.wait_seconds,
            "samples_per_second": measured.samples_per_second,
            "usd_per_1000_steps": measured.usd_per_1000_steps,
        }
    )
    return Told(
        parameters={"status": record.status, "training": carried(record)},
        metrics=_known({**record.metrics, **steps}),
    )


def carried(record: Training, *, max_bytes: int = _MAX_RECORD_BYTES) -> str:
    """Returns the record as a text of bounded length: events go first, then hosts, then words.

    Two branches of a pipeline can be joined on texts, not on files.
    """
    failure = record.failure[-_MAX_FAILURE:] if record.failure else None
    measured = record.measured
    if measured:
        # A file that stays with the step that trained.
        measured = msgspec.structs.replace(measured, timeline_file=None)
    short = msgspec.structs.replace(record, failure=failure, measured=measured)
    for less in (
        {},
        {"events": record.events[-20:]},
        {"events": ()},
        {"events": (), "hosts": record.hosts[:50]},
        {"events": (), "hosts": (), "metrics": dict(sorted(record.metrics.items())[:100])},
    ):
        text = json.dumps(to_document(msgspec.structs.replace(short, **less)), sort_keys=True)
        if len(text.encode()) <= max_bytes:
            break
    return text


def told_of_evaluation(record: Evaluation) -> Told:
    """Returns gates, speed and cost; and whether it passed."""
    gates = {gate.metric: gate.value for gate in record.gates}
    performance = record.performance
    held = (
        {}
        if performance is None
        else {
            "step_seconds": performance.measured.step_seconds,
            "speedup": performance.speedup,
            "prediction_error": performance.prediction_error,
            "cost_change": performance.cost_change,
        }
    )
    passed = {"passed": float(record.passed)}
    return Told(
        parameters={"passed": "true" if record.passed else "false"},
        metrics=_known({**gates, **held, **passed}),
    )


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _bare(group: Group) -> str:
    return group.instance_type.removeprefix("ml.")
