"""Lines show what changes between two definitions."""

import copy
import json
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from stoker.orchestrators.base import differences
from stoker.records import Json
from support.sagemaker_orchestrator import definition, workload

BASE = definition(workload())


def changed(**steps: Json) -> Json:
    """Returns the base with other arguments of some steps."""
    document = copy.deepcopy(BASE)
    for found in walk(document):
        if found.get("Name") in steps:
            found["Arguments"] = steps[str(found["Name"])]
    return document


def walk(value: object) -> Iterator[dict[str, Json]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def test_the_same_definition_has_no_differences() -> None:
    assert differences(BASE, json.loads(json.dumps(BASE))) == ()


def test_the_order_of_keys_is_no_difference() -> None:
    assert differences(BASE, json.loads(json.dumps(BASE, sort_keys=True))) == ()


def test_added_and_removed_steps_are_told_with_their_kind() -> None:
    more = definition(workload(), added=[{"Name": "Notify", "Type": "Lambda", "Arguments": {}}])
    assert differences(BASE, more) == ("+ step Notify: Lambda",)
    assert differences(more, BASE) == ("- step Notify: Lambda",)


def test_a_changed_argument_is_told_with_its_step_and_both_values() -> None:
    assert differences(changed(Profile={"Seed": 1}), changed(Profile={"Seed": 2})) == (
        "~ step Profile",
        "  - Seed = 1",
        "  + Seed = 2",
    )


def test_a_change_inside_a_condition_is_told_of_the_step_and_not_of_the_condition() -> None:
    lines = differences(BASE, changed(Refuse={"ErrorMessage": "too bad"}))
    assert lines[0] == "~ step Refuse"
    assert '  + ErrorMessage = "too bad"' in lines
    assert sum(line.startswith("~") for line in lines) == 1


def test_another_workload_is_told_once_for_all_steps_that_read_it() -> None:
    told, was, now = differences(BASE, definition(workload("training.epochs=7")))
    assert told == "~ step Decide, step Train, step DecideAgain"
    assert was.startswith("  - ProcessingInputs[workload].S3Input.S3Uri = ")
    assert was.endswith('/workload.json"')
    assert now != was.replace("-", "+", 1)


def test_a_changed_default_is_told_of_its_parameter() -> None:
    lines = differences(BASE, definition(workload("constraints.objective=time")))
    place = lines.index("~ parameter Objective")
    assert lines[place + 1 :] == ('  - DefaultValue = "cost"', '  + DefaultValue = "time"')


def test_parameters_that_come_and_go_are_told() -> None:
    fewer = copy.deepcopy(BASE)
    parameters = fewer["Parameters"]
    assert isinstance(parameters, list)
    last = parameters.pop()
    assert isinstance(last, dict)
    named = f"parameter {last['Name']}: {json.dumps(last['DefaultValue'])}"
    assert differences(BASE, fewer) == (f"- {named}",)
    assert differences(fewer, BASE) == (f"+ {named}",)


def test_a_step_that_moves_into_a_condition_is_told() -> None:
    moved = definition(workload(), added=[{"Name": "Late", "Type": "Fail", "Arguments": {}}])
    outer = copy.deepcopy(moved)
    steps = outer["Steps"]
    assert isinstance(steps, list)
    late = steps.pop()
    gate = next(
        found for found in walk(outer) if found.get("Name") == "Gate" and "Arguments" in found
    )
    arguments = gate["Arguments"]
    assert isinstance(arguments, dict)
    arguments["ElseSteps"] = [late]
    lines = differences(moved, outer)
    place = lines.index("~ step Late")
    assert lines[place + 1 :] == ('  - within = "the pipeline"', '  + within = "Gate"')


def test_true_and_one_are_two_values() -> None:
    lines = differences(changed(Profile={"Seed": True}), changed(Profile={"Seed": 1}))
    assert lines == ("~ step Profile", "  - Seed = true", "  + Seed = 1")


def test_items_are_called_by_their_names_and_values_moved_by_one_are_no_difference() -> None:
    tags: list[Json] = [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}]
    other_tags: list[Json] = [tags[0], {"Key": "b", "Value": "3"}]
    assert differences(changed(Profile={"Tags": tags}), changed(Profile={"Tags": other_tags})) == (
        "~ step Profile",
        '  - Tags[b].Value = "2"',
        '  + Tags[b].Value = "3"',
    )
    assert differences(
        changed(Profile={"Command": ["stoker", "profile"]}),
        changed(Profile={"Command": ["stoker", "--debug", "profile"]}),
    ) == ("~ step Profile", '  + Command[] = "--debug"')


def test_a_long_text_is_shown_where_it_differs_and_short() -> None:
    old, new = "x" * 500 + "OLD" + "y" * 500, "x" * 500 + "NEW" + "y" * 500
    told, was, now = differences(changed(Profile={"Text": old}), changed(Profile={"Text": new}))
    assert told == "~ step Profile"
    assert "OLD" in was
    assert "NEW" in now
    assert max(len(was), len(now)) < 100


def test_a_long_text_that_comes_with_a_step_or_parameter_is_shown_short() -> None:
    files = [{"Name": "Code", "Type": "String", "DefaultValue": "line\n" * 10_000}]
    (line,) = differences({}, {"Parameters": files})
    assert line.startswith("+ parameter Code: line")
    assert len(line) < 100


paths = st.lists(st.integers(0, 9), min_size=3, max_size=9)


@given(path=paths, value=st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none()))
def test_no_changed_value_goes_unseen(path: list[int], value: Json) -> None:
    """A leaf somewhere in the definition becomes another: there is a line, or it was the same."""
    document = copy.deepcopy(BASE)
    place: object = document["Steps"]
    held: tuple[dict[str, Json] | list[Json], str | int] | None = None
    for index in path:
        if isinstance(place, dict) and place:
            key = sorted(place)[index % len(place)]
            held, place = (place, key), place[key]
        elif isinstance(place, list) and place:
            held, place = (place, index % len(place)), place[index % len(place)]
    assert held is not None
    container, key = held
    container[key] = value  # type: ignore[index, call-overload]
    is_same = json.dumps(document, sort_keys=True) == json.dumps(BASE, sort_keys=True)
    assert (differences(BASE, document) == ()) == is_same
