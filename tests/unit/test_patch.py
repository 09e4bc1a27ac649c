import pytest

from stoker.platforms.patch import merged, unreserved


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
