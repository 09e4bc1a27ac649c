"""Applies a cluster's rules to what stoker itself writes into its objects, as a server does.

A server prunes unknown fields without a word, so that a misspelt one is only missed when the job
runs. The schemas are those of JobSet and Kubeflow Trainer, without their descriptions; see NOTICE.
What a server accepts and cannot run is not refused here.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft4Validator, FormatChecker, ValidationError, validators

from support.documents import (
    Document,
    amount,
    mapping,
    mappings,
    name_of,
    text,
    texts,
)

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
# Kubernetes' own rules for values of labels and names.
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")
_OBJECT_NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
_KINDS = ("JobSet", "TrainJob", "TrainingRuntime")


def schema_problems(document: Document) -> Iterator[str]:
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


def unknown_fields(document: Document) -> list[str]:
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


def rule_problems(document: Document, *, among: Sequence[Document] = ()) -> Iterator[str]:
    """Yields what is wrong with one of the objects `among`: by its schema, or else by rules."""
    if document.get("kind") in _KINDS:
        wrong = list(schema_problems(document))
        if wrong:
            yield from wrong
            return
    if not _OBJECT_NAME.match(name_of(document)):
        yield f"metadata.name: {name_of(document)} is not a name for an object"
    spec = mapping(document, "spec")
    if document.get("kind") == "TrainJob":
        named = text(spec, "runtimeRef", "name")
        if among and named not in [name_of(each) for each in among]:
            yield f"spec.runtimeRef: there is no runtime {named}"
    if document.get("kind") == "TrainingRuntime":
        spec = mapping(spec, "template", "spec")
    jobs = mappings(spec, "replicatedJobs")
    names = [text(job, "name") for job in jobs]
    for part in (mapping(spec, "successPolicy"), *mappings(spec, "failurePolicy", "rules")):
        for target in texts(part, "targetReplicatedJobs"):
            if target not in names:
                yield f"there is no replicated job {target}"
    for job in jobs:
        yield from (f"{job['name']}: {found}" for found in _job_problems(job))


def _job_problems(job: Document) -> Iterator[str]:
    spec = mapping(job, "template", "spec")
    pods = mapping(spec, "template", "spec")
    restart = text(pods, "restartPolicy")
    if restart not in ("Never", "OnFailure"):
        yield "restartPolicy: a job's pods restart Never or OnFailure"
    if "podFailurePolicy" in spec and restart != "Never":
        yield "podFailurePolicy: needs the restart policy Never"
    # validateJobSpec of Kubernetes' pkg/apis/batch/validation.
    allowed = ("Failed",) if "podFailurePolicy" in spec else ("Failed", "TerminatingOrFailed")
    if spec.get("podReplacementPolicy", "Failed") not in allowed:
        yield f"podReplacementPolicy: must be {' or '.join(allowed)}"
    for key, value in mapping(spec, "template", "metadata", "labels").items():
        if not _LABEL_VALUE.match(str(value)):
            yield f"labels: {key}: {value!r} is not a label value"
    volumes = [text(volume, "name") for volume in mappings(pods, "volumes")]
    yield from _repeated(volumes, "volumes")
    for container in mappings(pods, "containers"):
        yield from _repeated([text(each, "name") for each in mappings(container, "env")], "env")
        mounts = mappings(container, "volumeMounts")
        yield from _repeated([text(mount, "mountPath") for mount in mounts], "volumeMounts")
        for mount in mounts:
            if text(mount, "name") not in volumes:
                yield f"there is no volume {mount.get('name')}"
        requests = mapping(container, "resources", "requests")
        for name, limit in mapping(container, "resources", "limits").items():
            if name in requests and amount(str(requests[name])) > amount(str(limit)):
                yield f"the limit of {name} is below what is asked for"
    yield from security_problems(pods)


def _repeated(names: Sequence[str], key: str) -> Iterator[str]:
    for twice in sorted({one for one in names if names.count(one) > 1}):
        yield f"{key}: {twice} occurs twice"
