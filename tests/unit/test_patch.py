"""Patches change what stoker made, by RFC 7386 and by the names of list items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.platforms.patch import merged, unreserved

documents = st.recursive(
    st.booleans() | st.integers() | st.text("ab"),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("xyz"), children),
    max_leaves=8,
)
maps = st.dictionaries(st.text("xyz"), documents)


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        # The examples of RFC 7386, Appendix A.
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"a": "foo"}, {"b": {"c": None, "d": 1}}, {"a": "foo", "b": {"d": 1}}),
        # Items of lists by name.
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "A", "valueFrom": {}}, {"name": "C", "value": "3"}]},
            {
                "env": [
                    {"name": "A", "valueFrom": {}},
                    {"name": "B", "value": "2"},
                    {"name": "C", "value": "3"},
                ]
            },
        ),
        (
            {"containers": [{"name": "a", "image": "i", "tty": True}]},
            {"containers": [{"name": "a", "image": "j", "tty": None}]},
            {"containers": [{"name": "a", "image": "j"}]},
        ),
        (
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "b"}, {"key": "a"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
        ),
    ],
)
def test_a_patch_is_merged(base, patch, result):
    assert merged(base, patch) == result


@given(maps, maps)
def test_a_patch_is_merged_once_for_all(base, patch):
    once = merged(base, patch)
    assert merged(once, patch) == once
    assert merged(base, {}) == base


def test_what_may_be_set_of_a_request_is_what_is_not_reserved():
    request = {
        "Name": "x",
        "Vpc": {"Subnets": ["a"], "Id": ""},
        "Tags": [{"Key": "a", "Value": "b", "Note": "n"}],
        "Spot": False,
    }
    reserved = {"Name": "", "Tags * Note": ""}
    assert unreserved(request, reserved) == {
        "Vpc": {"Subnets": ["a"]},
        "Tags": [{"Key": "a", "Value": "b"}],
    }
