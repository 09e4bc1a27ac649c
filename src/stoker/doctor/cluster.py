"""Checks of a cluster for one workload: `stoker doctor --cluster WORKLOAD`.

A check that needs a right the caller lacks is a warning that names the right. Nothing is created:
the job is sent as a dry run.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from stoker.doctor import Finding
from stoker.errors import ServiceError, StokerError
from stoker.pipelines.kubeflow.client import KubeflowClient
from stoker.platforms.kubernetes import KubernetesPlatform, api
from stoker.platforms.kubernetes.api import ClusterApi, name_of, text
from stoker.platforms.kubernetes.pod_template import claim_of
from stoker.platforms.kubernetes.rights import is_allowed, is_useful, needed_rights
from stoker.records import Group, KubernetesSettings, PodSettings, Role, Workload
from stoker.records.base import mapping, mappings, texts
from stoker.train import prepare

KUBEFLOW_NAMESPACE = "kubeflow"
# The first server that passes PipelineTaskFinalStatus to the last step of a run.
LEAST_SERVER = (2, 14)
# Limits of older versions.
_LATER = {
    (2, 16): "steps run as the user of their image, whatever kubernetes.run_as says",
    (2, 17): "a schedule may start two runs at once",
}
ARGO_SETTINGS = "workflow-controller-configmap"
# Fate of a lost follower, by the policy that Argo merges into the retries of each step.
LOST_FOLLOWER = {
    "Always": "is tried again; so is each DAG around a step that failed, after a gate, too",
    "OnError": "is tried again if its pod vanishes, never after an exit code (143: evicted, 137: "
    "killed): then Finish follows the job to its end, and the run is FAILED",
    "OnFailure": "is tried again after an exit code, never if its pod vanishes",
}
# Both lines: without the second one Argo would also repeat DAGs, and steps that failed for good.
RETRY_LINES = """retryPolicy: Always
expression: lastRetry.status == "Error" || asInt(lastRetry.exitCode) in [137, 143]"""
_NO_RUNTIME = "specified trainingRuntime must be created before the TrainJob is created"


def examine_cluster(workload: Workload) -> Iterator[Finding]:
    settings = workload.kubernetes_settings
    connected = partial(ClusterApi, context=settings.context, strict_tls=settings.strict_tls)
    cluster = connected(namespace=settings.namespace)
    try:
        version = cluster.discover("/version") or {}
    except StokerError as err:
        if not (isinstance(err, ServiceError) and err.code == "403"):
            # The other checks would fail alike.
            yield Finding("cluster", "fail", err.what, err.fix)
            return
        version = {}
    version_text = text(version, "gitVersion") or "of unknown version (no permission)"
    yield Finding("cluster", "ok", f"Kubernetes {version_text}, namespace {cluster.namespace}")
    resources = [api.JOBSETS]
    if settings.api == "trainer":
        resources = [api.TRAINJOBS, api.RUNTIMES]
    for resource in resources:
        yield _check("api", partial(api_finding, cluster, resource))
    yield _check("rights", partial(rights_finding, cluster, settings))
    yield _check("job", partial(job_finding, cluster, workload))
    for use in claims_of(workload):
        yield _check("claim", partial(claim_finding, cluster, use))
    yield kubeflow_finding(workload)
    yield _check("argo", partial(argo_finding, connected(namespace=KUBEFLOW_NAMESPACE)))


def _check(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except StokerError as err:
        # For a job it may be a quota or an admission rule, which is a result.
        if isinstance(err, ServiceError) and err.code == "403" and (err.user or name != "job"):
            fix = "ask an administrator for the right; what it checks may be in order"
            return Finding(name, "warn", f"cannot be checked: {err.what}", fix)
        return Finding(name, "fail", err.what, err.fix)


def api_finding(cluster: ClusterApi, resource: api.Resource) -> Finding:
    kind = f"{resource.plural}.{resource.group}"
    listed = mappings(cluster.discover(resource.api), "resources")
    if any(text(each, "name") == resource.plural for each in listed):
        return Finding("api", "ok", f"{kind}, {resource.version}")
    group = cluster.discover(f"/apis/{resource.group}")
    versions = ", ".join(text(each, "version") for each in mappings(group, "versions"))
    if versions:
        words = f"{kind} has version {versions}; stoker needs {resource.version}"
        return Finding("api", "fail", words, api.OLDER[resource.group])
    return Finding("api", "fail", f"the cluster has no {kind}", api.INSTALL[resource.group])


def rights_finding(cluster: ClusterApi, settings: KubernetesSettings) -> Finding:
    needed = [*needed_rights(settings, cluster.namespace)]
    where = f"namespace {cluster.namespace}"
    missing = [action for action in needed if not is_allowed(cluster, action)]
    if not missing:
        words = f"all {len(needed)} rights of configs/kubernetes/rbac.yaml, in {where}"
        return Finding("rights", "ok", words)
    named = ", ".join(action.right for action in missing)
    words = f"{len(missing)} of {len(needed)} are missing in {where}: {named}"
    fix = "kubectl apply -k configs/kubernetes, with your account in kustomization.yaml"
    if all(map(is_useful, missing)):
        return Finding("rights", "warn", words, fix)
    return Finding("rights", "fail", words, fix)


def job_finding(cluster: ClusterApi, workload: Workload) -> Finding:
    """Asks the cluster to check the job on today's nodes in a dry run: schema, webhooks, quotas."""
    if workload.cluster is None:
        return _incomplete("cluster")
    if not workload.image:
        return _incomplete("image")
    groups = [Group.of_today(workload.cluster.dnn)]
    job = prepare(workload=workload, groups=groups, run_dir=Path(f"{workload.name}-doctor"))
    request = KubernetesPlatform().plan(job)
    # A TrainJob is checked against its runtime, which is there only for a run.
    shown = request.runtime or request.main
    if request.runtime and not request.runtime_is_ours:
        if cluster.find(api.RUNTIMES, name_of(shown)) is not None:
            return Finding("job", "ok", f"TrainingRuntime {name_of(shown)} exists")
        fix = "apply the TrainingRuntime of stoker train --dry-run, with this name"
        return Finding("job", "fail", f"TrainingRuntime {name_of(shown)} does not exist", fix)
    cluster.create(api.OF_KIND[text(shown, "kind")], shown, is_dry_run=True)
    if request.runtime is not None:
        try:
            cluster.create(api.TRAINJOBS, request.main, is_dry_run=True)
        except ServiceError as err:
            # Trainer's webhook: the dry run of the runtime left none for it to find.
            if _NO_RUNTIME not in err.what:
                raise
    return Finding("job", "ok", f"the cluster would take its {text(shown, 'kind')} (dry run)")


def _incomplete(key: str) -> Finding:
    words = f"the workload has no {key}: no job can be sent as a dry run"
    return Finding("job", "warn", words, f"name it under the key {key}")


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """How the pods of a workload mount a PersistentVolumeClaim, which the key `what` names.

    Attributes:
        num_hosts: Pods of today's cluster that mount it.
        may_be_more: Whether a plan's data hosts mount it, too.
    """

    claim: str
    what: str
    num_hosts: int
    is_written: bool
    may_be_more: bool = False

    @property
    def access_modes(self) -> set[str]:
        """Modes of a claim that pods on several nodes can use like this."""
        if self.is_written:
            return {"ReadWriteMany"}
        return {"ReadWriteMany", "ReadOnlyMany"}


def claims_of(workload: Workload) -> Iterator[ClaimUse]:
    """Yields the claims that channels, places and volumes of a workload name."""
    settings = workload.kubernetes_settings
    hosts = workload.num_todays_hosts
    has_data_hosts = workload.constraints.max_data_hosts > 0
    for name, channel in workload.channels.items():
        yield from _claims_at(
            channel.uri, f"channels.{name}", hosts, is_written=False, may_be_more=has_data_hosts
        )
    yield from _claims_at(settings.output, "kubernetes.output", hosts)
    # Steps of a pipeline mount them, one at a time.
    yield from _claims_at(settings.champion, "kubernetes.champion", 1)
    yield from _claims_at(settings.memory, "kubernetes.memory", 1)
    yield from _claims_of_pods(settings.dnn, "dnn", hosts)
    yield from _claims_of_pods(settings.data, "data", 1, may_be_more=has_data_hosts)


def _claims_at(
    uri: str | None,
    key: str,
    num_hosts: int,
    *,
    is_written: bool = True,
    may_be_more: bool = False,
) -> Iterator[ClaimUse]:
    """Yields the claim of an address, if it is on one; the others are as of `ClaimUse`."""
    if uri is None or not uri.startswith("pvc://"):
        return
    claim, _ = claim_of(uri, where=f"key {key}")
    yield ClaimUse(claim, key, num_hosts, is_written, may_be_more)


def _claims_of_pods(
    pods: PodSettings, role: Role, num_hosts: int, *, may_be_more: bool = False
) -> Iterator[ClaimUse]:
    """Yields the claims among the volumes of a role's pods."""
    key = f"kubernetes.{role}.pod.spec.volumes"
    for volume in mappings(pods.pod.document, "spec", "volumes"):
        if source := mapping(volume, "persistentVolumeClaim"):
            claim = str(source.get("claimName"))
            is_written = not source.get("readOnly")
            yield ClaimUse(claim, key, num_hosts, is_written, may_be_more)


def claim_finding(cluster: ClusterApi, use: ClaimUse) -> Finding:
    claim = cluster.find(api.CLAIMS, use.claim)
    if claim is None:
        words = f"claim {use.claim} not found in namespace {cluster.namespace} ({use.what})"
        fix = "make it (docs/kubeflow.md, Storage), or correct its name"
        return Finding("claim", "fail", words, fix)
    spec = mapping(claim, "spec")
    phase = text(claim, "status", "phase")
    modes = texts(spec, "accessModes")
    storage = text(spec, "storageClassName")
    line = f"{use.claim} ({use.what}): {', '.join(modes)}, {storage or 'no storage class'}, {phase}"
    if use.access_modes.isdisjoint(modes):
        modes_words = " or ".join(sorted(use.access_modes))
        fix = f"a claim of a class that has {modes_words} (EFS, Filestore, NFS...)"
        if use.num_hosts > 1:
            words = f"{line}; {use.num_hosts} hosts need to mount it"
            return Finding("claim", "fail", words, fix)
        if use.may_be_more:
            words = f"{line}; a dnn host and data hosts need to mount it"
            return Finding("claim", "warn", words, fix)
    if phase == "Bound":
        return Finding("claim", "ok", line)
    fix = f"kubectl describe pvc {use.claim} -n {cluster.namespace} says what it waits for"
    if phase == "Lost":
        return Finding("claim", "fail", line, fix)
    # Of most classes it waits for its first pod.
    return Finding("claim", "warn", line, fix)


def kubeflow_finding(workload: Workload) -> Finding:
    try:
        tag = KubeflowClient(workload).health.get("tag_name")
    except StokerError as err:
        fix = f"{err.fix or 'kubernetes.kubeflow says where it is'}; only pipelines need it"
        words = f"Kubeflow Pipelines cannot be checked: {err.what}"
        is_denied = isinstance(err, ServiceError) and err.kind == "denied"
        # A site without it trains all the same, unless the workload says that there is one.
        if workload.kubernetes_settings.kubeflow and not is_denied:
            return Finding("kubeflow", "fail", words, fix)
        return Finding("kubeflow", "warn", words, fix)
    least = "pipelines need 2.14 or later"
    # Custom builds have no version.
    match = re.match(r"v?(\d+)\.(\d+)", str(tag or ""))
    if match is None:
        return Finding("kubeflow", "warn", f"Kubeflow Pipelines of unknown version: {least}")
    version = int(match[1]), int(match[2])
    words = f"Kubeflow Pipelines {version[0]}.{version[1]}"
    if version < LEAST_SERVER:
        return Finding("kubeflow", "fail", words, least)
    lacks = [why for since, why in _LATER.items() if version < since]
    if lacks:
        fix = "update it, or see docs/kubeflow.md, Versions of Kubeflow Pipelines"
        return Finding("kubeflow", "warn", "; ".join([words, *lacks]), fix)
    return Finding("kubeflow", "ok", words)


def argo_finding(kubeflow: ClusterApi) -> Finding:
    """Checks whether Argo's defaults retry a step that follows a job and is lost."""
    if kubeflow.discover(f"/apis/{api.WORKFLOWS.group}") is None:
        return Finding("argo", "ok", "none here: pipelines run elsewhere, or never")
    where = f"ConfigMap {ARGO_SETTINGS} of namespace {KUBEFLOW_NAMESPACE}"
    settings = kubeflow.find(api.CONFIG_MAPS, ARGO_SETTINGS)
    if settings is None:
        return Finding("argo", "warn", f"{where} not found", "check the controller's own ConfigMap")
    defaults = yaml.safe_load(text(settings, "data", "workflowDefaults"))
    strategy = mapping({"of": defaults}, "of", "spec", "templateDefaults", "retryStrategy")
    expression = text(strategy, "expression")
    # As Argo has it: RetryPolicyActual in its workflow_types.go.
    policy = text(strategy, "retryPolicy")
    if not policy:
        policy = "Always" if expression else "OnFailure"
    if expression and policy == "Always":
        return Finding("argo", "ok", f"a lost follower is tried again if {expression}")
    means = LOST_FOLLOWER.get(policy, "is tried again only after errors that Argo calls transient")
    fix = f"in {where}, workflowDefaults.spec.templateDefaults.retryStrategy:\n{RETRY_LINES}"
    return Finding("argo", "warn", f"{policy}: a lost follower {means}", fix)
