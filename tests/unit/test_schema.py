import msgspec
import pytest

from stoker.cli.schema import json_schema
from stoker.records import RECORDS
from stoker.records.base import Record
from stoker.records.schema import field_texts, schema_of


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
