"""What the steps of a pipeline read: the workload as JSON, and its packed code."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.errors import UsageError
from stoker.platforms.packing import pack
from stoker.records import SageMakerSettings, Workload, to_document, to_json

CODE = "code.tar.gz"
WORKLOAD = "workload.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What an upload puts where the steps look for it.

    Attributes:
        uri: The folder; its name is a digest of what is in it.
        files: Name to content.
        workload: As the steps read it: its code has an address in place of a folder.
    """

    uri: str
    files: Mapping[str, bytes]
    workload: Workload


def pack_inputs(workload: Workload, *, folder: Path | None = None) -> Inputs:
    """The workload and its code under an address that names their content.

    Args:
        workload: With settings for SageMaker.
        folder: That a relative `sagemaker.source` stands in; absent: the current one.

    Raises:
        UsageError: If there are no settings for SageMaker, or the code cannot be packed.
    """
    settings = sagemaker_of(workload)
    code = _packed(settings, folder or Path.cwd())
    named = _with_source(workload, settings, CODE) if code is not None else workload
    document = json.dumps(to_document(named), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(document.encode())
    digest.update(hashlib.sha256(code or b"").digest())
    uri = f"{settings.output_uri.rstrip('/')}/stoker/inputs/{digest.hexdigest()[:16]}"
    placed = _with_source(workload, settings, f"{uri}/{CODE}") if code is not None else workload
    files = {WORKLOAD: to_json(placed).encode()}
    if code is not None:
        files[CODE] = code
    return Inputs(uri=uri, files=files, workload=placed)


def sagemaker_of(workload: Workload) -> SageMakerSettings:
    """The workload's settings for SageMaker.

    Raises:
        UsageError: If it has none.
    """
    if workload.sagemaker is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where=f"workload {workload.name}, key sagemaker",
            fix="add sagemaker: {role: ARN, output_uri: s3://...}",
        )
    return workload.sagemaker


def _packed(settings: SageMakerSettings, folder: Path) -> bytes | None:
    if settings.source is None or settings.source.startswith("s3://"):
        return None
    return pack(folder / settings.source)


def _with_source(workload: Workload, settings: SageMakerSettings, source: str) -> Workload:
    changed = msgspec.structs.replace(settings, source=source)
    return msgspec.structs.replace(workload, sagemaker=changed)
