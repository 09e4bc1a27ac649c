"""Patches of the requests and objects that stoker makes, in the services' own names.

Merged as RFC 7386 says: maps are merged, null deletes, lists are replaced. But lists of named items
are merged by name, and tolerations are added: a patch does not repeat what stoker made. Pods are
patched in `kubernetes.pods`, JobSets in `kubernetes.objects`, SageMaker's requests in
`sagemaker.request`.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from stoker.errors import UsageError
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings
from stoker.records.secrets import refuse_secret

# Lists by name, and the key that names their items. An item replaces the one of its name,
_NAMED = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "InputDataConfig": "ChannelName",
    "Tags": "Key",
}
# except for these, which are merged.
_MERGED = ("containers", "initContainers", "InputDataConfig")
_ADDED = "tolerations"
Path = tuple[str, ...]


def merged(base: Json, patch: Json, *, key: str = "") -> Json:
    """Returns `base` with `patch` merged into it; `key` is their name, where they are lists."""
    if isinstance(patch, Mapping):
        result = dict(mapping(base))
        for name, value in patch.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), value, key=name)
        return result
    if not isinstance(patch, list | tuple) or not isinstance(base, list | tuple):
        return patch
    if key == _ADDED:
        return [*base, *(item for item in patch if item not in base)]
    if key not in _NAMED:
        return patch
    items = _by_name(base, key)
    for name, item in _by_name(patch, key).items():
        if key in _MERGED:
            items[name] = mapping_of(items.get(name, {}), item)
        else:
            items[name] = item
    return list(items.values())


def mapping_of(base: Document, patch: Document) -> dict[str, Json]:
    """Returns `base` with `patch` merged into it; both are maps."""
    result = merged(base, patch)
    assert isinstance(result, dict)
    return result


def check_patch(patch: Document, *, key: str, reserved: Mapping[str, str]) -> None:
    """Refuses a patch of what stoker itself sets and relies on, and of secrets.

    Args:
        patch: The workload's patch.
        key: Its key in the workload.
        reserved: Paths, their steps divided by spaces and with `*` for any characters, and what to
            do instead.
    """
    for path, value in _walk(patch, ()):
        where = f"key {key}.{_shown(path)}"
        if isinstance(variable := _variable(path, value), str):
            refuse_secret(path[-1], variable, where=where, what=f"{key} is plain text")
        for pattern, fix in reserved.items():
            # Null also removes what is below the path.
            if _is_at(path, pattern, or_above=value is None):
                raise UsageError(
                    f"{_shown(path)} is set by stoker", where=where, fix=fix or "leave it out"
                )


def unreserved(value: Json, reserved: Mapping[str, str], path: Path = ()) -> Json:
    """Returns the part of a request that a patch may set, without empty and false values."""
    if isinstance(value, Mapping):
        kept = {}
        for name, item in value.items():
            place = (*path, name)
            if not any(_is_at(place, pattern) for pattern in reserved):
                kept[name] = unreserved(item, reserved, place)
        return {name: item for name, item in kept.items() if item not in (None, False, "", {}, [])}
    if isinstance(value, list | tuple) and path and path[-1] in _NAMED:
        items = _by_name(value, path[-1]).items()
        return [unreserved(item, reserved, (*path, name)) for name, item in items]
    return value


def _by_name(items: Json, key: str) -> dict[str, Document]:
    """Returns the items of the list `key` by the names that they are merged by."""
    return {str(item.get(_NAMED[key])): item for item in mappings(items)}


def _is_at(path: Path, pattern: str, *, or_above: bool = False) -> bool:
    """Whether a path is at or below a pattern's place; `or_above`: or above it."""
    steps = pattern.split()
    # `map` ends with the shorter one: steps that both have are compared.
    return (or_above or len(path) >= len(steps)) and all(map(fnmatchcase, path, steps))


def _walk(patch: Json, path: Path) -> Iterator[tuple[Path, Json]]:
    """Yields each path of a patch with its value; items of lists are named as they are merged."""
    below: Mapping[str, Json] = {}
    if isinstance(patch, Mapping):
        below = patch
    elif path and path[-1] in _NAMED:
        below = _by_name(patch, path[-1])
    for step, value in below.items():
        yield (*path, step), value
        yield from _walk(value, (*path, step))


def _variable(path: Path, value: Json) -> Json:
    """Returns the value of a container's variable that a patch sets; None: there is none here."""
    match path[-2:-1]:
        case ("Environment",):
            return value
        case ("env",):
            return item_at(value, "value")
    return None


def _shown(path: Path) -> str:
    shown = ""
    for parent, step in zip(("", *path), path, strict=False):
        shown += f"[{step}]" if parent in _NAMED else f".{step}"
    return shown.removeprefix(".")
