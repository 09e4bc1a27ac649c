"""`stoker decide --calibrate DIR`: the records of earlier runs, read and weighed."""

from pathlib import Path

from stoker.catalog import Catalog
from stoker.decide import Run, calibrate
from stoker.errors import UsageError
from stoker.records import Calibration, Decision, Profile, Training, read_json


def calibration_of(folder: Path, *, like: Profile, catalog: Catalog) -> Calibration:
    """What the runs in `folder` (DIR/ID/{profile,decision,training}.json) say of the constants.

    A run that was not finished, or whose records cannot be read, says nothing.

    Raises:
        UsageError: If there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"no runs in {folder}", where="--calibrate", fix="name the folder of the runs: runs"
        )
    found = [_run_in(each) for each in sorted(folder.iterdir()) if each.is_dir()]
    return calibrate((run for run in found if run), like=like, catalog=catalog)


def _run_in(folder: Path) -> Run | None:
    try:
        return Run(
            profile=read_json(folder / "profile.json", Profile),
            decision=read_json(folder / "decision.json", Decision),
            training=read_json(folder / "training.json", Training),
        )
    except UsageError:
        return None
