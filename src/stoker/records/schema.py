"""The records have a JSON Schema, for editors and other languages."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from stoker.errors import UsageError
from stoker.records.base import Json, Record, nearest
from stoker.records.decision import Decision
from stoker.records.profile import Profile
from stoker.records.training import Evaluation, Training
from stoker.records.workload import Workload

RECORDS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "workload": Workload,
        "profile": Profile,
        "decision": Decision,
        "training": Training,
        "evaluation": Evaluation,
    }
)


def json_schema(name: str) -> dict[str, Json]:
    """Returns the JSON Schema (2020-12) of a record.

    Raises:
        UsageError: If there is no record of that name.
    """
    if name not in RECORDS:
        raise UsageError(f"no record is called {name}", fix=nearest(name, list(RECORDS)))
    schema: dict[str, Json] = msgspec.json.schema(RECORDS[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
