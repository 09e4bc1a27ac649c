"""All objects of a run: JobSet, or TrainJob with its TrainingRuntime; Secret and ConfigMap.

The server checks what users write. Checked here is only what it accepts and then cannot run.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from stoker.environment import RUN_FILE, RunGroup, RunSettings
from stoker.errors import EXIT_PEER_LOST, EXIT_TERMINATED, UsageError
from stoker.platforms.base import (
    NOT_COMPARED,
    PLAIN_CHANNEL,
    JobSpec,
    check_container,
    check_job,
    run_settings,
)
from stoker.platforms.kubernetes.pods import (
    HYPERPARAMETERS_KEY,
    JOB_FOLDER,
    REQUEST_ANNOTATION,
    RESERVED_METADATA,
    RUN_ANNOTATION,
    TOKEN_KEY,
    PodGroup,
    labels_of,
    object_name,
    pod_groups,
)
from stoker.platforms.patch import patched
from stoker.records import Json, KubernetesSettings
from stoker.records.base import Document, item_at, mapping
from stoker.records.hyperparameters import encoded

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK_LABEL = "trainer.kubeflow.org/framework"
# In place of the token where the Secret is shown; a launcher refuses it as a token.
NO_TOKEN = "made-when-the-job-is-submitted"
# Kubernetes' largest limit: a failed pod of the data group is always replaced.
WITHOUT_END = 2**31 - 1
KEEP_SECONDS = 86400
# With the dnn group's other results; in the claim for outputs, where there is one.
PROFILE_FILE = f"{JOB_FOLDER}/output/profile/profile.json"
# Paths that `kubernetes.jobset` cannot set, and what to do instead.
_RESERVED = {
    **RESERVED_METADATA,
    "spec replicatedJobs": "use kubernetes.dnn.pod and kubernetes.data.pod",
    "spec failurePolicy": "use kubernetes.max_restarts",
    **{
        f"spec {key}": ""
        for key in ("successPolicy", "startupPolicy", "network", "coordinator", "suspend")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """All objects of a job, before anything is sent.

    The job owns Secret, ConfigMap and its runtime; submit() sets their owner references, and the
    job's to its Workflow.

    Attributes:
        groups: The dnn group first.
        main: JobSet or TrainJob.
        runtime: A TrainJob's own TrainingRuntime.
        config: ConfigMap that launchers read.
        secret: Secret, with NO_TOKEN in place of the token.
        request_sha256: Digest of the job's spec and configuration: equal in all attempts.
    """

    job: JobSpec
    groups: tuple[PodGroup, ...]
    main: Document
    runtime: Document | None
    config: Document
    secret: Document
    request_sha256: str

    @property
    def name(self) -> str:
        return object_name(self.job.name)

    @property
    def settings(self) -> KubernetesSettings:
        return self.job.platform_settings.kubernetes_settings

    @property
    def dnn(self) -> PodGroup:
        return self.groups[0]

    @property
    def objects(self) -> tuple[Document, ...]:
        """What submit() makes, in the order of need."""
        runtime = (self.runtime,) if self.runtime else ()
        return (self.secret, self.config, *runtime, self.main)


def plan_request(job: JobSpec) -> KubernetesRequest:
    """Returns the objects for `job`, without files or calls; raises UsageError for wrong ones."""
    settings = job.platform_settings.kubernetes_settings
    check_container(job, platform="Kubernetes")
    # Without it the launcher would parse options of the user's command.
    if settings.entrypoint[-1] != "--":
        raise UsageError(
            "the entry point must end with --",
            where="key kubernetes.entrypoint",
            fix="add -- as its last word",
        )
    if settings.dnn.image:
        raise UsageError(
            "kubernetes.dnn.image cannot be set: the dnn group uses the key image",
            where="key kubernetes.dnn.image",
            fix="set image, and another one for data hosts in kubernetes.data.image",
        )
    for name, source in job.secrets.items():
        if source.secret is None:
            raise UsageError(
                f"on Kubernetes the secret {name} needs a Secret of the job's namespace",
                where=f"key secrets.{name}",
                fix=f"kubectl create secret generic NAME --from-file={name}=FILE, and secret: NAME",
            )
    check_job(job)
    groups = pod_groups(job)
    # What launchers read, by its key in the run's ConfigMap: JSON.
    documents: dict[str, Json] = {HYPERPARAMETERS_KEY: encoded(job.hyperparameters)}
    for group in groups:
        documents[group.inputs_key] = dict.fromkeys(group.channels, PLAIN_CHANNEL)
    files: Document = {
        key: json.dumps(value, indent=2, sort_keys=True) + "\n" for key, value in documents.items()
    }
    run = _run_settings(job, groups)
    jobset = _jobset(job, groups)
    spec = main_spec = mapping(jobset, "spec")
    runtime = None
    main = {"apiVersion": JOBSET_API, "kind": "JobSet"}
    if settings.api == "trainer":
        runtime = _training_runtime(job, groups, spec)
        group_name = TRAINER_API.partition("/")[0]
        main_spec = {
            "runtimeRef": {
                "apiGroup": group_name,
                "kind": "TrainingRuntime",
                "name": object_name(job.name),
            }
        }
        main = {"apiVersion": TRAINER_API, "kind": "TrainJob"}
    compared = _compared([main_spec, {**files, RUN_FILE: run.to_compare()}, spec])
    content = json.dumps(compared, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()
    described = mapping(jobset, "metadata")
    annotations = {**mapping(described, "annotations"), REQUEST_ANNOTATION: digest}
    # Immutable: a run's settings do not change, and kubelets need not watch the objects.
    hidden: Json = {TOKEN_KEY: NO_TOKEN, RUN_FILE: run.to_json()}
    token: dict[str, Json] = {"type": "Opaque", "immutable": True, "stringData": hidden}
    return KubernetesRequest(
        job=job,
        groups=groups,
        main={**main, "metadata": {**described, "annotations": annotations}, "spec": main_spec},
        runtime=runtime,
        config=_object("v1", "ConfigMap", _metadata(job, "-config"), immutable=True, data=files),
        secret=_object("v1", "Secret", _metadata(job, "-token"), **token),
        request_sha256=digest,
    )


def _object(version: str, kind: str, metadata: Document, **parts: Json) -> dict[str, Json]:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


def _metadata(job: JobSpec, ending: str = "") -> dict[str, Json]:
    """Returns the metadata of an object of the run."""
    settings = job.platform_settings.kubernetes_settings
    return {
        "name": f"{object_name(job.name)}{ending}",
        **({"namespace": settings.namespace} if settings.namespace else {}),
        "labels": labels_of(settings),
        "annotations": {RUN_ANNOTATION: job.run_name},
    }


def _run_settings(job: JobSpec, groups: Sequence[PodGroup]) -> RunSettings:
    """Returns the content of the run's run.json."""
    settings = job.platform_settings.kubernetes_settings
    shared = run_settings(job)
    return replace(
        shared,
        run_id=object_name(job.name),
        pod_groups=tuple(
            RunGroup(
                name=pods.group.name,
                instance_type=pods.group.instance_type,
                count=pods.group.count,
                hosts=pods.hosts,
            )
            for pods in groups
        ),
        profile_file=Path(PROFILE_FILE) if shared.profile else None,
        # A data host that fails is restarted: it must not succeed before the run ends, and trainers
        # wait for it.
        comes_back=len(groups) > 1,
        # Each restart gives the Job a new deadline: the leader holds the one for all attempts.
        max_run_seconds=settings.max_run_seconds if settings.output else None,
    )


def _jobset(job: JobSpec, groups: Sequence[PodGroup]) -> Document:
    """Returns metadata and spec of the run's JobSet, with the workload's patch."""
    settings = job.platform_settings.kubernetes_settings
    is_trainer = settings.api == "trainer"
    spec: dict[str, Json] = {
        # The dnn group's end ends the JobSet, and its controller deletes the data group's pods.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [groups[0].job]},
        "failurePolicy": _failure_policy(settings, dnn=groups[0].job),
        "network": {
            "enableDNSHostnames": True,
            # JobSet's default; written, as the hosts' names rely on it.
            **({} if is_trainer else {"subdomain": object_name(job.name)}),
            # The feed waits for no host: pods find each other before they are ready.
            "publishNotReadyAddresses": True,
        },
        "ttlSecondsAfterFinished": KEEP_SECONDS,
        "replicatedJobs": [_replicated_job(settings, pods) for pods in groups],
    }
    reserved = _RESERVED
    if is_trainer:
        # Trainer 2.1 to 2.3 makes the JobSet of a failed TrainJob again when its TTL has deleted
        # it, and so trains again, for ever (kubeflow/trainer#3779). Later ones refuse it here.
        del spec["ttlSecondsAfterFinished"]
        reserved = {**_RESERVED, "spec ttlSecondsAfterFinished": "a TrainJob has no TTL"}
    return patched(
        {"metadata": _metadata(job), "spec": spec},
        settings.jobset.document,
        key="kubernetes.jobset",
        reserved=reserved,
    )


def _failure_policy(settings: KubernetesSettings, *, dnn: str) -> dict[str, Json]:
    policy: dict[str, Json] = {"maxRestarts": settings.max_restarts}
    rules: list[Json] = []
    if settings.max_run_seconds:
        # By default JobSet would restart all hosts, for as long again; and its state says by which
        # action it failed, not why.
        reasons: Json = ["DeadlineExceeded"]
        rules += [{"name": "out_of_time", "action": "FailJobSet", "onJobFailureReasons": reasons}]
    if settings.output:
        disrupted: Document = {
            "name": "disrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            # The only pod failure policy is the one for disruptions and lost hosts.
            "onJobFailureReasons": ["PodFailurePolicy"],
            "targetReplicatedJobs": [dnn],
        }
        rules.append(disrupted)
    if rules or settings.max_restarts:
        # A new leader must not be mistaken for the old one, which has the same name.
        policy["restartStrategy"] = "BlockingRecreate"
    if rules:
        policy["rules"] = rules
    return policy


def _replicated_job(settings: KubernetesSettings, group: PodGroup) -> dict[str, Json]:
    job: dict[str, Json] = {
        "parallelism": group.group.count,
        "completions": group.group.count,
        # Gives each pod its number, and with it a stable name in the DNS.
        "completionMode": "Indexed",
        # JobSet checks failed jobs before success: the data group's job must never fail, not even
        # as the training ends. After a failed dnn pod JobSet restarts all hosts (maxRestarts).
        "backoffLimit": 0 if group.is_dnn else WITHOUT_END,
    }
    if not group.is_dnn:
        # Not after its end, which a disconnected node never reports.
        job["podReplacementPolicy"] = "TerminatingOrFailed"
    elif settings.max_run_seconds:
        job["activeDeadlineSeconds"] = settings.max_run_seconds
    if group.is_dnn and settings.output:
        disrupted: Json = {"type": "DisruptionTarget", "status": "True"}
        # The first pod that fails decides: one that is drained or deleted, or a survivor. One that
        # was killed for its memory (137) would be again.
        codes: Json = {"operator": "In", "values": [EXIT_PEER_LOST, EXIT_TERMINATED]}
        job["podFailurePolicy"] = {
            "rules": [
                {"action": "FailJob", "onPodConditions": [disrupted]},
                {"action": "FailJob", "onExitCodes": codes},
            ],
        }
    job["template"] = group.template
    template: dict[str, Json] = {"spec": job}
    if settings.api == "trainer" and group.is_dnn:
        # The label by which Trainer finds the job that trains.
        template = {"metadata": {"labels": {ANCESTOR_LABEL: "trainer"}}, **template}
    return {"name": group.job, "replicas": 1, "template": template}


def _training_runtime(
    job: JobSpec, groups: Sequence[PodGroup], jobset: Document
) -> dict[str, Json]:
    spec: dict[str, Json] = {
        # Without torch's policy: stoker's launcher starts torchrun itself.
        "mlPolicy": {"numNodes": groups[0].group.count},
        # Both groups whole: a TrainJob only refers to it.
        "template": {"spec": jobset},
    }
    described = _metadata(job)
    described["labels"] = {**mapping(described, "labels"), FRAMEWORK_LABEL: "torch"}
    return _object(TRAINER_API, "TrainingRuntime", described, spec=spec)


def _compared(spec: Json) -> Json:
    if isinstance(spec, Mapping):
        return {key: _compared(value) for key, value in spec.items()}
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        kept = [each for each in spec if str(item_at(each, "name")) not in NOT_COMPARED]
        return [_compared(each) for each in kept]
    return spec


# Words that every parser reads as texts: kubectl's takes 1e3 for a number, and y for true.
_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./-]+( [A-Za-z0-9_./-]+)*$")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        # Not every reader knows them.
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'"
    if _PLAIN.match(text):
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_SECRET_NOTE = """\
# stoker writes a new token of 64 hexadecimal digits here when it submits the job.
# To apply this by hand, create one with openssl rand -hex 32.
"""


def manifest(objects: Sequence[Document]) -> str:
    """Returns the objects as YAML, one document each."""
    documents = []
    for document in objects:
        comment = _SECRET_NOTE if document.get("kind") == "Secret" else ""
        written = yaml.dump(
            document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
        )
        documents.append(comment + written)
    return "---\n".join(documents)
