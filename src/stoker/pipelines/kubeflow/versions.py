"""Versions of Kubeflow's pipelines."""

import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from stoker.errors import UsageError
from stoker.parameters import Kind
from stoker.pipelines.changes import PipelineVersion, workload_with_defaults
from stoker.pipelines.kubeflow.compile import inputs_of, spec_of_answer
from stoker.pipelines.kubeflow.schedule import kinds_of
from stoker.pipelines.versions import UploadedVersion, VersionHistory
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings, text


class KubeflowCall(Protocol):
    """A request of kfp's generated client: `KubeflowClient.call`."""

    def __call__(self, api: str, operation: str, **arguments: object) -> dict[str, Json]: ...


def add_version(call: KubeflowCall, name: str, *, id: str, definition: str, about: str) -> Document:
    """Uploads a version of a pipeline.

    Args:
        call: Of the client.
        name: The pipeline's.
        id: The pipeline's.
        definition: Content of the compiled file.
        about: Its description, in as many characters as the service takes.
    """
    # The service takes a version's name once.
    now = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        file = Path(folder, "pipeline.yaml")
        file.write_text(definition, encoding="utf-8")
        sent = {"uploadfile": str(file), "pipelineid": id, "name": f"{name}-{now}"}
        return call("upload", "upload_pipeline_version", **sent, description=about)


def told_version(version: Document) -> dict[str, Json]:
    return {"version": version.get("name") or version.get("display_name")}


def version_of(spec: Json) -> PipelineVersion:
    """Returns a spec with the workload that is in it."""
    told = mapping(mapping(inputs_of(spec).get("workload")).get("defaultValue"))
    if not told:
        return PipelineVersion(document=spec)
    return PipelineVersion(document=spec, workload=workload_with_defaults(told))


class KubeflowVersions(VersionHistory):
    """The versions of a pipeline of Kubeflow.

    Args:
        call: Of the client.
        pipeline: Name of the pipeline.
        id: Its id.
        newest: Its newest version, as the service gives it.
    """

    def __init__(self, call: KubeflowCall, *, pipeline: str, id: str, newest: Document) -> None:
        self._call = call
        self._pipeline = pipeline
        self._id = id
        self._newest = newest

    def listed(self) -> list[UploadedVersion]:
        latest = self._newest.get("pipeline_version_id")
        return [
            _uploaded(each, is_latest=each.get("pipeline_version_id") == latest)
            for each in self._all()
        ]

    def _all(self) -> Iterator[Document]:
        asked: dict[str, object] = {"page_size": 100, "sort_by": "created_at desc"}
        while True:
            answer = self._call(
                "pipelines", "list_pipeline_versions", pipeline_id=self._id, **asked
            )
            yield from mappings(answer, "pipeline_versions")
            asked["page_token"] = answer.get("next_page_token")
            if not asked["page_token"]:
                return

    def read(self, version: UploadedVersion) -> PipelineVersion:
        return version_of(spec_of_answer(self._spec(version)))

    def declared(self, version: UploadedVersion) -> Mapping[str, Kind]:
        return kinds_of(inputs_of(spec_of_answer(self._spec(version))))

    def _spec(self, version: UploadedVersion) -> Json:
        """Returns a version's spec as the service gives it."""
        which = {"pipeline_id": self._id, "pipeline_version_id": version.id}
        return self._call("pipelines", "get_pipeline_version", **which).get("pipeline_spec")

    def set_again(self, version: UploadedVersion) -> dict[str, Json]:
        action = "unchanged"
        newest = self._newest
        if not version.is_latest:
            action = "updated"
            file = _file_of(self._spec(version))
            newest = add_version(
                self._call,
                self._pipeline,
                id=self._id,
                definition=file,
                about=f"version {version.name} again",
            )
        return {**told_version(newest), "action": action, "id": self._id, "url": ""}

    def move_alias(self, alias: str) -> dict[str, Json]:
        raise UsageError(
            "Kubeflow's versions have no aliases",
            where=f"alias {alias}",
            fix="a version's name does the same",
        )


def _uploaded(found: Document, *, is_latest: bool) -> UploadedVersion:
    return UploadedVersion(
        id=str(found.get("pipeline_version_id")),
        name=str(found.get("name") or found.get("display_name")),
        created_at=text(found, "created_at"),
        about=text(found, "description"),
        is_latest=is_latest,
    )


def _file_of(spec: Json) -> str:
    """Returns a version's spec as the file of an upload: JSON is YAML, too."""
    pipeline = mapping(spec, "pipeline_spec") or mapping(spec)
    platform = mapping(spec, "platform_spec")
    documents = [pipeline]
    if platform:
        documents.append(platform)
    return "\n---\n".join(json.dumps(document) for document in documents)
