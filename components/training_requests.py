"""What the two training steps, profile's and train's native one, do to a job's literal request."""

from collections.abc import Collection, Mapping, Sequence

from components.sagemaker_run import (
    Run,
)
from components.sagemaker_steps import (
    Request,
    Text,
)

TOKEN = "stoker_token"


def job_request(run: Run, request: Mapping[str, object]) -> Request:
    """The request with the image by its parameter, and without what is true of a single job only:
    its name, and the digests among its tags, by which a launched job is adopted.
    """
    tags = [tag for tag in items(request.get("Tags")) if not str(tag["Key"]).startswith("stoker:")]
    return {
        **without(request, ("TrainingJobName",)),
        "AlgorithmSpecification": {
            **mapping(request["AlgorithmSpecification"]),
            "TrainingImage": run.parameters["image"],
        },
        "Tags": tags or None,
    }


def channels(run: Run, request: Mapping[str, object]) -> list[Request]:
    """The request's channels: input data by its parameter, and no token of a single job's.

    A file system stays as it is: it has no address that a parameter could replace.
    """
    return [
        placed(channel, run.parameters["input_data"])
        if channel["ChannelName"] == run.main_channel and "input_data" in run.parameters
        else dict(channel)
        for channel in items(request.get("InputDataConfig"))
        if channel["ChannelName"] != TOKEN
    ]


def placed(channel: Mapping[str, object], uri: Text) -> Request:
    """The channel with another address."""
    source = mapping(mapping(channel["DataSource"])["S3DataSource"])
    return {**channel, "DataSource": {"S3DataSource": {**source, "S3Uri": uri}}}


def without(request: object, keys: Collection[str]) -> Request:
    """The request's members but for `keys`."""
    return {key: value for key, value in mapping(request).items() if key not in keys}


def mapping(value: object) -> Mapping[str, object]:
    """A member of a request that is a structure."""
    assert isinstance(value, Mapping)
    return value


def items(value: object) -> Sequence[Mapping[str, object]]:
    """A member of a request that is a list of structures; empty where it is absent."""
    return value if isinstance(value, list | tuple) else ()
