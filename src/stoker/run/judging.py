"""Judgement of a run's training: gates, prediction, report, model in use; a run's last step."""

import json
from datetime import date
from pathlib import Path

from stoker.environment import pipeline_run
from stoker.errors import GateError, PlatformError, UsageError
from stoker.evaluate import (
    evaluate,
    evaluation_table,
    lost_training,
    model_metadata,
    model_quality,
)
from stoker.platforms import platform_named
from stoker.platforms.aws import Aws
from stoker.records import (
    Decision,
    Evaluation,
    Json,
    Profile,
    Training,
    Workload,
    read_json,
    write_json,
    write_text,
)
from stoker.records.base import item_at, mappings, text
from stoker.records.outcome import outcome_of, outcome_of_gates
from stoker.run.folders import RunFiles
from stoker.run.outputs import NO_STEP, KubeflowStep, deliver
from stoker.run.train import concluding
from stoker.run.webhook import RunEnding, post

# As Kubeflow's driver hands it to an exit handler. It publishes nothing of a step whose driver
# failed or whose pod was killed: for it, such a run still runs when it is over.
_FAILED = ("failed", "error", "system_error", "running", "new")
_SUCCEEDED = ("succeeded", "success", "complete", "cached")

_REGISTRY = "registry:"
# The model in use, in a folder of champions.
_CHAMPION = "champion.json"


def judge_run(
    workload: Workload,
    *,
    profile_file: Path,
    decision_file: Path,
    training_file: Path,
    champion: str,
    out: Path | None,
    step: KubeflowStep = NO_STEP,
    report: Path | None,
    as_json: bool = False,
    is_step: bool = False,
) -> int:
    """Judges a run, keeps what its pipeline needs, and notifies; returns the exit code.

    Args:
        workload: With the gates.
        profile_file: The run's profile.
        decision_file: The run's decision.
        training_file: The run's training.
        champion: Names the model in use; empty: none is configured.
        out: File of the evaluation.
        step: Of Kubeflow.
        report: File of the HTML report; None: none is written.
        as_json: Whether the evaluation is printed as JSON.
        is_step: Whether a run without a record has failed, and the exit code is 0 in any case.
    """
    run = pipeline_run()
    evaluation_file = out or Path("evaluation.json")
    # A pipeline judges every run: one whose hosts died without a record has failed.
    is_lost = is_step and not training_file.is_file()
    if is_lost:
        training_file = evaluation_file.with_name("training.json")
    files = RunFiles(
        profile=profile_file,
        decision=decision_file,
        training=training_file,
        evaluation=evaluation_file,
        report=report,
        profile_folder=profile_file.parent,
    )
    # On Kubeflow the run's last step notifies, and who types this command sees the result.
    is_told = bool(run) and not step.outputs
    with concluding(files, workload, run=run, step="evaluate", is_told=is_told) as ending:
        decision = read_json(decision_file, Decision)
        if is_lost:
            write_json(training_file, lost_training(workload, decision))
        trained = read_json(training_file, Training)
        ending.run = run or trained.job.name
        record = evaluate(
            workload=workload,
            profile=read_json(profile_file, Profile),
            decision=decision,
            training=trained,
            champion=champion_metrics(champion, workload=workload),
            today=date.today(),
        )
        deliver(
            record,
            out=out,
            step=step,
            explain=evaluation_table,
            as_json=as_json,
            parameters={"passed": str(record.passed).lower()},
        )
        if workload.platform == "sagemaker" and out:
            # What the model registry shows: Studio cannot show all of evaluation.json.
            metadata = model_metadata(trained, decision)
            shown = {"quality": model_quality(trained), "metadata": metadata}
            for name, document in shown.items():
                write_text(evaluation_file.with_name(f"model-{name}.json"), json.dumps(document))
        outcome = outcome_of(trained, record.gates)
        ending.warnings = record.warnings
        ending.take(outcome)
    return 0 if is_step else outcome.exit_code


def champion_metrics(named: str, *, workload: Workload) -> dict[str, float] | None:
    """Returns the metrics of the model in use; None if no gate needs them, or there is none yet.

    Args:
        named: Its evaluation.json, a folder with it, or registry:GROUP for the last approved
            model of SageMaker's registry; empty: the workload's group there, if it has one.
        workload: With its gates.

    Raises:
        UsageError: A gate needs it, and none is named.
    """
    asking = next((gate for gate in workload.gate if gate.needs_champion), None)
    if asking is None:
        return None
    if not named and workload.platform == "sagemaker" and workload.sagemaker:
        named = f"{_REGISTRY}{workload.sagemaker.model.group or workload.name}"
    if not named:
        raise UsageError(
            f"gate {asking.metric} compares with the champion, but no champion is configured",
            where=f"workload {workload.name}, key gate",
            fix="stoker evaluate --champion evaluation.json (of the model in use), or "
            "registry:GROUP; in a pipeline on Kubeflow the key kubernetes.champion",
        )
    if named.startswith(_REGISTRY):
        aws = Aws(region=workload.sagemaker_region)
        return champion_quality(aws, named.removeprefix(_REGISTRY))
    file = Path(named)
    if file.is_dir():
        file /= _CHAMPION
        if not file.exists():
            return None
    return read_json(file, Evaluation).numbers


def champion_quality(aws: Aws, group: str) -> dict[str, float] | None:
    """Returns the metrics of a group's last approved model in SageMaker's registry; None: no model.

    Raises:
        PlatformError: If the model has no metrics.
    """
    named = {"ModelPackageGroupName": group, "ModelApprovalStatus": "Approved"}
    order = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
    listed = aws.find("sagemaker", "ListModelPackages", **named, **order)
    models = mappings(listed, "ModelPackageSummaryList")
    if not models:
        return None
    name = text(models[0], "ModelPackageArn")
    package = aws.call("sagemaker", "DescribeModelPackage", ModelPackageName=name)
    uri = text(package, "CustomerMetadataProperties", "stoker-evaluation")
    if not uri:
        raise PlatformError(
            f"the approved model {name} has no evaluation to compare with",
            where=f"model package group {group}",
            fix="approve a model that stoker's pipeline registered, or write numbers into the gate",
        )
    return read_json(aws.read_object(uri).decode(), Evaluation).numbers


def pass_gate(evaluation_file: Path, *, champions: str) -> None:
    """Raises GateError unless an evaluation passed; makes it the champion of a folder.

    In a registry people choose the champion. Of two runs the last one counts.
    """
    record = read_json(evaluation_file, Evaluation)
    if not record.passed:
        raise GateError(record.reason or "the evaluation did not pass", where="the gate")
    print(outcome_of_gates(record.gates).words)
    if champions and not champions.startswith(_REGISTRY):
        champion = Path(champions) / _CHAMPION
        write_json(champion, record)
        print(f"it is the champion now: {champion}")


def finish_run(workload: Workload, *, run_id: str, outcome: str) -> None:
    """Reports how a run ended, and deletes the jobs that are left of it.

    `outcome` is JSON as of Kubeflow's PipelineTaskFinalStatus.
    """
    run = workload.run_name(run_id)
    # A server before 2.14 does not fill the placeholder in.
    document: Json = json.loads(outcome) if outcome.startswith("{") else {}
    state = str(item_at(document, "state") or "unknown").lower()
    why = text(document, "error", "message")
    # Else it was cancelled, or Kubeflow did not fill the state in.
    if state in (*_FAILED, *_SUCCEEDED):
        failure = (why or state) if state in _FAILED else ""
        post(workload, RunEnding(run=run, step="the pipeline", failure=failure))
    platform = platform_named(workload.platform, settings=workload)
    ended = platform.clean_up(run, workload, run_id=run_id)
    words = f"{state}: {why}" if why else state
    print(f"run {run}: {words}\n{ended or 'no job of the run was left'}")
