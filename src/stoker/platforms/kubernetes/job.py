"""A job on a cluster, followed to its end: its states, its pods and their logs."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from stoker.errors import (
    FeedError,
    FeedLostError,
    JobStoppedError,
    NoCapacityError,
    PlatformError,
    ServiceError,
    StokerError,
    TerminatedError,
)
from stoker.failure_reasons import reason_of_failure
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.base import JobEnd, LogLine, leader_record
from stoker.platforms.follow import FollowedRun
from stoker.platforms.kubernetes.api import (
    CLAIMS,
    EVENTS,
    OF_KIND,
    PODS,
    TRAINJOBS,
    ClusterApi,
    text,
)
from stoker.platforms.kubernetes.events import Happening, Happenings
from stoker.platforms.kubernetes.follower import Follower
from stoker.platforms.kubernetes.layout import Layout
from stoker.platforms.kubernetes.pod_outputs import OutputParts
from stoker.platforms.kubernetes.pods import (
    PodEnd,
    PodState,
    by_attempt,
    by_job,
    pod_state,
    seconds_between,
)
from stoker.platforms.kubernetes.request import KubernetesRequest
from stoker.platforms.kubernetes.state import ObjectState, delete_and_wait, job_state
from stoker.platforms.kubernetes.streams import (
    Following,
    LogLost,
    LogText,
    ObjectNews,
    WatchError,
)
from stoker.platforms.kubernetes.submit import StartedObjects, note_ended
from stoker.platforms.kubernetes.troubles import (
    Trouble,
    TroubleLog,
    has_no_group,
    idle_wait,
    is_of_quota,
    lacks_claim,
    refused_pods,
    troubles_of,
)
from stoker.records import Event, Training
from stoker.records.base import mapping
from stoker.records.training import EndState, InputVersion, Lineage

# Reason of a container that its node killed because of its memory.
_OUT_OF_MEMORY = "OOMKilled"
# The kubelet's MaxContainerTerminationMessageLogLength: in a longer log the first line is cut.
_LOG_BYTES = 2048
# Reasons of a TrainJob and of a JobSet, where only the rule `out_of_time` fails the JobSet.
_OUT_OF_TIME = ("DeadlineExceeded", "FailJobSetFailurePolicyAction")
# Host name of lines that no host wrote.
SERVICE = "kubernetes"
# How often a pipeline's last step asks whether the run was cancelled.
ASK_SECONDS = 5.0
# Between looks at troubles and at the end.
TICK_SECONDS = 0.25
# Between questions whether a wait that is over still lasts, while the cluster does not answer.
CONFIRM_SECONDS = 15.0
# Time after the job's end to read the dnn hosts' logs, and then the data hosts'.
DRAIN_SECONDS = 60.0
DATA_DRAIN_SECONDS = 15.0
# Beyond the pods' grace period, until a deleted job is gone.
STOP_SECONDS = 60.0
# Time after that for the last lines of its hosts.
LAST_LINES_SECONDS = 10.0


def conclude(
    state: ObjectState | None,
    *,
    is_stopped: bool,
    layout: Layout,
    pods: Iterable[PodState],
    output: OutputParts,
    events: Sequence[Event],
    log: Log,
    is_whole: Callable[[str], bool],
) -> JobEnd:
    """Returns the end of a job.

    Args:
        state: Its last state; None if the job was gone before its end was seen.
        is_whole: Whether the log of a pod, by its uid, was read to its end.
    """
    ordered = by_attempt(pods)
    # The last pod of each host.
    latest = {(pod.group, pod.index): pod for pod in ordered}
    leader = latest.get((layout.dnn.group.name, 0))
    output_dir = _written(output, layout.job.run_dir / "output", log=log)
    training = leader_record(output_dir)
    status: EndState = "stopped"
    failure = None
    if state and state.phase == "succeeded":
        status = "succeeded"
    elif state:
        status = "failed"
        failure = _failure(state, latest, layout, training)
    elif training and not is_stopped:
        # With a TTL of 0 a job may be gone before its end is seen.
        status = training.status
        failure = training.failure
    folder = _output_uri(layout)
    unfetched = None
    has_record = training or (layout.job.settings.profile and output.files)
    if status == "succeeded" and not has_record and not (leader and is_whole(leader.uid)):
        unfetched = _place_of_record(layout, leader)
    return JobEnd(
        status=status,
        exit_code=_exit_code(training, leader),
        failure=failure,
        output_dir=output_dir,
        data_group_release_seconds=_release_seconds(latest.values(), leader),
        model_uri=f"{folder}/model" if folder else None,
        events=tuple(events),
        unfetched=unfetched,
        host_seconds=_host_seconds(ordered, leader),
        lineage=Lineage(
            job_id=state.uid if state else None,
            image_digest=(leader.image_digest if leader else "") or None,
        ),
    )


def _written(output: OutputParts, folder: Path, *, log: Log) -> Path | None:
    """Writes the leader's outputs, and returns their folder; None without it."""
    if not output.files:
        return None
    try:
        output.write(folder)
    except OSError as err:
        log.event(EventName.OUTPUT_WRITE_FAILED, folder=str(folder), reason=err.strerror)
        return None
    return folder


def _exit_code(training: Training | None, leader: PodState | None) -> int | None:
    """Returns the training command's exit code, else the one of the leader's pod."""
    if training and training.exit_code is not None:
        return training.exit_code
    if leader and leader.ended:
        return leader.ended.exit_code
    return None


def _place_of_record(layout: Layout, leader: PodState | None) -> str:
    """Returns where the leader's record is that could not be read."""
    folder = _output_uri(layout)
    if folder:
        return f"{folder}/output/0/data/stoker/training.json"
    return f"the log of pod {leader.name if leader else layout.name}"


def _output_uri(layout: Layout) -> str:
    """Returns the address of the run's folder in the claim for outputs; empty without a claim."""
    claim = (layout.settings.output or "").rstrip("/")
    if not claim:
        return ""
    return f"{claim}/{layout.run_name}"


def _host_seconds(pods: Iterable[PodState], leader: PodState | None) -> dict[str, float]:
    """Returns the time that nodes ran pods of each group, replaced ones too, if known."""
    totals: dict[str, float] = {}
    leader_ended_at = leader.ended_at if leader else ""
    for pod in pods:
        # A pod that was deleted in mid-run may have no end; the others end with the leader.
        end = pod.ended_at or pod.deleted_at or leader_ended_at
        seconds = seconds_between(pod.placed_at, end)
        if seconds is not None:
            totals[pod.group] = totals.get(pod.group, 0.0) + max(0.0, seconds)
    return totals


def _release_seconds(pods: Iterable[PodState], leader: PodState | None) -> float | None:
    """Returns seconds from the leader's end to the last data host's, if all are known."""
    if leader is None or leader.ended is None:
        return None
    release_seconds = None
    for pod in pods:
        # A host that never began was not held, and released nothing.
        if pod.role != "data" or not (pod.ended or pod.is_started):
            continue
        seconds = seconds_between(leader.ended_at, pod.ended_at)
        if seconds is None:
            return None
        release_seconds = max(seconds, release_seconds or 0.0)
    return release_seconds


def _failure(
    state: ObjectState,
    latest: dict[tuple[str, int], PodState],
    layout: Layout,
    training: Training | None,
) -> str:
    """Returns why the job failed; dnn pods know it better than their controllers."""
    dnn = [pod for (group, _), pod in sorted(latest.items()) if group == layout.dnn.group.name]
    # First: the failures of pods that were killed for it are consequences.
    if state.reason in _OUT_OF_TIME:
        return _too_long(layout)
    if training and training.failure:
        return training.failure
    for pod in dnn:
        if pod.lost:
            return (
                f"dnn host {pod.host} was lost ({pod.lost}); then all hosts are restarted where"
                " kubernetes.output keeps checkpoints, else kubernetes.max_restarts times"
            )
        if pod.ended and pod.ended.reason == _OUT_OF_MEMORY:
            words = f"took more memory than its limit, {layout.dnn.limits['memory']}"
            return _reason(pod, pod.ended, f"{words}; raise kubernetes.dnn.memory")
    for pod in dnn:
        if pod.ended and pod.ended.exit_code:
            return _reason(pod, pod.ended)
    return state.message or state.reason or "the cluster gives no reason"


def _reason(pod: PodState, end: PodEnd, out_of_memory: str = "") -> str:
    lines = end.message.splitlines()
    # Without the launcher's `error:` the message is the end of the log, its first line cut.
    if len(end.message.encode()) >= _LOG_BYTES and not end.message.startswith("error:"):
        lines = lines[1:]
    if not end.message and end.reason != "Error":
        lines = [end.reason]
    return reason_of_failure(
        lines, who=f"dnn host {pod.host}", exit_code=end.exit_code, out_of_memory=out_of_memory
    )


def _too_long(layout: Layout) -> str:
    return f"it ran longer than kubernetes.max_run_seconds, {layout.settings.max_run_seconds} s"


class RunPicture:
    """State of a run, whose job was created at `since` (ISO 8601), from the cluster's news."""

    def __init__(self, layout: Layout, *, uid: str, since: str, namespace: str) -> None:
        # Of the job; None until it is known.
        self.state: ObjectState | None = None
        self.is_gone = False
        self.events: list[Event] = []
        self._layout = layout
        self._namespace = namespace
        self._uid = uid
        self._groups = by_job(layout.groups)
        self._happenings = Happenings(run=layout.name, groups=layout.groups, since=since)
        self._pods: dict[str, PodState] = {}
        self._gone_pods: dict[str, PodState] = {}
        self._changed: list[tuple[PodState, bool]] = []
        self._refused: dict[str, str] = {}
        # Monotonic seconds of the first look at a deleted pod, by its uid.
        self._deleted: dict[str, float] = {}
        # The autoscaler's words on pods that fit none of its groups, by name.
        self._unfit: dict[str, str] = {}
        # Digests of each image that pods have run, the first one first.
        self._digests: dict[str, list[str]] = {}
        self._restarts = 0

    @property
    def has_ended(self) -> bool:
        return self.is_gone or (self.state is not None and self.state.has_ended)

    @property
    def is_over(self) -> bool:
        """Whether no dnn host is known to run any more."""
        return self.is_gone or all(
            pod.is_final or not pod.is_started for pod in self._pods.values() if pod.role == "dnn"
        )

    @property
    def all_pods(self) -> tuple[PodState, ...]:
        """All pods as they were last seen, including deleted ones."""
        return (*self._gone_pods.values(), *self._pods.values())

    def quota_refusals(self) -> dict[str, str]:
        """Returns the groups whose pods a quota refuses, with the controller's message."""
        refused = self._refused.items()
        return {self._groups[job].group.name: said for job, said in refused if is_of_quota(said)}

    def uids_of(self, role: str) -> frozenset[str]:
        """Returns the uids of a role's pods, including deleted ones."""
        return frozenset(pod.uid for pod in self.all_pods if pod.role == role)

    def changed_pods(self) -> list[tuple[PodState, bool]]:
        """Returns the pods with news since the last call, and whether each is deleted."""
        changed = self._changed
        self._changed = []
        return changed

    def troubles(self, now: float) -> list[Trouble]:
        """Returns why hosts do not run now (monotonic seconds)."""
        layout = self._layout
        namespace = self._namespace
        pods = [*self._pods.values()]
        there = Counter(pod.group for pod in pods)
        for group in layout.groups:
            # All its pods are there: the refusal is over.
            if there[group.group.name] >= group.group.count:
                self._refused.pop(group.job, None)
        # Since this process first saw them deleted: the cluster's clock is not compared with ours.
        self._deleted = {p.uid: self._deleted.get(p.uid, now) for p in pods if p.deleted_at}
        seconds = {uid: now - at for uid, at in self._deleted.items()}
        unfit = self._unfit
        troubles = [
            *troubles_of(pods, layout, namespace=namespace, deleted_seconds=seconds, unfit=unfit),
            *(refused_pods(self._groups[job], said) for job, said in self._refused.items()),
        ]
        name = layout.dnn.group.name
        state = self.state
        has_reason = any(each.group == name and each.fatal_after is not None for each in troubles)
        if state is not None and not has_reason:
            pods += [pod for pod in self._gone_pods.values() if pod.has_succeeded]
            wait = idle_wait(
                pods, layout, state=state, events=self._happenings, namespace=namespace
            )
            troubles += filter(None, [wait])
        return troubles

    def take(self, news: ObjectNews) -> Iterator[str]:
        """Takes news; yields messages for the user."""
        if news.resource == EVENTS:
            yield from self._take_events(news)
        elif news.resource == PODS:
            yield from self._take_pods(news)
        else:
            yield from self._take_job(news)

    def _take_events(self, news: ObjectNews) -> Iterator[str]:
        # Events expire after an hour (kube-apiserver --event-ttl), which changes nothing here.
        if news.what == "deleted":
            return
        for event in news.items:
            for happening in self._happenings.take(event):
                yield from self._take_happening(happening)

    def _take_happening(self, happening: Happening) -> Iterator[str]:
        if happening.reason == "NotTriggerScaleUp":
            # The autoscaler's last words on a pod count.
            pod = happening.about.removeprefix("Pod ")
            self._unfit.pop(pod, None)
            if has_no_group(happening.message):
                self._unfit[pod] = happening.message
        if not happening.job:
            yield happening.text
        # Outdated if a queue has suspended the job since.
        elif not self._is_suspended:
            self._refused[happening.job] = happening.message

    def _take_job(self, news: ObjectNews) -> Iterator[str]:
        # Once this job is gone, another may have its name.
        same_uid = [item for item in news.items if text(item, "metadata", "uid") == self._uid]
        for document in same_uid:
            before = self.state
            self.state = job_state(document)
            if self._is_suspended:
                self._refused.clear()
            yield from self._words_of_job(before, self.state)
        is_missing = news.what == "all" and not same_uid
        is_deleted = news.what == "deleted" and same_uid
        if (is_missing or is_deleted) and not self.is_gone:
            self.is_gone = True
            if self.state is None or not self.state.has_ended:
                yield self._note("the job was deleted")

    @property
    def _is_suspended(self) -> bool:
        return self.state is not None and self.state.phase == "suspended"

    def _words_of_job(self, before: ObjectState | None, now: ObjectState) -> Iterator[str]:
        if before is None or before.phase != now.phase:
            yield self._note(self._words_of_phase(now, is_first=before is None))
        yield from self._see_restarts(now.restarts)
        if now.is_deleted and not (before and before.is_deleted) and not now.has_ended:
            yield self._note("the job is being deleted")

    def _words_of_phase(self, now: ObjectState, *, is_first: bool) -> str:
        match now.phase:
            case "suspended" if self._layout.queue:
                return f"the job waits for admission by queue {self._layout.queue}"
            case "suspended":
                return "the job waits for admission"
            case "running" if is_first:
                return "the job exists"
            case "running":
                return "the job is admitted"
            case "succeeded":
                return "the job has succeeded"
            case "failed" if now.reason in _OUT_OF_TIME:
                return f"the job has failed: {_too_long(self._layout)}"
            case "failed":
                return f"the job has failed: {now.message or now.reason}"

    def _see_restarts(self, restarts: int) -> Iterator[str]:
        """Reports a restart once: JobSets count them, TrainJobs only in their pods."""
        if restarts > self._restarts:
            self._restarts = restarts
            yield self._note(f"all hosts are restarted (restart {restarts})")

    def _take_pods(self, news: ObjectNews) -> Iterator[str]:
        states = (pod_state(one, self._groups, run=self._layout.name) for one in news.items)
        pods = [pod for pod in states if pod is not None]
        if news.what == "all":
            there = {pod.uid for pod in pods}
            for pod in [pod for uid, pod in self._pods.items() if uid not in there]:
                yield from self._lose_pod(pod)
        for pod in pods:
            yield from self._see_pod(pod)
            if news.what == "deleted":
                yield from self._lose_pod(pod)

    def _see_pod(self, pod: PodState) -> Iterator[str]:
        yield from self._see_restarts(pod.attempt)
        before = self._pods.get(pod.uid)
        self._pods[pod.uid] = pod
        self._changed.append((pod, False))
        if pod.is_running and not (before and before.is_running):
            again = ""
            if before and before.is_started:
                again = ", restarted"
            elif any(p.host == pod.host and p.uid != pod.uid for p in self.all_pods):
                again = ", replacing an earlier pod"
            yield self._note(f"runs on node {pod.node}{again}", pod.host)
            yield from self._see_image(pod)
        if pod.lost and not (before and before.lost):
            yield self._note(f"lost: {pod.lost}", pod.host)
        if pod.ended and not (before and before.ended):
            what = f"ended with exit code {pod.ended.exit_code}"
            # These two say no more than the code does.
            if pod.ended.reason not in ("Error", "Completed"):
                what += f", {pod.ended.reason}"
            yield self._note(what, pod.host)

    def _see_image(self, pod: PodState) -> Iterator[str]:
        """Tells once that the image's tag was pushed again, and hosts run different programs."""
        group = next(g for g in self._layout.groups if g.group.name == pod.group)
        image = group.settings.image or self._layout.image
        digests = self._digests.setdefault(image, [])
        if pod.image_digest.startswith("sha256:") and pod.image_digest not in digests:
            digests.append(pod.image_digest)
            if len(digests) > 1:
                what = f"{image} is {pod.image_digest} here, and {digests[0]} on earlier hosts"
                yield self._note(f"{what}: name it by its digest", pod.host)

    def _lose_pod(self, pod: PodState) -> Iterator[str]:
        self._pods.pop(pod.uid, None)
        self._gone_pods[pod.uid] = pod
        self._changed.append((pod, True))
        is_known = pod.is_final or pod.lost or pod.ended
        if not is_known and not self.has_ended:
            yield self._note("its pod was deleted", pod.host)

    def _note(self, what: str, host: str | None = None) -> str:
        self.events.append(Event(when=now_utc(), what=what, host=host))
        if host is None:
            return what
        return f"{host}: {what}"


class KubernetesRun(FollowedRun):
    """A submitted job, followed by watching the cluster; `is_last`: by a pipeline's last step."""

    def __init__(
        self,
        cluster: ClusterApi,
        *,
        request: KubernetesRequest,
        started: StartedObjects,
        follower: Follower,
        is_last: bool = False,
    ) -> None:
        layout = request.layout
        self._resource = OF_KIND[text(request.main, "kind")]
        self._place = f"{self._resource.plural} {request.name}"
        super().__init__(
            request.name,
            run=request.job.name,
            service=SERVICE,
            log_folder=layout.job.run_dir / "logs",
            way_back=f"the same command with --name {layout.job.run_name}",
            way_to_stop=f"kubectl delete {self._place} -n {cluster.namespace}",
            is_step=follower.pod is not None,
            # Without a limit the bound of the pipeline's step counts.
            may_last_seconds=layout.settings.max_run_seconds or float("inf"),
        )
        self.is_adopted = started.is_adopted
        self._cluster = cluster
        self._layout = layout
        self._uid = started.uid
        self._follower = follower
        self._lease = started.lease
        # When to ask next whether the run was cancelled; None: a signal tells, but not a last step.
        self._asks_at = cluster.clock() + ASK_SECONDS if is_last else None
        self._output = OutputParts()
        self._picture = RunPicture(
            layout, uid=started.uid, since=started.created_at, namespace=cluster.namespace
        )
        self._troubles = TroubleLog()
        self._following = Following(
            cluster,
            resource=self._resource,
            name=self.name,
            containers={group.group.name: group.job for group in layout.groups},
        )
        # Why the job was deleted before its end, which is recorded as a failure.
        self._given_up = ""
        # Whether the job was deleted because its controller does not end it.
        self._is_finished = False
        # Why `stop` could not delete the job.
        self._remains = ""
        self._is_stopped = threading.Event()
        # Set by `stop`: no further news comes.
        self._is_let_go = threading.Event()
        self._looked_at = float("-inf")
        # When to ask again whether a wait that is over still lasts.
        self._confirm_at = float("-inf")
        self._ended_at: float | None = None
        self._read_at: float | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """Events so far that only the cluster sees."""
        return tuple(self._picture.events)

    def stop(self) -> None:
        """Deletes the job unless it has ended, and blocks until its pods are gone.

        That takes at most STOP_SECONDS beyond their grace period. May be called by any thread.
        """
        if self._is_stopped.is_set() or self._is_left or self._has_ended:
            self._is_drained = self._is_drained or self._is_left
            self._close()
            return
        # Before the deletion: hosts that end from now on are not a trouble.
        self._is_stopped.set()
        seconds = self._layout.grace_seconds + STOP_SECONDS
        try:
            self._log.event(EventName.JOB_STOPPING, job=self.name, at_most_seconds=seconds)
            delete = partial(delete_and_wait, self._cluster, self._resource, self.name)
            is_gone = self._cluster.repeated(
                lambda: delete(uid=self._uid, seconds=seconds), seconds=seconds
            )
            if is_gone:
                self._log.event(EventName.JOB_DELETED, job=self.name)
                note_ended(self._layout.job.run_dir, uid=self._uid)
            else:
                self._log.event(EventName.JOB_STILL_STOPPING, job=self.name)
                self._remains = f"it is not gone after {seconds:g} s"
        except StokerError as err:
            self._log.event(EventName.JOB_DELETE_FAILED, job=self.name, why=err.what)
            self._remains = err.what
        self._following.await_logs(LAST_LINES_SECONDS)
        # For `lines` in another thread: the watches are closed before they could report it.
        self._picture.is_gone = True
        self._is_let_go.set()
        self._close()

    @property
    def _has_ended(self) -> bool:
        return self._picture.has_ended

    def _is_cancelled(self) -> bool:
        return bool(self._follower.is_cancelled(self._cluster))

    def leave(self) -> str:
        words = super().leave()
        if not words or self._has_ended or not self._lease or not self._lease.minutes:
            return words
        return f"{words}; without a follower it ends after {self._lease.minutes} minutes"

    def remaining(self) -> PlatformError | None:
        if not self._remains:
            return None
        return PlatformError(
            f"the job {self.name} could not be deleted: {self._remains}",
            where=f"{self._place} in namespace {self._cluster.namespace}",
            fix=f"{self._way_to_stop}, then {self._way_back}",
        )

    def clean_up(self) -> None:
        """Deletes a finished TrainJob with what it owns; a JobSet has a TTL.

        In a pipeline the last step deletes a TrainJob, which retries need until then.
        """
        state = self._picture.state
        is_kept = self._resource != TRAINJOBS or self._follower.workflow is not None
        if is_kept or self._picture.is_gone or not (state and state.has_ended):
            return
        try:
            self._cluster.repeated(
                lambda: self._cluster.delete(self._resource, self.name, uid=self._uid)
            )
            self._log.event(EventName.JOB_DELETED, job=self.name)
        except StokerError as err:
            self._log.event(EventName.JOB_DELETE_FAILED, job=self.name, why=err.what)

    def _close(self) -> None:
        if self._lease:
            self._lease.close()
        self._following.close()
        self._close_files()

    def _begin(self) -> None:
        if self._lease and self._lease.ident is None:
            self._lease.start()
        self._following.begin()

    def _conclude(self) -> JobEnd:
        state = self._picture.state
        # `stop` knows itself whether it is gone, and a job that was left has not ended.
        if self._has_ended and not self._is_stopped.is_set():
            note_ended(self._layout.job.run_dir, uid=self._uid)
        end = conclude(
            state if state and state.has_ended else None,
            is_stopped=self._is_stopped.is_set() and not self._is_finished,
            layout=self._layout,
            pods=self._picture.all_pods,
            output=self._output,
            events=self.events,
            log=self._log,
            is_whole=self._following.is_whole,
        )
        end = replace(end, lineage=Lineage(inputs=self._claims()).joined(end.lineage))
        if self._given_up:
            return replace(end, status="failed", failure=self._given_up)
        if state and state.phase == "failed":
            if state.reason in _OUT_OF_TIME:
                self._refuse_to_wait_for_the_deadline()
            else:
                self._refuse_to_train_without_data_hosts(end.failure or "")
        return end

    def _claims(self) -> dict[str, InputVersion]:
        """Returns the channels in claims that this account may read, with their UIDs."""
        versions = {}
        for name, channel in self._layout.job.channels.items():
            claim = urlsplit(channel.uri)
            if claim.scheme == "pvc":
                with contextlib.suppress(StokerError):
                    uid = text(mapping(self._cluster.get(CLAIMS, claim.netloc), "metadata"), "uid")
                    versions[name] = InputVersion(address=channel.uri, claim_uid=uid)
        return versions

    def _without_hosts(self, role: str) -> dict[str, str]:
        """Returns the groups of a role that lacked nodes or quota, with the reasons."""
        refusals = self._picture.quota_refusals()
        for pod in self._picture.all_pods:
            if pod.unschedulable and not lacks_claim(pod.unschedulable):
                refusals[pod.group] = " ".join(pod.unschedulable.split())
        names = [group.name for group in self._layout.job.groups if group.role == role]
        return {name: refusals[name] for name in names if name in refusals}

    def _lacked(self, without: dict[str, str], *, what: str, fix: str = "") -> NoCapacityError:
        """Returns the error for groups without hosts; the next plan is tried at once."""
        job = self._layout.job
        what = f"{what}: {next(iter(without.values()))}"
        fix = "; ".join(filter(None, (fix, job.next_best_advice)))
        error = NoCapacityError(what, where=self._place, fix=fix)
        error.types = frozenset(g.instance_type for g in job.groups if g.name in without)
        error.may_pass = False
        return error

    def _refuse_to_wait_for_the_deadline(self) -> None:
        """Raises NoCapacityError if the job's deadline came before its dnn hosts."""
        without = self._without_hosts("dnn")
        pods = self._picture.all_pods
        if not without or any(pod.is_started for pod in pods if pod.role == "dnn"):
            return
        limit = self._layout.settings.max_run_seconds
        minutes = self._layout.job.platform_settings.on_no_capacity.wait_minutes
        raise self._lacked(
            without,
            what=f"no dnn host began within kubernetes.max_run_seconds, {limit} s",
            fix=f"raise max_run_seconds above on_no_capacity.wait_minutes, {60 * minutes} s",
        )

    def _refuse_to_train_without_data_hosts(self, failure: str) -> None:
        """Raises NoCapacityError if trainers waited for data hosts that got no nodes."""
        job = self._layout.job
        without = self._without_hosts("data")
        pods = self._picture.all_pods
        loads_itself = job.groups[0].workers_per_host != 0
        if loads_itself or not without or any(p.is_started for p in pods if p.role == "data"):
            return
        limit = job.settings.feed.start_deadline_seconds
        for pod in pods:
            end = pod.ended
            if pod.role != "dnn" or end is None or end.exit_code != FeedError.exit_code:
                continue
            # A script may end with that code, too: so the feed's words count, or its deadline.
            names_the_feed = FeedLostError.__name__ in failure + end.message
            has_waited = (seconds_between(end.began_at, end.at) or 0.0) >= limit
            if names_the_feed or has_waited:
                raise self._lacked(
                    without, what="the training run failed: its data hosts got no nodes"
                )

    def _look(self) -> None:
        """Takes one piece of news, or waits for it."""
        item = self._following.next(0.0 if self._is_let_go.is_set() else TICK_SECONDS)
        match item:
            case LogText(pod, line):
                if not self._output.take(line):
                    self._emit(LogLine(group=pod.group, host=pod.host, text=line))
                # Not a look at troubles and the end with each of a thousand lines.
                if self._cluster.clock() < self._looked_at + TICK_SECONDS:
                    return
            case LogLost(pod, error):
                self._say(f"the log of {pod.host} cannot be read: {error.what}")
            case WatchError(resource, error, failing_seconds):
                # A run can be followed without events: pods tell most of it.
                seconds = 0.0 if resource == EVENTS else failing_seconds
                self._endure(error, now=self._cluster.clock(), failing_seconds=seconds)
            case ObjectNews():
                self._take(item)
        self._looked_at = self._cluster.clock()
        if self._asks_at is not None and self._looked_at >= self._asks_at:
            self._asks_at = self._looked_at + ASK_SECONDS
            if not self._has_ended and self._is_cancelled():
                raise TerminatedError
        self._look_at_troubles()
        self._look_for_end()

    def _look_at_troubles(self) -> None:
        if self._picture.has_ended or self._is_stopped.is_set():
            return
        self._tell_troubles()
        if self._troubles.over() is None or self._cluster.clock() < self._confirm_at:
            return
        self._confirm_at = self._cluster.clock() + CONFIRM_SECONDS
        # Not on what was seen before a control plane went away.
        with contextlib.suppress(ServiceError):
            shown = self._cluster.find(self._resource, self.name)
            self._take(ObjectNews(self._resource, "all", (shown,) if shown else ()))
            self._take(self._following.pods_now())
            self._tell_troubles()
            over = self._troubles.over()
            if over is not None and not self._picture.has_ended:
                self._give_up(over)

    def _tell_troubles(self) -> None:
        now = self._cluster.clock()
        for _, words in self._troubles.news(self._picture.troubles(now), now=now):
            self._say(words)

    def _give_up(self, over: Trouble) -> None:
        """Ends a wait that has lasted too long; raises JobStoppedError if it has not trained."""
        if over.is_dead_node or over.is_finished:
            # With the output so far; one that cannot be replaced is recorded as failed.
            self._is_finished = over.is_finished
            if not over.is_finished:
                self._given_up = f"{over.what}; {over.fix}"
            self.stop()
            return
        if over.is_capacity:
            raise self._no_capacity(over)
        raise JobStoppedError(
            f"{over.what} (for {over.fatal_after or 0:.0f} s)", where=self._place, fix=over.fix
        )

    def _no_capacity(self, trouble: Trouble) -> NoCapacityError:
        """Returns the error for missing hosts; only a quota is worth a retry."""
        job = self._layout.job
        waited = trouble.what
        fix = trouble.fix
        types = frozenset[str]()
        if not trouble.may_pass:
            types = frozenset(g.instance_type for g in job.groups if g.name == trouble.group)
        if trouble.key.startswith("unschedulable"):
            minutes = job.platform_settings.on_no_capacity.wait_minutes
            waited += f" (for {minutes} min, on_no_capacity.wait_minutes)"
            fix = f"give the cluster nodes of {', '.join(types)} (kubernetes.pools names their "
            fix += "labels), or let it wait longer"
            fix = "; ".join(filter(None, (fix, job.next_best_advice)))
        elif trouble.key.startswith("admission"):
            minutes = self._layout.settings.queue_wait_minutes
            waited += f" (for {minutes} min, kubernetes.queue_wait_minutes)"
        error = NoCapacityError(waited, where=self._place, fix=fix)
        error.types = types
        error.may_pass = trouble.may_pass
        dnn = self._layout.dnn.group
        pods = self._picture.all_pods
        started = {pod.index for pod in pods if pod.is_started and pod.group == dnn.name}
        # Each has, or had, a process, so that training could begin.
        error.had_hosts = len(started) >= dnn.count
        return error

    def _look_for_end(self) -> None:
        """Ends the reading once the job has ended and its hosts' logs were read."""
        if not self._picture.has_ended:
            return
        now = self._cluster.clock()
        if self._ended_at is None:
            self._ended_at = now
            # A job's end may be reported before its pods' ends.
            with contextlib.suppress(ServiceError):
                self._take(self._following.pods_now())
        is_read = self._following.is_read(self._picture.uids_of("dnn")) and self._picture.is_over
        if self._read_at is None and (is_read or now >= self._ended_at + DRAIN_SECONDS):
            self._read_at = now
        if self._read_at is None and not self._is_let_go.is_set():
            return
        data_is_read = self._following.is_read(self._picture.uids_of("data"))
        is_late = self._read_at is not None and now >= self._read_at + DATA_DRAIN_SECONDS
        if (data_is_read or is_late or self._is_let_go.is_set()) and self._following.is_empty:
            self._is_drained = True
            self._close()

    def _take(self, news: ObjectNews) -> None:
        for words in self._picture.take(news):
            self._say(words)
        for pod, is_deleted in self._picture.changed_pods():
            self._following.follow(pod, is_deleted=is_deleted)
