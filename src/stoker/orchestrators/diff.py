"""Two pipeline definitions are compared as sorted JSON, one line for each value."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from stoker.records import Json

# Keys by which the items of a list are called; the others are called by their place.
_NAMES = ("Name", "ChannelName", "InputName", "OutputName", "InstanceGroupName", "Key", "Step")
_BRANCHES = ("IfSteps", "ElseSteps", "Steps")
# A longer value, such as an embedded file, is cut: a terminal must show the whole comparison.
_MAX_VALUE = 66

Line = tuple[str, str]


def differences(old: Json, new: Json) -> tuple[str, ...]:
    """Returns lines that say what is added (`+`), removed (`-`) and changed (`~`) in a definition.

    Args:
        old: The definition that is uploaded.
        new: The definition that replaces it.

    Returns:
        Steps and parameters that come or go, one line each. Then those that change, each with
        its changed values in lines below it; steps that change in the same way share them.
        () where nothing changes.
    """
    if _text(old) == _text(new):
        return ()
    was, now = dict(_parts(old)), dict(_parts(new))
    lines = [f"- {_title(name, was[name])}" for name in was if name not in now]
    lines += [f"+ {_title(name, now[name])}" for name in now if name not in was]
    changed: dict[tuple[str, ...], list[str]] = {}
    for name in (name for name in now if name in was):
        values = tuple(_changes([*_lines(was[name], "")], [*_lines(now[name], "")]))
        changed.setdefault(values, []).append(name)
    changed.pop((), None)
    for values, names in changed.items():
        lines += [f"~ {', '.join(names)}", *(f"  {value}" for value in values)]
    return tuple(lines) or ("~ parts that have no name",)


def _parts(definition: Json) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields what a definition consists of, by name: steps, parameters, the rest."""
    whole = definition if isinstance(definition, Mapping) else {}
    yield from _steps(whole.get("Steps"), "the pipeline")
    for item in _mappings(whole.get("Parameters")):
        yield f"parameter {item.get('Name')}", item
    rest = {key: value for key, value in whole.items() if key not in ("Steps", "Parameters")}
    yield "the definition", rest


def _steps(steps: Json, around: str) -> Iterator[tuple[str, Mapping[str, Json]]]:
    for step in _mappings(steps):
        own = step.get("Arguments")
        inside: dict[str, Json] = {}
        if isinstance(own, Mapping):
            inside = {key: own[key] for key in _BRANCHES if key in own}
            # Of the steps inside it a step has the names; what changes in them is theirs.
            names = {
                key: [item.get("Name") for item in _mappings(branch)]
                for key, branch in inside.items()
            }
            own = {**own, **names}
        yield f"step {step.get('Name')}", {**step, "Arguments": own, "within": around}
        for branch in inside.values():
            yield from _steps(branch, str(step.get("Name")))


def _title(name: str, part: Mapping[str, Json]) -> str:
    default = part.get("DefaultValue")
    about = part.get("Type") if default is None else default
    return f"{name}: {_shorten(about if isinstance(about, str) else _text(about))}"


def _lines(value: Json, path: str) -> Iterator[Line]:
    """Yields each value of a document with the path to it, sorted by keys."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _lines(value[key], f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _lines(item, f"{path}[{_place(item, index)}]")
    else:
        yield path.removeprefix("Arguments."), _text(value)


def _place(item: Json, index: int) -> str:
    """Returns an item's name or number; none for a plain value: one more would move the others."""
    if isinstance(item, Mapping):
        return next((str(item[key]) for key in _NAMES if key in item), str(index))
    return str(index) if isinstance(item, list) else ""


def _changes(old: Sequence[Line], new: Sequence[Line]) -> Iterator[str]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        removed, added = [], []
        for (path, was), (other, now) in zip_longest(
            old[i:i_end], new[j:j_end], fillvalue=("", "")
        ):
            # A long text is shown from a little before the place where it begins to differ.
            pairs = enumerate(zip(was, now, strict=False))
            start = max(0, next((at for at, (one, other) in pairs if one != other), 0) - 20)
            removed.append(f"- {path} = {_shorten(was, start)}")
            added.append(f"+ {other} = {_shorten(now, start)}")
        yield from removed[: i_end - i]
        yield from added[: j_end - j]


def _shorten(text: str, start: int = 0) -> str:
    if len(text) <= _MAX_VALUE:
        return text
    end = start + _MAX_VALUE
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _mappings(value: Json) -> list[Mapping[str, Json]]:
    items = value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, Mapping)]


__all__ = ["differences"]
