"""A double of Kubernetes' API server on a loopback port, as far as stoker asks one.

It keeps objects, refuses what the real CRDs refuse, serves lists and logs, and plays the
troubles of real ones on command. The garbage collector and Trainer's controller run on their own.
No other one does: tests say what becomes of jobs and pods, in the real controllers' words. Those of
Job and JobSet judge on demand (`fail_pod`, `disrupt_pod`, `pass_deadline`,
`pass_seconds_after_end`).
"""

import contextlib
import copy
import functools
import json
import re
import select
import socket
import ssl
import subprocess
import threading
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from support.http_server import Handler, http_server
from support.kubernetes_rules import rule_problems, unknown_fields

TOKEN = "the-callers-own"
USER = "system:serviceaccount:team-a:runner"
NAMESPACE = "team-a"
# What is held is let go after it: a test has failed by then.
HOLD_SECONDS = 30.0

_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>log))?$"
)
_KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "jobsets"): "JobSet",
    ("trainer.kubeflow.org/v1alpha1", "trainjobs"): "TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "trainingruntimes"): "TrainingRuntime",
    ("v1", "secrets"): "Secret",
    ("v1", "configmaps"): "ConfigMap",
    ("v1", "pods"): "Pod",
    ("v1", "events"): "Event",
    ("v1", "nodes"): "Node",
    ("v1", "persistentvolumeclaims"): "PersistentVolumeClaim",
    ("argoproj.io/v1alpha1", "workflows"): "Workflow",
}
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_REPLICATED = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX = "batch.kubernetes.io/job-completion-index"
_FOREGROUND = "foregroundDeletion"

Object = dict[str, Any]


@dataclass
class Fault:
    method: str
    plural: str
    code: int = 500
    times: int = 1
    message: str = "etcdserver: request timed out"
    reason: str = "InternalError"
    # The call does what it should, and its answer does not arrive.
    is_answer_lost: bool = False


@dataclass
class PodLogFile:
    lines: list[tuple[str, str]] = field(default_factory=list)
    is_closed: bool = False


class Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.status |= {"message": message, "reason": reason, "code": code}


class KubernetesApi:
    """The server's objects, and what tests do with them.

    Attributes:
        calls: Method and path of each call, with the query of GETs.
        denied: Verb and resource of what the caller must not do: ("create", "jobsets").
        role: Rules of the caller's Role, as RBAC holds them; None: all is allowed.
        used: Verb, group and resource of each call that was allowed.
        holds: Plurals whose creation is done, and not answered.
        image_digest: What a pull of the image's tag gets now.
    """

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[str] = []
        self.denied: set[tuple[str, str]] = set()
        self.role: list[Mapping[str, Any]] | None = None
        self.used: set[tuple[str, str, str]] = set()
        self.namespaces = {NAMESPACE, "default"}
        self.holds: set[str] = set()
        self.image_digest = "sha256:" + "a" * 64
        self.faults: list[Fault] = []
        self.changed = threading.Condition(threading.RLock())
        self.let_go = threading.Event()
        self._objects: dict[tuple[str, str], Object] = {}
        self.version = 100
        self._logs: dict[str, PodLogFile] = {}
        self._streams: set[Stream] = set()
        self._second = datetime(2026, 11, 20, 9, 0, tzinfo=UTC)

    # --- what tests look at

    def names(self, plural: str) -> list[str]:
        with self.changed:
            return sorted(name for kind, name in self._objects if kind == plural)

    def get(self, plural: str, name: str) -> Object:
        with self.changed:
            return copy.deepcopy(self._objects[plural, name])

    def has(self, plural: str, name: str) -> bool:
        return name in self.names(plural)

    def count(self, call: str) -> int:
        return sum(found.startswith(call) for found in list(self.calls))

    def token(self, name: str) -> str:
        return str(self.get("secrets", f"{name}-token")["stringData"]["token"])

    @property
    def num_streams(self) -> int:
        with self.changed:
            return len(self._streams)

    # --- what a cluster's controllers do

    def make_pods(self, run: str, *, attempt: int = 0) -> list[str]:
        """Makes the pods of a JobSet that are not there yet, starts none; returns their names."""
        with self.changed:
            made = []
            for job in self._jobset_spec(run)["replicatedJobs"]:
                name, count = job["name"], job["template"]["spec"]["completions"]
                there = [self._objects["pods", pod] for pod in self.pods(run, name)]
                indexes = {int(pod["metadata"]["labels"][_INDEX]) for pod in there}
                missing = sorted({*range(count)} - indexes)
                made += [self.make_pod(run, name, index, attempt=attempt) for index in missing]
            return made

    def make_pod(self, run: str, job: str, index: int, *, attempt: int = 0) -> str:
        name = f"{run}-{job}-0-{index}-{uuid.uuid4().hex[:5]}"
        template = self._job(run, job)["template"]["spec"]["template"]
        labels = {
            **template["metadata"]["labels"],
            _JOBSET: run,
            _REPLICATED: job,
            _INDEX: str(index),
            "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        }
        owners = [self._reference("jobsets", run)]
        pod = _object("v1", "Pod", name, ownerReferences=owners, labels=labels)
        spec, status = {"containers": [{"name": job}]}, {"phase": "Pending"}
        self.put_pod({**pod, "spec": spec, "status": status})
        return name

    def pods(self, run: str, job: str) -> list[str]:
        with self.changed:
            found = [
                (int(pod["metadata"]["labels"][_INDEX]), name)
                for (plural, name), pod in self._objects.items()
                if plural == "pods" and name.startswith(f"{run}-{job}-0-")
                if pod["status"]["phase"] in ("Pending", "Running")
            ]
        return [name for _, name in sorted(found)]

    def run_pods(self, run: str, *, attempt: int = 0) -> None:
        for name in self.make_pods(run, attempt=attempt):
            self.start_pod(name)

    @contextlib.contextmanager
    def _changing(self, plural: str, name: str) -> Iterator[Object]:
        with self.changed:
            yield self._objects[plural, name]
            self._changed(plural, name)

    def start_pod(self, name: str, *, node: str = "node-1") -> None:
        with self._changing("pods", name) as pod:
            container = self._container(pod)
            pod["spec"]["nodeName"] = node
            container["imageID"] = f"registry.example/mnist@{self.image_digest}"
            container["state"] = {"running": {"startedAt": self._now()}}
            conditions = [{"type": "PodScheduled", "status": "True"}]
            pod["status"].update(phase="Running", conditions=conditions)

    def say(self, name: str, *lines: str) -> None:
        """Writes lines of a pod's container, a millisecond after each other."""
        with self.changed:
            for text in lines:
                self._second += timedelta(milliseconds=1)
                stamp = self._second.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
                self._logs[name].lines.append((stamp, text))
            self.changed.notify_all()

    def end_pod(self, name: str, code: int = 0, *, reason: str = "", message: str = "") -> None:
        with self._changing("pods", name) as pod:
            container = self._container(pod)
            running = container.get("state", {}).get("running", {})
            ended = {
                "exitCode": code,
                "reason": reason or ("Error" if code else "Completed"),
                "message": message,
                **running,
                "finishedAt": self._now(),
            }
            container["state"] = {"terminated": ended}
            pod["status"]["phase"] = "Failed" if code else "Succeeded"
            self._logs[name].is_closed = True

    def evict_pod(self, name, *, message="The node was low on resource: memory.", is_replaced=True):
        """Takes it away, puts another one in its place, and returns the name of that one."""
        with self.changed:
            with self._changing("pods", name) as pod:
                condition = _condition("DisruptionTarget", "TerminationByKubelet", message)
                told = {"reason": "Evicted", "message": message, "conditions": [condition]}
                pod["status"].update(phase="Failed", **told)
                self._logs[name].is_closed = True
            return self._replace_pod(name) if is_replaced else ""

    def _replace_pod(self, name: str) -> str:
        labels = self._objects["pods", name]["metadata"]["labels"]
        self._drop("pods", name)
        return self.make_pod(labels[_JOBSET], labels[_REPLICATED], int(labels[_INDEX]))

    def fail_pod(self, name, code, *, message=""):
        """Fails its container, and the controllers of Job and JobSet judge that."""
        with self.changed:
            self.end_pod(name, code, message=message)
            self._judge(name, is_disrupted=False, code=code)

    def disrupt_pod(self, name: str) -> None:
        """Drains its node or takes it away, and the controllers of Job and JobSet judge that."""
        with self.changed:
            self.evict_pod(name, message="node drained", is_replaced=False)
            self._judge(name, is_disrupted=True)

    def _judge(self, name: str, *, is_disrupted: bool, code: int = 1) -> None:
        """Treats a job one of whose pods has failed as its own policy says."""
        labels = self._objects["pods", name]["metadata"]["labels"]
        run, job = labels[_JOBSET], labels[_REPLICATED]
        spec = self._job(run, job)["template"]["spec"]
        reason = "BackoffLimitExceeded"
        for rule in spec.get("podFailurePolicy", {}).get("rules", []):
            kinds = [condition["type"] for condition in rule.get("onPodConditions", [])]
            codes = rule.get("onExitCodes", {"operator": "In", "values": []})
            assert codes["operator"] == "In", codes
            is_met = (is_disrupted and "DisruptionTarget" in kinds) or code in codes["values"]
            if is_met and rule["action"] == "FailJob":
                reason = "PodFailurePolicy"
        if reason == "BackoffLimitExceeded" and spec["backoffLimit"]:
            self._replace_pod(name)
            return
        self._judge_job(run, job, reason)

    def _judge_job(self, run: str, job: str, reason: str) -> None:
        """Treats a JobSet one of whose jobs has failed as failure_policy.go does."""
        policy = self._jobset_spec(run).get("failurePolicy", {})
        action = "RestartJobSet"
        for rule in policy.get("rules", []):
            reasons, jobs = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
            if (not reasons or reason in reasons) and (not jobs or job in jobs):
                action = rule["action"]
                break
        status = self._objects["jobsets", run].get("status", {})
        counted = status.get("restartsCountTowardsMax", 0)
        is_counted = action == "RestartJobSet"
        first = f"(first failed job: {run}-{job}-0)"
        if action == "FailJobSet":
            words = "applying FailJobSet failure policy action"
            by = "FailJobSetFailurePolicyAction"
            self.end_job(run, "Failed", reason=by, message=f"{words} {first}")
        elif is_counted and counted >= policy.get("maxRestarts", 0):
            words, by = "jobset failed due to reaching max number of restarts", "ReachedMaxRestarts"
            self.end_job(run, "Failed", reason=by, message=f"{words} {first}")
        else:
            restarts = status.get("restarts", 0) + 1
            for other in self._pods_of(run):
                self._drop("pods", other)
            counts = {"restarts": restarts, "restartsCountTowardsMax": counted + is_counted}
            self.set_status("jobsets", run, **counts)
            self.run_pods(run, attempt=restarts)

    def pass_deadline(self, run: str) -> None:
        """Lets the deadline of the JobSet's jobs be over."""
        with self.changed:
            for job in self._jobset_spec(run)["replicatedJobs"]:
                if "activeDeadlineSeconds" in job["template"]["spec"]:
                    for name in self.pods(run, job["name"]):
                        self._end_and_drop(name)
                    self._judge_job(run, job["name"], "DeadlineExceeded")

    def pass_seconds_after_end(self, seconds: float) -> None:
        """Lets so much time pass after their ends that JobSets are deleted by their TTL."""
        with self.changed:
            for name in self.names("jobsets"):
                status = self._objects["jobsets", name].get("status", {})
                ttl = self._jobset_spec(name).get("ttlSecondsAfterFinished")
                if _held(status) and ttl is not None and ttl <= seconds:
                    self._delete_foreground("jobsets", name)

    def _run_trainer(self) -> None:
        """Plays Trainer's controller, which makes a JobSet per TrainJob: see its Reconcile in 2.3.

        A JobSet of a failed TrainJob that its TTL has deleted is made and trained again
        (kubeflow/trainer#3779).
        """
        for (plural, name), train_job in list(self._objects.items()):
            if plural != "trainjobs" or "deletionTimestamp" in train_job["metadata"]:
                continue
            held = _held(train_job.get("status", {}))
            jobset = self._objects.get(("jobsets", name))
            if jobset is None:
                if "Complete" in held:
                    continue
                if held:
                    self.set_status(plural, name, conditions=[])
                self._put_jobset_of(name)
                continue
            if jobset["metadata"]["ownerReferences"][0]["uid"] != train_job["metadata"]["uid"]:
                continue
            for kind, condition in _held(jobset.get("status", {})).items():
                kind = {"Completed": "Complete"}.get(kind, kind)
                if kind in ("Complete", "Failed") and kind not in held:
                    self.set_status(plural, name, conditions=[{**condition, "type": kind}])

    def _put_jobset_of(self, train_job: str) -> None:
        runtime = self._objects[("trainjobs", train_job)]["spec"]["runtimeRef"]["name"]
        template = self._objects["trainingruntimes", runtime]["spec"]["template"]
        owners = [self._reference("trainjobs", train_job)]
        owned = {"namespace": NAMESPACE, "ownerReferences": owners}
        snapshot = f"{train_job}-runtime-snapshot"
        if ("configmaps", snapshot) not in self._objects:
            self._put("configmaps", _object("v1", "ConfigMap", snapshot, **copy.deepcopy(owned)))
        jobset = _object("jobset.x-k8s.io/v1alpha2", "JobSet", train_job, **owned)
        self._put("jobsets", {**jobset, "spec": copy.deepcopy(template["spec"])})

    # --- who follows a job: a pod of a step, which Argo made for a run of a pipeline

    def make_workflow(self, name: str = "mnist-w1") -> str:
        workflow = _object("argoproj.io/v1alpha1", "Workflow", name, namespace=NAMESPACE)
        with self.changed:
            self._put("workflows", {**workflow, "spec": {}})
            return str(workflow["metadata"]["uid"])

    def make_step(self, name, *, workflow="mnist-w1", run_id=""):
        """Makes the pod of a step; returns what its container finds in its environment."""
        pod = _object("v1", "Pod", name, namespace=NAMESPACE, labels={})
        if workflow:
            pod["metadata"]["labels"] = {
                "workflows.argoproj.io/workflow": workflow,
                "stoker/role": "follower",
                "stoker/step": re.sub(r"-\d+$", "", name),
            }
            pod["metadata"]["ownerReferences"] = [self._reference("workflows", workflow)]
        spec, status = {"containers": [{"name": "main"}]}, {"phase": "Running"}
        self.put_pod({**pod, "spec": spec, "status": status})
        return {
            "POD_NAME": name,
            "POD_UID": self.get("pods", name)["metadata"]["uid"],
            "POD_NAMESPACE": NAMESPACE,
            **({"POD_RUN_ID": run_id} if run_id else {}),
        }

    def take_node(self, name: str, process: "subprocess.Popen[bytes]", *, seconds: float) -> int:
        """Takes a pod's node as clouds take spot nodes, by no budget: SIGTERM, then deletion."""
        process.terminate()
        code = process.wait(seconds)
        self.evict_pod(name, message="node drained", is_replaced=False)
        self.remove("pods", name)
        return code

    def pod_waits(self, name: str, reason: str, message: str = "") -> None:
        with self._changing("pods", name) as pod:
            self._container(pod)["state"] = {"waiting": {"reason": reason, "message": message}}

    def pod_finds_no_node(self, name: str, message: str) -> None:
        """Reports it as the scheduler does, again and again, with the same start time."""
        with self._changing("pods", name) as pod:
            status = pod["status"]
            before = [c for c in status.get("conditions", []) if c["status"] == "False"]
            since = before[0]["lastTransitionTime"] if before else self._now()
            unscheduled = _condition("PodScheduled", "Unschedulable", message, status="False")
            status["conditions"] = [{**unscheduled, "lastTransitionTime": since}]

    def tell(self, kind, name, reason, message):
        event = {
            "metadata": {"name": f"{name}.{uuid.uuid4().hex[:8]}"},
            "involvedObject": {"kind": kind, "name": name},
            "reason": reason,
            "message": message,
            "type": "Warning",
            "lastTimestamp": self._now(),
        }
        with self.changed:
            self._put("events", event)

    def end_job(self, run, kind="Completed", *, reason="", message="", **status):
        with self.changed:
            default = "AllJobsCompleted" if kind == "Completed" else "FailedJobs"
            words = message or "jobset completed successfully"
            condition = _condition(kind, reason or default, words, lastTransitionTime=self._now())
            self.set_status("jobsets", run, conditions=[condition], terminalState=kind, **status)
            for name in self._pods_of(run):
                self._end_and_drop(name)

    def _pods_of(self, run: str) -> list[str]:
        return [pod for pod in self.names("pods") if pod.startswith(f"{run}-")]

    def _end_and_drop(self, name: str) -> None:
        phase = self._objects["pods", name]["status"]["phase"]
        # One that never started has no container that could end.
        if phase == "Running":
            self.end_pod(name, 143)
        if phase in ("Pending", "Running"):
            self._drop("pods", name)

    def set_status(self, plural: str, name: str, **status: Any) -> None:
        with self._changing(plural, name) as found:
            found.setdefault("status", {}).update(status)

    def change(self, plural: str, name: str, change: Mapping[str, Any]) -> None:
        with self._changing(plural, name) as found:
            _merge(found, change)

    def remove(self, plural: str, name: str) -> None:
        with self.changed:
            self._drop(plural, name)

    def put(self, plural: str, document: Mapping[str, Any]) -> None:
        with self.changed:
            self._put(plural, copy.deepcopy(dict(document)))

    def put_pod(self, document: Mapping[str, Any]) -> None:
        with self.changed:
            self._logs[document["metadata"]["name"]] = PodLogFile()
            self.put("pods", document)

    # --- troubles

    def drop_streams(self) -> int:
        """Cuts each log that is read; returns how many."""
        with self.changed:
            found = list(self._streams)
            for stream in found:
                stream.how = "cut"
                stream.cut()
            self.changed.notify_all()
        return len(found)

    # --- what the server does

    def answer(self, method: str, path: str, query: dict[str, str], body: Object | None) -> Object:
        place = self.place(method, path)
        verbs = {"GET": "get" if place.name else "list", "POST": "create"}
        verb = verbs.get(method, method.lower())
        self.check(verb, place)
        with self.changed:
            fault = self._fault(method, place.plural)
            if fault and not fault.is_answer_lost:
                raise Refusal(fault.code, fault.reason, fault.message)
            answer = self._do(verb, place, query, body)
        if fault:
            raise ConnectionResetError
        if method == "POST" and place.plural in self.holds:
            self.let_go.wait(HOLD_SECONDS)
        return answer

    def place(self, method: str, path: str) -> "Place":
        found = _PATH.match(path)
        if not found:
            raise Refusal(404, "NotFound", "404 page not found")
        group, plural = found.group("group") or "", found.group("plural")
        version = found.group("core") or f"{group}/{found.group('version')}"
        if (version, plural) not in _KINDS:
            raise Refusal(404, "NotFound", "404 page not found")
        namespace = found.group("namespace") or ""
        name, part = found.group("name") or "", found.group("part") or ""
        return Place(group, plural, name, namespace, version, part)

    def check(self, verb: str, place: "Place") -> None:
        resource = f"{place.plural}/{place.part}" if place.part else place.plural
        if self._is_allowed(verb, place.group, resource):
            self.used.add((verb, place.group, resource))
            return
        named = f' "{place.name}"' if place.name else ""
        words = f'{place.whole}{named} is forbidden: User "{USER}" cannot {verb} resource '
        where = f'"{resource}" in API group "{place.group}" in the namespace "{place.namespace}"'
        raise Refusal(403, "Forbidden", words + where)

    def _is_allowed(self, verb: str, group: str, resource: str) -> bool:
        has_right = self.role is None or any(
            verb in rule["verbs"] and group in rule["apiGroups"] and resource in rule["resources"]
            for rule in self.role
        )
        return has_right and (verb, resource) not in self.denied

    def log_of(self, name: str) -> PodLogFile:
        with self.changed:
            if ("pods", name) not in self._objects:
                raise Refusal(404, "NotFound", f'pods "{name}" not found')
            container = self._container(self._objects["pods", name])
            if not container.get("state", {}).keys() & {"running", "terminated"}:
                words = f'container "x" in pod "{name}" is waiting to start: ContainerCreating'
                raise Refusal(400, "BadRequest", words)
            return self._logs[name]

    @contextlib.contextmanager
    def streaming(self, stream: "Stream") -> Iterator["Stream"]:
        """Keeps a stream among those that can be broken off, and ends it in good order."""
        with self.changed:
            self._streams.add(stream)
        try:
            yield stream
            stream.end()
        finally:
            with self.changed:
                self._streams.discard(stream)

    def _do(self, verb: str, place: "Place", query: dict[str, str], body: Object | None) -> Object:
        key = (place.plural, place.name)
        if verb == "list":
            return self._list(place, query)
        if verb == "create":
            return self._create(place, body or {}, query)
        if key not in self._objects:
            raise Refusal(404, "NotFound", f'{place.whole} "{place.name}" not found')
        if verb == "patch":
            asked = (body or {}).get("metadata", {}).get("resourceVersion")
            if asked not in (None, self._objects[key]["metadata"]["resourceVersion"]):
                message = f'"{place.name}": the object has been modified; please apply your changes'
                raise Refusal(409, "Conflict", message)
            self.change(*key, body or {})
        elif verb == "delete":
            return self._delete(place, body or {})
        return copy.deepcopy(self._objects[key])

    def _list(self, place: "Place", query: dict[str, str]) -> Object:
        found = [
            copy.deepcopy(item)
            for (plural, _), item in sorted(self._objects.items())
            if plural == place.plural and _is_selected(item, query)
        ]
        described = {"resourceVersion": str(self.version)}
        return {"kind": "List", "metadata": described, "items": found}

    def _create(self, place: "Place", body: Object, query: dict[str, str]) -> Object:
        if place.namespace not in self.namespaces:
            raise Refusal(404, "NotFound", f'namespaces "{place.namespace}" not found')
        kind, name = _KINDS[place.version, place.plural], body["metadata"]["name"]
        if body.get("kind") != kind or body.get("apiVersion") != place.version:
            raise Refusal(400, "BadRequest", f"{body.get('kind')} is no {kind}")
        if body["metadata"].get("namespace", place.namespace) != place.namespace:
            raise Refusal(400, "BadRequest", "the namespace of the object does not match")
        if (place.plural, name) in self._objects:
            raise Refusal(409, "AlreadyExists", f'{place.whole} "{name}" already exists')
        body = copy.deepcopy(body)
        self._prune(body, is_strict=query.get("fieldValidation") == "Strict")
        self._validate(body)
        body["metadata"]["namespace"] = place.namespace
        if kind == "TrainJob":
            self._check_runtime(body)
        if query.get("dryRun") == "All":
            return body
        self._put(place.plural, body)
        made = copy.deepcopy(self._objects[place.plural, name])
        # An owner that is not there is as good as one that was deleted.
        self._collect()
        return made

    def _check_runtime(self, train_job: Object) -> None:
        """Plays Trainer's webhook, which refuses a TrainJob without its runtime."""
        name = train_job["spec"]["runtimeRef"]["name"]
        if ("trainingruntimes", name) not in self._objects:
            words = (
                'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
                f'spec.runtimeRef: Invalid value: {{"name":"{name}"}}: TrainingRuntime.trainer.'
                f'kubeflow.org "{name}" not found: specified trainingRuntime must be created '
                "before the TrainJob is created"
            )
            raise Refusal(403, "Forbidden", words)

    def _prune(self, body: Object, *, is_strict: bool) -> None:
        """Drops fields that the CRD does not have, without a word unless the caller is strict."""
        unknown = [path for path in unknown_fields(body) if not path.startswith("metadata.")]
        if unknown and is_strict:
            named = ", ".join(f'unknown field "{path}"' for path in unknown)
            kind, version = body["kind"], body["apiVersion"].rpartition("/")[2]
            words = f'{kind} in version "{version}" cannot be handled as a {kind}: '
            words += f"strict decoding error: {named} (object {body['metadata']['name']})"
            raise Refusal(400, "BadRequest", words)
        for path in unknown:
            *parents, last = path.split(".")
            holder = _at(body, ".".join(parents))
            if isinstance(holder, dict):
                holder.pop(last, None)

    def _validate(self, body: Object) -> None:
        bare = copy.deepcopy(body)
        owners = bare["metadata"].pop("ownerReferences", [])
        wrong = list(rule_problems(bare, among=[o for (_, _), o in self._objects.items()]))
        for owner in owners:
            needed = {"apiVersion", "kind", "name", "uid"}
            missing = needed - set(owner)
            wrong += [f"metadata.ownerReferences: no {key}" for key in sorted(missing)]
            unknown = set(owner) - needed - {"controller", "blockOwnerDeletion"}
            wrong += [f"metadata.ownerReferences: unknown {key}" for key in sorted(unknown)]
        if wrong:
            raise Refusal(422, "Invalid", f"{body['kind']} is invalid: " + "; ".join(wrong))

    def _delete(self, place: "Place", options: Object) -> Object:
        found = self._objects[place.plural, place.name]
        asked = options.get("preconditions", {}).get("uid")
        if asked and asked != found["metadata"]["uid"]:
            raise Refusal(409, "Conflict", "the UID in the precondition does not match")
        if options.get("propagationPolicy") == "Foreground":
            self._delete_foreground(place.plural, place.name)
        else:
            self._drop(place.plural, place.name)
        return {"kind": "Status", "status": "Success"}

    def _delete_foreground(self, plural: str, name: str) -> None:
        """Deletes an object after all that it alone owns; what is held is marked, and stays."""
        found = self._objects[plural, name]
        if "deletionTimestamp" not in found["metadata"]:
            found["metadata"]["deletionTimestamp"] = self._now()
            found["metadata"]["finalizers"] = [_FOREGROUND]
            self._changed(plural, name)
        self._collect()
        if (plural, name) in self._objects:
            self._drop(plural, name)

    def _drop(self, plural: str, name: str) -> None:
        self._objects.pop((plural, name))
        if plural == "pods":
            self._logs[name].is_closed = True
        self.version += 1
        self.changed.notify_all()
        self._collect()
        if plural == "jobsets":
            self._run_trainer()

    def _collect(self) -> None:
        """Deletes as the garbage collector does: see attemptToDeleteItem in its source."""
        for key, item in list(self._objects.items()):
            owners = item["metadata"].get("ownerReferences")
            if key not in self._objects or not owners:
                continue
            there = {found["metadata"]["uid"]: found for found in self._objects.values()}
            # An owner that is deleted after what refers to it so takes it along now.
            left = [
                owner
                for owner in owners
                if (found := there.get(owner["uid"]))
                if _FOREGROUND not in found["metadata"].get("finalizers", ())
                or not owner.get("blockOwnerDeletion")
            ]
            if left:
                if len(left) < len(owners):
                    item["metadata"]["ownerReferences"] = left
                    self._changed(*key)
            elif "deletionTimestamp" not in item["metadata"]:
                self._delete_foreground(*key)

    def _put(self, plural: str, document: Object) -> None:
        described = document["metadata"]
        described.setdefault("uid", str(uuid.uuid4()))
        described.setdefault("creationTimestamp", self._now())
        self._objects[plural, described["name"]] = document
        self._changed(plural, described["name"])

    def _changed(self, plural: str, name: str) -> None:
        self.version += 1
        found = self._objects[plural, name]
        found["metadata"]["resourceVersion"] = str(self.version)
        self.changed.notify_all()
        if plural in ("jobsets", "trainjobs"):
            self._run_trainer()

    def _jobset_spec(self, run: str) -> Any:
        return self._objects["jobsets", run]["spec"]

    def _job(self, run: str, name: str) -> Any:
        jobs = self._jobset_spec(run)["replicatedJobs"]
        return next(job for job in jobs if job["name"] == name)

    def _reference(self, plural: str, name: str) -> Object:
        owner = self._objects[plural, name]
        about = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": name}
        about["uid"] = owner["metadata"]["uid"]
        return {**about, "controller": True, "blockOwnerDeletion": True}

    def _container(self, pod: Object) -> Object:
        name = pod["spec"]["containers"][0]["name"]
        return pod["status"].setdefault("containerStatuses", [{"name": name}])[0]

    def _fault(self, method: str, plural: str) -> Fault | None:
        for fault in self.faults:
            if (fault.method, fault.plural) == (method, plural) and fault.times:
                fault.times -= 1
                return fault
        return None

    def _now(self) -> str:
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Place:
    group: str
    plural: str
    name: str
    namespace: str
    version: str
    part: str = ""

    @property
    def whole(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


class Stream:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.how = ""

    @property
    def is_over(self) -> bool:
        if self.how:
            return True
        connection = self._handler.connection
        readable, _, _ = select.select([connection], [], [], 0)
        # A reader sends nothing, and TLS cannot look without taking.
        flags = () if isinstance(connection, ssl.SSLSocket) else (socket.MSG_PEEK,)
        return bool(readable) and not connection.recv(1, *flags)

    def begin(self) -> None:
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "application/json")
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def write(self, text: str) -> None:
        content = text.encode()
        self._handler.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def end(self) -> None:
        self._handler.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._handler.connection.shutdown(socket.SHUT_RDWR)


def _is_selected(item: Object, query: Mapping[str, str]) -> bool:
    selectors = filter(None, query.get("labelSelector", "").split(","))
    wanted = dict(selector.split("=", 1) for selector in selectors)
    fields = filter(None, query.get("fieldSelector", "").split(","))
    chosen = dict(selector.split("=", 1) for selector in fields)
    return _has_labels(item, wanted) and all(_at(item, path) == chosen[path] for path in chosen)


def _object(version: str, kind: str, name: str, **metadata: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **metadata}}


def _condition(kind: str, reason: str, message: str, **more: str) -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message, **more}


def _held(status: Mapping[str, Any]) -> dict[str, Object]:
    found = status.get("conditions", [])
    return {condition["type"]: condition for condition in found if condition["status"] == "True"}


def _has_labels(item: Object, wanted: Mapping[str, str]) -> bool:
    return wanted.items() <= item["metadata"].get("labels", {}).items()


def _at(document: Any, path: str) -> Any:
    """Returns what is at a path of keys and [numbers]; None if nothing is."""
    for key in re.findall(r"[^.\[\]]+", path):
        try:
            document = document[int(key) if isinstance(document, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return document


def _merge(target: Object, change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        elif value is None:
            target.pop(key, None)
        else:
            target[key] = value


def _handler(api: KubernetesApi) -> type[Handler]:
    class Answering(Handler):
        protocol_version = "HTTP/1.1"

        def serve(self, method: str) -> None:
            split = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(split.query))
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            api.calls.append(f"{method} {self.path}")
            try:
                kind, _, token = self.headers.get("Authorization", "").partition(" ")
                if (kind.lower(), token) != ("bearer", TOKEN):
                    raise Refusal(401, "Unauthorized", "Unauthorized")
                if split.path.endswith("/log"):
                    self.log(split.path, query)
                else:
                    code = 201 if method == "POST" else 200
                    answer = api.answer(method, split.path, query, body)
                    self.reply(code, json.dumps(answer).encode())
            except Refusal as refusal:
                with contextlib.suppress(OSError):
                    self.reply(refusal.code, json.dumps(refusal.status).encode())
            except OSError:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = functools.partialmethod(serve, "GET")
        do_POST = functools.partialmethod(serve, "POST")
        do_PATCH = functools.partialmethod(serve, "PATCH")
        do_DELETE = functools.partialmethod(serve, "DELETE")

        def log(self, path: str, query: dict[str, str]) -> None:
            place = api.place("GET", path)
            position = 0
            with api.streaming(Stream(self)) as stream:
                api.check("get", place)
                log = api.log_of(place.name)
                with api.changed:
                    lines = log.lines
                stream.begin()
                while True:
                    with api.changed:
                        is_last = log.is_closed or query.get("follow", "").lower() != "true"
                        # A restarted container has a new log.
                        is_last = is_last or log.lines is not lines
                        new = lines[position:]
                        position += len(new)
                    for stamp, text in new:
                        stream.write(f"{stamp} {text}\n")
                    if stream.is_over or is_last:
                        return
                    with api.changed:
                        if len(lines) <= position and not log.is_closed and not stream.how:
                            api.changed.wait(0.1)

    return Answering


@contextlib.contextmanager
def kubernetes_api(*, host="127.0.0.1", tls=None):
    api = KubernetesApi()
    with http_server(_handler(api), host=host, tls=tls) as api.url:
        try:
            yield api
        finally:
            api.let_go.set()
            api.drop_streams()


def kube_config(folder, url, *, token=TOKEN, namespace=NAMESPACE, authority=None):
    """Returns a kube config for the server, whose certificate that authority has signed."""
    path = folder / "kubeconfig"
    context = {"cluster": "here", "user": "me", "namespace": namespace}
    server = {"server": url, **({"certificate-authority": str(authority)} if authority else {})}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": context}],
        "clusters": [{"name": "here", "cluster": server}],
        "users": [{"name": "me", "user": {"token": token}}],
    }
    path.write_text(json.dumps(document))
    return path
