"""The model in use, the champion: an evaluation.json, a folder of them, or SageMaker's registry.

A folder of champions holds the evaluation.json of each model that was in use, as 000001.json and so
on; the highest number is in use now. A model that passed gets the next number by a hard link. Of
two runs the file system lets one succeed; the other is compared with it and takes the number after
it. To return to an earlier model, delete the files after its own.
"""

import os
import re
import secrets
from pathlib import Path

from stoker.errors import GateError, UsageError
from stoker.evaluate import judged_again
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.registry import champion_quality
from stoker.records import Evaluation, Workload, read_json

_REGISTRY = "registry:"
_NUMBERED = re.compile(r"[0-9]{6,}\.json")


def champion_metrics(
    named: str, *, workload: Workload, region: str | None
) -> dict[str, float] | None:
    """Returns the metrics of the model in use; None if no gate needs them, or there is none yet.

    It is `named` by a file, a folder of champions, or registry:GROUP. Raises UsageError if a gate
    needs it, and none is named.

    Args:
        named: A file, a folder of champions, or registry:GROUP; empty: none is configured.
        workload: With its gates.
        region: AWS region of the registry.
    """
    asking = next((gate for gate in workload.gate if gate.needs_champion), None)
    if asking is None:
        return None
    if not named:
        raise UsageError(
            f"gate {asking.metric} compares with the champion, but no champion is configured",
            where=f"workload {workload.name}, key gate",
            fix="stoker evaluate --champion evaluation.json (of the model in use), a folder of "
            "champions, or registry:GROUP; in a pipeline on Kubeflow the key kubernetes.champion",
        )
    if named.startswith(_REGISTRY):
        return champion_quality(Aws(region=region), named.removeprefix(_REGISTRY))
    files = [Path(named)]
    if Path(named).is_dir():
        files = _champions(Path(named))
    if files:
        return read_json(files[-1], Evaluation).metrics
    return None


def promote(evaluation_file: Path, *, named: str) -> str:
    """Makes the model of an evaluation that passed the champion; returns a line on the result.

    The model is judged again: another model may be in use since its evaluation; GateError if it
    falls behind that. In a file or a registry, people choose the champion.
    """
    folder = Path(named)
    if named.startswith(_REGISTRY) or folder.is_file():
        return f"not made the champion: in {named} people choose it"
    record = read_json(evaluation_file, Evaluation)
    content = evaluation_file.read_bytes()
    # Again whenever another run has taken the number.
    while True:
        files = _champions(folder)
        # A retried step: its model may have been replaced since.
        before = next((file for file in files if file.read_bytes() == content), None)
        if before:
            return f"it is champion {int(before.stem)} already: {before}"
        number = 1
        if files:
            number = int(files[-1].stem) + 1
            judged = judged_again(record, champion=read_json(files[-1], Evaluation).metrics)
            if not judged.passed:
                raise GateError(judged.reason, where=f"the model in use by now: {files[-1]}")
        champion_file = folder / f"{number:06}.json"
        if _link(content, champion_file):
            return f"champion {number}: {champion_file}"


def _champions(folder: Path) -> list[Path]:
    try:
        numbered = [file for file in folder.iterdir() if _NUMBERED.fullmatch(file.name)]
    except OSError as err:
        raise UsageError(
            f"the folder of champions cannot be read: {err.strerror}",
            where=str(folder),
            fix="mount the claim of kubernetes.champion there, or make the folder",
        ) from None
    # By number: from 1000000 on names are longer.
    return sorted(numbered, key=lambda file: int(file.stem))


def _link(content: bytes, made: Path) -> bool:
    """Writes a file atomically; returns False if its name is taken."""
    # The dot keeps it from being taken for a champion.
    written = made.with_name(f".{secrets.token_hex(8)}")
    try:
        try:
            with written.open("wb") as file:
                file.write(content)
                file.flush()
                # Before it gets its name, so that a file of that name is always complete.
                os.fsync(file.fileno())
            made.hardlink_to(written)
        finally:
            written.unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError as err:
        raise UsageError(
            f"the champion cannot be written: {err.strerror}",
            where=str(made.parent),
            fix="use a volume that has hard links (NFS, EFS, CephFS, a disk), and that the pods' "
            "user may write to (docs/kubeflow.md, Storage)",
        ) from None
    return True
