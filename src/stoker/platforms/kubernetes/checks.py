"""Checks what users write into objects before it is sent: names, labels, pods, sizes.

A JobSet is let in with pods that can never be made: that shows only in events of its jobs, while
the data group's nodes are already paid for. What stoker itself writes is held against the schemas
of JobSet and Kubeflow Trainer, and the restricted profile, by its tests.
"""

import re
from collections.abc import Iterator, Sequence

from stoker.errors import UsageError
from stoker.platforms.kubernetes.objects import is_dns_label
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
_MAX_COUNT = 2**31 - 1
# Of a TrainJob, which a JobSet does not bound.
_MAX_WORDS, _MAX_IMAGE = 128, 500


def metadata_problems(metadata: Document, path: str) -> Iterator[str]:
    """Yields what is wrong with labels, annotations, and an object's name where it has one."""
    if "name" in metadata and not _is_subdomain(text(metadata, "name")):
        yield f"{path}.name: {metadata['name']} is no name of an object"
    for key, value in mapping(metadata, "labels").items():
        yield from _key_problems(key, f"{path}.labels")
        if not _LABEL_VALUE.match(str(value)):
            yield f"{path}.labels: {value!r} is no value of a label"
    annotations = mapping(metadata, "annotations")
    for key in annotations:
        yield from _key_problems(key, f"{path}.annotations")
    if sum(len(k) + len(str(v)) for k, v in annotations.items()) > _MAX_ANNOTATIONS:
        yield f"{path}.annotations: are too long"


def pod_problems(pods: Document, path: str) -> Iterator[str]:
    """Yields what is wrong with a pod's spec, one `path: what` each."""
    yield from _repeated(pods, "volumes", "name", path)
    yield from _repeated(pods, "imagePullSecrets", "name", path)
    for key, value in mapping(pods, "nodeSelector").items():
        yield from _key_problems(key, f"{path}.nodeSelector")
        if not _LABEL_VALUE.match(str(value)):
            yield f"{path}.nodeSelector: {value!r} is no value of a label"
    for key in ("serviceAccountName", "priorityClassName"):
        if key in pods and not _is_subdomain(text(pods, key)):
            yield f"{path}.{key}: {pods[key]} is no name of an object"
    for secret in mappings(pods, "imagePullSecrets"):
        if not _is_subdomain(text(secret, "name")):
            yield f"{path}.imagePullSecrets: {secret.get('name')} is no name of an object"
    for index, toleration in enumerate(mappings(pods, "tolerations")):
        yield from _toleration_problems(toleration, f"{path}.tolerations[{index}]")
    yield from _affinity_problems(mapping(pods, "affinity", "nodeAffinity"), f"{path}.affinity")
    for index, container in enumerate(mappings(pods, "containers")):
        yield from _container_problems(container, f"{path}.containers[{index}]")


def _repeated(document: Document, key: str, name: str, path: str) -> Iterator[str]:
    names = [text(item, name) for item in mappings(document, key)]
    for twice in sorted({one for one in names if names.count(one) > 1}):
        yield f"{path}.{key}: {twice} is there twice"


def _container_problems(container: Document, path: str) -> Iterator[str]:
    image = text(container, "image")
    if not image or image != image.strip():
        yield f"{path}.image: {image!r} is no image"
    for variable in mappings(container, "env"):
        if not _VARIABLE.match(text(variable, "name")):
            yield f"{path}.env: {variable.get('name')!r} is no name of a variable"
    yield from _repeated(container, "env", "name", path)
    yield from _repeated(container, "volumeMounts", "mountPath", path)
    for mount in mappings(container, "volumeMounts"):
        for key in ("subPath", "subPathExpr"):
            inner = text(mount, key)
            if inner.startswith("/") or ".." in inner.split("/"):
                yield f"{path}.volumeMounts: {inner} is no folder within a volume"
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
            yield f"{path}: {name} comes in whole numbers, and none beyond what is asked for"


def _toleration_problems(toleration: Document, path: str) -> Iterator[str]:
    key, operator = text(toleration, "key"), text(toleration, "operator") or "Equal"
    if key:
        yield from _key_problems(key, path)
    elif operator != "Exists":
        yield f"{path}: without a key its operator is Exists"
    if operator == "Exists" and toleration.get("value"):
        yield f"{path}: Exists has no value"
    if not _LABEL_VALUE.match(text(toleration, "value")):
        yield f"{path}: {toleration.get('value')!r} is no value of a taint"


def _affinity_problems(affinity: Document, path: str) -> Iterator[str]:
    terms = mappings(
        affinity, "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
    )
    preferred = mappings(affinity, "preferredDuringSchedulingIgnoredDuringExecution")
    terms += [mapping(term, "preference") for term in preferred]
    for term in terms:
        for rule in mappings(term, "matchExpressions"):
            key, values = text(rule, "key"), texts(rule, "values")
            yield from _key_problems(key, path)
            match text(rule, "operator"):
                case "In" | "NotIn" if not values:
                    yield f"{path}: {key} names no values"
                case "Exists" | "DoesNotExist" if values:
                    yield f"{path}: {key} needs no values"
                case "Gt" | "Lt" if len(values) != 1 or not _WHOLE.match(values[0]):
                    yield f"{path}: {key} is compared with one whole number"
                case _:
                    pass


def _key_problems(key: str, path: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not _QUALIFIED.match(name) or (slash and not _is_subdomain(prefix)):
        yield f"{path}: {key!r} is no key"


def _is_subdomain(name: str) -> bool:
    return len(name) <= 253 and bool(_SUBDOMAIN.match(name))


def check_objects(objects: Sequence[Document]) -> None:
    """Checks what users wrote into the objects that are about to be sent.

    Raises:
        UsageError: With every rule that the first wrong object breaks.
    """
    for document in objects:
        found = list(problems_of(document, among=objects))
        if found:
            raise UsageError(
                "the cluster would refuse this: " + "; ".join(found[:5]),
                where=f"{document.get('kind')} {name_of(document)}",
                fix="change the workload's kubernetes settings",
            )


def problems_of(document: Document, *, among: Sequence[Document] = ()) -> Iterator[str]:
    """Yields what is wrong with what users wrote into an object.

    Args:
        document: The object.
        among: All objects of the run: a TrainJob's names are those of its runtime's jobs.
    """
    yield from metadata_problems(mapping(document, "metadata"), "metadata")
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
        case "ConfigMap" | "Secret":
            size = sum(len(k) + len(str(v)) for k, v in mapping(document, "data").items())
            if size > _MAX_BYTES:
                yield f"data: {size} bytes are more than {_MAX_BYTES}"
    _, jobset = jobset_of(document)
    for key, holder in (
        ("ttlSecondsAfterFinished", jobset),
        ("maxRestarts", mapping(jobset, "failurePolicy")),
    ):
        if number(holder, key) > _MAX_COUNT:
            yield f"{key}: {holder[key]} is more than {_MAX_COUNT}"
    for job in replicated_jobs(document):
        pods = f"{job.path}.template.spec.template"
        yield from metadata_problems(mapping(job.template, "metadata"), f"{pods}.metadata")
        yield from pod_problems(job.pods, f"{pods}.spec")


def _name_problems(job: ReplicatedJob, name: str) -> Iterator[str]:
    """Checks names of jobs and pods as the controllers will call them, with the suffix of five."""
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


def _train_job_problems(document: Document, among: Sequence[Document]) -> Iterator[str]:
    name, spec = name_of(document), mapping(document, "spec")
    if not is_dns_label(name):
        yield f"metadata.name: {name} is no name of a host"
    reference = text(mapping(spec, "runtimeRef"), "name")
    for runtime in among:
        if runtime.get("kind") == "TrainingRuntime" and name_of(runtime) == reference:
            for job in replicated_jobs(runtime):
                yield from _name_problems(job, name)
    trainer = mapping(spec, "trainer")
    if len(text(trainer, "image")) > _MAX_IMAGE:
        yield f"spec.trainer.image: is longer than {_MAX_IMAGE}"
    for key in ("command", "args", "env"):
        words = trainer.get(key)
        if isinstance(words, list) and len(words) > _MAX_WORDS:
            yield f"spec.trainer.{key}: is longer than {_MAX_WORDS}"
    yield from _container_problems(trainer, "spec.trainer")
