"""How a job ended: its records put together, its failure in words."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from stoker.errors import UsageError
from stoker.logs import Log
from stoker.platforms.base import JobEnd
from stoker.platforms.kubernetes.groups import Layout
from stoker.platforms.kubernetes.pod_state import PodState, seconds_between
from stoker.platforms.kubernetes.state import JobState
from stoker.platforms.output_lines import OutputParts
from stoker.records import Event, Training, read_json, write_json

# Of a container that its node killed for what it took of memory.
_OUT_OF_MEMORY = "OOMKilled"


def conclude(
    state: JobState | None,
    *,
    is_stopped: bool,
    layout: Layout,
    pods: Iterable[PodState],
    output: OutputParts,
    events: Sequence[Event],
    log: Log,
) -> JobEnd:
    """The end of a job.

    Args:
        state: Its last one; None where the job was gone before it was seen to end.
        is_stopped: Whether the caller stopped it.
        layout: Of the run.
        pods: As they were last seen, those that are gone, too.
        output: What the dnn hosts left in their logs.
        events: That only the cluster saw; they are added to the leader's record.
        log: For what is worth telling.
    """
    latest = _latest(pods)
    leader = latest.get((layout.dnn.group.name, 0))
    release = _release_seconds(latest.values(), leader)
    output_dir = _write(output, layout.job.run_dir / "output", log)
    training = _complete_record(output_dir, events, release) if output_dir else None
    exit_code = training.exit_code if training else None
    if exit_code is None and leader and leader.ended:
        exit_code = leader.ended.exit_code
    status, failure = _verdict(state, is_stopped=is_stopped, training=training)
    if state is not None and status == "failed":
        failure = _failure(state, latest, layout, training)
    if release is None and training:
        release = training.data_group_release_seconds
    return JobEnd(
        status=status,
        exit_code=exit_code,
        failure=failure,
        output_dir=output_dir,
        data_group_release_seconds=release,
        model_uri=_model_uri(layout),
    )


def _verdict(
    state: JobState | None, *, is_stopped: bool, training: Training | None
) -> tuple[Literal["succeeded", "failed", "stopped"], str | None]:
    if state is not None:
        return ("succeeded", None) if state.phase == "succeeded" else ("failed", state.message)
    # Kept for no time at all, a job may be gone before its end was seen: its record knows it.
    if training and not is_stopped:
        return training.status, training.failure
    return "stopped", None


def _latest(pods: Iterable[PodState]) -> dict[tuple[str, int], PodState]:
    """The last pod of each host."""
    found: dict[tuple[str, int], PodState] = {}
    for pod in sorted(pods, key=lambda pod: (pod.attempt, pod.created_at)):
        found[pod.group, pod.index] = pod
    return found


def _write(output: OutputParts, folder: Path, log: Log) -> Path | None:
    if not output.files:
        return None
    try:
        output.write(folder)
    except OSError as err:
        log.event("output_not_written", folder=str(folder), reason=err.strerror)
        return None
    return folder


def _complete_record(
    folder: Path, events: Sequence[Event], release: float | None
) -> Training | None:
    path = folder / "stoker" / "training.json"
    try:
        training = read_json(path, Training)
        merged = sorted([*training.events, *events], key=lambda event: event.when)
        training = msgspec.structs.replace(training, events=tuple(merged))
        if release is not None:
            training = msgspec.structs.replace(training, data_group_release_seconds=release)
        write_json(path, training)
    except UsageError:
        return None
    return training


def _release_seconds(pods: Iterable[PodState], leader: PodState | None) -> float | None:
    """From the leader's end to the last data host's, where all of them are known."""
    data = [pod for pod in pods if pod.role == "data"]
    if not data or leader is None or leader.ended is None:
        return None
    ends = []
    for pod in data:
        if pod.ended is None:
            # Never started, it held nothing; gone without a word, its end is not known.
            if pod.is_started:
                return None
            continue
        seconds = seconds_between(leader.ended.at, pod.ended.at)
        if seconds is None:
            return None
        ends.append(seconds)
    return max(0.0, *ends) if ends else None


def _failure(
    state: JobState,
    latest: dict[tuple[str, int], PodState],
    layout: Layout,
    training: Training | None,
) -> str:
    """Why it failed: what a dnn host's pod says, before what its controllers make of it."""
    dnn = [pod for (group, _), pod in sorted(latest.items()) if group == layout.dnn.group.name]
    if "DeadlineExceeded" in state.reason + state.message:
        limit = layout.settings.max_run_seconds
        return f"it ran longer than kubernetes.max_run_seconds, {limit} s: {state.message}"
    if training and training.failure:
        return training.failure
    for pod in dnn:
        if pod.lost:
            return (
                f"dnn host {pod.host} was taken away ({pod.lost}); kubernetes.max_restarts says"
                " how often all hosts are started again then"
            )
        if pod.ended and pod.ended.reason == _OUT_OF_MEMORY:
            limit_of = layout.dnn.limits["memory"]
            return (
                f"dnn host {pod.host} took more memory than its limit, {limit_of}; "
                "raise kubernetes.dnn.memory_limit"
            )
    for pod in dnn:
        if pod.ended and pod.ended.exit_code:
            words = pod.ended.message.strip() or pod.ended.reason
            return f"dnn host {pod.host} ended with exit code {pod.ended.exit_code}: {words}"
    return state.message or state.reason or "the cluster gives no reason"


def _model_uri(layout: Layout) -> str | None:
    """Where the dnn group's model lies; it is gone with its pods where there is no output."""
    if not layout.settings.output:
        return None
    return f"{layout.settings.output.rstrip('/')}/{layout.name}/model"
