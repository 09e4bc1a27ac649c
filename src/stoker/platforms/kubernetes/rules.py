"""What a cluster checks beyond the schemas: rules of webhooks, CEL, and Kubernetes' own validation.

A JobSet is let in with pods that can never be made: that shows only in events of its jobs, while
the data group's nodes are already paid for. So the rules for pods are checked here, too.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from stoker.errors import UsageError
from stoker.platforms.kubernetes import pod_rules, schema, security
from stoker.platforms.kubernetes.names import is_dns_label
from stoker.platforms.kubernetes.reading import (
    Document,
    ReplicatedJob,
    jobset_of,
    mapping,
    mappings,
    name_of,
    number,
    replicated_jobs,
    text,
    texts,
)
from stoker.platforms.kubernetes.trainer import ANCESTOR_LABEL

_CHECKED_BY_SCHEMA = ("JobSet", "TrainJob", "TrainingRuntime")
_MAX_PODS = 2**31 - 1
# What the API server takes of a ConfigMap or Secret.
_MAX_BYTES = 1 << 20
_RULE_NAME = re.compile(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
# Features that a JobSet controller has switched off unless it is told otherwise.
_ALPHA_ACTIONS = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
_ALPHA_RESTARTS = ("InPlaceRestart",)
_RESERVED_CONTAINERS = ("node", "dataset-initializer", "model-initializer")
_ANCESTORS = {"trainer": "node", "dataset-initializer": "dataset-initializer"}
_MANAGER = re.compile(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9/_.%:~-]+$")


def check_objects(objects: Sequence[Document]) -> None:
    """Checks what is about to be sent.

    Raises:
        UsageError: With every rule that the first wrong object breaks.
    """
    for document in objects:
        found = list(problems(document, among=objects))
        if found:
            raise UsageError(
                "the cluster would refuse this: " + "; ".join(found[:5]),
                where=f"{document.get('kind')} {name_of(document)}",
                fix="change the workload's kubernetes settings",
            )


def problems(document: Document, *, among: Sequence[Document] = ()) -> Iterator[str]:
    """What is wrong with one object; of its schema only, if there is anything.

    Args:
        document: The object.
        among: All objects of the run: a TrainJob is held against its runtime.
    """
    kind = str(document.get("kind"))
    if kind in _CHECKED_BY_SCHEMA:
        wrong = list(schema.problems(document))
        if wrong:
            yield from wrong
            return
    yield from pod_rules.metadata_problems(mapping(document, "metadata"), "metadata")
    match kind:
        case "JobSet":
            yield from _jobset_problems(document, name=name_of(document))
        case "TrainingRuntime":
            yield from _jobset_problems(document, name="")
            yield from _runtime_problems(document)
        case "TrainJob":
            yield from _train_job_problems(document, among)
        case "ConfigMap" | "Secret":
            size = sum(len(k) + len(str(v)) for k, v in mapping(document, "data").items())
            if size > _MAX_BYTES:
                yield f"data: {size} bytes are more than {_MAX_BYTES}"


def _jobset_problems(document: Document, *, name: str) -> Iterator[str]:
    for rule in _JOBSET_RULES:
        yield from rule(document)
    for job in replicated_jobs(document):
        if name:
            yield from _name_problems(job, name)
        yield from _job_problems(job)


def _policy_problems(document: Document) -> Iterator[str]:
    path, spec = jobset_of(document)
    jobs = [job.name for job in replicated_jobs(document)]
    for target in texts(mapping(spec, "successPolicy"), "targetReplicatedJobs"):
        if target not in jobs:
            yield f"{path}.successPolicy: there is no replicated job {target}"
    policy = mapping(spec, "failurePolicy")
    if text(policy, "restartStrategy") in _ALPHA_RESTARTS:
        yield f"{path}.failurePolicy: {policy['restartStrategy']} is an alpha feature"
    names: list[str] = []
    for index, rule in enumerate(mappings(policy, "rules")):
        where = f"{path}.failurePolicy.rules[{index}]"
        rule_name = text(rule, "name")
        if len(rule_name) > 128 or not _RULE_NAME.match(rule_name):
            yield f"{where}: {rule_name!r} is no name for a rule"
        if rule_name in names:
            yield f"{where}: two rules are called {rule_name}"
        names.append(rule_name)
        if text(rule, "action") in _ALPHA_ACTIONS:
            yield f"{where}: {rule['action']} is an alpha feature, off by default"
        for reason in texts(rule, "onJobFailureReasons"):
            if reason not in _REASONS:
                yield f"{where}: no job fails for the reason {reason}"
        for target in texts(rule, "targetReplicatedJobs"):
            if target not in jobs:
                yield f"{where}: there is no replicated job {target}"


def _order_problems(document: Document) -> Iterator[str]:
    path, spec = jobset_of(document)
    in_order = text(mapping(spec, "startupPolicy"), "startupPolicyOrder") == "InOrder"
    before: list[str] = []
    for job in replicated_jobs(document):
        for dependency in mappings(job.document, "dependsOn"):
            if not before:
                yield f"{job.path}.dependsOn: the first replicated job depends on none"
            elif text(dependency, "name") not in before:
                yield f"{job.path}.dependsOn: {dependency.get('name')} does not come before it"
            if in_order:
                yield f"{path}.startupPolicy: InOrder and dependsOn exclude each other"
        before.append(job.name)


def _network_problems(document: Document) -> Iterator[str]:
    path, spec = jobset_of(document)
    subdomain = text(mapping(spec, "network"), "subdomain")
    if subdomain and not is_dns_label(subdomain):
        yield f"{path}.network.subdomain: {subdomain} is no name for a service"


_JOBSET_RULES: tuple[Callable[[Document], Iterator[str]], ...] = (
    _policy_problems,
    _order_problems,
    _network_problems,
)


def _name_problems(job: ReplicatedJob, name: str) -> Iterator[str]:
    """Of jobs and pods as the controllers will call them, with the suffix of five."""
    replicas, completions = number(job.document, "replicas", 1), number(job.spec, "completions", 1)
    names = [f"{name}-{job.name}-{replicas - 1}"]
    if text(job.spec, "completionMode") == "Indexed":
        names.append(f"{names[0]}-{completions - 1}-abcde")
    for generated in names:
        if not is_dns_label(generated):
            yield (
                f"{job.path}: {generated} ({len(generated)} characters) is no name of a host: "
                "small letters, digits and dashes, a letter first, 63 at most"
            )


def _job_problems(job: ReplicatedJob) -> Iterator[str]:
    path = f"{job.path}.template.spec"
    if number(job.document, "replicas", 1) * number(job.spec, "parallelism", 1) > _MAX_PODS:
        yield f"{job.path}: has too many pods"
    restart = text(job.pods, "restartPolicy")
    if restart not in ("Never", "OnFailure"):
        yield f"{path}.template.spec.restartPolicy: a job's pods restart Never or OnFailure"
    if "podFailurePolicy" in job.spec and restart != "Never":
        yield f"{path}.podFailurePolicy: needs the restart policy Never"
    for key in ("backoffLimit", "activeDeadlineSeconds", "parallelism", "completions"):
        if number(job.spec, key, 1) < 0:
            yield f"{path}.{key}: is negative"
    pods = f"{path}.template"
    yield from pod_rules.metadata_problems(mapping(job.template, "metadata"), f"{pods}.metadata")
    yield from pod_rules.problems(job.pods, f"{pods}.spec")
    yield from (f"{pods}.spec.{problem}" for problem in security.problems(job.pods))


def _runtime_problems(document: Document) -> Iterator[str]:
    policies = set(mapping(document, "spec", "mlPolicy")) - {"numNodes"}
    if len(policies) > 1:
        yield f"spec.mlPolicy: has {len(policies)} policies, and can have one"
    for job in replicated_jobs(document):
        ancestor = text(job.labels, ANCESTOR_LABEL)
        is_trainer = ancestor == "trainer"
        # All pods of a gang are scheduled at one priority: the trainer's.
        if "priorityClassName" in job.pods and not is_trainer:
            yield (
                f"{job.path}: with Kubeflow Trainer only the job that trains has a priority class "
                "(kubernetes.data.priority_class)"
            )
        needed = _ANCESTORS.get(ancestor)
        if needed is None:
            continue
        if number(job.document, "replicas", 1) != 1:
            yield f"{job.path}.replicas: is always 1"
        if needed not in [text(c, "name") for c in mappings(job.pods, "containers")]:
            yield f"{job.path}: has no container {needed}"


def _train_job_problems(document: Document, among: Sequence[Document]) -> Iterator[str]:
    name, spec = name_of(document), mapping(document, "spec")
    if not is_dns_label(name):
        yield f"metadata.name: {name} is no name of a host"
    reference = text(mapping(spec, "runtimeRef"), "name")
    runtimes = [d for d in among if d.get("kind") == "TrainingRuntime" and name_of(d) == reference]
    jobs = {job.name: job for runtime in runtimes[:1] for job in replicated_jobs(runtime)}
    for job in jobs.values():
        yield from _name_problems(job, name)
    for index, patch in enumerate(mappings(spec, "runtimePatches")):
        path = f"spec.runtimePatches[{index}]"
        if not _MANAGER.match(text(patch, "manager")):
            yield f"{path}.manager: is no domain with a path"
        template = mapping(patch, "trainingRuntimeSpec", "template", "spec")
        for patched in mappings(template, "replicatedJobs"):
            yield from _patch_problems(patched, jobs, path)


def _patch_problems(patched: Document, jobs: dict[str, ReplicatedJob], path: str) -> Iterator[str]:
    target = jobs.get(text(patched, "name"))
    if jobs and target is None:
        yield f"{path}: the runtime has no replicated job {patched.get('name')}"
    known = [text(c, "name") for c in mappings(target.pods, "containers")] if target else []
    pods = mapping(patched, "template", "spec", "template", "spec")
    for container in mappings(pods, "containers"):
        name = text(container, "name")
        if target and name not in known:
            yield f"{path}: the runtime's {target.name} has no container {name}"
        if name in _RESERVED_CONTAINERS and container.get("env"):
            yield f"{path}: variables of {name} are set by spec.trainer.env only"
