"""`stoker evaluate` checks a training run against its quality gates and its prediction."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stoker.cli.options import HIDDEN, AsJson, OutFile, OutputFiles, Overrides, StepParams
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Workload


def evaluate_verb(
    workload: str | None = None,
    *,
    profile: Path | None = None,
    decision: Path | None = None,
    training: str | None = None,
    champion: str | None = None,
    gate_of: Path | None = None,
    promote: bool = False,
    always: Annotated[bool, HIDDEN] = False,
    expires: Annotated[bool, HIDDEN] = False,
    remember: Annotated[Path | None, HIDDEN] = None,
    comparison: Annotated[Path | None, HIDDEN] = None,
    branch: Annotated[str, HIDDEN] = "",
    files: OutputFiles,
    report: OutFile = None,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Check a training run against its quality gates and its prediction.

    The record is evaluation.json, unless --out names another file. Exit code 3 means that a gate
    did not pass, or that the training did no step; a run that failed or was stopped has its own
    exit code.

    Args:
        workload ([WORKLOAD]): The workload file (.yaml), for its gates; not needed for a command
            after --.
        profile (F): The run's profile.json (required).
        decision (F): The run's decision.json (required).
        training (F): The run's training.json (required).
        champion (F): Compare with the model in use, for gates such as accuracy>=champion-0.005: its
            evaluation.json, a folder of champions, or registry:GROUP for the last approved model in
            SageMaker's registry (default: none; such gates are then refused).
        gate_of (F): Only read this evaluation.json, and exit with 3 if it did not pass (default:
            evaluate the run).
        promote: With --gate-of: make a model that passed the new champion, in the folder of
            --champion.
        always: Exit with 0, and also judge a training run whose record is lost; the record's passed
            says how it was judged.
        expires: Tag a refused model in S3, so that a rule of the bucket deletes it.
        remember (DIR): Add a run that passed to the pipeline's memory, in this folder.
        comparison (F): With --remember: the comparison.json of the run's first step.
        branch (NAME): With --remember: name of the branch that this training job belongs to.
        report (F): Also write an HTML report to this file (default: none).

    Examples:
        stoker evaluate w.yaml --profile p.json --decision d.json --training t.json
        stoker evaluate --profile p.json --decision d.json --training t.json
    """
    from stoker.cli.workloads import read_with_params, workload_of_records
    from stoker.environment import pipeline_run
    from stoker.records import Profile, Training, read_json
    from stoker.records.outcome import outcome_of
    from stoker.run.cloudwatch_metrics import publish
    from stoker.run.judging import judged, mark_model, pass_gate
    from stoker.run.outputs import EVALUATE_PARAMETERS, outputs_of, step_inputs
    from stoker.run.pipeline_memory import keep_remembered
    from stoker.run.webhook import telling

    given = step_inputs(files)
    workload, training = workload or given.workload, training or given.training
    # A pipeline without a champion leaves it out.
    champion = given.champion or "" if files.executor_input and champion is None else champion
    if promote and not (gate_of and champion is not None):
        raise UsageError(
            "--promote needs --gate-of and --champion",
            where="--promote",
            fix="stoker evaluate --gate-of evaluation.json --champion FOLDER --promote",
        )
    if gate_of:
        pass_gate(gate_of, champions=champion if promote else None)
        if remember:
            _remember(
                remember,
                workload=read_with_params(workload or "", overrides=overrides or (), params=()),
                records=_records(profile, decision, training),
                comparison=comparison or given.comparison,
                quiet=as_json,
            )
        return 0
    profile, decision, training = _records(profile, decision, training)
    destinations = outputs_of(files, parameters=EVALUATE_PARAMETERS)
    params = [*given.params, *(params or ())]
    if workload:
        of = read_with_params(workload, overrides=overrides or (), params=params)
    else:
        # Of `-- CMD`: the records have the command, and --set may name gates.
        of = workload_of_records(
            read_json(training, Training), read_json(profile, Profile), overrides=overrides or ()
        )
    run = pipeline_run()
    # On Kubeflow the run's last step notifies, and who types this command sees the result.
    with telling(
        of, run=run, step="evaluate", quiet=as_json, is_told=bool(run) and not destinations.executor
    ) as ending:
        trained, record = judged(
            of,
            records=(profile, decision, training),
            may_be_lost=always,
            champion=champion,
            destinations=destinations,
            report=report,
            links=ending.links,
            as_json=as_json,
        )
        if expires:
            mark_model(trained, record, workload=of, quiet=as_json)
        if remember and record.passed:
            keep_remembered(
                remember,
                workload=of,
                branch=branch or given.branch,
                run=run or trained.job.name,
                records=(profile, decision),
                training=trained,
                comparison=comparison,
                quiet=as_json,
            )
        ending.run = run or trained.job.name
        ending.links |= {"job": trained.job.url} if trained.job.url else {}
        outcome = outcome_of(trained, record.gates)
        ending.tells(record.notices)
        if run and of.platform_info.has_model_registry:
            publish(of, record.notices, quiet=as_json)
        if not outcome.is_good:
            ending.failed(outcome.words, exit_code=outcome.exit_code)
        if outcome.state == "stopped":
            ending.status = "stopped"
    return 0 if always else outcome.exit_code


def _records(
    profile: Path | None, decision: Path | None, training: str | None
) -> tuple[Path, Path, str]:
    """Returns the three records of a run; raises UsageError for one that is missing."""
    if profile and decision and training:
        return profile, decision, training
    named = {"--profile": profile, "--decision": decision, "--training": training}
    lacking = next(flag for flag, value in named.items() if not value)
    fix = "evaluate needs --profile, --decision and --training"
    raise UsageError(f"missing {lacking}", fix=fix)


def _remember(
    folder: Path,
    *,
    workload: "Workload",
    records: tuple[Path, Path, str],
    comparison: Path | str,
    quiet: bool,
) -> None:
    """Adds a run to its pipeline's memory, of which the gate has just been passed."""
    from stoker.records import Training, read_json
    from stoker.run.pipeline_memory import keep_remembered

    profile, decision, text = records
    training = read_json(text, Training)
    keep_remembered(
        folder,
        workload=workload,
        branch="",
        run=training.job.name,
        records=(profile, decision),
        training=training,
        comparison=comparison,
        quiet=quiet,
    )
