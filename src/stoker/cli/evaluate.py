"""`stoker evaluate` judges a training, and closes a pipeline's gate or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.cli.outputs import Outputs, deliver, told_of_evaluation
from stoker.cli.verbs import exit_code_of
from stoker.cli.workloads import new_run_dir, read_with_params, region_of
from stoker.errors import GateError, UsageError
from stoker.records import Decision, Evaluation, Profile, Training, Workload, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRecords:
    """The records of a run, as the command line names them.

    Attributes:
        training: A file, or the record's own text.
        outputs_uri: Where else a training.json may be: a job's outputs in S3.
    """

    profile: Path
    decision: Path
    training: str
    outputs_uri: str | None = None


def evidence_of(
    *, profile: Path | None, decision: Path | None, training: str | None, outputs_uri: str | None
) -> JudgedRecords:
    """Returns the three records that an evaluation rests on.

    Raises:
        UsageError: If one of them is not named.
    """
    if profile and decision and training:
        return JudgedRecords(
            profile=profile, decision=decision, training=training, outputs_uri=outputs_uri
        )
    named = {"--profile": profile, "--decision": decision, "--training": training}
    lacking = next(flag for flag, value in named.items() if not value)
    raise UsageError(
        f"nothing to judge: {lacking} is missing",
        fix="name a run's profile.json, decision.json and training.json",
    )


def evaluate_command(
    workload_file: str,
    *,
    evidence: JudgedRecords,
    outputs: Outputs,
    report: Path | None,
    always: bool,
    delete: str | None,
    overrides: Sequence[str],
    params: Sequence[str],
    as_json: bool,
) -> int:
    """Runs `stoker evaluate`; gives the exit code."""
    from stoker.evaluate import evaluate, summary

    if delete:
        from stoker.platforms.aws import Aws

        Aws().delete_object(delete)
    workload = read_with_params(workload_file, overrides=overrides, params=params)
    profile = read_json(evidence.profile, Profile)
    decision = read_json(evidence.decision, Decision)
    training, folder = _training(evidence, workload, decision, may_be_lost=always)
    record = evaluate(workload=workload, profile=profile, decision=decision, training=training)
    deliver(
        record,
        outputs=outputs,
        name="evaluation",
        explain=summary,
        as_json=as_json,
        told=told_of_evaluation(record),
    )
    if report:
        from stoker.cli.report import report_of_records

        report_of_records(
            report,
            workload=workload,
            profile=profile,
            decision=decision,
            training=training,
            evaluation=record,
            training_file=folder / "training.json",
            profile_file=evidence.profile,
        )
    return 0 if always else exit_code_of(training) or _gate_code(record)


def gate_command(evaluation_file: Path) -> None:
    """Runs `stoker evaluate --gate-of EVALUATION`: raises nothing if it passed.

    Raises:
        GateError: If it did not, in the evaluation's own words.
        UsageError: If there is no such evaluation.
    """
    record = read_json(evaluation_file, Evaluation)
    if not record.passed:
        raise GateError(record.reason or "the evaluation did not pass", where="the gate")
    held = f"{len(record.gates)} of {len(record.gates)} gates held"
    print(f"passed: {held if record.gates else 'the training succeeded; no gates'}")


def _training(
    evidence: JudgedRecords, workload: Workload, decision: Decision, *, may_be_lost: bool
) -> tuple[Training, Path]:
    """Returns the training's record, and the folder that its timeline is in."""
    from stoker.evaluate import lost_training

    if evidence.training.lstrip().startswith("{"):
        return read_json(evidence.training, Training), Path()
    file = Path(evidence.training)
    if evidence.outputs_uri:
        from stoker.platforms.aws import Aws
        from stoker.platforms.sagemaker.job import fetch_training

        account = Aws(region=region_of(workload))
        folder = new_run_dir(workload.name)
        file = fetch_training(evidence.outputs_uri, folder=folder, aws=account) or file
    if may_be_lost and not file.is_file():
        return lost_training(workload, decision), file.parent
    return read_json(file, Training), file.parent


def _gate_code(evaluation: Evaluation) -> int:
    return 0 if all(gate.passed for gate in evaluation.gates) else 3
