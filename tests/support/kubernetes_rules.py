"""Applies a cluster's rules to what stoker itself writes into its objects, as a server does.

A server prunes unknown fields without a word, so that a misspelt one is only missed when the job
runs. The schemas are those of JobSet and Kubeflow Trainer, without their descriptions; see NOTICE.
What a server accepts and cannot run is checked by `stoker.platforms.kubernetes.jobset`.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft4Validator, FormatChecker, ValidationError, validators

from stoker.platforms.kubernetes.api import name_of, number, text
from stoker.platforms.kubernetes.jobset import (
    ANCESTOR_LABEL,
    ReplicatedJob,
    jobset_of,
    problems_of,
    replicated_jobs,
)
from stoker.platforms.kubernetes.layout import is_dns_label
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings, texts
from stoker.records.platforms import amount

CRDS = Path(__file__).parents[1] / "data" / "crds"

_FILES: Mapping[tuple[str, str], str] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset.x-k8s.io_jobsets",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainer.kubeflow.org_trainjobs",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "trainer.kubeflow.org_trainingruntimes",
}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
# CRDs leave an object's own metadata to the server.
_METADATA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "namespace": {"type": "string", "minLength": 1, "maxLength": 63},
        "labels": _TEXTS,
        "annotations": _TEXTS,
    },
}
# Kubernetes' own rules for values of labels, keys, names and variables.
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")
_QUALIFIED = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$")
_VARIABLE = re.compile(r"^[A-Za-z_.-][A-Za-z0-9_.-]*$")
_WHOLE = re.compile(r"^[0-9]+$")
# Resources that may be asked for in parts; all others come whole, and are not overcommitted.
_DIVISIBLE = ("cpu", "memory", "ephemeral-storage")
_MAX_ANNOTATIONS = 256 << 10
# What the API server takes of a ConfigMap or Secret.
_MAX_BYTES = 1 << 20


def schema_problems(document: Mapping[str, Json]) -> Iterator[str]:
    """Yields what is wrong with an object by its schema, one `path: what` each."""
    key = (str(document.get("apiVersion")), str(document.get("kind")))
    validator = _validator(_FILES[key], version=key[0].partition("/")[2])
    for error in validator.iter_errors(json.loads(json.dumps(document))):
        path = error.json_path.removeprefix("$").removeprefix(".")
        if error.validator == "additionalProperties":
            for name in error.instance.keys() - error.schema.get("properties", {}).keys():
                yield f"{path}.{name}".removeprefix(".") + ": no such field"
        else:
            yield f"{path or 'the object'}: {error.message[:200]}"


def unknown_fields(document: Mapping[str, Json]) -> list[str]:
    if (str(document.get("apiVersion")), str(document.get("kind"))) not in _FILES:
        return []
    found = (problem.partition(": no such field") for problem in schema_problems(document))
    return [path for path, unknown, _ in found if unknown]


@cache
def _validator(name: str, *, version: str) -> Any:
    document = json.loads(gzip.decompress((CRDS / f"{name}.json.gz").read_bytes()))
    versions = {each["name"]: each for each in document["spec"]["versions"]}
    schema = versions[version]["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = _METADATA
    _close(schema)
    return _Validator(schema, format_checker=_FORMATS)


def _close(schema: dict[str, Any]) -> None:
    """Makes unknown fields an error in a schema, where it does not keep them."""
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            _close(schema[key])
    for below in schema.get("properties", {}).values():
        _close(below)
    if schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)


def _repeated_items(_, kind, value, schema) -> Iterator[ValidationError]:
    keys, items = schema.get("x-kubernetes-list-map-keys", []), schema.get("items", {})
    seen: list[Any] = []
    for item in value if kind in ("set", "map") and isinstance(value, list) else ():
        identity = item
        if kind == "map" and isinstance(item, dict):
            defaults = {key: items["properties"][key].get("default") for key in keys}
            identity = [item.get(key, defaults[key]) for key in keys]
        if identity in seen:
            yield ValidationError(f"stands there twice: {identity}")
        seen.append(identity)


_Validator = validators.extend(Draft4Validator, {"x-kubernetes-list-type": _repeated_items})
_FORMATS = FormatChecker(())
_FORMATS.checks("int32", raises=TypeError)(lambda value: -(1 << 31) <= value < 1 << 31)
_FORMATS.checks("int64", raises=TypeError)(lambda value: -(1 << 63) <= value < 1 << 63)


_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"}
_VOLUMES |= {"persistentVolumeClaim", "projected", "secret"}


def security_problems(pods: Document) -> Iterator[str]:
    """Yields what the restricted profile refuses in a pod's spec, one `path: what` each."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pods.get(key):
            yield f"{key}: shares the node's"
    for index, volume in enumerate(mappings(pods, "volumes")):
        for kind in sorted(set(volume) - {"name"} - _VOLUMES):
            yield f"volumes[{index}].{kind}: pods must not have volumes of this kind"
    whole = mapping(pods, "securityContext")
    containers = [
        (f"{key}[{index}]", container)
        for key in ("initContainers", "containers")
        for index, container in enumerate(mappings(pods, key))
    ]
    for path, container in containers:
        own = mapping(container, "securityContext")
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{path}: must not let its processes gain privileges"
        if own.get("privileged"):
            yield f"{path}: must not be privileged"
        capabilities = mapping(own, "capabilities")
        if "ALL" not in texts(capabilities, "drop"):
            yield f"{path}: must drop all capabilities"
        if set(texts(capabilities, "add")) - {"NET_BIND_SERVICE"}:
            yield f"{path}: must not add capabilities"
        if not own.get("runAsNonRoot", whole.get("runAsNonRoot")):
            yield f"{path}: must not run as root"
        if own.get("runAsUser", whole.get("runAsUser")) == 0:
            yield f"{path}: must not run as user 0"
        profile = mapping(own, "seccompProfile") or mapping(whole, "seccompProfile")
        if text(profile, "type") not in ("RuntimeDefault", "Localhost"):
            yield f"{path}: needs a seccomp profile"
        for port in mappings(container, "ports"):
            if port.get("hostPort"):
                yield f"{path}: must not use a port of the node"


_CHECKED_BY_SCHEMA = ("JobSet", "TrainJob", "TrainingRuntime")
_MAX_PODS = 2**31 - 1
_DNS_LABEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
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


def rule_problems(document: Document, *, among: Sequence[Document] = ()) -> Iterator[str]:
    """Yields what is wrong with one of the objects `among`: by its schema, or else by rules."""
    kind = str(document.get("kind"))
    if kind in _CHECKED_BY_SCHEMA:
        wrong = list(schema_problems(document))
        if wrong:
            yield from wrong
            return
    for rule in (_policy_problems, _order_problems, _network_problems):
        yield from rule(document)
    for job in replicated_jobs(document):
        yield from _job_problems(job)
    if kind == "TrainingRuntime":
        yield from _runtime_problems(document)
    if kind == "TrainJob":
        yield from _train_job_problems(document, among)
    yield from _server_problems(document)
    yield from problems_of(document, among=among)


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
            yield f"{where}: {rule_name!r} is not a name for a rule"
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
        yield f"{path}.network.subdomain: {subdomain} is not a name for a service"


def _job_problems(job: ReplicatedJob) -> Iterator[str]:
    path = f"{job.path}.template.spec"
    if number(job.document, "replicas", 1) * number(job.spec, "parallelism", 1) > _MAX_PODS:
        yield f"{job.path}: has too many pods"
    restart = text(job.pods, "restartPolicy")
    if restart not in ("Never", "OnFailure"):
        yield f"{path}.template.spec.restartPolicy: a job's pods restart Never or OnFailure"
    if "podFailurePolicy" in job.spec and restart != "Never":
        yield f"{path}.podFailurePolicy: needs the restart policy Never"
    # validateJobSpec of Kubernetes' pkg/apis/batch/validation.
    allowed = ("Failed",) if "podFailurePolicy" in job.spec else ("Failed", "TerminatingOrFailed")
    if job.spec.get("podReplacementPolicy", "Failed") not in allowed:
        yield f"{path}.podReplacementPolicy: must be {' or '.join(allowed)}"
    for key in ("backoffLimit", "activeDeadlineSeconds", "parallelism", "completions"):
        if number(job.spec, key, 1) < 0:
            yield f"{path}.{key}: is negative"
    volumes = [text(volume, "name") for volume in mappings(job.pods, "volumes")]
    for name in volumes:
        if not _DNS_LABEL.match(name):
            yield f"{path}.template.spec.volumes: {name!r} is not a volume name"
    for container in mappings(job.pods, "containers"):
        if not _DNS_LABEL.match(text(container, "name")):
            yield f"{path}: {container.get('name')!r} is not a container name"
        for mount in mappings(container, "volumeMounts"):
            if text(mount, "name") not in volumes:
                yield f"{path}: there is no volume {mount.get('name')}"
        requests = mapping(container, "resources", "requests")
        for name, limit in mapping(container, "resources", "limits").items():
            if name in requests and amount(str(requests[name])) > amount(str(limit)):
                yield f"{path}: the limit of {name} is below what is asked for"
    yield from (f"{path}.template.spec.{problem}" for problem in security_problems(job.pods))


def _runtime_problems(document: Document) -> Iterator[str]:
    policies = set(mapping(document, "spec", "mlPolicy")) - {"numNodes"}
    if len(policies) > 1:
        yield f"spec.mlPolicy: has {len(policies)} policies, and can have one"
    for job in replicated_jobs(document):
        needed = _ANCESTORS.get(text(job.labels, ANCESTOR_LABEL))
        if needed is None:
            continue
        if number(job.document, "replicas", 1) != 1:
            yield f"{job.path}.replicas: is always 1"
        if needed not in [text(c, "name") for c in mappings(job.pods, "containers")]:
            yield f"{job.path}: has no container {needed}"


def _train_job_problems(document: Document, among: Sequence[Document]) -> Iterator[str]:
    spec = mapping(document, "spec")
    reference = text(mapping(spec, "runtimeRef"), "name")
    runtimes = [d for d in among if d.get("kind") == "TrainingRuntime" and name_of(d) == reference]
    jobs = {job.name: job for runtime in runtimes[:1] for job in replicated_jobs(runtime)}
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


def _server_problems(document: Document) -> Iterator[str]:
    yield from _metadata_problems(mapping(document, "metadata"), "metadata")
    if document.get("kind") in ("ConfigMap", "Secret"):
        size = sum(len(k) + len(str(v)) for k, v in mapping(document, "data").items())
        if size > _MAX_BYTES:
            yield f"data: {size} bytes are more than {_MAX_BYTES}"
    for job in replicated_jobs(document):
        pods = f"{job.path}.template.spec.template"
        yield from _metadata_problems(mapping(job.template, "metadata"), f"{pods}.metadata")
        yield from _pod_problems(job.pods, f"{pods}.spec")


def _metadata_problems(metadata: Document, path: str) -> Iterator[str]:
    if "name" in metadata and not _is_subdomain(text(metadata, "name")):
        yield f"{path}.name: {metadata['name']} is not a name for an object"
    for key, value in mapping(metadata, "labels").items():
        yield from _key_problems(key, f"{path}.labels")
        if not _LABEL_VALUE.match(str(value)):
            yield f"{path}.labels: {value!r} is not a label value"
    annotations = mapping(metadata, "annotations")
    for key in annotations:
        yield from _key_problems(key, f"{path}.annotations")
    if sum(len(k) + len(str(v)) for k, v in annotations.items()) > _MAX_ANNOTATIONS:
        yield f"{path}.annotations: they are too long"


def _pod_problems(pods: Document, path: str) -> Iterator[str]:
    yield from _repeated(pods, "volumes", "name", path)
    for key, value in mapping(pods, "nodeSelector").items():
        yield from _key_problems(key, f"{path}.nodeSelector")
        if not _LABEL_VALUE.match(str(value)):
            yield f"{path}.nodeSelector: {value!r} is not a label value"
    for index, container in enumerate(mappings(pods, "containers")):
        yield from _container_problems(container, f"{path}.containers[{index}]")


def _container_problems(container: Document, path: str) -> Iterator[str]:
    image = text(container, "image")
    if not image or image != image.strip():
        yield f"{path}.image: {image!r} is not an image"
    for variable in mappings(container, "env"):
        if not _VARIABLE.match(text(variable, "name")):
            yield f"{path}.env: {variable.get('name')!r} is not a variable name"
    yield from _repeated(container, "env", "name", path)
    yield from _repeated(container, "volumeMounts", "mountPath", path)
    for mount in mappings(container, "volumeMounts"):
        for key in ("subPath", "subPathExpr"):
            inner = text(mount, key)
            if inner.startswith("/") or ".." in inner.split("/"):
                yield f"{path}.volumeMounts: {inner} is not a folder inside a volume"
    yield from _resource_problems(mapping(container, "resources"), f"{path}.resources")


def _resource_problems(resources: Document, path: str) -> Iterator[str]:
    requests, limits = mapping(resources, "requests"), mapping(resources, "limits")
    for name in {**requests, **limits}:
        yield from _key_problems(name, path)
        if name in _DIVISIBLE or name.startswith("hugepages-"):
            continue
        if "/" not in name:
            yield f"{path}: there is no resource {name}"
        limit = limits.get(name)
        if not _WHOLE.match(str(limit)) or requests.get(name, limit) != limit:
            yield f"{path}: {name} needs a whole number, and its limit equals its request"


def _key_problems(key: str, path: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not _QUALIFIED.match(name) or (slash and not _is_subdomain(prefix)):
        yield f"{path}: {key!r} is not a key"


def _is_subdomain(name: str) -> bool:
    return len(name) <= 253 and bool(_SUBDOMAIN.match(name))


def _repeated(document: Document, key: str, name: str, path: str) -> Iterator[str]:
    names = [text(item, name) for item in mappings(document, key)]
    for twice in sorted({one for one in names if names.count(one) > 1}):
        yield f"{path}.{key}: {twice} occurs twice"
