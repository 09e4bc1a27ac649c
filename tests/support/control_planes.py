"""Control planes with JobSet's controller: the double, or a real one (KUBECONFIG)."""

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.api import PODS, ClusterApi
from stoker.platforms.kubernetes.pods import ROLE_LABEL
from support.kubernetes_api import NAMESPACE, Fault, KubernetesApi, kube_config
from support.local_job import until
from support.platform_jobs import use_kube_config

SECONDS = 60.0
GROUPS = {
    "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
    "workflows": "apis/argoproj.io/v1alpha1",
    "roles": "apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "apis/rbac.authorization.k8s.io/v1",
}
_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX = "batch.kubernetes.io/job-completion-index"


class DoublePlane:
    namespace = NAMESPACE

    def __init__(self, api: KubernetesApi, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._api = api
        use_kube_config(monkeypatch, kube_config(folder, api.url))
        self._cluster = ClusterApi(sleep=lambda seconds: time.sleep(min(seconds, 0.05)))
        self.platform = KubernetesPlatform(cluster=self._cluster)
        self.names, self.get, self.delete = api.names, api.get, api.remove
        self.make_workflow, self.make_step = api.make_workflow, api.make_step
        self.take_away = api.disrupt_pod
        self.pass_deadline, self.fail = api.pass_deadline, api.fail_pod
        self.pass_seconds_after_end = api.pass_seconds_after_end

    def has_trainer(self) -> bool:
        return True

    def run_pods(self, run: str, *, count: int | None = None) -> None:
        """Waits until all pods of the job's present attempt run, or `count` of them."""
        self._api.run_pods(run)

    def pods(self, run: str, group: str) -> list[str]:
        is_trained = group == "dnn" and self._api.has("trainjobs", run)
        return self._api.pods(run, "node" if is_trained else group)

    def end(self, run: str, code: int) -> None:
        pods = self.pods(run, "dnn")
        if code:
            self._api.fail_pod(pods[0], code)
            return
        for pod in pods:
            self._api.end_pod(pod)
        self._api.end_job(run)

    def evict(self, pod: str) -> bool:
        is_of_job = _LABEL in self._api.get("pods", pod)["metadata"]["labels"]
        another = self._api.evict_pod(pod, is_replaced=is_of_job)
        if another:
            self._api.start_pod(another)
        else:
            self._api.remove("pods", pod)
        return True

    def allow_no_jobs(self) -> None:
        words = 'jobsets "x" is forbidden: exceeded quota: none, requested: count/jobsets=1'
        self._api.faults.append(
            Fault("POST", "jobsets", code=403, message=words, reason="Forbidden", times=99)
        )

    def restart(self) -> None:
        self._api.drop_streams()

    def as_account(self, objects: Sequence[Mapping[str, Any]]) -> KubernetesPlatform:
        (role,) = (each for each in objects if each["kind"] == "Role")
        self._api.role = role["rules"]
        return self.platform


class RealNamespace:
    """A namespace on the cluster that KUBECONFIG names, driven through its API alone."""

    def __init__(self, namespace: str | None = None) -> None:
        from kubernetes import client, config

        config.load_kube_config(config_file=os.environ["KUBECONFIG"])
        self._client = client.ApiClient()
        self.namespace = namespace or f"stoker-test-{uuid.uuid4().hex[:6]}"
        if namespace is None:
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            body = described("v1", "Namespace", self.namespace, labels=labels)
            self.call("POST", "api/v1/namespaces", body)

    def call(self, method, path, body=None, *, kind="application/json"):
        return api_call(self._client, method, path, body, kind=kind)

    def patch(self, path: str, body: Mapping[str, Any]) -> None:
        self.call("PATCH", path, body, kind="application/merge-patch+json")

    def path(self, plural: str, name: str = "") -> str:
        place = f"{GROUPS.get(plural, 'api/v1')}/namespaces/{self.namespace}/{plural}"
        return f"{place}/{name}" if name else place

    def get(self, plural: str, name: str) -> Any:
        return self.call("GET", self.path(plural, name))

    def objects(self, plural: str, selector: str = "") -> list[dict[str, Any]]:
        """Returns the objects of a kind, less those that are being deleted."""
        query = f"?labelSelector={selector}" if selector else ""
        items = self.call("GET", self.path(plural) + query)["items"]
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def names(self, plural: str, selector: str = "") -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.objects(plural, selector))

    def delete(self, plural: str, name: str) -> None:
        self.call("DELETE", self.path(plural, name), {"propagationPolicy": "Background"})

    def evict(self, pod: str) -> bool:
        """Evicts as a drain does; returns whether a disruption budget allowed it."""
        from kubernetes.client.exceptions import ApiException

        eviction = described("policy/v1", "Eviction", pod, namespace=self.namespace)
        try:
            self.call("POST", f"{self.path('pods', pod)}/eviction", eviction)
        except ApiException as err:
            if err.status != 429:
                raise
            return False
        return True


class RealPlane(RealNamespace):
    """A control plane alone: this is the kubelet of its pods."""

    def __init__(self, folder: Path, *, restart: str = "") -> None:
        super().__init__()
        self._folder = folder
        self._restart = restart
        self._node = f"{self.namespace}-node"
        self.call("POST", "api/v1/nodes", described("v1", "Node", self._node))
        self._is_over = threading.Event()
        self._kubelet = threading.Thread(target=self._run_kubelet, name="kubelet")
        self._kubelet.start()
        self._cluster = ClusterApi(namespace=self.namespace)
        self.platform = KubernetesPlatform(cluster=self._cluster)

    def close(self) -> None:
        for plural in ("trainjobs", "jobsets", "workflows", "pods"):
            with contextlib.suppress(Exception):
                self.call("DELETE", self.path(plural))
        self.call("DELETE", f"api/v1/namespaces/{self.namespace}")
        until(lambda: not self.names("pods"), what="pods are gone", seconds=SECONDS)
        self._is_over.set()
        self._kubelet.join(SECONDS)
        self.call("DELETE", f"api/v1/nodes/{self._node}")

    def has_trainer(self) -> bool:
        groups = self.call("GET", "apis")["groups"]
        return any(group["name"] == "trainer.kubeflow.org" for group in groups)

    def run_pods(self, run: str, *, count: int | None = None) -> None:
        def wanted() -> int:
            jobset = self.get("jobsets", run)
            return sum(
                job["replicas"] * job["template"]["spec"]["completions"]
                for job in jobset["spec"]["replicatedJobs"]
            )

        def they_run() -> bool:
            # Of a TrainJob it is made a moment later.
            if run not in self.names("jobsets"):
                return False
            phases = [pod["status"]["phase"] for pod in self._pods(run)]
            return (count or wanted()) == phases.count("Running")

        until(they_run, what="its pods run", seconds=SECONDS)

    def pods(self, run: str, group: str) -> list[str]:
        found = [
            (int(pod["metadata"]["labels"][_INDEX]), pod["metadata"]["name"])
            for pod in self._pods(run)
            if pod["metadata"]["labels"][ROLE_LABEL] == group
            and pod["status"]["phase"] in ("Pending", "Running")
        ]
        return [name for _, name in sorted(found)]

    def end(self, run: str, code: int) -> None:
        for pod in self.pods(run, "dnn"):
            self.fail(pod, code)

    def take_away(self, pod: str) -> None:
        """Takes the pod's node away, whatever a budget says."""
        told = {"reason": "DeletionByTaintManager", "message": "its node is gone"}
        condition = {"type": "DisruptionTarget", "status": "True", **told}
        self.fail(pod, 137, conditions=[condition])

    def make_workflow(self, name: str) -> None:
        body = {**described("argoproj.io/v1alpha1", "Workflow", name), "spec": {}}
        self.call("POST", self.path("workflows"), body)

    def make_step(self, name: str, *, workflow: str) -> Mapping[str, str]:
        owner = self.get("workflows", workflow)
        pod = described("v1", "Pod", name)
        reference = {"apiVersion": owner["apiVersion"], "kind": "Workflow", "name": workflow}
        reference |= {"uid": owner["metadata"]["uid"], "controller": True}
        pod["metadata"]["ownerReferences"] = [reference]
        pod["spec"] = restricted_spec("none")
        uid = self.call("POST", self.path("pods"), pod)["metadata"]["uid"]
        return {"POD_NAME": name, "POD_UID": uid, "POD_NAMESPACE": self.namespace}

    def pass_deadline(self, run: str) -> None:
        """Lets its controllers' clocks run on their own."""

    def pass_seconds_after_end(self, seconds: float) -> None:
        time.sleep(seconds)

    def allow_no_jobs(self) -> None:
        self._set_quota("none", {"count/jobsets.jobset.x-k8s.io": "0"})

    def _set_quota(self, name: str, hard: Mapping[str, str]) -> None:
        path = self.path("resourcequotas", name)
        if name in self.names("resourcequotas"):
            self.patch(path, {"spec": {"hard": hard}})
        else:
            quota = {**described("v1", "ResourceQuota", name), "spec": {"hard": hard}}
            self.call("POST", self.path("resourcequotas"), quota)

        def is_known() -> bool:
            return bool(self.call("GET", path).get("status", {}).get("hard") == hard)

        until(is_known, what="the quota counts", seconds=SECONDS)

    def restart(self) -> None:
        if not self._restart:
            pytest.skip("STOKER_TEST_RESTART names no command that starts the API server again")
        assert os.system(self._restart) == 0

        def answers() -> bool:
            with contextlib.suppress(Exception):
                return bool(self.call("GET", self.path("pods")))
            return False

        until(answers, what="it answers again", seconds=SECONDS)

    def as_account(self, objects: Sequence[Mapping[str, Any]]) -> KubernetesPlatform:
        file = self._folder / "runner"
        account_config(self._client, objects, namespace=self.namespace, file=file)
        with pytest.MonkeyPatch.context() as patch:
            use_kube_config(patch, file)
            cluster = ClusterApi(namespace=self.namespace)
            # The client reads the file with the first call.
            cluster.find(PODS, "none")
            return KubernetesPlatform(cluster=cluster)

    # --- the kubelet

    def _run_kubelet(self) -> None:
        while not self._is_over.wait(0.05):
            with contextlib.suppress(Exception):
                for pod in self.call("GET", self.path("pods"))["items"]:
                    self._tend(pod)

    def _tend(self, pod: Mapping[str, Any]) -> None:
        name = pod["metadata"]["name"]
        path = self.path("pods", name)
        if "deletionTimestamp" in pod["metadata"]:
            self.call("DELETE", path, {"gracePeriodSeconds": 0})
        elif "nodeName" not in pod["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
            binding = {**described("v1", "Binding", name), "target": target}
            self.call("POST", f"{path}/binding", binding)
        elif pod["status"].get("phase") == "Pending":
            self._say(name, "Running", {"running": {"startedAt": _now()}})

    def fail(self, name: str, code: int, conditions: Sequence[Mapping[str, str]] = ()) -> None:
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now()}
        phase = "Failed" if code else "Succeeded"
        self._say(name, phase, {"terminated": ended}, conditions=conditions)

    def _say(self, name, phase, state, *, conditions=()):
        pod = self.get("pods", name)
        containers = [
            {"name": each["name"], "image": each["image"], "imageID": "", "restartCount": 0}
            | {"ready": phase == "Running", "state": state}
            for each in pod["spec"]["containers"]
        ]
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        status = {"phase": phase, "containerStatuses": containers}
        status["conditions"] = [ready, *conditions]
        self.patch(f"{self.path('pods', name)}/status", {"status": status})

    # --- calls

    def _pods(self, run: str) -> list[dict[str, Any]]:
        return self.objects("pods", f"jobset.sigs.k8s.io/jobset-name={run}")


def api_call(client, method, path, body=None, *, kind="application/json"):
    """Sends a request with the kube config's credentials; returns the answer's JSON."""
    headers = {"Accept": "application/json", "Content-Type": kind}
    raw = {"_preload_content": False, "_return_http_data_only": True}
    given = {"header_params": headers, "body": body, "auth_settings": ["BearerToken"], **raw}
    return json.loads(client.call_api(f"/{path}", method, **given).data)


def in_namespace(document: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}


def account_config(client, objects, *, namespace, file):
    """Makes the service account `runner` with a Role; writes a kube config with its token."""
    core = f"api/v1/namespaces/{namespace}/serviceaccounts"
    api_call(client, "POST", core, described("v1", "ServiceAccount", "runner"))
    for each in objects:
        plural = _plural(each["kind"])
        place = f"{GROUPS.get(plural, 'api/v1')}/namespaces/{namespace}/{plural}"
        api_call(client, "POST", place, in_namespace(each, namespace))
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    # Longer than any test.
    asked["spec"] = {"expirationSeconds": 7200}
    token = api_call(client, "POST", f"{core}/runner/token", asked)
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"] = [{"name": "me", "user": {"token": token["status"]["token"]}}]
    for context in config["contexts"]:
        context["context"]["user"] = "me"
    file.write_text(yaml.safe_dump(config))


def described(api: str, kind: str, name: str, **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **metadata}}


def _plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


def restricted_spec(image: str, **more: Any) -> dict[str, Any]:
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "main", "image": image, "securityContext": rights, **more}
    context = {"runAsNonRoot": True, "runAsUser": 1000}
    context["seccompProfile"] = {"type": "RuntimeDefault"}
    return {"containers": [container], "securityContext": context}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextlib.contextmanager
def argo_crd() -> Iterator[None]:
    """Lets the cluster know Workflows while the block runs; it need not have Argo."""
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException

    config.load_kube_config(config_file=os.environ["KUBECONFIG"])
    api = client.ApiextensionsV1Api()
    name = "workflows.argoproj.io"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": "argoproj.io",
            "scope": "Namespaced",
            "names": {"kind": "Workflow", "plural": "workflows", "singular": "workflow"},
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    try:
        api.create_custom_resource_definition(definition)
    except ApiException as err:
        if err.status != 409:
            raise
        yield
        return

    def is_served() -> bool:
        with contextlib.suppress(ApiException):
            client.CustomObjectsApi().list_cluster_custom_object(
                "argoproj.io", "v1alpha1", "workflows"
            )
            return True
        return False

    until(is_served, what="Workflows are known", seconds=SECONDS)
    try:
        yield
    finally:
        api.delete_custom_resource_definition(name)


Plane = DoublePlane | RealPlane
