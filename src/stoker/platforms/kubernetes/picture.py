"""What is known of a run at a moment, and what of it is worth saying."""

from collections.abc import Iterable, Iterator

from stoker.logs import now_utc
from stoker.platforms.kubernetes.groups import Layout
from stoker.platforms.kubernetes.happenings import Happenings
from stoker.platforms.kubernetes.pod_state import PodState, pod_state
from stoker.platforms.kubernetes.reading import Document, mapping, text
from stoker.platforms.kubernetes.resources import EVENTS, PODS, Resource
from stoker.platforms.kubernetes.state import JobState, job_state
from stoker.platforms.kubernetes.troubles import Trouble, by_job, refused_pods, troubles_of
from stoker.platforms.kubernetes.watching import Changed, Gone, Listed
from stoker.records import Event

# Who speaks where it is not a host.
SERVICE = "kubernetes"


class Picture:
    """A run as far as it has been told.

    Args:
        layout: Of the run.
        main: JobSets or TrainJobs.
        uid: Of the run's one.
        since: When it was made, ISO 8601.

    Attributes:
        state: Of the job; None until it is told.
        is_gone: Whether the job is there no more.
        events: What happened, for the record.
    """

    def __init__(self, layout: Layout, *, main: Resource, uid: str, since: str) -> None:
        self.state: JobState | None = None
        self.is_gone = False
        self.events: list[Event] = []
        self._layout = layout
        self._main = main
        self._uid = uid
        self._groups = by_job(layout.groups)
        self._happenings = Happenings(run=layout.name, groups=layout.groups, since=since)
        self._pods: dict[str, PodState] = {}
        self._gone_pods: dict[str, PodState] = {}
        self._changed: list[PodState] = []
        self._refused: dict[str, str] = {}

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, or is gone."""
        return self.is_gone or (self.state is not None and self.state.has_ended)

    @property
    def is_over(self) -> bool:
        """Whether no dnn host runs any more, as far as is known."""
        return self.is_gone or all(
            pod.is_final or not pod.is_started for pod in self._pods.values() if pod.role == "dnn"
        )

    @property
    def all_pods(self) -> tuple[PodState, ...]:
        """Pods as they were last seen, those that are gone, too."""
        return (*self._gone_pods.values(), *self._pods.values())

    def uids_of(self, role: str) -> frozenset[str]:
        """The pods of a role that there are, or were."""
        return frozenset(pod.uid for pod in self.all_pods if pod.role == role)

    def changed_pods(self) -> list[PodState]:
        """The pods that were told of since this was asked last."""
        changed, self._changed = self._changed, []
        return changed

    def troubles(self) -> list[Trouble]:
        """Why hosts do not run, at this moment."""
        layout = self._layout
        found = list(
            troubles_of(
                self._pods.values(),
                layout.groups,
                image=layout.image,
                next_best=layout.job.next_best,
            )
        )
        for job, message in self._refused.items():
            group = self._groups[job]
            there = [p for p in self._pods.values() if p.group == group.group.name]
            if len(there) < group.group.count:
                found.append(refused_pods(group, message))
        return found

    def take(self, item: Listed | Changed | Gone) -> Iterator[str]:
        """Takes a piece of news; gives what to say of it."""
        if item.resource == EVENTS:
            yield from self._take_events(item)
        elif item.resource == PODS:
            yield from self._take_pods(item)
        else:
            yield from self._take_job(item)

    def _take_events(self, item: Listed | Changed | Gone) -> Iterator[str]:
        if isinstance(item, Gone):
            return
        for event in item.items if isinstance(item, Listed) else (item.item,):
            for happening in self._happenings.take(event):
                if happening.job:
                    self._refused[happening.job] = happening.message
                else:
                    yield happening.text

    def _take_job(self, item: Listed | Changed | Gone) -> Iterator[str]:
        if isinstance(item, Listed):
            found = next((one for one in item.items if self._is_it(one)), None)
            if found is None:
                yield from self._lose_job()
                return
            document = found
        elif not self._is_it(item.item):
            return
        else:
            document = item.item
        before, self.state = self.state, job_state(document)
        yield from self._words_of_job(before, self.state)
        if isinstance(item, Gone):
            yield from self._lose_job()

    def _is_it(self, document: Document) -> bool:
        return text(mapping(document, "metadata"), "uid") == self._uid

    def _lose_job(self) -> Iterator[str]:
        if self.is_gone:
            return
        self.is_gone = True
        if self.state is None or not self.state.has_ended:
            yield self._note("the job was deleted")

    def _words_of_job(self, before: JobState | None, now: JobState) -> Iterator[str]:
        if before is None or before.phase != now.phase:
            queue = self._layout.settings.queue
            words = {
                "suspended": "the job waits to be admitted"
                + (f" by queue {queue}" if queue else ""),
                "running": "the job is admitted" if before else "the job is there",
                "succeeded": "the job has succeeded",
                "failed": f"the job has failed: {now.message or now.reason}",
            }[now.phase]
            yield self._note(words)
        if now.restarts > (before.restarts if before else 0):
            yield self._note(f"all hosts are started again, for the {now.restarts}. time")
        if now.is_deleted and not (before and before.is_deleted) and not now.has_ended:
            yield self._note("the job is being deleted")

    def _take_pods(self, item: Listed | Changed | Gone) -> Iterator[str]:
        if isinstance(item, Listed):
            listed = list(self._states(item.items))
            there = {pod.uid for pod in listed}
            for pod in [pod for uid, pod in self._pods.items() if uid not in there]:
                yield from self._lose_pod(pod)
            for pod in listed:
                yield from self._see_pod(pod)
            return
        for pod in self._states((item.item,)):
            yield from self._see_pod(pod)
            if isinstance(item, Gone):
                yield from self._lose_pod(pod)

    def _states(self, documents: Iterable[Document]) -> Iterator[PodState]:
        for document in documents:
            state = pod_state(document, self._groups, run=self._layout.name)
            if state is not None:
                yield state

    def _see_pod(self, pod: PodState) -> Iterator[str]:
        before = self._pods.get(pod.uid)
        others = [p for p in self.all_pods if p.host == pod.host and p.uid != pod.uid]
        self._pods[pod.uid] = pod
        self._changed.append(pod)
        if pod.is_running and not (before and before.is_running):
            again = ""
            if before and before.is_started:
                again = ", started again"
            elif others:
                again = ", in place of the one before"
            yield self._note(f"it runs on node {pod.node}{again}", pod.host)
        if pod.lost and not (before and before.lost):
            yield self._note(f"it is taken away: {pod.lost}", pod.host)
        if pod.ended and not (before and before.ended):
            reason = "" if pod.ended.reason in ("Error", "Completed") else f", {pod.ended.reason}"
            yield self._note(f"it has ended with exit code {pod.ended.exit_code}{reason}", pod.host)

    def _lose_pod(self, pod: PodState) -> Iterator[str]:
        self._pods.pop(pod.uid, None)
        self._gone_pods[pod.uid] = pod
        is_known = pod.is_final or pod.lost or pod.ended
        if not is_known and not self.has_ended:
            yield self._note("its pod is gone", pod.host)

    def _note(self, what: str, host: str | None = None) -> str:
        self.events.append(Event(when=now_utc(), what=what, host=host))
        return f"{host}: {what}" if host else what
