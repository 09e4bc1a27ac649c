"""The template of a group's pods: volumes, environment, containers, the users' patches."""

import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from stoker.environment import RunEnvironment, RunGroup
from stoker.errors import UsageError
from stoker.host.machine import CPU_REQUEST
from stoker.platforms.base import (
    MLFLOW_VARIABLES,
    PLAIN_CHANNEL,
    TENSORBOARD,
)
from stoker.platforms.kubernetes.api import text
from stoker.platforms.kubernetes.layout import (
    GRACE_SECONDS,
    HYPERPARAMETERS_KEY,
    JOB_FOLDER,
    JOBSET_LABEL,
    LEASE_FOLDER,
    ROLE_LABEL,
    TOKEN_FOLDER,
    TOKEN_KEY,
    WRITTEN_FOLDERS,
    Layout,
    PodGroup,
)
from stoker.platforms.patch import mapping_of
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings

RESTARTS_ANNOTATION = "jobset.sigs.k8s.io/restart-attempt"
ZONE_LABEL = "topology.kubernetes.io/zone"
ISTIO_INJECT = "sidecar.istio.io/inject"
# Readable by the owner; Kubernetes adds the pod's group.
_TOKEN_MODE = 0o400
# With the dnn group's other results; in the claim for outputs, where there is one.
PROFILE_FILE = f"{JOB_FOLDER}/output/profile/profile.json"
# Autoscalers remove nodes under pods without these. A GPU host that is moved costs the whole run,
# and a follower an attempt; a data host is replaced.
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


# A volume of a pod, and its mounts.
Mounted = tuple[Document, list[Document]]


def _mounted(name: str, source: Document, *mounts: Document) -> Mounted:
    return {"name": name, **source}, [{"name": name, **mount} for mount in mounts]


def _size_limit(size: str | int | float | None) -> Document:
    if size is None:
        return {}
    return {"sizeLimit": str(size)}


def has_lease(layout: Layout, group: PodGroup) -> bool:
    return group.is_dnn and layout.settings.follower_lease_minutes != 0


def _volumes_of_run(layout: Layout, group: PodGroup) -> list[Mounted]:
    """Returns volumes of this run only: its token, and what its launchers read."""
    items: list[Json] = [
        {"key": HYPERPARAMETERS_KEY, "path": "hyperparameters.json"},
        {"key": _inputs_key(group), "path": "inputdataconfig.json"},
    ]
    # Made after the pods, or never. Mounted whole: a kubelet updates no subPath.
    lease: Document = {"configMap": {"name": layout.names.lease, "optional": True}}
    token: Document = {
        "secretName": layout.names.token,
        "defaultMode": _TOKEN_MODE,
        "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}],
    }
    config: Document = {"name": layout.names.config, "items": items}
    volumes = [
        ("follower", lease, LEASE_FOLDER),
        ("token", {"secret": token}, TOKEN_FOLDER),
        ("config", {"configMap": config}, f"{JOB_FOLDER}/input/config"),
    ]
    return [
        _mounted(name, source, {"mountPath": path, "readOnly": True})
        for name, source, path in volumes
        if name != "follower" or has_lease(layout, group)
    ]


def _inputs_key(group: PodGroup) -> str:
    return f"inputdataconfig.{group.job}.json"


def claim_of(uri: str, *, where: str) -> tuple[str, str]:
    """Returns claim and folder of a pvc:// address; an empty folder means the whole claim."""
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    folder = posixpath.normpath(path).strip("/") if path.strip("/") else ""
    if not uri.startswith("pvc://") or not claim or ".." in folder.split("/"):
        raise UsageError(
            f"pods mount claims, not {uri}",
            where=where,
            fix="pvc://CLAIM/FOLDER, for a bucket with its CSI driver; if the script reads S3 "
            "itself, pass the address as a hyperparameter, and the keys by envFrom in "
            "kubernetes.data.pod",
        )
    return claim, folder


def _job_folder(layout: Layout, group: PodGroup) -> Mounted:
    """Mounts model, checkpoints and output: on the node, or the dnn group's in the output claim."""
    # Not the whole job folder, in which images have code.
    output = layout.settings.output
    key = "subPath"
    volume: Document = {"emptyDir": _size_limit(layout.settings.scratch)}
    paths = {name: name for name in WRITTEN_FOLDERS}
    if output and group.is_dnn:
        claim, folder = claim_of(output, where="key kubernetes.output")
        # Filled in by the kubelet: a TrainingRuntime is the same for all runs. A further attempt of
        # a run continues in the run's folder.
        folder_of_job = "$(STOKER_RUN_ID)" if layout.job.run is None else layout.run_name
        parent = posixpath.join(folder.replace("$", "$$"), folder_of_job)
        # Every host has its own output folder; model and checkpoints are the run's.
        paths = {name: f"{parent}/{name}" for name in WRITTEN_FOLDERS}
        paths["output"] += "/$(JOB_COMPLETION_INDEX)"
        key = "subPathExpr"
        volume = {"persistentVolumeClaim": {"claimName": claim}}
    mounts = [{"mountPath": f"{JOB_FOLDER}/{name}", key: path} for name, path in paths.items()]
    return _mounted("job", volume, *mounts)


def _channels(layout: Layout, group: PodGroup) -> Iterator[Mounted]:
    for index, (name, channel) in enumerate(layout.channels[group.group.name].items()):
        key = f"key channels.{name}"
        if channel.data_type != "S3Prefix" or channel.distribution != "FullyReplicated":
            raise UsageError(
                "manifests and sharding by key exist on SageMaker only",
                where=key,
                fix="leave data_type and distribution out: every host sees the whole folder",
            )
        if channel.mode == "Pipe":
            raise UsageError(
                "mode Pipe exists on SageMaker only", where=f"{key}.mode", fix="use File"
            )
        claim, folder = claim_of(channel.uri, where=f"{key}.uri")
        path = f"{JOB_FOLDER}/input/data/{name}"
        mount: dict[str, Json] = {"mountPath": path, "readOnly": True}
        if folder:
            mount["subPath"] = folder
        source: Document = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        yield _mounted(f"channel-{index}", source, mount)


def _share_claims(spec: dict[str, Json]) -> None:
    """Merges volumes of one claim: a kubelet mounts a claim once, and waits for the second one."""
    kept: dict[str, Document] = {}
    names: dict[str, str] = {}
    for volume in mappings(spec, "volumes"):
        name = str(volume["name"])
        claim = mapping(volume, "persistentVolumeClaim")
        key = f"claim {claim.get('claimName')}" if claim else f"volume {name}"
        first = kept.setdefault(key, volume)
        names[name] = str(first["name"])
        both = (claim, mapping(first, "persistentVolumeClaim"))
        if first is not volume and not all(one.get("readOnly") for one in both):
            kept[key] = {**first, "persistentVolumeClaim": {"claimName": claim["claimName"]}}
    spec["volumes"] = list(kept.values())
    for key in ("initContainers", "containers"):
        if key in spec:
            spec[key] = [_mounting(container, names) for container in mappings(spec, key)]


def _mounting(container: Document, names: Mapping[str, str]) -> Document:
    """Returns the container with its mounts' volumes by their new names."""
    if "volumeMounts" not in container:
        return container
    mounts: list[Json] = []
    for mount in mappings(container, "volumeMounts"):
        name = mount.get("name")
        mounts.append({**mount, "name": names.get(str(name), name)})
    return {**container, "volumeMounts": mounts}


def _environment_of_group(layout: Layout, group: PodGroup) -> list[Json]:
    """Returns variables that are the same for every run of the workload."""
    theirs = {k: v for k, v in layout.job.environment.items() if k not in MLFLOW_VARIABLES}
    ours = {"HOME": "/tmp", "USER": "stoker"}  # of a user that the image may not know
    if layout.data:
        # A data host that fails is restarted: it must not succeed before the run ends, and trainers
        # wait for it.
        ours |= RunEnvironment(comes_back=True).to_environ("comes_back")
    if not group.gpus:
        # GPU images ask for all GPUs of a host, whatever the pod is given.
        ours["NVIDIA_VISIBLE_DEVICES"] = "void"
    # JobSet's own label in place of a text: a TrainingRuntime is the same for all runs.
    of_pod = {"STOKER_RUN_ID": f"metadata.labels['{JOBSET_LABEL}']"}
    settings = layout.settings
    if group.is_dnn and settings.output:
        # Restarts that do not count as failures are counted there, too.
        most = settings.max_restarts + settings.max_fresh_starts
        # Each restart gives the Job a new deadline: the leader holds the one for all attempts.
        bounds = RunEnvironment(max_fresh_starts=most, max_run_seconds=settings.max_run_seconds)
        is_bounded = settings.max_run_seconds is not None
        ours |= bounds.to_environ("max_fresh_starts", *["max_run_seconds"] * is_bounded)
        of_pod["STOKER_RESTARTS"] = f"metadata.annotations['{RESTARTS_ANNOTATION}']"
    variables_of_pod: list[Json] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in of_pod.items()
    ]
    # Without a limit nothing else in the pod shows how many CPUs it requested.
    of_cpu: dict[str, Json] = {"resource": "requests.cpu", "divisor": "1m"}
    variables_of_pod.append({"name": CPU_REQUEST, "valueFrom": {"resourceFieldRef": of_cpu}})
    return [*variables_of_pod, *_secret_variables(layout, group), *variables({**theirs, **ours})]


def _secret_variables(layout: Layout, group: PodGroup) -> Iterator[Json]:
    """Yields the variables that the kubelet reads from Secrets."""
    for name, source in sorted(layout.job.secrets.items()):
        if source.is_for(group.group.role):
            place: Document = {"name": source.secret, "key": source.key or name}
            yield {"name": name, "valueFrom": {"secretKeyRef": place}}


def _environment_of_run(layout: Layout, group: PodGroup) -> list[Json]:
    """Returns variables of this run only."""
    settings = replace(
        layout.environment,
        token_file=Path(TOKEN_FOLDER, TOKEN_KEY),
        group=group.group.name,
        pod_groups=tuple(map(_run_group, layout.groups)),
        profile_file=Path(PROFILE_FILE) if layout.environment.profile else None,
        follower_lease=Path(LEASE_FOLDER) if has_lease(layout, group) else None,
        tensorboard=Path(JOB_FOLDER, TENSORBOARD) if layout.job.tracking.tensorboard else None,
    )
    # MLflow's run is this run's; what the user says of MLflow is the same for all runs.
    ours = settings.to_environ()
    if group.is_dnn:
        names = MLFLOW_VARIABLES - _patched_names(group)
        ours = {k: v for k, v in layout.job.environment.items() if k in names} | ours
    return variables(ours)


def _run_group(pods: PodGroup) -> RunGroup:
    group = pods.group
    return RunGroup(
        name=group.name, instance_type=group.instance_type, count=group.count, hosts=pods.hosts
    )


def _patched_names(group: PodGroup) -> frozenset[str]:
    """Returns the variables that patches of the group's pods set, in any container."""
    patched: list[Document] = []
    for patch in group.patches:
        for container in mappings(patch, "spec", "containers"):
            patched += mappings(container, "env")
    return frozenset(text(variable, "name") for variable in patched)


def variables(values: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": verbatim(value)} for name, value in sorted(values.items())]


def verbatim(text: str) -> str:
    """Escapes `$`, so that Kubernetes expands no $(NAME)."""
    return text.replace("$", "$$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a group, as the job's object has them.

    Attributes:
        template: With JobSet all of it; with Trainer what is the same for all runs.
        of_run: The part of their spec that only this run has.
    """

    group: PodGroup
    template: Document
    of_run: Document

    @property
    def variables(self) -> Json:
        """Variables of this run only."""
        (container,) = mappings(self.of_run, "containers")
        return container["env"]


def pods_of(layout: Layout) -> tuple[Pods, ...]:
    """Returns the pods of each group; raises UsageError for a channel that pods cannot mount."""
    pods = []
    for group in layout.groups:
        of_run = _spec_of_run(layout, group)
        template = _pod_template(layout, group, of_run=of_run)
        pods.append(Pods(group=group, template=template, of_run=of_run))
    return tuple(pods)


def _pod_template(layout: Layout, group: PodGroup, *, of_run: Document) -> Document:
    # A mesh's sidecar does not end when the training does, and all traffic passes through it.
    no_mesh = {ISTIO_INJECT: "false"}
    described: dict[str, Json] = {
        "labels": {**layout.labels, ROLE_LABEL: group.group.role, **no_mesh},
        "annotations": {**no_mesh, **(STAY_ANNOTATIONS if group.is_dnn else {})},
    }
    template: dict[str, Json] = {"metadata": described, "spec": _spec_of_group(layout, group)}
    for patch in group.patches:
        template = mapping_of(template, patch)
    spec = {
        **mapping(template, "spec"),
        "nodeSelector": group.node_selector,
        "tolerations": [*group.tolerations],
    }
    if layout.settings.api == "jobset":
        # After the patches, as a TrainJob does it.
        spec = mapping_of(spec, of_run)
    _share_claims(spec)
    return {**template, "spec": spec}


def _spec_of_group(layout: Layout, group: PodGroup) -> Document:
    """Returns the spec that is the same for every run of the workload, before the patches."""
    # Containers have 64 MB of it by default, too little for batches in shared memory.
    shm: Document = {"medium": "Memory", **_size_limit(layout.settings.shm)}
    in_shm = _mounted("shm", {"emptyDir": shm}, {"mountPath": "/dev/shm"})
    mounted = (_job_folder(layout, group), in_shm, *_channels(layout, group))
    volumes, mounts = zip(*mounted, strict=True)
    container: dict[str, Json] = {
        "name": group.job,
        "image": group.settings.image or layout.image,
        "command": [verbatim(word) for word in layout.settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "env": _environment_of_group(layout, group),
        "resources": {"requests": group.requests, "limits": group.limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The last words of a host that failed are in its pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*chain(*mounts)],
    }
    return {
        # A data host is restarted on its node, under its address. What the end of a dnn host means
        # is JobSet's to decide: all hosts restart together.
        "restartPolicy": "Never" if group.is_dnn else "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # The user's code has no business with the cluster's API.
        "automountServiceAccountToken": False,
        # Else each service of the namespace adds variables to the environment.
        "enableServiceLinks": False,
        "securityContext": _security_context(layout.settings.run_as),
        "nodeSelector": group.node_selector,
        "tolerations": [*group.tolerations],
        **pull_secrets(layout.settings.image_pull_secrets),
        "containers": [container],
        "volumes": list(volumes),
    }


def _security_context(run_as: int) -> Document:
    """Returns what the restricted profile of pod security asks for."""
    return {
        "runAsNonRoot": True,
        "runAsUser": run_as,
        "runAsGroup": run_as,
        "fsGroup": run_as,
        # Else the kubelet would set the owner of every file of a claim at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pull_secrets(names: Iterable[str]) -> dict[str, Json]:
    """Returns a pod's imagePullSecrets; {} without names."""
    listed: list[Json] = [{"name": name} for name in names]
    if not listed:
        return {}
    return {"imagePullSecrets": listed}


def _spec_of_run(layout: Layout, group: PodGroup) -> Document:
    volumes, mounts = zip(*_volumes_of_run(layout, group), strict=True)
    container: dict[str, Json] = {
        "name": group.job,
        "volumeMounts": [*chain(*mounts)],
        "env": _environment_of_run(layout, group),
    }
    spec: dict[str, Json] = {"containers": [container], "volumes": list(volumes)}
    zone = layout.settings.zone
    if zone != "any" and sum(g.group.count for g in layout.groups) > 1:
        pods: Document = {"matchLabels": {JOBSET_LABEL: layout.name}}
        kind = "required"
        term: Document = {"labelSelector": pods, "topologyKey": ZONE_LABEL}
        if zone != "require":
            # The greatest weight of a preference.
            kind = "preferred"
            term = {"weight": 100, "podAffinityTerm": term}
        affinity: Document = {f"{kind}DuringSchedulingIgnoredDuringExecution": [term]}
        spec["affinity"] = {"podAffinity": affinity}
    return spec


def files_of_run(layout: Layout) -> dict[str, str]:
    """Returns what launchers read, by its key in the run's ConfigMap: JSON."""
    documents: dict[str, Json] = {HYPERPARAMETERS_KEY: layout.hyperparameters}
    for group in layout.groups:
        channels = layout.channels[group.group.name]
        documents[_inputs_key(group)] = dict.fromkeys(channels, PLAIN_CHANNEL)
    return {k: json.dumps(v, indent=2, sort_keys=True) + "\n" for k, v in documents.items()}
