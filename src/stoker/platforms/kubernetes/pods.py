"""The pods of a job's groups: what they request, mount and run, and the workload's patches."""

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.environment import RUN_FILE, RUN_VARIABLE
from stoker.errors import UsageError
from stoker.host.machine import CPU_REQUEST
from stoker.platforms.base import MLFLOW_VARIABLES, JobSpec, channels_by_group
from stoker.platforms.patch import check_patch, mapping_of
from stoker.records import Channel, Group, Json, KubernetesSettings, PodSettings, bare_type
from stoker.records.base import Document, mapping, mappings, text
from stoker.records.platforms import NodePool

# Pods are called NAME-JOB-0-INDEX-xxxxx, 63 characters at most: what is left with a job's name of 9
# characters and 100000 hosts.
MAX_NAME = 40
MAX_LABEL = 63
# Kubeflow Trainer's limit.
MAX_TRAINER_JOB = 20
_DIGEST = 8
_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
RESTARTS_ANNOTATION = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ISTIO_INJECT = "sidecar.istio.io/inject"
# On each pod of a run: dnn or data; on the pod of a step that follows a job: follower.
ROLE_LABEL = "stoker/role"
FOLLOWER_LABELS = {ROLE_LABEL: "follower"}
RUN_ANNOTATION = "stoker/run"
# The pipeline's run that made the job, and the workload, of which a pipeline may train several.
PIPELINE_RUN_LABEL = "stoker/pipeline-run"
WORKLOAD_LABEL = "stoker/workload"
REQUEST_ANNOTATION = "stoker/request-sha256"
# Autoscalers remove nodes under pods without these. A GPU host that is moved costs the whole run,
# and a follower an attempt; a data host is replaced.
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
# Kubeflow Trainer's name of the job that trains, and of its container.
TRAINER_JOB = "node"
JOB_FOLDER = "/opt/ml"
TOKEN_FOLDER = "/var/run/secrets/stoker"
TOKEN_KEY = "token"
HYPERPARAMETERS_KEY = "hyperparameters.json"
# Folders in the job folder that are written to.
WRITTEN_FOLDERS = ("model", "checkpoints", "output")
GRACE_SECONDS = 120
# Labels and annotations by which stoker and the controllers know their objects.
_PREFIXES = ("stoker/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/")
# Paths that no patch can set, and what to do instead.
RESERVED_METADATA = {
    "metadata name": "use --name",
    "metadata namespace": "use kubernetes.namespace",
    "metadata ownerReferences": "",
    f"metadata labels {MANAGED_BY_LABEL}": "",
    **{f"metadata {part} {name}*": "" for part in ("labels", "annotations") for name in _PREFIXES},
}


def object_name(run: str) -> str:
    """Returns the run's name; where Kubernetes forbids it, another that ends with a digest."""
    plain = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    if plain == run and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def is_dns_label(name: str) -> bool:
    """RFC 1035: a small letter, then also digits and dashes."""
    return len(name) <= MAX_LABEL and bool(_DNS_LABEL.fullmatch(name))


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


def verbatim(word: str) -> str:
    """Escapes `$`, so that Kubernetes expands no $(NAME)."""
    return word.replace("$", "$$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """An instance group as a replicated job, whose pods are alike.

    Attributes:
        job: Name of the replicated job, and of its pods' container.
        hosts: Host names in the cluster's DNS, with `{index}` for the number.
        channels: The group's channels by name.
        template: The pods, with the workload's patches.
    """

    group: Group
    job: str
    hosts: str
    channels: Mapping[str, Channel]
    template: Document

    @property
    def is_dnn(self) -> bool:
        return self.group.role == "dnn"

    @property
    def inputs_key(self) -> str:
        """Key of its inputdataconfig.json in the run's ConfigMap."""
        return f"inputdataconfig.{self.job}.json"

    @property
    def container(self) -> Document:
        containers = mappings(self.template, "spec", "containers")
        return next(each for each in containers if each.get("name") == self.job)

    @property
    def grace_seconds(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        seconds = mapping(self.template, "spec").get("terminationGracePeriodSeconds")
        return seconds if isinstance(seconds, int) else GRACE_SECONDS


def pod_groups(job: JobSpec) -> tuple[PodGroup, ...]:
    """Returns the pods of each group, the dnn group first.

    Raises:
        UsageError: If the workload lacks what pods need, or a patch sets what stoker relies on.
    """
    settings = job.platform_settings.kubernetes_settings
    channels = channels_by_group(job)
    name = object_name(job.name)
    groups: list[PodGroup] = []
    for group in job.groups:
        replicated = _job_name(group, settings, taken=[each.job for each in groups])
        maker = _PodMaker(job, settings, group, replicated, name, channels[group.name])
        made = PodGroup(
            group=group,
            job=replicated,
            # JOBSET-JOB-JOBINDEX-PODINDEX.SUBDOMAIN
            hosts=f"{name}-{replicated}-0-{{index}}.{name}",
            channels=channels[group.name],
            template=maker.template(),
        )
        groups.append(made)
    return tuple(groups)


def _job_name(group: Group, settings: KubernetesSettings, *, taken: Sequence[str]) -> str:
    job = group.name.lower()
    most = MAX_LABEL
    if settings.api == "trainer":
        most = MAX_TRAINER_JOB
        # Kubeflow Trainer fills in the job of this name only.
        if group.role == "dnn":
            job = TRAINER_JOB
    if not is_dns_label(job) or len(job) > most or job in taken:
        raise UsageError(
            f"{group.name} cannot be part of a host's name",
            where="the plan's groups",
            fix=f"use {most} letters, digits and dashes at most, a letter first, and another name "
            "for each group",
        )
    return job


@dataclass(frozen=True, slots=True)
class _PodMaker:
    """Makes the template of one group's pods."""

    job: JobSpec
    settings: KubernetesSettings
    group: Group
    name: str
    run: str
    channels: Mapping[str, Channel]

    @property
    def is_dnn(self) -> bool:
        return self.group.role == "dnn"

    @property
    def pods(self) -> PodSettings:
        return self.settings.dnn if self.is_dnn else self.settings.data

    @property
    def pool(self) -> NodePool:
        return self.settings.pool_of(self.group.instance_type)[1]

    def template(self) -> Document:
        template = self._unpatched()
        pool_name = self.settings.pool_of(self.group.instance_type)[0]
        patches = {
            f"kubernetes.pools.{pool_name}.pod": self.pool.pod.document,
            f"kubernetes.{self.group.role}.pod": self.pods.pod.document,
        }
        for key, patch in patches.items():
            named = self._named(patch)
            check_patch(named, key=key, reserved=self._reserved())
            template = mapping_of(template, named)
        return template

    def _unpatched(self) -> Document:
        # A mesh's sidecar does not end when the training does, and all traffic passes through it.
        no_mesh = {ISTIO_INJECT: "false"}
        labels = {**labels_of(self.settings), ROLE_LABEL: self.group.role, **no_mesh}
        annotations = {**no_mesh, **(STAY_ANNOTATIONS if self.is_dnn else {})}
        volumes: dict[str, Document] = {}
        mounts: list[Json] = []
        for name, source, mounted in self._volumes():
            # A kubelet mounts a claim once, and waits for ever for the second one.
            claim = text(source, "persistentVolumeClaim", "claimName")
            volume = volumes.setdefault(claim or name, {"name": name, **source})
            mounts += [{"name": volume["name"], **mount} for mount in mounted]
        gpus = self._gpus()
        selector: dict[str, Json] = {}
        # Clouds label nodes with their type; pools of other clusters have other labels.
        if self.pool.node_selector is None:
            selector[INSTANCE_TYPE_LABEL] = bare_type(self.group.instance_type)
        # The usual taint of GPU nodes: data pods, which do not tolerate it, leave them free.
        taint = {"key": self.settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        secrets: list[Json] = [{"name": name} for name in self.settings.image_pull_secrets]
        user = self.settings.run_as
        container: dict[str, Json] = {
            "name": self.name,
            "image": self.pods.image or self.job.image,
            "command": [verbatim(word) for word in self.settings.entrypoint],
            "args": [verbatim(word) for word in self.job.command],
            "env": self._environment(gpus),
            "resources": self._resources(gpus),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            # The last words of a host that failed are in its pod's status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }
        spec: dict[str, Json] = {
            # A data host is restarted on its node, under its address. What the end of a dnn host
            # means is JobSet's to decide: all hosts restart together.
            "restartPolicy": "Never" if self.is_dnn else "OnFailure",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            # The user's code has no business with the cluster's API.
            "automountServiceAccountToken": False,
            # Else each service of the namespace adds variables to the environment.
            "enableServiceLinks": False,
            # What the restricted profile of pod security asks for.
            "securityContext": {
                "runAsNonRoot": True,
                **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user),
                # Else the kubelet would set the owner of every file of a claim at each start.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "nodeSelector": selector,
            "tolerations": [taint] if gpus else [],
            **({"imagePullSecrets": secrets} if secrets else {}),
            "containers": [container],
            "volumes": list(volumes.values()),
            **self._affinity(),
        }
        return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}

    def _affinity(self) -> dict[str, Json]:
        """Prefers one zone for all pods of a run: traffic between zones is slow and billed."""
        if sum(group.count for group in self.job.groups) == 1:
            return {}
        pods: Document = {"matchLabels": {JOBSET_LABEL: self.run}}
        term: Document = {"labelSelector": pods, "topologyKey": ZONE_LABEL}
        # The greatest weight of a preference.
        preferred: Json = [{"weight": 100, "podAffinityTerm": term}]
        rule = "preferredDuringSchedulingIgnoredDuringExecution"
        return {"affinity": {"podAffinity": {rule: preferred}}}

    def _gpus(self) -> int:
        """Returns the GPUs of one pod; pods of the data group have none."""
        group = self.group
        gpus = self.pods.gpus
        if gpus is None:
            gpus = self.pool.gpus
        if self.is_dnn and gpus is None:
            raise self._unknown("how many GPUs a pod gets (0: training on CPUs)")
        if not self.is_dnn and gpus:
            raise UsageError(
                f"{group.instance_type} has GPUs, which pods of the data group do not use",
                where=f"group {group.name}, key kubernetes.data.gpus",
                fix="plan data hosts of a type without GPUs",
            )
        return gpus or 0

    def _resources(self, gpus: int) -> Document:
        cpu = self.pods.cpu or self.pool.cpu
        memory = self.pods.memory or self.pool.memory
        if cpu is None or memory is None:
            raise self._unknown("what a pod requests of its node, which daemons use as well,")
        # No limit of the CPUs: a CPU-bound training on a node was stopped in 97% of the kernel's
        # periods by it.
        limits: dict[str, Json] = {"memory": str(memory)}
        if gpus:
            limits[self.settings.gpu_resource] = str(gpus)
        return {"requests": {"cpu": str(cpu), "memory": str(memory)}, "limits": limits}

    def _unknown(self, what: str) -> UsageError:
        pool = bare_type(self.group.instance_type)
        gpus = ", gpus: 1" if self.is_dnn else ""
        return UsageError(
            f"the workload does not say {what} on {pool}",
            where=f"group {self.group.name}, key kubernetes.pools.{pool}",
            fix=f'for example kubernetes: {{pools: {{"{pool}": {{cpu: 7, memory: 28Gi{gpus}}}}}}}',
        )

    def _environment(self, gpus: int) -> list[Json]:
        # JobSet's own labels in place of texts: a restart changes them.
        fields = {"STOKER_RUN_ID": f"metadata.labels['{JOBSET_LABEL}']"}
        if self.is_dnn and self.settings.output:
            fields["STOKER_RESTARTS"] = f"metadata.annotations['{RESTARTS_ANNOTATION}']"
        variables: list[Json] = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ]
        # Without a limit nothing else in the pod shows how many CPUs it requested.
        of_cpu: Json = {"resource": "requests.cpu", "divisor": "1m"}
        variables.append({"name": CPU_REQUEST, "valueFrom": {"resourceFieldRef": of_cpu}})
        for name, source in sorted(self.job.secrets.items()):
            if source.is_for(self.group.role):
                place: Json = {"name": source.secret, "key": source.key or name}
                variables.append({"name": name, "valueFrom": {"secretKeyRef": place}})
        plain = {
            name: value
            for name, value in self.job.environment.items()
            if self.is_dnn or name not in MLFLOW_VARIABLES
        }
        # Of a user that the image may not know.
        plain |= {"HOME": "/tmp", "USER": "stoker", "STOKER_GROUP": self.group.name}
        plain[RUN_VARIABLE] = f"{TOKEN_FOLDER}/{RUN_FILE}"
        if not gpus:
            # GPU images ask for all GPUs of a host, whatever the pod is given.
            plain["NVIDIA_VISIBLE_DEVICES"] = "void"
        for name, value in sorted(plain.items()):
            variables.append({"name": name, "value": verbatim(value)})
        return variables

    def _volumes(self) -> Iterator[tuple[str, Document, list[Document]]]:
        """Yields name, source and mounts of each volume."""
        yield self._job_folder()
        # Containers have 64 MB of it by default, too little for batches in shared memory.
        shm: dict[str, Json] = {"medium": "Memory"}
        if self.settings.shm is not None:
            shm["sizeLimit"] = str(self.settings.shm)
        yield "shm", {"emptyDir": shm}, [{"mountPath": "/dev/shm"}]
        for index, (name, channel) in enumerate(self.channels.items()):
            yield f"channel-{index}", *_channel_volume(name, channel)
        # Readable by the owner; Kubernetes adds the pod's group.
        token: Document = {
            "secretName": f"{self.run}-token",
            "defaultMode": 0o400,
            "items": [{"key": key, "path": key} for key in (TOKEN_KEY, RUN_FILE)],
        }
        yield "token", {"secret": token}, [{"mountPath": TOKEN_FOLDER, "readOnly": True}]
        items: Json = [
            {"key": HYPERPARAMETERS_KEY, "path": "hyperparameters.json"},
            {"key": f"inputdataconfig.{self.name}.json", "path": "inputdataconfig.json"},
        ]
        config: Document = {"name": f"{self.run}-config", "items": items}
        mount: Document = {"mountPath": f"{JOB_FOLDER}/input/config", "readOnly": True}
        yield "config", {"configMap": config}, [mount]

    def _job_folder(self) -> tuple[str, Document, list[Document]]:
        """Mounts model, checkpoints and output: on the node, or the dnn group's in the claim."""
        # Not the whole job folder, in which images have code.
        output = self.settings.output
        paths = {name: name for name in WRITTEN_FOLDERS}
        key = "subPath"
        source: Document = {"emptyDir": {}}
        if output and self.is_dnn:
            claim, folder = claim_of(output, where="key kubernetes.output")
            # A further attempt of a run continues in the run's folder.
            of_run = "$(STOKER_RUN_ID)" if self.job.run is None else object_name(self.job.run)
            parent = posixpath.join(verbatim(folder), of_run)
            # Every host has its own output folder; model and checkpoints are the run's.
            paths = {name: f"{parent}/{name}" for name in WRITTEN_FOLDERS}
            paths["output"] += "/$(JOB_COMPLETION_INDEX)"
            key = "subPathExpr"
            source = {"persistentVolumeClaim": {"claimName": claim}}
        mounts: list[Document] = [
            {"mountPath": f"{JOB_FOLDER}/{name}", key: path} for name, path in paths.items()
        ]
        return "job", source, mounts

    def _named(self, patch: Document) -> Document:
        """Returns a patch in which the group's container has its name."""
        if "containers" not in mapping(patch, "spec"):
            return patch
        containers: list[Json] = []
        for container in mappings(patch, "spec", "containers"):
            is_own = container.get("name") in (None, self.group.role, self.group.name)
            containers.append({**container, "name": self.name} if is_own else container)
        return {**patch, "spec": {**mapping(patch, "spec"), "containers": containers}}

    def _reserved(self) -> dict[str, str]:
        """Returns the paths of a pod that a patch cannot set, with what to do instead."""
        container = f"spec containers {self.name}"
        return {
            **RESERVED_METADATA,
            "spec restartPolicy": "",
            **{f"spec volumes {name}": "" for name in ("token", "config", "job")},
            f"{container} image": "use the workload's key image, or kubernetes.data.image",
            f"{container} command": "use kubernetes.entrypoint",
            f"{container} args": "use the workload's key command",
            f"{container} env STOKER_*": "use the workload's keys in place of variables of stoker",
            f"{container} volumeMounts {TOKEN_FOLDER}*": "",
        }


def labels_of(settings: KubernetesSettings) -> Document:
    """Returns the labels of all objects of a run; Kueue admits the job, and no pod of its own."""
    labels = mapping(settings.jobset.document, "metadata", "labels")
    kept = {key: value for key, value in labels.items() if key != QUEUE_LABEL}
    return {**kept, MANAGED_BY_LABEL: "stoker"}


def _channel_volume(name: str, channel: Channel) -> tuple[Document, list[Document]]:
    where = f"key channels.{name}"
    is_whole = channel.data_type == "S3Prefix" and channel.distribution == "FullyReplicated"
    if not is_whole or channel.mode == "Pipe":
        raise UsageError(
            "manifests, sharding by key and mode Pipe exist on SageMaker only",
            where=where,
            fix="leave data_type, distribution and mode out: every host sees the whole folder",
        )
    claim, folder = claim_of(channel.uri, where=f"{where}.uri")
    mount: dict[str, Json] = {"mountPath": f"{JOB_FOLDER}/input/data/{name}", "readOnly": True}
    if folder:
        mount["subPath"] = folder
    source: Document = {"claimName": claim, "readOnly": True}
    return {"persistentVolumeClaim": source}, [mount]
