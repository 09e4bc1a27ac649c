"""What changes between two definitions, in words."""

import copy
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.orchestrators.diff import differences, in_words
from stoker.records import Json
from support.sagemaker_orchestrator import definition, workload

BASE = definition(workload())


def changed(**steps: Json) -> Json:
    """The base with other arguments of some steps."""
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
    assert differences(BASE, more) == ("+ step Notify (Lambda)",)
    assert differences(more, BASE) == ("- step Notify (Lambda)",)


def test_a_changed_argument_is_told_with_its_step_and_both_values() -> None:
    assert differences(BASE, changed(Profile={"Seed": 2})) == ("~ step Profile: Seed: 1 → 2",)


def test_a_change_inside_a_condition_is_told_of_the_step_and_not_of_the_condition() -> None:
    lines = differences(BASE, changed(Refuse={"ErrorMessage": "too bad"}))
    assert lines == ("~ step Refuse: ErrorMessage added: too bad",)


def test_another_workload_is_told_once_for_all_steps_that_read_it() -> None:
    lines = differences(BASE, definition(workload("training.epochs=7")))
    assert len(lines) == 1
    assert lines[0].startswith("~ steps Decide, Train, DecideAgain: input workload.json: ")


def test_a_changed_default_is_told_of_its_parameter() -> None:
    lines = differences(BASE, definition(workload("constraints.objective=time")))
    assert "~ parameter Objective: default: cost → time" in lines


def test_parameters_that_come_and_go_are_told() -> None:
    fewer = copy.deepcopy(BASE)
    parameters = fewer["Parameters"]
    assert isinstance(parameters, list)
    parameters.pop()
    assert differences(BASE, fewer) == ("- parameter DataInstanceCount",)
    assert differences(fewer, BASE) == ("+ parameter DataInstanceCount = 2",)


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
    assert "~ step Late: stands in: the pipeline → Gate" in lines


def test_true_and_one_are_two_values() -> None:
    lines = differences(changed(Profile={"Seed": True}), changed(Profile={"Seed": 1}))
    assert lines == ("~ step Profile: Seed: true → 1",)


def test_items_are_matched_by_their_names_and_not_by_their_places() -> None:
    tags = [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}]
    one, other = changed(Profile={"Tags": tags}), changed(Profile={"Tags": tags[::-1]})
    assert differences(one, other) == ()
    changed_tags = changed(Profile={"Tags": [tags[0], {"Key": "b", "Value": "3"}]})
    assert differences(one, changed_tags) == ("~ step Profile: Tags[b].Value: 2 → 3",)


def test_a_long_text_is_shown_where_it_differs_and_short() -> None:
    old, new = "x" * 500 + "OLD" + "y" * 500, "x" * 500 + "NEW" + "y" * 500
    (line,) = differences(changed(Profile={"Text": old}), changed(Profile={"Text": new}))
    assert "OLD" in line
    assert "NEW" in line
    assert len(line) < 200


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"Get": "Parameters.Epochs"}, "{Parameters.Epochs}"),
        ({"Std:Join": {"On": "/", "Values": ["a", {"Get": "Execution.Id"}]}}, "a/{Execution.Id}"),
        ({"Std:JsonGet": {"Path": "passed"}}, "{passed}"),
        ([1, "two"], "1 two"),
        ("", '""'),
        (None, "none"),
        (True, "true"),
    ],
)
def test_values_are_shown_as_people_write_them(value: Json, words: str) -> None:
    assert in_words(value) == words


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
