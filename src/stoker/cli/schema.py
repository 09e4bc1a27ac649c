"""`stoker schema` prints what a record may hold, for other programs."""

import json
from typing import Annotated

import typer


def schema_verb(
    record: Annotated[
        str,
        typer.Argument(
            metavar="RECORD",
            help="workload, profile, decision, training or evaluation.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Prints the JSON Schema of a record."""
    from stoker.records import json_schema

    print(json.dumps(json_schema(record), indent=2))
