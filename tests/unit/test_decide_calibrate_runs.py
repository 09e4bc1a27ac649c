"""`stoker decide --calibrate DIR` reads what is whole and leaves the rest."""

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.cli.decide import calibration_of
from stoker.errors import UsageError
from stoker.records import write_json
from support import sample_records


def test_whole_runs_are_read_and_the_rest_is_left(tmp_path):
    whole = {
        "profile": sample_records.profile(),
        "decision": sample_records.decision(),
        "training": sample_records.training(),
    }
    for run in ("one", "two", "three"):
        for name, record in whole.items():
            known = msgspec.structs.replace(record, workload_sha256="a" * 64)
            write_json(tmp_path / run / f"{name}.json", known)
    write_json(tmp_path / "half" / "profile.json", whole["profile"])
    (tmp_path / "torn").mkdir()
    for name in whole:
        (tmp_path / "torn" / f"{name}.json").write_text("{")
    (tmp_path / "notes.txt").write_text("not a run")
    found = calibration_of(
        tmp_path, like=sample_records.profile(), catalog=load_catalog("local", cores=2)
    )
    assert found.runs == 3
    with pytest.raises(UsageError, match="no runs in"):
        calibration_of(
            tmp_path / "runs", like=sample_records.profile(), catalog=load_catalog("local")
        )
