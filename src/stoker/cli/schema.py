"""`stoker schema` prints the JSON Schema of a record, for editors and other languages."""

import inspect
import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import offered

if TYPE_CHECKING:
    from stoker.records import Json


def schema_verb(
    record: Annotated[
        str,
        typer.Argument(
            autocompletion=offered("workload", "profile", "decision", "training", "evaluation")
        ),
    ] = "",
) -> None:
    """Print the JSON Schema of a record.

    Args:
        record ([RECORD]): workload, profile, decision, training or evaluation; without one, list
            them.

    Examples:
        stoker schema
        stoker schema workload > workload.schema.json
    """
    if not record:
        from stoker.records import RECORDS

        for name, kind in RECORDS.items():
            line = f"{name:<10} {(inspect.getdoc(kind) or '').splitlines()[0]}"
            print(textwrap.fill(line, 80, subsequent_indent=" " * 11))
        return
    print(json.dumps(json_schema(record), indent=2))


def json_schema(name: str) -> "dict[str, Json]":
    """Returns the JSON Schema (2020-12) of a record; raises UsageError for an unknown name."""
    from stoker.errors import UsageError
    from stoker.records import RECORDS, nearest
    from stoker.records.schema import schema_of

    if name not in RECORDS:
        raise UsageError(f"no record is called {name}", fix=nearest(name, list(RECORDS)))
    return schema_of(RECORDS[name])
