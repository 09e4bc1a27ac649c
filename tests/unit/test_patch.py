import pytest

from stoker.platforms.patch import merged, unreserved

A, B, C = ({"name": name, "value": "1"} for name in "ABC")
OTHER_A = {"name": "A", "valueFrom": {}}
KEY_A, KEY_B = {"key": "a"}, {"key": "b"}


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        # Examples of RFC 7386, Appendix A.
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": "foo"}, {"b": {"c": None, "d": 1}}, {"a": "foo", "b": {"d": 1}}),
        # Items of lists by name.
        ({"env": [A, B]}, {"env": [OTHER_A, C]}, {"env": [OTHER_A, B, C]}),
        (
            {"containers": [{"name": "a", "image": "i", "tty": True}]},
            {"containers": [{"name": "a", "image": "j", "tty": None}]},
            {"containers": [{"name": "a", "image": "j"}]},
        ),
        (
            {"tolerations": [KEY_A]},
            {"tolerations": [KEY_B, KEY_A]},
            {"tolerations": [KEY_A, KEY_B]},
        ),
    ],
)
def test_a_patch_is_merged(base, patch, result):
    assert merged(base, patch) == result


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
