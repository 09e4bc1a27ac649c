import json

import pytest

from stoker.errors import UsageError
from stoker.records import (
    RECORDS,
    Profile,
    read_json,
    write_json,
)
from stoker.records.workload import refuse_foreign
from stoker.workload_file import workload_from
from support import builders, sample_records


def _documents():
    group = {"name": "dnn", "role": "dnn", "instance_type": "local.c1", "count": 1}
    plan = {"action": "keep", "groups": [group]}
    step, job = {"step_seconds": 0.5, "global_batch_size": 64}, {"platform": "local", "name": "r1"}
    chosen = {"bottleneck": "cpu", "action": "keep", "plan": plan, "plans": [plan]}
    chosen["verdict"] = "none"
    asked = {"prices": {"source": "nominal"}, "objective": "cost", "constraints": {}}
    baseline, measured = {"step_seconds": 0.5}, {"step_seconds": 0.4}
    gain = {"baseline": baseline, "measured": measured, "speedup": 1.25}
    bodies = {
        "profile": {"host": {"instance_type": "local.c1"}, "step": step},
        "decision": chosen | asked,
        "training": {"status": "succeeded", "groups": [group], "job": job},
        "evaluation": {"passed": True, "performance": gain},
    }
    told = {name: {"schema": f"stoker.{name}/v1", **body} for name, body in bodies.items()}
    return {"workload": {"name": "a-job", "command": ["python", "train.py"]}, **told}


def _write(folder, document):
    file = folder / "record.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def _refusal(folder, name, document):
    with pytest.raises(UsageError) as caught:
        read_json(_write(folder, document), RECORDS[name])
    return caught.value


def _numbers(document, path=()):
    if isinstance(document, dict):
        return [p for key, item in document.items() for p in _numbers(item, (*path, key))]
    if isinstance(document, list):
        return [p for at, item in enumerate(document) for p in _numbers(item, (*path, at))]
    is_number = isinstance(document, int | float) and not isinstance(document, bool)
    return [path] if is_number else []


def _with(document, path, value):
    copy = json.loads(json.dumps(document))
    target = copy
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return copy


def _dotted(path):
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".")


@pytest.mark.parametrize(
    ("name", "path", "key", "meant"),
    [
        ("profile", (), "hosst", "host"),
        ("decision", ("plans", 0, "groups", 0), "worker_per_host", "workers_per_host"),
        ("workload", (), "comand", "command"),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest_known_one(tmp_path, name, path, key, meant):
    error = _refusal(tmp_path, name, _with(_documents()[name], (*path, key), 1))
    assert error.what == f"object contains unknown field `{key}`"
    assert error.where.endswith(f"key {_dotted((*path, key))}")
    assert error.fix == f"did you mean {meant}?"
    assert error.exit_code == 2


@pytest.mark.parametrize("name", ["profile", "training"])
@pytest.mark.parametrize("literal", ["NaN", "-1"])
def test_numbers_that_are_not_finite_or_negative_are_refused_everywhere(tmp_path, name, literal):
    paths = _numbers(_documents()[name])
    assert paths
    for path in paths:
        text = json.dumps(_with(_documents()[name], path, "HERE")).replace('"HERE"', literal)
        file = tmp_path / "record.json"
        file.write_text(text)
        with pytest.raises(UsageError) as caught:
            read_json(file, RECORDS[name])
        assert f"key {_dotted(path)}" in caught.value.where


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step", "step_seconds"), 0),
        (("step", "step_seconds"), "0.5"),
        (("step", "global_batch_size"), 1.5),
        (("host", "count"), 0),
    ],
)
def test_wrong_value_of_a_profile_names_its_key(tmp_path, path, value):
    error = _refusal(tmp_path, "profile", _with(_documents()["profile"], path, value))
    assert _dotted(path) in error.where
    assert str(tmp_path) in error.where
    assert error.what.startswith("expected")


@pytest.mark.parametrize("name", ["profile", "training"])
@pytest.mark.parametrize("schema", ["stoker.workload/v1", "stoker.profile/v2"])
def test_other_schema_is_refused(tmp_path, name, schema):
    error = _refusal(tmp_path, name, {**_documents()[name], "schema": schema})
    assert error.what == f"invalid enum value '{schema}'"
    assert f"give a {name} of this version of stoker" in error.fix


def test_writing_over_a_file_leaves_the_new_one_and_nothing_else(tmp_path):
    file = tmp_path / "deep" / "profile.json"
    write_json(file, sample_records.profile())
    new = builders.profile(step_seconds=1.0)
    write_json(file, new)
    assert read_json(file, Profile) == new
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"]


# What makes a profile, a decision or a training another workload's, key by key.

DIGITS = {
    "name": "digits",
    "command": ["python", "train.py"],
    "cluster": {"dnn": {"instance_type": "local.c2"}},
}


def changed(**keys):
    return workload_from({**DIGITS, **keys})


def refused(workload, other):
    try:
        refuse_foreign("profile", workload.profile_keys(), workload=other)
    except UsageError as err:
        return err.what
    return ""


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "numbers"},
        {"gate": [{"metric": "accuracy", "min": 0.9}]},
        {"feed": {"max_errors": 4, "port": 7700}},
        {"hyperparameters": {"epochs": 3}},
    ],
)
def test_what_does_not_change_a_step_voids_no_profile(keys):
    assert refused(changed(), changed(**keys)) == ""


TODAY = "cluster.dnn: 1 x local.c2, processes_per_host auto"
TWO_HOSTS = {"dnn": {"instance_type": "local.c1", "count": 2}}
TWO_PROCESSES = {"dnn": {"instance_type": "local.c2", "processes_per_host": 2}}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("command", ["python", "b.py"], "command: python train.py -> python b.py"),
        ("strategy", "torchrun", "strategy: auto -> torchrun"),
        ("cluster", TWO_HOSTS, f"{TODAY} -> 2 x local.c1, processes_per_host auto"),
        ("cluster", TWO_PROCESSES, f"{TODAY} -> 1 x local.c2, processes_per_host 2"),
    ],
)
def test_what_changes_a_step_is_named_with_both_values(key, value, words):
    found = refused(changed(), changed(**{key: value}))
    assert found == f"the profile was made for another workload: {words}"
