"""How a job ended: its records fetched, its failure in words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from stoker.errors import PlatformError, StokerError, UsageError
from stoker.logs import Log
from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.base import JobEnd
from stoker.platforms.sagemaker.outputs import fetch_outputs
from stoker.platforms.sagemaker.state import JobState, lacks_capacity, no_capacity
from stoker.records import Event, Group, Training, read_json, write_json


def conclude(
    aws: Aws,
    state: JobState,
    *,
    groups: Sequence[Group],
    run_dir: Path | None,
    asked_name: str,
    events: Sequence[Event],
    next_best: str,
    log: Log,
) -> JobEnd:
    """The end of a job whose state is final.

    Args:
        aws: The account.
        state: Of the job.
        groups: That were asked for.
        run_dir: Gets the folder output/ with the leader's records; absent: they are not fetched.
        asked_name: Of the job, where an earlier one had it: a pipeline registers the model under
            the name it knew beforehand, and the model is copied there.
        events: That only the service saw; they are added to the leader's record.
        next_best: Plan to take where this one got no hosts.
        log: For what is worth telling.

    Raises:
        PlatformError: If the job got no hosts.
    """
    if state.status == "Failed" and lacks_capacity(state.reason):
        raise no_capacity(state.reason, groups, job_name=state.name, next_best=next_best)
    output_dir = _outputs(aws, state, run_dir, log) if run_dir else None
    training = _complete_record(output_dir, events) if output_dir else None
    status, failure = _verdict(state)
    exit_code = training.exit_code if training else None
    model_uri = _model_uri(aws, state)
    if status == "succeeded" and model_uri and asked_name not in ("", state.name):
        _copy_model(aws, model_uri, state, asked_name, log)
    return JobEnd(
        status=status,
        exit_code=state.exit_code if exit_code is None else exit_code,
        failure=failure,
        output_dir=output_dir,
        data_group_release_seconds=None,
        model_uri=model_uri,
        job_url=state.url,
    )


def _outputs(aws: Aws, state: JobState, run_dir: Path, log: Log) -> Path | None:
    archive = f"{state.output_prefix}/output.tar.gz"
    try:
        return fetch_outputs(aws, archive, folder=run_dir / "output")
    except PlatformError as err:
        log.event("outputs_not_readable", object=archive, why=err.what)
        return None


def _model_uri(aws: Aws, state: JobState) -> str | None:
    uri = state.model_uri or f"{state.output_prefix}/model.tar.gz"
    if state.status == "Completed":
        return uri
    try:
        return uri if aws.has_object(uri) else None
    except AwsError:
        return None


def _copy_model(aws: Aws, uri: str, state: JobState, asked_name: str, log: Log) -> None:
    known = f"{state.output_prefix}/model.tar.gz".replace(f"/{state.name}/", f"/{asked_name}/")
    try:
        aws.copy_object(uri, known)
    except StokerError as err:
        log.event("model_not_copied", object=known, why=err.what)
    else:
        log.event("model_copied", object=known)


def _complete_record(folder: Path, events: Sequence[Event]) -> Training | None:
    """Adds what only the service saw to the record that the leader wrote."""
    path = folder / "stoker" / "training.json"
    try:
        training = read_json(path, Training)
        merged = sorted([*training.events, *events], key=lambda event: event.when)
        training = msgspec.structs.replace(training, events=tuple(merged))
        write_json(path, training)
    except UsageError:
        return None
    return training


def _verdict(state: JobState) -> tuple[Literal["succeeded", "failed", "stopped"], str | None]:
    if state.status == "Completed":
        return "succeeded", None
    if state.status == "Stopped":
        if state.secondary.startswith("Max"):
            # Nobody asked for that: the training is not done.
            return "failed", (
                f"the service stopped the job: {state.secondary}; "
                "raise sagemaker.max_run_seconds (with spot: max_wait_seconds)"
            )
        return "stopped", None
    return "failed", state.reason or "the service gave no reason"
