from pathlib import Path

from stoker.cli.verbs import _beside


def test_a_record_written_elsewhere_takes_its_timeline_along(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    timeline = tmp_path / "run" / "timeline.csv"
    timeline.write_text("loader,epoch\n")
    record = tmp_path / "output" / "training" / "training.json"
    name = _beside(timeline, record)
    assert (record.parent / name).read_text() == "loader,epoch\n"
    assert _beside(timeline, tmp_path / "run" / "training.json") == "timeline.csv"
    assert len(list(timeline.parent.iterdir())) == 1
