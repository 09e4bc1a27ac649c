"""Versions of an uploaded pipeline, and which of them a user means.

Both services start the newest version where none is named, schedules too. So the way back to a
version makes it the newest one again, under a new number.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stoker.errors import UsageError
from stoker.parameters import Kind
from stoker.pipelines.changes import PipelineVersion
from stoker.records import Json, nearest

# CreatePipeline and UpdatePipelineVersion.
_ALIAS = re.compile(r"[a-zA-Z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedVersion:
    """A version of a pipeline, as its service keeps it.

    Attributes:
        id: What the service calls it: a number on SageMaker.
        name: Its name on Kubeflow; on SageMaker the number.
        created_at: UTC, ISO 8601.
        aliases: Further names, each of one version at a time; Kubeflow has none.
        about: Its description.
        is_latest: Whether starts and schedules take it.
    """

    id: str
    name: str
    created_at: str
    aliases: tuple[str, ...] = ()
    about: str = ""
    is_latest: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.id, self.name, *self.aliases)))


class VersionHistory(ABC):
    """The versions that a service keeps of one pipeline."""

    @abstractmethod
    def listed(self) -> list[UploadedVersion]:
        """Returns the versions, the newest first."""

    @abstractmethod
    def read(self, version: UploadedVersion) -> PipelineVersion:
        """Returns a version with what its steps read and is still there."""

    def check(self, version: UploadedVersion) -> None:  # noqa: B027
        """Raises UsageError if a version can no longer run."""

    @abstractmethod
    def declared(self, version: UploadedVersion) -> Mapping[str, Kind]:
        """Returns names and kinds of a version's parameters."""

    @abstractmethod
    def set_again(self, version: UploadedVersion) -> dict[str, Json]:
        """Makes a version the newest one again; returns what an upload reports."""

    @abstractmethod
    def move_alias(self, alias: str) -> dict[str, Json]:
        """Gives the newest version an alias, which another may have had; reports both."""


def version_text(version: UploadedVersion) -> str:
    """Returns a version in one line: name, time, aliases, description."""
    words = [*version.aliases]
    if version.is_latest:
        words.append("runs now")
    if version.about:
        words.append(version.about)
    return f"{version.name}  {version.created_at}  {', '.join(words)}".rstrip()


def version_named(
    versions: Sequence[UploadedVersion], word: str, *, pipeline: str, option: str
) -> UploadedVersion:
    """Returns the version that a user names by number, id, name or alias.

    Args:
        versions: All of the pipeline.
        word: As typed.
        pipeline: Its name, for the error.
        option: The option that was typed, for the error.

    Raises:
        UsageError: If there is none, with the nearest name.
    """
    for version in versions:
        if word in version.names:
            return version
    known = list(chain.from_iterable(version.names for version in versions))
    raise UsageError(
        f"pipeline {pipeline} has no version {word}", where=option, fix=nearest(word, known)
    )


def check_alias(alias: str) -> None:
    """Raises UsageError for an alias that SageMaker would refuse."""
    if not _ALIAS.fullmatch(alias) or alias.isdigit():
        raise UsageError(
            f"not an alias: {alias}",
            where="--alias",
            fix="up to 128 letters, digits, dots, dashes and underscores, and not digits alone",
        )
