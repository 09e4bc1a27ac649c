"""A job as SageMaker runs it: the CreateTrainingJob request, a pure value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.platforms.base import JobSpec
from stoker.records import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerRequest:
    """A job as SageMaker runs it.

    Attributes:
        body: The whole CreateTrainingJob request; it holds nothing secret.
        token_uri: Object that submit() fills with the run's token, and that is deleted at the end.
        code_uri: Object that submit() fills with the packed folder `code_folder`.
        code_folder: Absent where the code is in the image, or packed already.
    """

    job: JobSpec
    body: Mapping[str, Json]
    token_uri: str
    code_uri: str | None = None
    code_folder: Path | None = None
