"""Logs of a run's steps: the command that prints one, and a failed step's own last lines.

The lines are those that Argo has archived, which the API server reads; else those of the step's
pod, while it is there. Kubeflow's own copy (`executor-logs`) has an address in ML Metadata only.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from stoker.errors import ServiceError, StokerError
from stoker.pipelines.base import RunStep
from stoker.pipelines.kubeflow.pod_ends import pod_end_words
from stoker.pipelines.kubeflow.run_steps import (
    DRIVER_FAILED,
    UNCHANGED,
    driver_error,
    driver_node_of,
    has_error,
    node_of,
    own_lines,
    reason_in,
    task_of,
    text_of_artifact,
)
from stoker.platforms.kubernetes.api import PODS, ClusterApi, name_of
from stoker.platforms.kubernetes.layout import STEP_LABEL
from stoker.platforms.kubernetes.streams import split_time
from stoker.records import Json
from stoker.records.base import Document, mapping, text

_SELDOM = ("not run", "PENDING", "cached")
# Steps whose command is shown.
_LOOKED_FOR = ("FAILED", "RUNNING")
# Argo's: path of a pod's node, as `mnist-w1.root(0).use(0).executor(0)`.
_NODE_NAME = "workflows.argoproj.io/node-name"
_RUN_LABEL = "pipeline/runid"
_READ_SECONDS = 20.0
_TAIL_LINES = "200"


class Sent(Protocol):
    """Sends a request of kfp's generated client, and returns its answer as JSON."""

    def __call__(
        self,
        send: Callable[[Mapping[str, object]], object],
        *,
        action: str,
        given: Mapping[str, object],
    ) -> dict[str, Json]: ...


class ApiClient(Protocol):
    """kfp's generated client, for a path without its own function."""

    def call_api(self, path: str, method: str, **options: object) -> object: ...


class StepLogs:
    """Reads the logs of steps, once each: a run that is waited for is read again and again.

    Args:
        sent: Sends a request, and raises ServiceError if it is refused.
        client: Returns kfp's generated client.
        cluster: Returns the cluster where steps run.
        namespace: Returns the namespace of the steps' pods.
    """

    def __init__(
        self,
        sent: Sent,
        *,
        client: Callable[[], ApiClient],
        cluster: Callable[[], ClusterApi],
        namespace: Callable[[], str],
    ) -> None:
        self._sent = sent
        self._client = client
        self._cluster = cluster
        self._namespace = namespace
        self._lines: dict[tuple[str, str], tuple[str, ...]] = {}
        # Asked once a step, as a cluster may not be in reach.
        self._pods: dict[tuple[str, str], str] = {}

    def explained(self, step: RunStep, run: Document) -> RunStep:
        """Adds the command for a step's log and, if it failed, why and its own last lines."""
        if step.status in _SELDOM:
            return step
        if step.reason == DRIVER_FAILED:
            return self._with_words_of_driver(step, run)
        step = dataclasses.replace(step, log=self._log_command(str(run.get("run_id")), step))
        if step.status != "FAILED":
            return step
        lines = self.lines_of(run, step)
        reason = reason_in(lines)
        if not has_error(lines):
            # A killed pod's last line says nothing of its end.
            reason = self._end_of_pod(str(run.get("run_id")), step) or reason
        return dataclasses.replace(step, lines=lines, reason=reason)

    def _log_command(self, run_id: str, step: RunStep) -> str:
        """Returns the command that prints a step's log, and no driver's."""
        if step.status in _LOOKED_FOR and (run_id, step.name) not in self._pods:
            self._pods[run_id, step.name] = self._pod_without_label(run_id, step)
        pod = self._pods.get((run_id, step.name), "")
        command = f"kubectl logs -n {self._namespace()}"
        if pod:
            return f"{command} {pod} -c main --tail=-1"
        return f"{command} -l {_selector(run_id, step)} -c main --prefix --tail=-1"

    def _pod_without_label(self, run_id: str, step: RunStep) -> str:
        """Returns the newest pod of a step that no label tells from others.

        Empty: it has one, or no pod.
        """
        with contextlib.suppress(StokerError):
            cluster = self._cluster()
            for pod in _pods_of_step(cluster, run_id=run_id, step=step)[:1]:
                is_labelled = STEP_LABEL in mapping(pod, "metadata", "labels")
                if is_labelled and _is_alone(cluster, run_id=run_id, step=step):
                    return ""
                return name_of(pod)
        return ""

    def _with_words_of_driver(self, step: RunStep, run: Document) -> RunStep:
        log = self._archived(str(run.get("run_id")), driver_node_of(run, step))
        words = driver_error(log)
        if words:
            return dataclasses.replace(step, reason=f"{step.reason}: {words}")
        return step

    def lines_of(self, run: Document, step: RunStep) -> tuple[str, ...]:
        """Returns a step's own last lines; empty if neither service nor cluster has them."""
        id = str(run.get("run_id"))
        lines = self._lines.get((id, step.name), ())
        if not lines:
            log = self._archived(id, node_of(run, step)) or self._of_pod(id, step)
            lines = self._lines[id, step.name] = own_lines(log)
        return lines

    def _archived(self, run_id: str, node: str) -> str:
        """Returns a node's log; empty: not kept, as of a killed pod, or where archiving is off."""
        if not node:
            return ""
        path = f"/apis/v2beta1/runs/{run_id}/nodes/{node}/artifacts/main-logs:read"

        def send(options: Mapping[str, object]) -> object:
            asked = {"header_params": {"Accept": "application/json"}, "auth_settings": ["Bearer"]}
            return self._client().call_api(path, "GET", **asked, **options)

        given: dict[str, object] = {"_return_http_data_only": True}
        try:
            answer = self._sent(send, action="read_artifact", given=given)
        except ServiceError:
            return ""
        return text_of_artifact(answer)

    def _of_pod(self, run_id: str, step: RunStep) -> str:
        """Returns the log of a step's newest pod that has one; empty if the cluster shows none."""
        try:
            return _log_of_step(self._cluster(), run_id=run_id, step=step)
        except StokerError:
            # The status is shown without it.
            return ""

    def _end_of_pod(self, run_id: str, step: RunStep) -> str:
        """Returns why a step's newest pod was ended or did not start; empty if nothing says so."""
        try:
            pods = _pods_of_step(self._cluster(), run_id=run_id, step=step)
        except StokerError:
            return ""
        return next((words for words in map(pod_end_words, pods) if words), "")


def words_of_skip(cluster: ClusterApi, *, run_id: str) -> str:
    """Returns why a run was skipped, from its step's log; empty: it was not, or none shows it.

    Raises:
        ServiceError: If the cluster refuses, or does not answer.
    """
    step = RunStep(name=UNCHANGED, status="SUCCEEDED")
    lines = own_lines(_log_of_step(cluster, run_id=run_id, step=step))
    if lines:
        return lines[-1]
    return ""


def _log_of_step(cluster: ClusterApi, *, run_id: str, step: RunStep) -> str:
    for pod in _pods_of_step(cluster, run_id=run_id, step=step):
        # The newest may not have started: an attempt before it has the reason.
        if log := _log_of(cluster, name_of(pod)):
            return log
    return ""


def _pods_of_step(cluster: ClusterApi, *, run_id: str, step: RunStep) -> list[Document]:
    """Returns the pods of a step's attempts, the newest first.

    By stoker's label; those of other components by the path that Argo writes on each pod.
    """
    pods, _ = cluster.list(PODS, query={"labelSelector": _selector(run_id, step)})
    if not pods:
        of_run, _ = cluster.list(PODS, query={"labelSelector": f"{_RUN_LABEL}={run_id}"})
        pods = [pod for pod in of_run if _is_executor(pod, task_of(step.name))]
    pods = [pod for pod in pods if _is_at(pod, step.path)]
    return sorted(pods, key=_created_at, reverse=True)


def _is_alone(cluster: ClusterApi, *, run_id: str, step: RunStep) -> bool:
    """Returns whether all pods with a step's label are its own: no group has one of its name."""
    pods, _ = cluster.list(PODS, query={"labelSelector": _selector(run_id, step)})
    return all(_is_at(pod, step.path) for pod in pods)


def _is_executor(pod: Document, task: str) -> bool:
    """Returns whether a pod runs a task, and is no driver."""
    attempt = r"(\([^()]*\))?"
    return bool(re.search(rf"\.{re.escape(task)}{attempt}\.executor{attempt}$", _path_of(pod)))


def _is_at(pod: Document, path: str) -> bool:
    """Returns whether a pod is at a path; also where path or pod do not say so."""
    of_pod = _path_of(pod).partition(".")[2]
    return not path or not of_pod or of_pod.startswith(f"{path}(")


def _path_of(pod: Document) -> str:
    return text(pod, "metadata", "annotations", _NODE_NAME)


def _log_of(cluster: ClusterApi, pod: str) -> str:
    """Returns a pod's last lines; if the connection breaks off, those that came."""
    asked = {"container": "main", "tailLines": _TAIL_LINES, "timestamps": "true"}
    lines: list[str] = []
    with contextlib.suppress(StokerError):
        log = cluster.open(PODS, pod, part="log", query=asked, read_seconds=_READ_SECONDS)
        try:
            for line, _ in log.lines():
                written_at, text = split_time(line)
                # Without a time it is a kubelet's error in place of a log.
                if written_at is not None:
                    lines.append(text)
        finally:
            log.release()
    return "\n".join(lines)


def _selector(run_id: str, step: RunStep) -> str:
    return f"{_RUN_LABEL}={run_id},{STEP_LABEL}={task_of(step.name)}"


def _created_at(document: Document) -> str:
    return text(document, "metadata", "creationTimestamp")
