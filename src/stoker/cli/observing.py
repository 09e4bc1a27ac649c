"""`stoker profile --training-job NAME` profiles a job that ran, or runs, and starts none."""

from datetime import UTC, datetime
from pathlib import Path

from stoker.catalog import load_catalog
from stoker.cli.delivery import Outputs, deliver
from stoker.cli.progress import say
from stoker.cli.step_outputs import told_of_profile
from stoker.errors import UsageError


def observe_command(
    name: str,
    *,
    has_words: bool,
    logs: Path | None,
    region: str | None,
    outputs: Outputs,
    as_json: bool,
) -> None:
    """Runs `stoker profile --training-job NAME`.

    Args:
        name: Of the job.
        has_words: Whether a workload or a command is named, too.
        logs: File with its log: gives a step's time, and the hosts' groups.
        region: Of the job; absent: as AWS's own tools find it.
        outputs: Where the profile goes.
        as_json: The profile on stdout in place of words.

    Raises:
        UsageError: If something else is to be profiled, too, a type is in no catalog, or the log
            has no steps.
        PlatformError: If the job or its load cannot be read.
    """
    from stoker.platforms.aws import Aws
    from stoker.platforms.sagemaker.usage import describe_job, observe_job
    from stoker.profile import explain
    from stoker.profile.job import observed_profile, steps_in

    if has_words:
        raise UsageError(
            "--training-job reads a job that ran: there is nothing to run",
            where="command line",
            fix=f"stoker profile --training-job {name}",
        )
    lines = _lines_of(logs) if logs else None
    steps = steps_in(lines, source=str(logs)) if lines is not None else None
    aws = Aws(region=region)
    say(f"profile of training job {name}: from CloudWatch", quiet=as_json)
    state = describe_job(aws, name)
    catalog = load_catalog("sagemaker")
    sizes = {}
    for kind, _ in state.groups.values():
        instance = catalog.get(kind)
        sizes[kind] = (instance.vcpus, instance.accelerators)
    job = observe_job(aws, state, sizes=sizes, log=lines, now=datetime.now(UTC))
    record = observed_profile(job, sizes=sizes, steps=steps)
    deliver(
        record,
        outputs=outputs,
        name="profile",
        explain=explain,
        as_json=as_json,
        told=told_of_profile(record),
    )


def _lines_of(file: Path) -> list[str]:
    """Reads the lines of a log; replaces bytes that are no text, as progress bars leave some."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as err:
        raise UsageError(
            f"the log cannot be read: {err.strerror or err}",
            where=f"--logs {file}",
            fix="name a text file with the job's log",
        ) from None
