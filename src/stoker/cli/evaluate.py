"""`stoker evaluate` checks a training run against its quality gates and its prediction."""

from stoker.cli.options import AsJson, Overrides, ReportFiles
from stoker.cli.step import MemoryFlags, RunRecords, StepFlags, evaluate_step


def evaluate_verb(
    workload: str | None = None,
    *,
    records: RunRecords,
    champion: str | None = None,
    files: ReportFiles,
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
        champion (F): Compare with the model in use, for gates such as accuracy>=champion-0.005: its
            evaluation.json, a folder of champions, or registry:GROUP for the last approved model in
            SageMaker's registry (default: none; such gates are then refused).

    Examples:
        stoker evaluate w.yaml --profile p.json --decision d.json --training t.json
        stoker evaluate --profile p.json --decision d.json --training t.json
    """
    return evaluate_step(
        workload,
        records=records,
        champion=champion,
        step=StepFlags(),
        memory=MemoryFlags(),
        files=files,
        overrides=overrides,
        as_json=as_json,
    )
