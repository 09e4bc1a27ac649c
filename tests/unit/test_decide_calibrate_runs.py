"""`stoker decide --calibrate DIR` reads what is whole and leaves the rest."""

import pytest

from stoker.catalog import load_catalog
from stoker.cli.decide import calibration_of
from stoker.errors import UsageError
from stoker.records import Calibration, write_json
from support import sample_records

LOCAL = load_catalog("local", cores=2)


def test_folders_without_whole_records_say_nothing(tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    write_json(half / "profile.json", sample_records.profile())
    torn = tmp_path / "torn"
    torn.mkdir()
    for name in ("profile", "decision", "training"):
        (torn / f"{name}.json").write_text("{")
    (tmp_path / "notes.txt").write_text("not a run")
    found = calibration_of(tmp_path, like=sample_records.profile(), catalog=LOCAL)
    assert found == Calibration()


def write_runs(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir(parents=True)
        for record, value in (
            ("profile", sample_records.profile()),
            ("decision", sample_records.decision()),
            ("training", sample_records.training()),
        ):
            file = tmp_path / name / f"{record}.json"
            write_json(file, value)
            if "workload_sha256" not in file.read_text():
                text = file.read_text().replace("{", '{"workload_sha256": "%s",' % ("a" * 64), 1)
                file.write_text(text)


def test_whole_runs_are_read(tmp_path):
    write_runs(tmp_path)
    found = calibration_of(tmp_path, like=sample_records.profile(), catalog=LOCAL)
    assert found.runs == 3


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no runs in"):
        calibration_of(tmp_path / "runs", like=sample_records.profile(), catalog=LOCAL)
