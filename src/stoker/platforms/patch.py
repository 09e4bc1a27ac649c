"""Patches of the requests and objects that stoker makes, in the services' own names.

Merged as RFC 7386 says: maps are merged, null deletes, lists are replaced. But lists of named items
are merged by name, and tolerations are added: a patch does not repeat what stoker made. Pods are
patched in `kubernetes.pods`, JobSets in `kubernetes.objects`, SageMaker's requests in
`sagemaker.request`.
"""

from collections.abc import Callable, Mapping
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


def patched(
    base: Document, patch: Document, *, key: str, reserved: Mapping[str, str]
) -> dict[str, Json]:
    """Returns `base` with a workload's patch merged into it.

    Args:
        base: What stoker made.
        patch: The workload's patch.
        key: Its key in the workload.
        reserved: Paths that stoker sets and relies on, their steps divided by spaces and with `*`
            for any characters, and what to do instead.

    Raises:
        UsageError: If the patch sets one of these, or a secret.
    """

    def check(path: Path, value: Json) -> None:
        where = f"key {key}.{_shown(path)}"
        variable = item_at(value, "value") if path[-2:-1] == ("env",) else None
        if path[-2:-1] == ("Environment",):
            variable = value
        if isinstance(variable, str):
            refuse_secret(path[-1], variable, where=where, what=f"{key} is plain text")
        for pattern, fix in reserved.items():
            # Null also removes what is below the path.
            if _is_at(path, pattern, or_above=value is None):
                raise UsageError(
                    f"{_shown(path)} is set by stoker", where=where, fix=fix or "leave it out"
                )

    return _merged(base, patch, (), check)


def _merged(
    base: Json, patch: Document, path: Path, check: Callable[[Path, Json], None]
) -> dict[str, Json]:
    result = dict(mapping(base))
    for name, value in patch.items():
        place = (*path, name)
        there = result.get(name)
        check(place, value)
        if isinstance(value, Mapping):
            value = _merged(there, value, place, check)
        elif isinstance(value, list | tuple) and name in _NAMED:
            items = _by_name(there, name)
            for item_name, item in _by_name(value, name).items():
                check((*place, item_name), item)
                own = items.get(item_name) if name in _MERGED else None
                items[item_name] = _merged(own, item, (*place, item_name), check)
            value = list(items.values())
        elif isinstance(value, list | tuple) and name == _ADDED:
            added = mappings(there)
            value = [*added, *(item for item in value if item not in added)]
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def _by_name(items: Json, key: str) -> dict[str, Document]:
    """Returns the items of the list `key` by the names that they are merged by."""
    return {str(item.get(_NAMED[key])): item for item in mappings(items)}


def _is_at(path: Path, pattern: str, *, or_above: bool = False) -> bool:
    """Whether a path is at or below a pattern's place; `or_above`: or above it."""
    steps = pattern.split()
    # `map` ends with the shorter one: steps that both have are compared.
    return (or_above or len(path) >= len(steps)) and all(map(fnmatchcase, path, steps))


def _shown(path: Path) -> str:
    shown = ""
    for parent, step in zip(("", *path), path, strict=False):
        shown += f"[{step}]" if parent in _NAMED else f".{step}"
    return shown.removeprefix(".")
