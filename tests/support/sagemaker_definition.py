"""Reads a definition of a pipeline on SageMaker, and resolves its values as a run does."""

from collections.abc import Iterator, Mapping

from support.documents import Json

EXECUTION_ID = "abcdefghijkl"


def steps(document: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    def walk(listed: Json) -> Iterator[dict[str, Json]]:
        for step in listed:
            yield step
            for branch in ("IfSteps", "ElseSteps"):
                yield from walk(step["Arguments"].get(branch, []))

    return walk(document["Steps"])


def resolved(value, document, *, reuse_profile=None) -> Json:
    """Resolves a value as in a run with the defaults of all parameters but `reuse_profile`."""
    listed = document["Parameters"]
    known = {f"Parameters.{p['Name']}": p["DefaultValue"] for p in listed}
    if reuse_profile is not None:
        known["Parameters.reuse_profile"] = reuse_profile
    known["Execution.PipelineExecutionId"] = EXECUTION_ID

    def resolve(value: Json) -> Json:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        if set(value) == {"Get"}:
            named = str(value["Get"])
            return known.get(named, f"s3://bucket/{named}")
        if set(value) == {"Std:Join"}:
            join = value["Std:Join"]
            return str(join["On"]).join(str(resolve(item)) for item in join["Values"])
        if set(value) == {"Std:JsonGet"}:
            return "s3://bucket/of-a-file"
        return {key: resolve(item) for key, item in value.items()}

    return resolve(value)
