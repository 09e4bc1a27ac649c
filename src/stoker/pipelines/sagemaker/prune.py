"""What runs and uploads left in the bucket and nothing names any more: `stoker prune`.

Kept is what a definition (of any pipeline of the region, in any version), a schedule, a package of
the model registry or an active run names, and what is younger than some days. Names are looked for
as text, so an address in a parameter, a tag or a comment keeps it, too.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from stoker.errors import ServiceError
from stoker.pipelines.base import sagemaker_of
from stoker.pipelines.sagemaker.overlap import ACTIVE
from stoker.platforms.aws import Aws, split_uri
from stoker.records import Workload
from stoker.records.base import Document, mapping, mappings
from stoker.records.platforms import NAME_END

# DeleteObjects takes so many keys.
_MAX_KEYS = 1000
INPUTS = "stoker/inputs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftFolder:
    """A folder of the bucket that nothing names.

    Attributes:
        uri: Its address, with a slash at the end.
        kind: inputs: code and workload of an upload; run: outputs and models of a run.
        num_bytes: Size of all its objects.
        changed: When the newest of its objects was written.
    """

    uri: str
    kind: str
    num_objects: int
    num_bytes: int
    changed: datetime


def left_folders(
    workload: Workload, *, aws: Aws, older_than_days: float, now: datetime | None = None
) -> list[LeftFolder]:
    """Returns what nothing names below `sagemaker.output_uri`, oldest first.

    Folders of runs are those of the workload's own pipeline. Blocks for a call for each pipeline,
    version, schedule, package and folder.

    Args:
        workload: Its settings name the bucket, and its name the pipeline.
        aws: The account.
        older_than_days: What changed later is kept; at least the workload's `cache_days` are.
        now: With a time zone. Absent: this moment.

    Raises:
        ServiceError: If AWS refuses to tell what is named: then nothing is known to be left.
    """
    settings = sagemaker_of(workload)
    days = max(older_than_days, settings.cache_days)
    before = (now or datetime.now(UTC)) - timedelta(days=days)
    bucket, key = split_uri(f"{settings.output_uri.rstrip('/')}/")
    named = _Named(aws, workload)
    folders: list[LeftFolder] = []
    for place in _places(aws, bucket, key, name=workload.name):
        if named.has(place):
            continue
        folder = _folder(aws, bucket, place)
        if folder is not None and folder.changed < before:
            folders.append(folder)
    return sorted(folders, key=lambda folder: folder.changed)


def delete_folder(aws: Aws, folder: LeftFolder) -> None:
    """Deletes the objects of a folder; in a bucket with versions they become noncurrent."""
    bucket, prefix = split_uri(folder.uri)
    keys = [str(item["Key"]) for item in _objects(aws, bucket, prefix)]
    for first in range(0, len(keys), _MAX_KEYS):
        objects = [{"Key": key} for key in keys[first : first + _MAX_KEYS]]
        asked = {"Objects": objects, "Quiet": True}
        answer = aws.call("s3", "DeleteObjects", Bucket=bucket, Delete=asked)
        for error in mappings(answer, "Errors"):
            raise ServiceError(
                f"{error.get('Code')}: {error.get('Message')}",
                where=f"s3://{bucket}/{error.get('Key')}",
                code=str(error.get("Code")),
                action="s3:DeleteObject",
                kind="refused",
            )


@dataclass(frozen=True, slots=True)
class _MaybeLeft:
    """A folder that may be left: it is kept where something names `word`."""

    kind: str
    prefix: str
    word: str


def _places(aws: Aws, bucket: str, key: str, *, name: str) -> Iterator[_MaybeLeft]:
    for prefix in _subfolders(aws, bucket, f"{key}{INPUTS}"):
        yield _MaybeLeft("inputs", prefix, _last(prefix))
    run_ids: set[str] = set()
    for prefix in _subfolders(aws, bucket, f"{key}pipelines/{name}/"):
        # Branches have their own folders, ID-BRANCH.
        run_id = _last(prefix).partition("-")[0]
        run_ids.add(run_id)
        yield _MaybeLeft("run", prefix, run_id)
    for run_id in sorted(run_ids):
        # The jobs of a run, of its branches and attempts, have its id in their names.
        # With one dash they are an earlier version's.
        for end in (NAME_END, "-"):
            for prefix in _subfolders(aws, bucket, f"{key}{name}{end}{run_id}"):
                yield _MaybeLeft("run", prefix, run_id)


class _Named:
    """The texts that name what is kept, and the ids of runs that are active."""

    def __init__(self, aws: Aws, workload: Workload) -> None:
        self._texts = [*_definitions(aws), *_schedules(aws), *_packages(aws, workload)]
        self._active = set(_active_runs(aws, workload.name))

    def has(self, place: _MaybeLeft) -> bool:
        return place.word in self._active or any(place.word in text for text in self._texts)


def _definitions(aws: Aws) -> Iterator[str]:
    for pipeline in aws.pages("sagemaker", "ListPipelines", items="PipelineSummaries"):
        name = str(pipeline["PipelineName"])
        yield str(aws.call("sagemaker", "DescribePipeline", PipelineName=name))
        asked = {"items": "PipelineVersionSummaries", "PipelineName": name}
        for version in aws.pages("sagemaker", "ListPipelineVersions", **asked):
            of = {"PipelineName": name, "PipelineVersionId": version["PipelineVersionId"]}
            yield str(aws.call("sagemaker", "DescribePipeline", **of).get("PipelineDefinition"))


def _schedules(aws: Aws) -> Iterator[str]:
    for schedule in aws.pages("scheduler", "ListSchedules", items="Schedules"):
        place = {"Name": schedule["Name"], "GroupName": schedule["GroupName"]}
        yield json.dumps(mapping(aws.call("scheduler", "GetSchedule", **place), "Target"))


def _packages(aws: Aws, workload: Workload) -> Iterator[str]:
    group = sagemaker_of(workload).model.group or workload.name
    asked = {"items": "ModelPackageSummaryList", "ModelPackageGroupName": group}
    try:
        summaries = [*aws.pages("sagemaker", "ListModelPackages", **asked)]
    except ServiceError as err:
        # No model was registered yet.
        if err.kind != "missing":
            raise
        return
    for package in summaries:
        arn = package["ModelPackageArn"]
        yield json.dumps(aws.call("sagemaker", "DescribeModelPackage", ModelPackageName=arn))


def _active_runs(aws: Aws, name: str) -> Iterator[str]:
    asked = {"items": "PipelineExecutionSummaries", "PipelineName": name}
    for run in aws.pages("sagemaker", "ListPipelineExecutions", **asked):
        if run.get("PipelineExecutionStatus") in ACTIVE:
            yield str(run["PipelineExecutionArn"]).rpartition("/")[2]


def _folder(aws: Aws, bucket: str, place: _MaybeLeft) -> LeftFolder | None:
    objects = [*_objects(aws, bucket, place.prefix)]
    if not objects:
        return None
    times = [datetime.fromisoformat(str(item["LastModified"])) for item in objects]
    return LeftFolder(
        uri=f"s3://{bucket}/{place.prefix}",
        kind=place.kind,
        num_objects=len(objects),
        num_bytes=sum(int(str(item["Size"])) for item in objects),
        changed=max(times),
    )


def _subfolders(aws: Aws, bucket: str, prefix: str) -> Iterator[str]:
    for page in aws.object_pages(f"s3://{bucket}/{prefix}", Delimiter="/"):
        for common in mappings(page, "CommonPrefixes"):
            yield str(common["Prefix"])


def _objects(aws: Aws, bucket: str, prefix: str) -> Iterator[Document]:
    for page in aws.object_pages(f"s3://{bucket}/{prefix}"):
        yield from mappings(page, "Contents")


def _last(prefix: str) -> str:
    return prefix.rstrip("/").rpartition("/")[2]
