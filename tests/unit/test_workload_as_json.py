"""A workload that is written as JSON is read by libyaml, as PyYAML would read it."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker import workload_file
from stoker.errors import UsageError
from stoker.records import to_json
from stoker.workload_file import read_workload

WORKLOAD = {"name": "w", "command": ["x"], "image": "registry/x:1"}
# What YAML takes for a value without quotes, and what JSON writes with an escape.
TEXTS = [
    *(
        "yes",
        "012",
        "1:30",
        "2026-11-26",
        "1e5",
        "~",
        "null",
        "<<",
        "=",
        "",
        "- a",
        "a: b",
        "#",
        "!x",
    ),
    *(
        "\x00\x07\x1f\x7f\x85\xa0",
        "größe \N{SNOWMAN}",
        "\u2028\ufeff",
        "two\nlines\t",
        '"',
        "\\",
        "/",
    ),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def read(path, *, libyaml):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", libyaml)
        if not libyaml:
            patch.setattr(yaml, "CSafeLoader", None)
        try:
            # The record's text has 1, 1.0 and true apart.
            return to_json(read_workload(path))
        except UsageError as err:
            return err.what, err.where, err.fix


@given(
    values=st.dictionaries(st.text(min_size=1, max_size=5), VALUES, max_size=4),
    indent=st.none() | st.just(1),
)
def test_it_is_the_same_workload_or_the_same_error(tmp_path_factory, values, indent):
    path = tmp_path_factory.mktemp("workload") / "w.json"
    document = {**WORKLOAD, "hyperparameters": values, "kubernetes": {"pod": values}}
    path.write_text(json.dumps(document, indent=indent))
    assert read(path, libyaml=True) == read(path, libyaml=False)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "w",\n "command": ["x"],\n "command": ["y"]}',
        '{"name": "w",\n "command": ["x"],\n "comand": ["y"]}',
        '{"name": "w", "command": ["x"], "hyperparameters": {"a": "\\ud83d\\ude00"}}',
        '{"name": "w", "command": ["x"], "hyperparameters": {"a": NaN, "b": 1E400}}',
        '{"name": ' + "[" * 3000 + "]" * 3000 + "}",
        "[]",
        '{"name": "w", "command": ["x"]',
    ],
)
def test_lines_and_errors_are_the_same(tmp_path, text):
    path = tmp_path / "w.json"
    path.write_text(text)
    assert read(path, libyaml=True) == read(path, libyaml=False)


class Used(Exception):
    """PyYAML's own parser has been asked."""


class PurePython(workload_file._Loader):
    def __init__(self, text):
        raise Used(text)


def test_libyaml_reads_json_and_no_other_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(workload_file, "_Loader", PurePython)
    path = tmp_path / "w.json"
    path.write_text(json.dumps(WORKLOAD))
    assert read_workload(path).name == "w"
    path.write_text("name: w\ncommand: [x]")
    with pytest.raises(Used):
        read_workload(path)
