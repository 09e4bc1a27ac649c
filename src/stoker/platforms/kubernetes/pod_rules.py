"""Kubernetes' own rules for pods, which a JobSet's pods meet only when they are to be made."""

import re
from collections.abc import Iterator

from stoker.platforms.kubernetes.reading import Document, mapping, mappings, text, texts
from stoker.records.cloud import amount

_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")
_QUALIFIED = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$")
_VARIABLE = re.compile(r"^[A-Za-z_.-][A-Za-z0-9_.-]*$")
_DNS_LABEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_WHOLE = re.compile(r"^[0-9]+$")
# Resources that may be asked for in parts; all others come whole, and are not overcommitted.
_DIVISIBLE = ("cpu", "memory", "ephemeral-storage")
_MAX_ANNOTATIONS = 256 << 10


def metadata_problems(metadata: Document, path: str) -> Iterator[str]:
    """Of labels, annotations, and an object's name where it has one."""
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


def problems(pods: Document, path: str) -> Iterator[str]:
    """What is wrong with a pod's spec, one `path: what` each."""
    volumes = [text(volume, "name") for volume in mappings(pods, "volumes")]
    for name in volumes:
        if not _DNS_LABEL.match(name):
            yield f"{path}.volumes: {name!r} is no name of a volume"
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
        yield from _container_problems(container, f"{path}.containers[{index}]", volumes)


def _container_problems(container: Document, path: str, volumes: list[str]) -> Iterator[str]:
    if not _DNS_LABEL.match(text(container, "name")):
        yield f"{path}.name: {container.get('name')!r} is no name of a container"
    image = text(container, "image")
    if not image or image != image.strip():
        yield f"{path}.image: {image!r} is no image"
    for variable in mappings(container, "env"):
        if not _VARIABLE.match(text(variable, "name")):
            yield f"{path}.env: {variable.get('name')!r} is no name of a variable"
    for mount in mappings(container, "volumeMounts"):
        if text(mount, "name") not in volumes:
            yield f"{path}.volumeMounts: there is no volume {mount.get('name')}"
        for key in ("subPath", "subPathExpr"):
            inner = text(mount, key)
            if inner.startswith("/") or ".." in inner.split("/"):
                yield f"{path}.volumeMounts: {inner} is no folder within a volume"
    yield from _resource_problems(mapping(container, "resources"), f"{path}.resources")


def _resource_problems(resources: Document, path: str) -> Iterator[str]:
    requests, limits = mapping(resources, "requests"), mapping(resources, "limits")
    for name, limit in limits.items():
        if name in requests and amount(str(requests[name])) > amount(str(limit)):
            yield f"{path}: the limit of {name} is below what is asked for"
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
