"""The model in use, the champion, is known by its evaluation.json, or by SageMaker's registry.

A folder of champions holds one evaluation.json for each model that was in use, as 000001.json and
so on; the highest number is in use now. A model that passed gets the next number by a hard link,
which a file system gives to one of two runs only: the other one is held against the first, and then
tries the number after it. To go back to an earlier model is to delete the files after its own.
"""

import errno
import json
import os
import re
import secrets
from pathlib import Path

from stoker.errors import GateError, UsageError
from stoker.evaluate import judged_again, told_metrics
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.registry import champion_quality
from stoker.records import Evaluation, Json, Workload, read_json

_REGISTRY = "registry:"
_NUMBERED = re.compile(r"[0-9]{6,}\.json")
_FIX = (
    "--champion evaluation.json (of the model in use), a folder of champions, or registry:GROUP; "
    "in a pipeline on Kubeflow the key kubernetes.champion"
)


def champion_metrics(
    named: str, *, workload: Workload, region: str | None
) -> dict[str, float] | None:
    """Returns the metrics of the model in use; None where no gate asks, or there is none yet.

    Args:
        named: A file, a folder of champions, or registry:GROUP; empty: none is named.
        workload: The one whose gates ask.
        region: Region of the registry.

    Raises:
        UsageError: If a gate asks for it, and nothing says which it is.
    """
    if not any(gate.needs_champion for gate in workload.gate):
        return None
    if not named:
        raise UsageError(
            "a gate holds the model against the champion, and nothing says which that is",
            where="--champion",
            fix=_FIX,
        )
    if named.startswith(_REGISTRY):
        quality = champion_quality(Aws(region=region), named.removeprefix(_REGISTRY))
        return None if quality is None else told_metrics(quality)
    path = Path(named)
    if path.is_dir():
        files = _champions(path)
        return _metrics_of(files[-1]) if files else None
    return _metrics_of(path)


def promote(evaluation_file: Path, *, named: str) -> str:
    """Makes the model of an evaluation that passed the champion, and says so in a line.

    The model in use may be another one than when it was evaluated: it is judged again.

    Args:
        evaluation_file: Its evaluation.json.
        named: The folder of champions. Of a file or a registry it says that people choose there.

    Raises:
        GateError: If it falls behind the model that is in use by now.
        UsageError: If the folder is not there, or cannot be written.
    """
    folder = Path(named)
    if named.startswith(_REGISTRY) or folder.is_file():
        return f"not made the champion: in {named} people choose it"
    record = read_json(evaluation_file, Evaluation)
    content = evaluation_file.read_bytes()
    while True:
        files = _champions(folder)
        # A step that is tried again: its model may even have been followed by another one since.
        before = next((file for file in files if _read(file) == content), None)
        if before:
            return f"it is champion {int(before.stem)} already: {before}"
        number = 1
        if files:
            judged = judged_again(record, champion=_metrics_of(files[-1]))
            if not judged.passed:
                raise GateError(judged.reason, where=f"the model in use by now: {files[-1]}")
            number = int(files[-1].stem) + 1
        made = folder / f"{number:06}.json"
        if _link(content, made):
            return f"champion {number}: {made}"


def _champions(folder: Path) -> list[Path]:
    """Returns the files of a folder of champions, the one in use last."""
    try:
        found = [file for file in folder.iterdir() if _NUMBERED.fullmatch(file.name)]
    except OSError as err:
        raise UsageError(
            f"the folder of champions cannot be read: {err.strerror}",
            where=str(folder),
            fix="mount the claim of kubernetes.champion there, or make the folder",
        ) from None
    return sorted(found, key=lambda file: int(file.stem))


def _metrics_of(file: Path) -> dict[str, float]:
    content = _read(file)
    try:
        document: Json = json.loads(content)
    except ValueError:
        raise UsageError("not JSON", where=str(file), fix=_FIX) from None
    return told_metrics(document)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as err:
        raise UsageError(
            f"the champion's record cannot be read: {err.strerror}", where=str(file), fix=_FIX
        ) from None


def _link(content: bytes, made: Path) -> bool:
    """Writes a file that is there whole or not at all; False if its name is taken."""
    written = made.with_name(f".{secrets.token_hex(8)}")
    try:
        try:
            with written.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            made.hardlink_to(written)
        finally:
            written.unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError as err:
        has_no_links = err.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
        raise UsageError(
            f"the champion cannot be written: {err.strerror}",
            where=str(made.parent),
            fix="put it on a volume that has hard links (NFS, EFS, CephFS, a disk)"
            if has_no_links
            else "give the folder to the pods' user (docs/kubeflow.md, Storage)",
        ) from None
    return True
