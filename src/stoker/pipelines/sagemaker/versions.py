"""Versions and aliases of SageMaker's pipelines, and what their steps read."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping

from stoker.errors import ServiceError, UsageError
from stoker.parameters import Kind
from stoker.pipelines.base import CODE, WORKLOAD, Compiled
from stoker.pipelines.changes import (
    PipelineVersion,
    code_digests,
    inputs_of_definition,
    workload_with_defaults,
)
from stoker.pipelines.sagemaker.schedule import declared_in
from stoker.pipelines.versions import UploadedVersion, VersionHistory
from stoker.platforms.aws import Aws
from stoker.records import Json
from stoker.records.base import Document, text, texts

# Of the inputs of a deployed pipeline.
_READ = (WORKLOAD, CODE)


def compared_versions(
    aws: Aws, compiled: Compiled, *, deployed: Json, wanted: Json
) -> tuple[PipelineVersion, PipelineVersion]:
    """Returns both pipelines with what their steps read; the deployed one's is fetched.

    Args:
        aws: The account.
        compiled: The pipeline that would be uploaded.
        deployed: The uploaded one's settings and definition.
        wanted: The compiled one's.
    """
    ours = {uri.rpartition("/")[2]: content for uri, content in compiled.uploads.items()}
    names = frozenset(parameter.name for parameter in compiled.parameters)
    now = _version(wanted, ours.get(WORKLOAD), ours.get(CODE))
    return _deployed(aws, deployed), dataclasses.replace(now, derived=names)


class SageMakerVersions(VersionHistory):
    """The versions of a pipeline of SageMaker.

    Args:
        aws: The account.
        pipeline: Name of the pipeline.
        arn: Its ARN.
    """

    def __init__(self, aws: Aws, *, pipeline: str, arn: str) -> None:
        self._aws = aws
        self._pipeline = pipeline
        self._arn = arn

    def listed(self) -> list[UploadedVersion]:
        asked = {"PipelineName": self._pipeline, "SortOrder": "Descending"}
        pages = self._aws.pages(
            "sagemaker", "ListPipelineVersions", items="PipelineVersionSummaries", **asked
        )
        return [_uploaded(summary, is_latest=index == 0) for index, summary in enumerate(pages)]

    def read(self, version: UploadedVersion) -> PipelineVersion:
        return _deployed(self._aws, json.loads(self._definition(version)))

    def check(self, version: UploadedVersion) -> None:
        document: Json = json.loads(self._definition(version))
        folder = inputs_of_definition(document)
        if folder is None:
            return
        # The workload names its code, which is packed beside it.
        workload = _read(self._aws, f"{folder}/{WORKLOAD}") or b""
        needed = [WORKLOAD]
        if f"{folder}/{CODE}" in json.dumps(document) + workload.decode(errors="replace"):
            needed.append(CODE)
        for name in needed:
            if not self._aws.has_object(f"{folder}/{name}"):
                raise UsageError(
                    f"version {version.name} cannot run: {folder}/{name} is gone",
                    where="--back-to",
                    fix="git checkout COMMIT; stoker upload sagemaker WORKLOAD",
                )

    def declared(self, version: UploadedVersion) -> Mapping[str, Kind]:
        return declared_in(self._definition(version))

    def _definition(self, version: UploadedVersion) -> str:
        asked = {"PipelineName": self._pipeline, "PipelineVersionId": int(version.id)}
        return str(self._aws.call("sagemaker", "DescribePipeline", **asked)["PipelineDefinition"])

    def set_again(self, version: UploadedVersion) -> dict[str, Json]:
        if version.is_latest:
            return {"action": "unchanged", "id": self._arn, "version": version.id, "url": ""}
        asked = {"PipelineName": self._pipeline, "PipelineDefinition": self._definition(version)}
        answer = self._aws.call("sagemaker", "UpdatePipeline", **asked)
        number = answer.get("PipelineVersionId")
        if number is not None:
            self._update(number, PipelineVersionDescription=f"version {version.name} again")
        return {"action": "updated", "id": self._arn, "version": str(number or ""), "url": ""}

    def move_alias(self, alias: str) -> dict[str, Json]:
        newest, *others = self.listed()
        for version in others:
            if alias in version.aliases:
                self._update(version.id, PipelineVersionAliasOperations={"Remove": [alias]})
        if alias not in newest.aliases:
            self._update(newest.id, PipelineVersionAliasOperations={"Add": [alias]})
        return {"alias": alias, "version": newest.id}

    def _update(self, number: Json, **change: object) -> None:
        which = {"PipelineArn": self._arn, "PipelineVersionId": int(str(number))}
        self._aws.call("sagemaker", "UpdatePipelineVersion", **which, **change)


def _uploaded(summary: Document, *, is_latest: bool) -> UploadedVersion:
    number = str(summary["PipelineVersionId"])
    return UploadedVersion(
        id=number,
        name=number,
        created_at=text(summary, "CreationTime"),
        aliases=tuple(texts(summary, "PipelineVersionAliases")),
        about=text(summary, "PipelineVersionDescription"),
        is_latest=is_latest,
    )


def _deployed(aws: Aws, document: Json) -> PipelineVersion:
    folder = inputs_of_definition(document)
    if folder is None:
        return _version(document, None, None)
    contents = {name: _read(aws, f"{folder}/{name}") for name in _READ}
    return _version(document, contents[WORKLOAD], contents[CODE])


def _read(aws: Aws, uri: str) -> bytes | None:
    try:
        return aws.read_object(uri)
    except ServiceError as err:
        # It was pruned, or this caller may not read it: the definition tells then.
        if err.kind not in ("missing", "denied"):
            raise
        return None


def _version(document: Json, workload: bytes | None, code: bytes | None) -> PipelineVersion:
    read: Json = None
    with contextlib.suppress(ValueError):
        read = json.loads(workload or b"null")
    version = PipelineVersion(document=document, code=code_digests(code))
    if isinstance(read, dict):
        return dataclasses.replace(version, workload=workload_with_defaults(read))
    return version
