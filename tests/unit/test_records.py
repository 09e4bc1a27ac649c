import functools
import json
import math
import os
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.cli.schema import json_schema
from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.records import (
    RECORDS,
    Profile,
    ProfiledHost,
    StepTerms,
    TodaysGroup,
    nearest,
    read_json,
    sha256_of,
    to_document,
    to_json,
    write_json,
)
from stoker.records.base import Record
from stoker.records.schema import field_texts, schema_of
from stoker.records.workload import own_keys, refuse_foreign
from stoker.run.run_folders import latest_run_dir
from stoker.workload_file import workload_from
from support import builders, sample_records
from support.property_tests import examples

_property = settings(
    max_examples=examples(25),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


# Strategies made from the records' own types, so that a new field is tested from its first day.


def _of(info):
    inspect = msgspec.inspect
    if isinstance(info, inspect.Metadata):
        return _of(info.type)
    if isinstance(info, inspect.NoneType):
        return st.none()
    if isinstance(info, inspect.BoolType):
        return st.booleans()
    if isinstance(info, inspect.LiteralType):
        return st.sampled_from(info.values)
    if isinstance(info, inspect.IntType):
        low = info.ge if info.ge is not None else -(10**6)
        return st.integers(min_value=low, max_value=info.le if info.le is not None else 10**9)
    if isinstance(info, inspect.FloatType):
        return _floats(info)
    if isinstance(info, inspect.StrType):
        if info.pattern:
            return st.from_regex(info.pattern, fullmatch=True)
        return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 12, 12))
    if isinstance(info, inspect.UnionType):
        return st.one_of([_of(child) for child in info.types])
    if isinstance(info, inspect.VarTupleType):
        return st.lists(_of(info.item_type), min_size=info.min_length or 0, max_size=3).map(tuple)
    if isinstance(info, inspect.ListType):
        return st.lists(_of(info.item_type), max_size=3)
    if isinstance(info, inspect.DictType):
        return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)
    if isinstance(info, inspect.CustomType | inspect.AnyType):
        # A patch of a service's own request, as JSON has it.
        return st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3)
    assert isinstance(info, inspect.StructType), info
    return _records(info.cls)


def _floats(info):
    low, is_open = (info.gt, True) if info.gt is not None else (info.ge, False)
    return st.floats(
        min_value=low, max_value=info.le, exclude_min=is_open, allow_nan=False, allow_infinity=False
    )


@functools.cache
def _records(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {
        f.encode_name: _of(msgspec.inspect.type_info(hints[f.name]))
        for f in msgspec.structs.fields(kind)
        # Of documents alone: their readers put the values back.
        if f.name != "not_numbers"
    }
    if kind is not Profile:
        return st.builds(kind, **fields)

    def says_something(drawn):
        observed = drawn["observed"]
        return drawn["step"] is not None or (observed is not None and observed.is_known)

    said = st.fixed_dictionaries(fields).filter(says_something)
    return said.map(lambda drawn: Profile(**drawn))


def _documents():
    group = {"name": "dnn", "role": "dnn", "instance_type": "local.c1", "count": 1}
    plan = {"action": "keep", "groups": [group]}
    step, job = {"step_seconds": 0.5, "global_batch_size": 64}, {"platform": "local", "name": "r1"}
    chosen = {"bottleneck": "cpu", "action": "keep", "plan": plan, "plans": [plan]}
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


@pytest.mark.parametrize("name", list(RECORDS))
@_property
@given(data=st.data())
def test_record_survives_its_file(tmp_path_factory, name, data):
    record = data.draw(_records(RECORDS[name]))
    file = tmp_path_factory.getbasetemp() / f"{name}.json"
    file.write_text(to_json(record), encoding="utf-8")
    assert read_json(file, RECORDS[name]) == record
    assert sha256_of(read_json(file, RECORDS[name])) == sha256_of(record)


@pytest.mark.parametrize("name", list(RECORDS))
def test_small_documents_are_valid_and_written_without_what_is_not_known(tmp_path, name):
    record = read_json(_write(tmp_path, _documents()[name]), RECORDS[name])
    assert to_document(record)["schema"] == f"stoker.{name}/v1"
    assert "null" not in to_json(record)


def test_an_unknown_word_gets_the_nearest_or_all_that_are_known():
    with pytest.raises(UsageError, match="did you mean profile"):
        json_schema("profil")
    assert nearest("wait", ("next_plan", "fail")) == "known are: fail, next_plan"


@pytest.mark.parametrize(
    ("name", "path", "key", "meant"),
    [
        ("profile", (), "hosst", "host"),
        ("decision", ("plan",), "remote_shar", "remote_share"),
        ("decision", ("plans", 0, "groups", 0), "worker_per_host", "workers_per_host"),
        ("training", ("job",), "names", "name"),
        ("evaluation", ("performance", "measured"), "step_second", "step_seconds"),
        ("workload", (), "comand", "command"),
        ("workload", (), "credits", "feed.credits"),
        ("workload", (), "budget_seconds", "profile.budget_seconds"),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest_known_one(tmp_path, name, path, key, meant):
    error = _refusal(tmp_path, name, _with(_documents()[name], (*path, key), 1))
    assert error.what == f"unknown key {key}"
    assert error.where.endswith(f"key {_dotted((*path, key))}")
    assert error.fix == f"did you mean {meant}?"
    assert error.exit_code == 2


@pytest.mark.parametrize("name", ["profile", "decision", "training", "evaluation"])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1"])
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


def test_a_number_that_json_lacks_is_null_and_fails_no_record():
    assert json.loads(to_json(StepTerms(step_seconds=math.inf))) == {"step_seconds": None}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step", "step_seconds"), 0),
        (("step", "step_seconds"), "0.5"),
        (("step", "step_seconds"), True),
        (("step", "global_batch_size"), 1.5),
        (("host", "instance_type"), ""),
        (("host", "count"), 0),
        (("observed",), {"cpu_utilization": 1.2}),
        (("spread",), {"step_seconds": {"low": -1, "high": 1, "samples": 2}}),
        (("check",), {"predicted_step_seconds": 0.1, "error": 0.1, "explained": "yes"}),
    ],
)
def test_wrong_value_of_a_profile_names_its_key(tmp_path, path, value):
    error = _refusal(tmp_path, "profile", _with(_documents()["profile"], path, value))
    assert _dotted(path) in error.where
    assert str(tmp_path) in error.where
    assert error.what.startswith("expected")


@pytest.mark.parametrize("name", ["profile", "decision", "training", "evaluation"])
@pytest.mark.parametrize("schema", [None, "", "stoker.profile/v2", "stoker.workload/v1", 1])
def test_other_schema_is_refused(tmp_path, name, schema):
    error = _refusal(tmp_path, name, {**_documents()[name], "schema": schema})
    assert f"wrong file: expected stoker.{name}/v1" in error.what


@pytest.mark.parametrize("name", list(RECORDS))
@pytest.mark.parametrize("document", [[], 1, "text", None])
def test_document_that_is_no_mapping_is_refused(tmp_path, name, document):
    assert "expected a mapping" in _refusal(tmp_path, name, document).what


@pytest.mark.parametrize("name", list(RECORDS))
def test_missing_required_field_is_named(tmp_path, name):
    document = _documents()[name]
    required = [f for f in msgspec.structs.fields(RECORDS[name]) if f.required]
    assert required
    for field in required:
        less = {key: value for key, value in document.items() if key != field.name}
        assert field.name in _refusal(tmp_path, name, less).what


def test_a_record_of_another_kind_is_named(tmp_path):
    error = _refusal(tmp_path, "decision", _documents()["profile"])
    assert error.fix == "this is a profile: give a decision here"


@pytest.mark.parametrize(
    ("key", "found", "fix"),
    [
        ("command", "python train.py", "command: [python, train.py]"),
        ("command", "sh -c 1 a:b true", 'command: [sh, -c, "1", "a:b", "true"]'),
        ("command", ["python", 1.5], 'in quotes: "1.5"'),
        ("command", ["python", True], 'in quotes: "true"'),
        ("name", "Größe 1", "name: gr-e-1"),
        ("name", "!", "stoker schema workload     shows the expected keys"),
        ("image", 7, 'in quotes: "7"'),
        ("feed", "fast", "stoker schema workload     shows the expected keys"),
        ("feed", {"max_errors": "2.5 %"}, "max_errors: 0.025"),
        ("feed", {"max_errors": "1e9"}, "max_errors: 1000000000"),
        ("feed", {"max_errors": "5e-3"}, "max_errors: 0.005"),
        ("feed", {"max_bytes": "1e9"}, "max_bytes: 1000000000"),
        ("feed", {"max_bytes": "1.5"}, "stoker schema workload     shows the expected keys"),
        ("feed", {"sample_timeout_seconds": "1.5h"}, "sample_timeout_seconds: 5400"),
        ("feed", {"max_bytes": "2GiB"}, "max_bytes: 2147483648"),
        ("feed", {"max_bytes": "5%"}, "stoker schema workload     shows the expected keys"),
    ],
)
def test_an_error_shows_the_line_as_it_would_be_right(key, found, fix):
    document = {"name": "a", "command": ["x"], key: found}
    with pytest.raises(UsageError) as caught:
        workload_from(document)
    assert caught.value.fix == fix


@pytest.mark.parametrize("value", [0.01, 0.999, 1, 1.0, 2.0, 10**9])
def test_a_limit_of_bad_samples_is_a_share_or_a_whole_number(value):
    document: Any = {"name": "a", "command": ["x"], "feed": {"max_errors": value}}
    assert workload_from(document).feed.max_errors == value


@pytest.mark.parametrize("value", [0, 0.0, -1, 1.5, math.nan, math.inf, True, "5%", None])
@pytest.mark.parametrize("is_variable", [False, True])
def test_another_limit_of_bad_samples_is_refused_with_its_key(value, is_variable):
    document: Any = {"name": "a", "command": ["x"], "feed": {"max_errors": value}}
    read: Any = workload_from
    if is_variable:
        document = {"STOKER_FEED": json.dumps(document["feed"])}
        read = from_environment
    with pytest.raises(UsageError) as caught:
        read(document)
    error = caught.value
    # JSON has neither NaN nor infinity.
    is_json = isinstance(value, str | None) or math.isfinite(value) or not is_variable
    assert ("max_errors" if is_json else "STOKER_FEED") in error.where
    assert ("number" if is_json else "malformed") in error.what


def test_a_limit_of_bad_samples_that_is_neither_is_explained():
    with pytest.raises(UsageError, match=r"whole number of samples, found 1.5") as caught:
        workload_from({"name": "a", "command": ["x"]}, overrides=["feed.max_errors=1.5"])
    assert caught.value.where.startswith("--set feed.max_errors=")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not a JSON document"),
        ("{", "not a JSON document"),
        ('{"a": 1,}', "not a JSON document"),
        ("schema: x", "not a JSON document"),
        ('{"schema": "stoker.profile/v1", "schema": "stoker.profile/v1"}', "duplicate key"),
    ],
)
def test_a_file_that_holds_no_document_is_refused_with_its_name(tmp_path, text, what):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=what) as caught:
        read_json(file, Profile)
    assert str(file) in caught.value.where


def test_a_record_that_is_too_large_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    file = _write(tmp_path, _documents()["training"])
    monkeypatch.setattr("stoker.records.base.MAX_TEXT_LENGTH", file.stat().st_size - 1)
    with pytest.raises(UsageError, match="is too large"):
        read_json(file, RECORDS["training"])


def test_missing_and_unreadable_files_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_json(tmp_path / "none.json", Profile)
    with pytest.raises(UsageError, match="cannot read"):
        read_json(tmp_path, Profile)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        read_json(tmp_path / "binary.json", Profile)


def test_writing_over_a_file_leaves_the_new_one_and_nothing_else(tmp_path):
    file = tmp_path / "deep" / "profile.json"
    write_json(file, sample_records.profile())
    new = builders.profile(step_seconds=1.0)
    write_json(file, new)
    assert read_json(file, Profile) == new
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"]


def test_writing_into_a_file_as_a_folder_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", ProfiledHost(instance_type="x"))


def test_a_record_is_written_as_the_umask_says_which_no_thread_sees_changed(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)
        write_json(tmp_path / "x.json", ProfiledHost(instance_type="x"))
        monkeypatch.undo()
    finally:
        os.umask(before)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640


# What makes a profile, a decision or a training another workload's, key by key.

DIGITS = {
    "name": "digits",
    "command": ["python", "train.py"],
    "cluster": {"dnn": {"instance_type": "local.c2"}},
}
# `stoker profile -- python train.py` on two cores.
BARE = workload_from({"name": "train", "command": ["python", "train.py"]})
BARE_KEYS = BARE.profile_keys(today=TodaysGroup(instance_type="local.c2"))


def changed(**keys):
    return workload_from({**DIGITS, **keys})


def refused(workload, other):
    try:
        keys, digest = workload.profile_keys(), workload.digest()
        refuse_foreign("profile", keys=keys, digest=digest, workload=other)
    except UsageError as err:
        return err.what
    return ""


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "numbers"},
        {"gate": [{"metric": "accuracy", "min": 0.9}]},
        {"constraints": {"max_usd_per_hour": 3.0}, "training": {"steps": 9}},
        {"feed": {"credits": 4, "port": 7700}},
        {"hyperparameters": {"epochs": 3}},
        {"channels": {"train": {"uri": "data"}}},
        {"image": "registry/other:2"},
        {"cluster": {"dnn": {"instance_type": "local.c2", "processes_per_host": 1}}},
    ],
)
def test_what_does_not_change_a_step_voids_no_profile(keys):
    assert refused(changed(), changed(**keys)) == ""


DNN = "cluster.dnn"
TWO_HOSTS = {"dnn": {"instance_type": "local.c1", "count": 2}}
TWO_PROCESSES = {"dnn": {"instance_type": "local.c2", "processes_per_host": 2}}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("command", ["python", "b.py"], "command: python train.py -> python b.py"),
        ("strategy", "torchrun", "strategy: auto -> torchrun"),
        ("cluster", TWO_HOSTS, f"{DNN}.instance_type: local.c2 -> local.c1; {DNN}.count: 1 -> 2"),
        ("cluster", TWO_PROCESSES, f"{DNN}.processes_per_host: 1 -> 2"),
    ],
)
def test_what_changes_a_step_is_named_with_both_values(key, value, words):
    found = refused(changed(), changed(**{key: value}))
    assert found == f"the profile was made for another workload: {words}"


def test_a_profile_of_the_same_command_serves_with_and_without_a_cluster_and_arguments():
    for workload in (changed(), workload_from({**DIGITS, "cluster": None})):
        refuse_foreign("profile", keys=BARE_KEYS, digest=BARE.digest(), workload=workload)
    keys = {**changed().profile_keys(), "command": "python train.py --epochs 3"}
    refuse_foreign("profile", keys=keys, digest=changed().digest(), workload=changed())


def test_a_profile_taken_for_other_hosts_is_not_held_to_its_own():
    cloud = changed(cluster={"dnn": {"instance_type": "ml.g5.2xlarge"}})
    with pytest.raises(UsageError, match=r"instance_type: local\.c2 -> g5\.2xlarge"):
        refuse_foreign("profile", keys=BARE_KEYS, digest=BARE.digest(), workload=cloud)
    keys = own_keys(BARE_KEYS, is_elsewhere=True)
    refuse_foreign("profile", keys=keys, digest=BARE.digest(), workload=cloud)


def run_of(workload, *, at):
    folder = Path("runs") / f"{workload.name}-{at}"
    folder.mkdir(parents=True)
    write_json(folder / "workload.json", workload)
    (folder / "profile.json").touch()
    os.utime(folder / "workload.json", (at, at))
    return folder


def test_from_takes_the_newest_run_whose_keys_are_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(changed(), at=1)
    newest = run_of(changed(gate=[{"metric": "m", "min": 0.5}]), at=2)
    run_of(changed(command=["python", "b.py"]), at=3)
    renamed = run_of(changed(name="numbers"), at=4)
    assert latest_run_dir(changed(), needs=["profile.json"]) == newest
    assert latest_run_dir(changed(name="new"), needs=["profile.json"]) == renamed


def test_from_names_what_differs_from_the_last_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(changed(), at=1)
    with pytest.raises(UsageError, match=r"command: python train\.py -> python b\.py") as caught:
        latest_run_dir(changed(command=["python", "b.py"]), needs=["profile.json"])
    assert "digits-1" in caught.value.where
    with pytest.raises(UsageError, match=r"no earlier run of this workload has decision\.json"):
        latest_run_dir(changed(), needs=["decision.json"])


@pytest.mark.parametrize("name", RECORDS)
def test_each_property_says_what_it_means(name):
    schema = json_schema(name)
    silent = [
        f"{kind}.{key}"
        for kind, definition in schema["$defs"].items()
        for key, described in definition["properties"].items()
        # A word alone repeats the key.
        if len(described["description"].split()) < 3 or not described["description"].endswith(".")
    ]
    assert silent == []
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert all("Attributes:" not in each["description"] for each in schema["$defs"].values())


def test_the_schema_is_otherwise_that_of_the_types():
    def bare(value):
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if not isinstance(v, str) or k == "$ref"}
        return [bare(each) for each in value] if isinstance(value, list) else value

    for kind in RECORDS.values():
        assert bare(schema_of(kind)) == bare(msgspec.json.schema(kind))


def test_texts_are_read_over_lines_and_from_classes_below():
    class Below(Record, frozen=True, kw_only=True):
        """Something.

        Attributes:
            first: Says this,
                and that.

        Not an attribute: this.
        """

        first: int = 0

    class Above(Below, frozen=True, kw_only=True):
        """Something more."""

    assert field_texts(Above) == {"first": "Says this, and that."}
