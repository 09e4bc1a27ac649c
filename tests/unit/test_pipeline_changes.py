"""What an upload changes is told by meaning: keys, files, steps; never by digests."""

import copy

import pytest

from stoker.pipelines.changes import (
    PipelineVersion,
    changed_lines,
    code_digests,
    inputs_of_definition,
    workload_with_defaults,
)

URI = "s3://acme/stoker/stoker/inputs/"


def step(name, uri, **more):
    return {"Name": name, "Type": "Processing", "Arguments": {"In": f"{URI}{uri}/w.json", **more}}


def document(uri="0" * 16, *, image="a:1", steps=(), **more):
    guarded = {
        "Name": "Needs",
        "Type": "Condition",
        "Arguments": {"IfSteps": [step("Train", uri, Image=image)], "ElseSteps": []},
    }
    parameters = [{"Name": "Gate", "DefaultValue": "a>=1"}, {"Name": "Least", "DefaultValue": 1}]
    made = {"Parameters": parameters, "Steps": [step("Decide", uri, Image=image), guarded, *steps]}
    return {"PipelineName": "mnist", "RoleArn": "arn:1", "PipelineDefinition": made, **more}


WORKLOAD = workload_with_defaults({"name": "mnist", "command": ["python", "train.py"]})


def version(document, code=None, **keys):
    told = workload_with_defaults({**WORKLOAD, **keys})
    return PipelineVersion(document=document, workload=told, code=code, derived={"Gate"})


def lines(was, now):
    return changed_lines(was, now)


def test_the_same_is_no_change():
    assert lines(version(document()), version(document())) == []


def test_keys_of_the_workload_are_named_and_what_follows_of_them_only_by_steps():
    was, now = document(), document("1" * 16, image="a:2")
    now["PipelineDefinition"]["Parameters"][0]["DefaultValue"] = "a>=2"
    assert lines(version(was, image="a:1"), version(now, image="a:2")) == [
        "image: a:1 -> a:2",
        "steps that change: Decide, Train",
    ]


def test_hyperparameters_and_gates_are_named_by_their_place():
    keys = {"hyperparameters": {"lr": 0.1, "n.layers": 2}, "gate": [{"metric": "a", "min": 0.9}]}
    other = {"hyperparameters": {"lr": 0.2, "n.layers": 2}, "gate": [{"metric": "a", "min": 0.8}]}
    found = lines(version(document(), **keys), version(document("1" * 16), **other))
    assert sorted(found) == ["gate[0].min: 0.9 -> 0.8", "hyperparameters.lr: 0.1 -> 0.2"]


def test_code_is_told_by_its_files():
    was = {"train.py": "1", "old.py": "1", "a.py": "1", "b.py": "1", "c.py": "1", "d.py": "1"}
    now = {**dict.fromkeys(was, "2"), "new.py": "1"} | {"train.py": "1"}
    del now["old.py"]
    (line,) = lines(version(document(), was), version(document("1" * 16), now))
    assert line == (
        "code: four files changed (a.py, b.py, c.py and 1 more), one file new (new.py), "
        "one file removed (old.py)"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"RoleArn": "arn:2"}, "RoleArn: arn:1 -> arn:2"),
        ({"Tags": [{"Key": "a", "Value": "b"}]}, 'Tags: none -> [{"Key": "a", "Value": "b"}]'),
        ({"steps": [step("Mine", "0" * 16)]}, "Steps[Mine]: none -> {"),
    ],
)
def test_what_the_workload_does_not_say_is_told_from_the_definition(change, line):
    (found,) = lines(version(document()), version(document(**change)))
    assert found.startswith(line)


def test_a_parameter_of_ones_own_is_told_though_the_workload_changed_too():
    now = document("1" * 16)
    now["PipelineDefinition"]["Parameters"][1]["DefaultValue"] = 2
    found = lines(version(document()), version(now, image="a:2"))
    assert found == ["image: none -> a:2", "Parameters[Least].DefaultValue: 1 -> 2"]


def test_a_workload_of_an_earlier_version_has_the_defaults_of_later_keys():
    old = dict(copy.deepcopy(WORKLOAD))
    for key in ("feed", "watchdog"):
        del old[key]
    assert workload_with_defaults(old) == WORKLOAD


def test_another_spelling_alone_is_told_in_one_line():
    (line,) = lines(version(document()), version(document("1" * 16)))
    assert "another version of stoker" in line


def test_inputs_that_could_not_be_read_leave_the_definition():
    was = PipelineVersion(document=document())
    (line, other) = lines(was, version(document("1" * 16, image="a:2"), {"a": "1"}, image="a:2"))
    assert line == "Steps[Decide].Arguments.Image: a:1 -> a:2"
    assert other.endswith("[Train].Arguments.Image: a:1 -> a:2")


def test_many_differences_are_cut():
    was = document(steps=[step("Own", "0" * 16, **{f"K{n}": 1 for n in range(30)})])
    now = document(steps=[step("Own", "0" * 16, **{f"K{n}": 2 for n in range(30)})])
    found = lines(version(was), version(now))
    assert len(found) == 13
    assert found[-1] == "and 18 more differences (--json has all of them)"


def test_long_and_odd_texts_stay_in_one_short_line():
    keys = {"image": "a" * 300}
    (line,) = lines(version(document()), version(document("1" * 16), **keys))
    assert line == f"image: none -> {'a' * 57}..."


def test_a_broken_package_is_not_compared():
    assert code_digests(b"not a package") is None
    assert code_digests(None) is None


def test_the_inputs_of_a_definition_are_one_folder():
    assert inputs_of_definition(document()) == f"{URI}{'0' * 16}"
    assert inputs_of_definition({}) is None
    both = [document(), document("1" * 16)]
    assert inputs_of_definition(both) is None
