"""Versions and aliases of SageMaker's pipelines, which moto does not keep.

Requests are validated by botocore's model; rules that the API's reference states beside it are
checked here. Left out: display names, who made a version, and its last run; a definition of S3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import botocore.client
import pytest
from botocore.exceptions import ClientError, ParamValidationError
from botocore.validate import ParamValidator

_MAX_ALIASES = 10
_OPERATIONS = ("CreatePipeline", "UpdatePipeline", "DescribePipeline", "ListPipelineVersions")
_OWN = (*_OPERATIONS, "UpdatePipelineVersion", "StartPipelineExecution")


@dataclass
class KeptVersion:
    number: int
    definition: str
    created: datetime
    about: str = ""
    aliases: list[str] = field(default_factory=list)


@dataclass
class PipelineVersions:
    """The versions of each pipeline, and what runs were started from: (pipeline, number)."""

    kept: dict[str, list[KeptVersion]] = field(default_factory=dict)
    started: list[tuple[str, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> "PipelineVersions":
        real = botocore.client.BaseClient._make_api_call

        def call(client: Any, operation: str, asked: dict[str, Any]) -> Any:
            if client.meta.service_model.service_name != "sagemaker" or operation not in _OWN:
                return real(client, operation, asked)
            shape = client.meta.service_model.operation_model(operation).input_shape
            if wrong := ParamValidator().validate(asked, shape).generate_report():
                raise ParamValidationError(report=wrong)
            self.calls.append(operation)
            return self._answer(operation, asked, lambda known: real(client, operation, known))

        patch.setattr(botocore.client.BaseClient, "_make_api_call", call)
        return self

    def _answer(self, operation: str, asked: dict[str, Any], real: Any) -> Any:
        name = str(asked.get("PipelineName") or asked["PipelineArn"]).rpartition("/")[2]
        if operation == "ListPipelineVersions":
            return self._listed(name)
        if operation == "UpdatePipelineVersion":
            return self._updated(name, asked)
        picked = [asked.pop(f"PipelineVersion{key}", None) for key in ("Id", "Alias")]
        if operation in ("DescribePipeline", "StartPipelineExecution"):
            version = self._picked(operation, name, *picked)
            answer = real(asked)
            if operation == "DescribePipeline":
                told = {"PipelineDefinition": version.definition} if version else {}
                return {**answer, **told}
            self.started.append((name, version.number if version else 0))
            return answer
        aliases = asked.pop("PipelineVersionAliases", [])
        answer = real(asked)
        versions = self.kept.setdefault(name, [])
        text = asked.get("PipelineDefinition")
        if text and (not versions or versions[-1].definition != text):
            self._check_free(name, aliases)
            made = KeptVersion(len(versions) + 1, text, datetime.now(UTC), aliases=[*aliases])
            versions.append(made)
        elif aliases:
            raise _refused("ValidationException", "aliases need a changed definition", operation)
        told = {"PipelineVersionId": versions[-1].number} if operation == "UpdatePipeline" else {}
        return {**answer, **told}

    def _listed(self, name: str) -> dict[str, Any]:
        if name not in self.kept:
            raise _refused("ResourceNotFound", f"no pipeline {name}", "ListPipelineVersions")
        summaries = [
            {
                "PipelineVersionId": each.number,
                "CreationTime": each.created,
                "PipelineVersionDescription": each.about,
                "PipelineVersionAliases": each.aliases,
            }
            for each in self.kept[name]
        ]
        return {"PipelineVersionSummaries": summaries[::-1]}

    def _picked(
        self, operation: str, name: str, number: int | None, alias: str | None
    ) -> KeptVersion | None:
        if number and alias:
            raise _refused("ValidationException", "id and alias cannot both be given", operation)
        versions = self.kept.get(name, [])
        if not number and not alias:
            return versions[-1] if versions else None
        found = [each for each in versions if each.number == number or alias in each.aliases]
        if not found:
            raise _refused("ResourceNotFound", f"no version {number or alias}", operation)
        return found[0]

    def _updated(self, name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        version = self._picked("UpdatePipelineVersion", name, asked["PipelineVersionId"], None)
        assert version
        change = asked.get("PipelineVersionAliasOperations", {})
        for alias in change.get("Remove", []):
            if alias not in version.aliases:
                raise _refused("ResourceNotFound", f"no alias {alias}", "UpdatePipelineVersion")
            version.aliases.remove(alias)
        added = change.get("Add", [])
        self._check_free(name, added)
        if len(version.aliases) + len(added) > _MAX_ALIASES:
            raise _refused("ValidationException", "too many aliases", "UpdatePipelineVersion")
        version.aliases += added
        version.about = asked.get("PipelineVersionDescription", version.about)
        return {"PipelineArn": asked["PipelineArn"], "PipelineVersionId": version.number}

    def _check_free(self, name: str, aliases: list[str]) -> None:
        taken = [alias for each in self.kept.get(name, []) for alias in each.aliases]
        for alias in aliases:
            if alias in taken:
                raise _refused("ConflictException", f"{alias} is in use", "UpdatePipelineVersion")
            is_valid = re.fullmatch(r"[a-zA-Z0-9._-]{1,128}", alias) and not alias.isdigit()
            if not is_valid:
                raise _refused("ValidationException", f"alias {alias}", "UpdatePipelineVersion")


def _refused(code: str, message: str, operation: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)
