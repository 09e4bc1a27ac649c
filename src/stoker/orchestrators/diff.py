"""Two pipeline definitions are compared step by step, and what changes is told in words."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from stoker.records import Json

# Keys by which the items of a list are known; the others are known by their place.
_NAMES = ("Name", "ChannelName", "InputName", "OutputName", "InstanceGroupName", "Key", "Step")
_INPUT = re.compile(r"/inputs/(?P<digest>[0-9a-f]{12,64})/(?P<file>[^/]+)$")
_PLAIN = {"DefaultValue": "default", "Type": "type", "EnumValues": "choices"}
_WIDTH = 66
# A change that holds for more steps than these is told once.
_SAME_CHANGE = 1
_ABSENT = object()

Leaf = tuple[str, str, str]


def differences(old: Json, new: Json) -> tuple[str, ...]:
    """Returns lines that tell what is added (`+`), removed (`-`) and changed (`~`) in a definition.

    Args:
        old: The definition that is uploaded.
        new: The definition that replaces it.

    Returns:
        Steps first, then parameters, then the rest; () where nothing changes.
    """
    before, after = _mapping(old), _mapping(new)
    lines = [*_steps(before, after), *_parameters(before, after)]
    rest = [
        line
        for key in sorted({*before, *after} - {"Steps", "Parameters"})
        for line in _leaf_lines(_compare(before.get(key, _ABSENT), after.get(key, _ABSENT), key))
    ]
    return (*lines, *rest)


def steps_of(definition: Json) -> Iterator[tuple[str, int, Mapping[str, Json]]]:
    """Yields all steps of a definition: name of the step around it, depth, the step."""
    yield from _walk(_mapping(definition).get("Steps"), "", 0)


def parameters_of(definition: Json) -> dict[str, Mapping[str, Json]]:
    """Returns the parameters of a definition, by name."""
    return {str(item.get("Name", "")): item for item in _items(definition, "Parameters")}


def in_words(value: Json) -> str:
    """Writes a value of a definition for people: references by their names, joins put together."""
    if isinstance(value, Mapping):
        if list(value) == ["Get"]:
            return "{" + str(value["Get"]) + "}"
        join = value.get("Std:Join")
        if isinstance(join, Mapping) and isinstance(join.get("Values"), Sequence):
            return str(join.get("On", "")).join(in_words(part) for part in _list(join["Values"]))
        read = value.get("Std:JsonGet")
        if isinstance(read, Mapping):
            return "{" + str(read.get("Path", "")) + "}"
        return "{" + ", ".join(f"{key}: {in_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, Sequence):
        return " ".join(in_words(item) for item in value) or "nothing"
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _steps(before: Mapping[str, Json], after: Mapping[str, Json]) -> list[str]:
    old = {str(step.get("Name")): (around, step) for around, _, step in steps_of(before)}
    new = {str(step.get("Name")): (around, step) for around, _, step in steps_of(after)}
    lines = [f"- step {name} ({_kind(old[name][1])})" for name in old if name not in new]
    lines += [f"+ step {name} ({_kind(new[name][1])})" for name in new if name not in old]
    changed: dict[Leaf, list[str]] = {}
    for name in (name for name in new if name in old):
        (was_in, was), (is_in, step) = old[name], new[name]
        leaves = list(_compare(_own(was), _own(step), ""))
        if was_in != is_in:
            leaves.append(("stands in", was_in or "the pipeline", is_in or "the pipeline"))
        for leaf in leaves:
            changed.setdefault(_told(leaf), []).append(name)
    shared = {leaf: names for leaf, names in changed.items() if len(names) > _SAME_CHANGE}
    lines += [f"~ steps {', '.join(names)}: {_words(leaf)}" for leaf, names in shared.items()]
    for name in new:
        own = [leaf for leaf, names in changed.items() if names == [name]]
        lines += [f"~ step {name}: {_words(leaf)}" for leaf in own]
    return lines


def _parameters(before: Mapping[str, Json], after: Mapping[str, Json]) -> list[str]:
    old, new = parameters_of(before), parameters_of(after)
    lines = [f"- parameter {name}" for name in old if name not in new]
    lines += [
        f"+ parameter {name} = {in_words(new[name].get('DefaultValue'))}"
        for name in new
        if name not in old
    ]
    for name in (name for name in new if name in old):
        lines += [
            f"~ parameter {name}: {_words((_PLAIN.get(path, path), was, now))}"
            for path, was, now in _compare(old[name], new[name], "")
        ]
    return lines


def _walk(steps: Json, around: str, depth: int) -> Iterator[tuple[str, int, Mapping[str, Json]]]:
    for step in _list(steps):
        if isinstance(step, Mapping):
            yield around, depth, step
            arguments = _mapping(step.get("Arguments"))
            for branch in ("IfSteps", "ElseSteps", "Steps"):
                yield from _walk(arguments.get(branch), str(step.get("Name")), depth + 1)


def _own(step: Mapping[str, Json]) -> Mapping[str, Json]:
    """Returns the step without the steps inside it: of those only the names."""
    arguments = step.get("Arguments")
    if not isinstance(arguments, Mapping):
        return step
    own: dict[str, Json] = {}
    for key, value in arguments.items():
        is_branch = key in ("IfSteps", "ElseSteps", "Steps")
        own[key] = [_mapping(inner).get("Name") for inner in _list(value)] if is_branch else value
    return {**step, "Arguments": own}


def _compare(old: object, new: object, path: str) -> Iterator[Leaf]:
    if _is_same(old, new):
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping) and not _is_function(old, new):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _compare(old.get(key, _ABSENT), new.get(key, _ABSENT), _joined(path, key))
    elif _are_lists(old, new):
        yield from _compare_lists(_list(old), _list(new), path)
    else:
        yield path, _text(old), _text(new)


def _is_same(old: object, new: object) -> bool:
    """Compares as JSON: 1 and true are two values, which Python takes for one."""
    if _ABSENT in (old, new):
        return old is new
    return json.dumps(_json(old), sort_keys=True) == json.dumps(_json(new), sort_keys=True)


def _compare_lists(old: Sequence[Json], new: Sequence[Json], path: str) -> Iterator[Leaf]:
    before, after = _by_name(old), _by_name(new)
    if before is not None and after is not None:
        for key in [*before, *(key for key in after if key not in before)]:
            one, other = before.get(key, _ABSENT), after.get(key, _ABSENT)
            yield from _compare(one, other, f"{path}[{key}]")
    elif len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _compare(one, other, f"{path}[{index}]")
    else:
        gone = [in_words(item) for item in old if item not in new]
        come = [in_words(item) for item in new if item not in old]
        yield path, " ".join(gone) or f"{len(old)} items", " ".join(come) or f"{len(new)} items"


def _by_name(items: Sequence[Json]) -> dict[str, Json] | None:
    """Returns the items by their names; None where they have none, or not one each."""
    named: dict[str, Json] = {}
    for item in items:
        key = next((key for key in _NAMES if isinstance(item, Mapping) and key in item), None)
        if key is None or not isinstance(item, Mapping):
            return None
        named[in_words(item[key])] = item
    return named if len(named) == len(items) else None


def _told(leaf: Leaf) -> Leaf:
    """Tells an input that is known by its content by its file's name."""
    path, old, new = leaf
    before, after = _INPUT.search(old), _INPUT.search(new)
    if before and after and before["file"] == after["file"]:
        return f"input {after['file']}", before["digest"][:12], after["digest"][:12]
    return path.removeprefix("Arguments."), old, new


def _words(leaf: Leaf) -> str:
    path, old, new = leaf
    if old == "absent":
        return f"{path} added: {_short(new)}"
    if new == "absent":
        return f"{path} removed: {_short(old)}"
    start = 0
    if max(len(old), len(new)) > _WIDTH:
        # Long texts are shown from a little before the place where they begin to differ.
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
        start = max(0, same - 20)
    return f"{path}: {_short(old, start)} → {_short(new, start)}"


def _leaf_lines(leaves: Iterator[Leaf]) -> list[str]:
    return [f"~ {_words(leaf)}" for leaf in leaves]


def _short(text: str, start: int = 0) -> str:
    shown = ("…" if start else "") + text[start:]
    return shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…"


def _text(value: object) -> str:
    return "absent" if value is _ABSENT else in_words(_json(value))


def _json(value: object) -> Json:
    return (
        value if isinstance(value, None | bool | int | float | str | Sequence | Mapping) else None
    )


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_function(old: Mapping[str, Json], new: Mapping[str, Json]) -> bool:
    keys = {*old, *new}
    return "Get" in keys or any(key.startswith("Std:") for key in keys)


def _are_lists(old: object, new: object) -> bool:
    return isinstance(old, list | tuple) and isinstance(new, list | tuple)


def _kind(step: Mapping[str, Json]) -> str:
    return str(step.get("Type", "step"))


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Json]:
    return value if isinstance(value, list | tuple) else ()


def _items(value: Json, key: str) -> list[Mapping[str, Json]]:
    return [item for item in _list(_mapping(value).get(key)) if isinstance(item, Mapping)]


__all__ = ["differences", "in_words", "parameters_of", "steps_of"]
