"""Kubernetes runs a job from its objects, a pure value: they are made, checked and written as YAML.

The objects come from `objects`, a pod's spec from `objects.pod_template`.

Nothing here needs an alpha feature of JobSet. A TrainingRuntime is the same for all runs of a
workload on one plan, and may be there already, applied by those who run the cluster; what is a
run's alone is patched in by its TrainJob.

The server checks what users write. Only what it accepts and then cannot run is checked here. What
stoker itself writes is held against the schemas of JobSet and Kubeflow Trainer, and the restricted
profile, by its tests.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml

from stoker.errors import UsageError
from stoker.platforms.base import MLFLOW_VARIABLES, JobSpec, hyperparameters
from stoker.platforms.kubernetes.api import name_of, number, text
from stoker.platforms.kubernetes.objects import (
    HYPERPARAMETERS_KEY,
    JOBSET_LABEL,
    MANAGED_BY_LABEL,
    QUEUE_LABEL,
    REQUEST_ANNOTATION,
    ROLE_LABEL,
    RUN_ANNOTATION,
    STEP_LABEL,
    TOKEN_KEY,
    TRAINER_JOB,
    WORKFLOW_LABEL,
    WORKLOAD_ANNOTATION,
    Layout,
    PodGroup,
    channels_of,
    config_map,
    environment_of_run,
    inputs_key,
    is_dns_label,
    lay_out,
    mounts_of,
    pod_template,
    records_map,
    token_secret,
    verbatim,
    volumes_of_run,
    zone_affinity,
)
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
# Kubernetes' largest limit: a failed pod of the data group is always replaced.
WITHOUT_END = 2**31 - 1
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK_LABEL = "trainer.kubeflow.org/framework"
# Who patches: a domain and a path, by Trainer's rule.
MANAGER = "stoker/run"
# Shown in place of the token wherever the Secret is shown: a launcher refuses it as a token.
NO_TOKEN = "made-when-the-job-is-submitted"
# Texts that every version of YAML reads as texts.
_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*$")
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def jobset(layout: Layout) -> dict[str, Json]:
    """Returns the JobSet that runs `layout`.

    Raises:
        UsageError: If Kubernetes cannot run the groups' pods.
    """
    spec = jobset_spec(layout, of_run=True)
    network: dict[str, Json] = {
        "enableDNSHostnames": True,
        # JobSet's default; written, as `host_pattern` counts on it.
        "subdomain": layout.name,
        "publishNotReadyAddresses": True,
    }
    return {
        "apiVersion": JOBSET_API,
        "kind": "JobSet",
        "metadata": metadata(layout, queued=True),
        "spec": {**spec, "network": network},
    }


def jobset_spec(
    layout: Layout, *, of_run: bool, job_labels: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, Json]:
    """Returns the spec that a JobSet and the template of a TrainingRuntime have in common.

    Args:
        layout: Layout of the job.
        of_run: Whether with what only this run has.
        job_labels: Labels of jobs, by the replicated job's name.
    """
    settings = layout.settings
    spec: dict[str, Json] = {
        # The dnn group's end ends the JobSet, and its controller deletes the data group's pods.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [layout.dnn.job]},
        "failurePolicy": _failure_policy(layout),
        # Pods find each other before they are ready: the feed waits for nobody.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # Trainer 2.1 to 2.3 makes the JobSet of a failed TrainJob anew when its TTL has deleted it,
        # and so trains again, for ever (kubeflow/trainer#3779). Later ones refuse it here.
        **({} if settings.api == "trainer" else {"ttlSecondsAfterFinished": settings.keep_seconds}),
        "replicatedJobs": [
            _replicated_job(layout, group, of_run=of_run, labels=(job_labels or {}).get(group.job))
            for group in layout.groups
        ],
    }
    return spec


def metadata(layout: Layout, *, name: str | None = None, queued: bool = False) -> dict[str, Json]:
    """Returns the metadata of an object of the run: its name, namespace, labels and annotations.

    Args:
        layout: Layout of the job.
        name: Absent: the run's.
        queued: Whether Kueue admits the object.
    """
    settings = layout.settings
    labels = {**settings.labels, MANAGED_BY_LABEL: "stoker"}
    if queued and settings.queue:
        labels[QUEUE_LABEL] = settings.queue
    described: dict[str, Json] = {"name": name or layout.name}
    if settings.namespace:
        described["namespace"] = settings.namespace
    described["labels"] = labels
    described["annotations"] = {RUN_ANNOTATION: layout.job.run_name}
    return described


def _failure_policy(layout: Layout) -> dict[str, Json]:
    settings = layout.settings
    policy: dict[str, Json] = {"maxRestarts": settings.max_restarts}
    rules: list[Json] = []
    if _deadline_of_job(layout):
        rules.append(
            {
                "name": "out_of_time",
                # By default JobSet would start all hosts again, for as long again; and its state
                # does not say why a job of it failed, but only by which action.
                "action": "FailJobSet",
                "onJobFailureReasons": ["DeadlineExceeded"],
            }
        )
    if _resumes(layout):
        # The one failure that is a pod failure policy's.
        rules.append(
            {
                "name": "disrupted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "targetReplicatedJobs": [layout.dnn.job],
            }
        )
    if rules or settings.max_restarts:
        # A new leader must not be taken for the old one, which has the same name.
        policy["restartStrategy"] = "BlockingRecreate"
    if rules:
        policy["rules"] = rules
    return policy


def _resumes(layout: Layout) -> bool:
    """Returns whether hosts that are started again find the checkpoints of those before."""
    return layout.settings.output is not None


def _deadline_of_job(layout: Layout) -> int | None:
    """Returns the limit of the dnn group's Job; a TrainJob has one of its own."""
    return layout.settings.max_run_seconds if layout.settings.api == "jobset" else None


def _replicated_job(
    layout: Layout, group: PodGroup, *, of_run: bool, labels: Mapping[str, str] | None
) -> dict[str, Json]:
    count = group.group.count
    job: dict[str, Json] = {
        "parallelism": count,
        "completions": count,
        # Gives each pod its number, and with it a name in the DNS that stays the same.
        "completionMode": "Indexed",
        # JobSet looks at failed jobs before it looks at success: the data group's job must never
        # fail, not even as the training ends. A failed dnn pod is JobSet's case (maxRestarts), as
        # all hosts start again with it.
        "backoffLimit": 0 if group.is_dnn else WITHOUT_END,
    }
    if not group.is_dnn:
        # Not after its end, which a node that is cut off never tells.
        job["podReplacementPolicy"] = "TerminatingOrFailed"
    deadline = _deadline_of_job(layout)
    if group.is_dnn and deadline:
        job["activeDeadlineSeconds"] = deadline
    if group.is_dnn and _resumes(layout):
        disrupted: Json = {"type": "DisruptionTarget", "status": "True"}
        job["podFailurePolicy"] = {
            "rules": [{"action": "FailJob", "onPodConditions": [disrupted]}],
        }
    job["template"] = pod_template(layout, group, of_run=of_run)
    template: dict[str, Json] = {"metadata": {"labels": dict(labels)}} if labels else {}
    return {"name": group.job, "replicas": 1, "template": {**template, "spec": job}}


def disruption_budget(layout: Layout) -> Document:
    """Returns the budget by which a drain waits for the dnn group to end."""
    described = metadata(layout)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": described,
        "spec": {
            # Not maxUnavailable: how many pods a Job should have is not known to budgets.
            "minAvailable": layout.dnn.group.count,
            "selector": {"matchLabels": {JOBSET_LABEL: layout.name, ROLE_LABEL: "dnn"}},
        },
    }


def follower_budget(layout: Layout, workflow: Document, labels: Document) -> Document:
    """Returns the budget by which a drain waits for the pod that follows a Workflow's job.

    There is one for each step, and not for each job: the eviction API refuses a pod with two
    budgets by an error (500), on which a drain gives up instead of waiting.

    Args:
        layout: Layout of the job.
        workflow: Reference to the Workflow, which owns the budget.
        labels: Labels that only this step's pods have in the Workflow.
    """
    name = text(workflow, "name")
    described = metadata(layout, name=f"{name}-{text(labels, STEP_LABEL) or 'followers'}")
    del described["annotations"]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {**described, "ownerReferences": [dict(workflow)]},
        "spec": {
            # A Workflow has no scale: maxUnavailable would not be known.
            "minAvailable": 1,
            "selector": {"matchLabels": {WORKFLOW_LABEL: name, **labels}},
        },
    }


def training_runtime(layout: Layout, *, name: str) -> dict[str, Json]:
    """Returns the TrainingRuntime of `layout`, without what is a run's alone.

    Raises:
        UsageError: If Kubernetes cannot run the groups' pods.
    """
    # The trainer's label is what tells Trainer which job a TrainJob's settings go to.
    ancestors = {TRAINER_JOB: {ANCESTOR_LABEL: "trainer"}}
    spec: dict[str, Json] = {
        # Without torch's policy: stoker's launcher starts torchrun itself.
        "mlPolicy": {"numNodes": layout.dnn.group.count},
        # Both groups, whole: a TrainJob sets count, image and resources of the trainer's job only.
        "template": {"spec": jobset_spec(layout, of_run=False, job_labels=ancestors)},
    }
    described = metadata(layout, name=name)
    labels = described["labels"]
    assert isinstance(labels, dict)
    described["labels"] = {**labels, FRAMEWORK_LABEL: "torch"}
    described["annotations"] = {REQUEST_ANNOTATION: digest(spec)}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": described,
        "spec": spec,
    }


def train_job(layout: Layout, *, runtime: str) -> dict[str, Json]:
    """Returns the TrainJob that runs `layout` on the TrainingRuntime called `runtime`."""
    dnn = layout.dnn
    trainer: dict[str, Json] = {
        "image": layout.image,
        "command": [verbatim(word) for word in layout.settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "numNodes": dnn.group.count,
        "resourcesPerNode": {"requests": dict(dnn.requests), "limits": dict(dnn.limits)},
        "env": environment_of_run(layout, dnn),
    }
    patches: list[Json] = [_patch(layout, group) for group in layout.groups]
    limit = layout.settings.max_run_seconds
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": metadata(layout, queued=True),
        "spec": {
            "runtimeRef": {
                "apiGroup": TRAINER_API.partition("/")[0],
                "kind": "TrainingRuntime",
                "name": runtime,
            },
            **({"activeDeadlineSeconds": limit} if limit else {}),
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": patches}}},
                }
            ],
        },
    }


def digest(spec: Json) -> str:
    """Returns the digest by which two objects' specs are compared: 64 hexadecimal digits."""
    text = json.dumps(_without_mlflow(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_mlflow(spec: Json) -> Json:
    """Returns the spec without the variables of MLflow, which may be away in one attempt."""
    if isinstance(spec, Mapping):
        return {key: _without_mlflow(value) for key, value in spec.items()}
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return [_without_mlflow(each) for each in spec if not _is_of_mlflow(each)]
    return spec


def _is_of_mlflow(item: Json) -> bool:
    return isinstance(item, Mapping) and str(item.get("name")) in MLFLOW_VARIABLES


def _patch(layout: Layout, group: PodGroup) -> dict[str, Json]:
    mounted = volumes_of_run(layout, group)
    container: dict[str, Json] = {"name": group.job, "volumeMounts": mounts_of(mounted)}
    if not group.is_dnn:
        # Trainer takes the variables of its own container from the TrainJob's trainer only.
        container["env"] = environment_of_run(layout, group)
    spec: dict[str, Json] = {
        "containers": [container],
        "volumes": [one.volume for one in mounted],
    }
    affinity = zone_affinity(layout)
    if affinity:
        spec["affinity"] = affinity
    return {"name": group.job, "template": {"spec": {"template": {"spec": spec}}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedJob:
    """A JobSet, or a runtime's template, consists of replicated jobs.

    Attributes:
        path: Its place in the document.
        spec: Spec of the job.
        pods: The pods' spec.
        template: Template of the pods.
    """

    name: str
    path: str
    document: Document
    spec: Document
    template: Document
    pods: Document

    @property
    def labels(self) -> Document:
        """Returns the labels of the job."""
        return mapping(self.document, "template", "metadata", "labels")


def jobset_of(document: Document) -> tuple[str, Document]:
    """Returns path and spec of the JobSet in a JobSet or TrainingRuntime; none of other objects."""
    match document.get("kind"):
        case "JobSet":
            return "spec", mapping(document, "spec")
        case "TrainingRuntime":
            return "spec.template.spec", mapping(document, "spec", "template", "spec")
    return "", {}


def replicated_jobs(document: Document) -> Iterator[ReplicatedJob]:
    """Yields the replicated jobs of a JobSet or TrainingRuntime."""
    path, spec = jobset_of(document)
    for index, job in enumerate(mappings(spec, "replicatedJobs")):
        described = mapping(job, "template", "spec")
        template = mapping(described, "template")
        yield ReplicatedJob(
            name=text(job, "name"),
            path=f"{path}.replicatedJobs[{index}]",
            document=job,
            spec=described,
            template=template,
            pods=mapping(template, "spec"),
        )


def _repeated(document: Document, key: str, name: str, path: str) -> Iterator[str]:
    names = [text(item, name) for item in mappings(document, key)]
    for twice in sorted({one for one in names if names.count(one) > 1}):
        yield f"{path}.{key}: {twice} occurs twice"


def check_objects(objects: Sequence[Document]) -> None:
    """Checks what users wrote into the objects that are about to be sent.

    Raises:
        UsageError: With every rule that the first wrong object breaks.
    """
    # The server checks all other rules. It accepts a JobSet whose pods have names that are too long
    # or two volumes of one name: only events of the jobs tell, while the other group is paid for.
    for document in objects:
        found = list(problems_of(document, among=objects))
        if found:
            raise UsageError(
                "the cluster would refuse this: " + "; ".join(found[:5]),
                where=f"{document.get('kind')} {name_of(document)}",
                fix="change the workload's kubernetes settings",
            )


def problems_of(document: Document, *, among: Sequence[Document] = ()) -> Iterator[str]:
    """Yields what the server accepts in an object, although its pods could never run.

    Args:
        document: The object.
        among: All objects of the run: a TrainJob's names are those of its runtime's jobs.
    """
    name = name_of(document)
    match document.get("kind"):
        case "JobSet":
            for job in replicated_jobs(document):
                yield from _name_problems(job, name)
        case "TrainingRuntime":
            for job in replicated_jobs(document):
                # All pods of a gang are scheduled at one priority: the trainer's.
                is_trainer = text(job.labels, ANCESTOR_LABEL) == "trainer"
                if "priorityClassName" in job.pods and not is_trainer:
                    yield (
                        f"{job.path}: with Kubeflow Trainer only the job that trains has a "
                        "priority class (kubernetes.data.priority_class)"
                    )
        case "TrainJob":
            yield from _train_job_problems(document, among)
    for job in replicated_jobs(document):
        pods = f"{job.path}.template.spec.template.spec"
        yield from _repeated(job.pods, "volumes", "name", pods)
        for index, container in enumerate(mappings(job.pods, "containers")):
            path = f"{pods}.containers[{index}]"
            yield from _repeated(container, "volumeMounts", "mountPath", path)


def _name_problems(job: ReplicatedJob, name: str) -> Iterator[str]:
    """Checks names of jobs and pods as the controllers will call them, with the suffix of five."""
    replicas, completions = number(job.document, "replicas", 1), number(job.spec, "completions", 1)
    names = [f"{name}-{job.name}-{replicas - 1}"]
    if text(job.spec, "completionMode") == "Indexed":
        names.append(f"{names[0]}-{completions - 1}-abcde")
    for generated in names:
        if not is_dns_label(generated):
            yield (
                f"{job.path}: {generated} ({len(generated)} characters) is not a host name: "
                "small letters, digits and dashes, a letter first, 63 at most"
            )


def _train_job_problems(document: Document, among: Sequence[Document]) -> Iterator[str]:
    name, spec = name_of(document), mapping(document, "spec")
    if not is_dns_label(name):
        yield f"metadata.name: {name} is not a host name"
    reference = text(mapping(spec, "runtimeRef"), "name")
    for runtime in among:
        if runtime.get("kind") == "TrainingRuntime" and name_of(runtime) == reference:
            for job in replicated_jobs(runtime):
                yield from _name_problems(job, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """A request holds all objects of a job, before anything is sent.

    The job owns secret, configuration, budget and a runtime of its own; their owner references, and
    the job's own to the Workflow that it is made for, are set by submit().

    Attributes:
        layout: The groups that the objects are made of.
        main: The JobSet, or the TrainJob.
        runtime: The TrainingRuntime that the TrainJob needs; None with a JobSet.
        runtime_is_ours: Whether submit() makes the runtime; else it must be there, as it is here.
        config: The ConfigMap with what launchers read.
        secret: The Secret, with NO_TOKEN in place of the token.
        budget: The PodDisruptionBudget of the dnn group.
        records: The ConfigMap with what a later follower needs; None outside of pipelines.
    """

    job: JobSpec
    layout: Layout
    main: Document
    runtime: Document | None
    runtime_is_ours: bool
    config: Document
    secret: Document
    budget: Document
    records: Document | None = None

    @property
    def name(self) -> str:
        """Returns the name of the job's objects."""
        return self.layout.name

    @property
    def namespace(self) -> str | None:
        """Returns the namespace; None: that of the pod or kube config that submits."""
        return self.layout.settings.namespace

    @property
    def objects(self) -> tuple[Document, ...]:
        """Returns all that submit() makes, in the order in which one needs the other."""
        runtime = (self.runtime,) if self.runtime and self.runtime_is_ours else ()
        records = (self.records,) if self.records else ()
        return (self.secret, self.config, *records, self.budget, *runtime, self.main)

    @property
    def request_sha256(self) -> str:
        """Returns a digest of the job's spec and configuration: the same in each attempt."""
        return str(mapping(self.main, "metadata", "annotations")[REQUEST_ANNOTATION])


def plan_request(job: JobSpec) -> KubernetesRequest:
    """Returns the objects for `job`; reads no file and calls no cluster.

    Raises:
        UsageError: If the cluster would refuse them, with the rule, the reason and a fix.
    """
    layout = lay_out(job)
    if layout.settings.runtime and job.run is not None:
        raise UsageError(
            f"the TrainingRuntime {layout.settings.runtime} is of the run's first plan",
            where="key kubernetes.runtime",
            fix="leave it out, so that one is made for each plan",
        )
    config = _config(layout)
    runtime: Document | None = None
    if layout.settings.api == "jobset":
        main = jobset(layout)
    else:
        runtime = training_runtime(layout, name=layout.settings.runtime or layout.name)
        main = train_job(layout, runtime=layout.settings.runtime or layout.name)
    request = KubernetesRequest(
        job=job,
        layout=layout,
        main=_signed(main, layout, parts=[config["data"], runtime and runtime["spec"]]),
        runtime=runtime,
        runtime_is_ours=runtime is not None and layout.settings.runtime is None,
        config=config,
        secret=_secret(layout),
        budget=disruption_budget(layout),
        records=_records(layout) if job.records else None,
    )
    check_objects(_checked(request))
    return request


def _checked(request: KubernetesRequest) -> tuple[Document, ...]:
    objects = request.objects
    if request.runtime and not request.runtime_is_ours:
        return (request.runtime, *objects)
    return objects


def _signed(main: dict[str, Json], layout: Layout, *, parts: list[Json]) -> Document:
    """Returns the job with a digest of it and `parts`, to recognise an earlier attempt's job."""
    described = mapping(main, "metadata")
    annotations = {**mapping(described, "annotations")}
    annotations[REQUEST_ANNOTATION] = digest([main["spec"], *parts])
    if layout.job.settings.workload_sha256:
        annotations[WORKLOAD_ANNOTATION] = layout.job.settings.workload_sha256
    return {**main, "metadata": {**described, "annotations": annotations}}


def _config(layout: Layout) -> Document:
    data: dict[str, Json] = {
        HYPERPARAMETERS_KEY: _json(hyperparameters(layout.job.hyperparameters)),
    }
    for group in layout.groups:
        channels = channels_of(layout, group)
        data[inputs_key(group)] = _json(
            {
                name: {
                    "TrainingInputMode": "File",
                    "S3DistributionType": "FullyReplicated",
                    "RecordWrapperType": "None",
                }
                for name in channels
            }
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(layout, name=config_map(layout.name)),
        # Nobody changes a run's settings under it, and kubelets need not watch the object.
        "immutable": True,
        "data": data,
    }


def _records(layout: Layout) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(layout, name=records_map(layout.name)),
        "immutable": True,
        "data": dict(layout.job.records),
    }


def _secret(layout: Layout) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(layout, name=token_secret(layout.name)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: NO_TOKEN},
    }


def _json(document: Json) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes what a parser could take for a number, a date or a truth: kubectl reads YAML 1.1."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns True: objects are written in full, however often they are used."""
        # Kubernetes' parser knows YAML's anchors, people who read the file may not.
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.match(text) and text.lower() not in _WORDS
    style = "" if is_plain else "|" if "\n" in text else "'"
    if not text.replace("\n", "").isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def manifest(
    objects: Sequence[Mapping[str, Json]], *, notes: Mapping[str, str] | None = None
) -> str:
    """Returns the objects as YAML, one document each.

    Args:
        objects: Objects in their order.
        notes: Words for those who read it, by the object's kind.
    """
    documents = []
    for document in objects:
        words = (notes or {}).get(str(document.get("kind")), "")
        comment = "".join(f"# {line}\n" for line in words.splitlines())
        written = yaml.dump(
            document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
        )
        documents.append(comment + written)
    return "---\n".join(documents)
