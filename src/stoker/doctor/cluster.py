"""`stoker doctor --cluster WORKLOAD` says what a cluster lacks for a workload.

What may not be looked at is told as such, with the right for it: it may be in order all the same.
Nothing is made or changed: the job is shown to the cluster as a dry run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stoker.doctor import Finding, listed
from stoker.errors import StokerError
from stoker.orchestrators.kubeflow.api import Flags, Kubeflow, KubeflowError, connection_of
from stoker.orchestrators.kubeflow.pipelines import NEEDS, dotted
from stoker.orchestrators.kubeflow.schedules import LATEST_SCHEDULES
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.api import (
    ACCESS_REVIEWS,
    CLAIMS,
    DEPLOYMENTS,
    INSTALL,
    JOBSETS,
    OF_KIND,
    OLDER,
    RUNTIMES,
    STORAGE_CLASSES,
    TRAINJOBS,
    WORKFLOWS,
    ApiError,
    ClusterApi,
    Resource,
    name_of,
    text,
    texts,
)
from stoker.platforms.kubernetes.objects import claim_of
from stoker.platforms.kubernetes.submit import is_allowed, is_useful, needed_rights
from stoker.records import Group, KubernetesSettings, Workload
from stoker.records.base import Document, mapping, mappings
from stoker.settings import kubeflow_environment
from stoker.train import prepare

# Where Kubeflow's manifests put Argo's controller.
KUBEFLOW_NAMESPACE = "kubeflow"
CONTROLLER = "workflow-controller"
CAPTURE = "ARGO_POD_STATUS_CAPTURE_FINALIZER"
# Words of the webhook of Kubeflow Trainer.
_NO_RUNTIME = "specified trainingRuntime must be created before the TrainJob is created"


def examine_cluster(workload: Workload, *, cluster: ClusterApi | None = None) -> Iterator[Finding]:
    """Looks at what the workload needs of its cluster; yields each finding as soon as it is made.

    Args:
        workload: Whatever platform it names.
        cluster: Absent: that of its settings.
    """
    settings = workload.kubernetes or KubernetesSettings()
    api = cluster or ClusterApi(context=settings.context, namespace=settings.namespace)
    try:
        version = api.discover("/version") or {}
    except StokerError as err:
        if not (isinstance(err, ApiError) and err.code == 403):
            # Any other question would fare the same.
            yield Finding(name="cluster", state="fail", text=err.what, fix=err.fix)
            return
        version = {}
    said = text(version, "gitVersion") or "of a version that may not be asked"
    yield Finding(name="cluster", state="ok", text=f"Kubernetes {said}, namespace {api.namespace}")
    apis = [TRAINJOBS, RUNTIMES] if settings.api == "trainer" else [JOBSETS]
    for resource in apis:
        yield from _look("api", partial(api_finding, api, resource))
    yield from _look("rights", partial(rights_finding, api, settings))
    yield from _look("job", partial(job_findings, api, workload))
    for use in claims_of(workload):
        yield from _look("claim", partial(claim_finding, api, use))
    yield kubeflow_finding(workload)
    yield from _look("argo", partial(argo_findings, api, settings))


def _look(name: str, look: Callable[[], Finding | Iterator[Finding]]) -> list[Finding]:
    """Returns what a look finds, or why there is nothing to be seen."""
    try:
        return listed(look())
    except ApiError as err:
        if err.code != 403 or err.action is None:
            return [Finding(name=name, state="fail", text=err.what, fix=err.fix)]
        is_asking = err.action.resource == ACCESS_REVIEWS.plural
        if not err.user and err.action.verb == "create" and not is_asking:
            # A quota, or an admission rule: that is the answer to the question.
            return [Finding(name=name, state="fail", text=err.what, fix=err.fix)]
        return [
            Finding(
                name=name,
                state="warn",
                text=f"may not be looked at: the right {err.action.right} is missing ({err.where})",
                fix="ask somebody who has it; it may be in order",
            )
        ]
    except StokerError as err:
        return [Finding(name=name, state="fail", text=err.what, fix=err.fix)]


def api_finding(cluster: ClusterApi, resource: Resource) -> Finding:
    """Says whether an API is installed in the version that stoker speaks."""
    kind = f"{resource.plural}.{resource.group}"
    listed = mappings(cluster.discover(resource.api), "resources")
    if any(text(each, "name") == resource.plural for each in listed):
        return Finding(name="api", state="ok", text=f"{kind}, {resource.version}")
    group = cluster.discover(f"/apis/{resource.group}")
    versions = [text(each, "version") for each in mappings(group, "versions")]
    if versions:
        return Finding(
            name="api",
            state="fail",
            text=f"{kind} is there in {', '.join(versions)}, and stoker speaks {resource.version}",
            fix=OLDER[resource.group],
        )
    return Finding(
        name="api",
        state="fail",
        text=f"the cluster has no {kind}",
        fix=INSTALL[resource.group],
    )


def rights_finding(cluster: ClusterApi, settings: KubernetesSettings) -> Finding:
    """Says which rights of the rendered Role the caller lacks."""
    needed = list(needed_rights(settings, cluster.namespace))
    missing = [action for action in needed if not is_allowed(cluster, action)]
    if not missing:
        return Finding(
            name="rights",
            state="ok",
            text=f"all {len(needed)} rights of stoker render rbac, in namespace "
            f"{cluster.namespace}",
        )
    is_vital = not all(map(is_useful, missing))
    return Finding(
        name="rights",
        state="fail" if is_vital else "warn",
        text=f"{len(missing)} of {len(needed)} are missing in namespace {cluster.namespace}: "
        f"{', '.join(action.right for action in missing)}",
        fix="stoker render rbac WORKLOAD --service-account ACCOUNT | kubectl apply -f -",
    )


def job_findings(cluster: ClusterApi, workload: Workload) -> Iterator[Finding]:
    """Asks the cluster to check the job on today's nodes in a dry run: schema, webhooks, quotas."""
    if workload.cluster is None or not workload.image:
        missing = "image" if workload.cluster else "cluster"
        yield Finding(
            name="job",
            state="warn",
            text=f"the workload has no {missing}: there is no job to show the cluster",
            fix=f"name it under the key {missing}",
        )
        return
    job = prepare(
        workload=workload,
        groups=[Group.of_today(workload.cluster.dnn)],
        run_dir=Path(f"{workload.name}-doctor"),
    )
    request = KubernetesPlatform().plan(job)
    shown = request.main
    if request.runtime is not None:
        # A TrainJob is checked against its runtime, which is there only for a run.
        shown = request.runtime
        if not request.runtime_is_ours:
            is_there = cluster.find(RUNTIMES, name_of(shown)) is not None
            yield Finding(
                name="job",
                state="ok" if is_there else "fail",
                text=f"TrainingRuntime {name_of(shown)} is {'' if is_there else 'not '}there",
                fix="" if is_there else "stoker render runtime WORKLOAD | kubectl apply -f -",
            )
            return
    kind = text(shown, "kind")
    cluster.create(OF_KIND[kind], shown, is_dry_run=True)
    if request.runtime is not None:
        try:
            cluster.create(TRAINJOBS, request.main, is_dry_run=True)
        except ApiError as err:
            # The dry run of the runtime left none for the webhook to find: no news.
            if _NO_RUNTIME not in err.what:
                raise
    yield Finding(name="job", state="ok", text=f"the cluster would take its {kind} (dry run)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimUse:
    """Says how the pods of a workload mount a PersistentVolumeClaim.

    Attributes:
        what: Key of the workload that names it.
        num_hosts: Pods of today's cluster that mount it.
        may_be_more: Whether a plan's data hosts mount it, too.
        is_written: Whether they write there.
    """

    claim: str
    what: str
    num_hosts: int
    may_be_more: bool = False
    is_written: bool = False


def claims_of(workload: Workload) -> list[ClaimUse]:
    """Returns the claims that a workload names."""
    settings = workload.kubernetes or KubernetesSettings()
    hosts = workload.cluster.dnn.count if workload.cluster else 1
    has_data = workload.constraints.max_data_hosts > 0
    found = [
        ClaimUse(
            claim=claim_of(channel.uri, where=f"key channels.{name}.uri")[0],
            what=f"channels.{name}",
            num_hosts=hosts,
            may_be_more=has_data,
        )
        for name, channel in workload.channels.items()
        if channel.uri.startswith("pvc://")
    ]
    if settings.output:
        claim, _ = claim_of(settings.output, where="key kubernetes.output")
        found.append(
            ClaimUse(claim=claim, what="kubernetes.output", num_hosts=hosts, is_written=True)
        )
    if settings.champion and settings.champion.startswith("pvc://"):
        claim, _ = claim_of(settings.champion, where="key kubernetes.champion")
        found.append(
            ClaimUse(claim=claim, what="kubernetes.champion", num_hosts=1, is_written=True)
        )
    for role, pods in (("dnn", settings.dnn), ("data", settings.data)):
        found += [
            ClaimUse(
                claim=volume.claim,
                what=f"kubernetes.{role}.volumes",
                num_hosts=hosts if role == "dnn" else 1,
                may_be_more=role == "data" and has_data,
                is_written=not volume.read_only,
            )
            for volume in pods.volumes
            if volume.claim
        ]
    return found


def claim_finding(cluster: ClusterApi, use: ClaimUse) -> Finding:
    """Says whether a claim is there, and whether as many pods as need it can mount it."""
    found = cluster.find(CLAIMS, use.claim)
    if found is None:
        return Finding(
            name="claim",
            state="fail",
            text=f"there is no claim {use.claim} in namespace {cluster.namespace} ({use.what})",
            fix="make it (docs/kubeflow.md, Storage), or correct its name",
        )
    spec, phase = mapping(found, "spec"), text(mapping(found, "status"), "phase")
    modes, storage = texts(spec, "accessModes"), text(spec, "storageClassName")
    line = f"{use.claim} ({use.what}): {', '.join(modes)}, {storage or 'no storage class'}, {phase}"
    many = {"ReadWriteMany"} if use.is_written else {"ReadWriteMany", "ReadOnlyMany"}
    if not many & set(modes) and (use.num_hosts > 1 or use.may_be_more):
        is_today = use.num_hosts > 1
        who = f"{use.num_hosts} hosts" if is_today else "a dnn host and data hosts"
        return Finding(
            name="claim",
            state="fail" if is_today else "warn",
            text=f"{line}; {who} are to mount it",
            fix=f"a claim of a class that has {' or '.join(sorted(many))} (EFS, Filestore, Azure "
            "Files, NFS, CephFS)",
        )
    if phase == "Bound":
        return Finding(name="claim", state="ok", text=line)
    return _unbound(cluster, line, storage=storage, phase=phase)


def _unbound(cluster: ClusterApi, line: str, *, storage: str, phase: str) -> Finding:
    fix = f"kubectl describe pvc -n {cluster.namespace} says why"
    if phase == "Lost":
        return Finding(name="claim", state="fail", text=f"{line}: its volume is gone", fix=fix)
    if not storage:
        return Finding(name="claim", state="warn", text=line, fix=fix)
    try:
        known = cluster.find(STORAGE_CLASSES, storage)
    except ApiError as err:
        if not err.is_denied:
            raise
        return Finding(name="claim", state="warn", text=f"{line}, not bound yet", fix=fix)
    if known is None:
        return Finding(
            name="claim",
            state="fail",
            text=f"{line}: the cluster has no storage class {storage}",
            fix="kubectl get storageclass shows what there is",
        )
    if text(known, "volumeBindingMode") == "WaitForFirstConsumer":
        return Finding(name="claim", state="ok", text=f"{line}: bound when a pod needs it")
    return Finding(name="claim", state="warn", text=f"{line}, not bound yet", fix=fix)


def kubeflow_finding(workload: Workload) -> Finding:
    """Says which Kubeflow Pipelines answers, and what of stoker's pipelines it cannot do."""
    kubernetes = workload.kubernetes
    try:
        connection = connection_of(workload, flags=Flags(), environment=kubeflow_environment())
        version = Kubeflow(connection).version
    except StokerError as err:
        # A site without it trains all the same, unless the workload says that there is one.
        is_named = bool(kubernetes and kubernetes.kubeflow)
        is_unasked = isinstance(err, KubeflowError) and err.status in (401, 403)
        return Finding(
            name="kubeflow",
            state="fail" if is_named and not is_unasked else "warn",
            text=f"Kubeflow Pipelines cannot be asked: {err.what}",
            fix=f"{err.fix or 'kubernetes.kubeflow says where it is'}; only pipelines need it",
        )
    if version is None:
        least = dotted(max(need.version for need in NEEDS if not need.is_soft))
        return Finding(
            name="kubeflow",
            state="warn",
            text="Kubeflow Pipelines, which does not tell its version",
            fix=f"see that it is {least} or later",
        )
    said = f"Kubeflow Pipelines {dotted(version)}"
    unmet = [need for need in NEEDS if version < need.version]
    lacks = [f"before {dotted(need.version)} {need.why}" for need in unmet]
    hard = [need for need in unmet if not need.is_soft]
    if hard:
        return Finding(
            name="kubeflow",
            state="fail",
            text=f"{said}; {'; '.join(lacks)}",
            fix=f"pipelines need {dotted(hard[-1].version)} or later",
        )
    if version[:2] < LATEST_SCHEDULES:
        lacks.append(f"before {dotted(LATEST_SCHEDULES)} a schedule keeps to one version")
    if lacks:
        fix = "update it, or see docs/kubeflow.md, Versions of Kubeflow Pipelines"
        return Finding(name="kubeflow", state="warn", text=f"{said}; {'; '.join(lacks)}", fix=fix)
    return Finding(name="kubeflow", state="ok", text=said)


def argo_findings(cluster: ClusterApi, settings: KubernetesSettings) -> Iterator[Finding]:
    """Says whether Argo waits for how a drained step ended, without which its retry is lost."""
    if cluster.discover(f"/apis/{WORKFLOWS.group}") is None:
        yield Finding(name="argo", state="ok", text="none here: pipelines run elsewhere, or never")
        return
    kubeflow = ClusterApi(context=settings.context, namespace=KUBEFLOW_NAMESPACE)
    found = kubeflow.find(DEPLOYMENTS, CONTROLLER)
    if found is None:
        yield Finding(
            name="argo",
            state="warn",
            text=f"no deployment {CONTROLLER} in namespace {KUBEFLOW_NAMESPACE} to look at",
            fix=f"see that {CAPTURE} is true where Argo's controller is",
        )
        return
    if _captures(found):
        yield Finding(name="argo", state="ok", text=f"{CAPTURE} is true: drained steps are retried")
        return
    yield Finding(
        name="argo",
        state="warn",
        text=f"{CAPTURE} is not set: a step whose pod is drained may count as an error, which is "
        "not retried, and the run's last step then deletes the job",
        fix=f"kubectl -n {KUBEFLOW_NAMESPACE} set env deployment/{CONTROLLER} {CAPTURE}=true",
    )


def _captures(deployment: Document) -> bool:
    pod = mapping(deployment, "spec", "template", "spec")
    return any(
        text(variable, "name") == CAPTURE and text(variable, "value").lower() == "true"
        for container in mappings(pod, "containers")
        for variable in mappings(container, "env")
    )
