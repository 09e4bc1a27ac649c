import itertools
import threading
from pathlib import Path

import pytest

from stoker.errors import GateError, StokerError, UsageError
from stoker.records import Evaluation, Gate, GateResult, Workload, read_json, write_json
from stoker.run.champions import champion_metrics, promote

GATE = Gate(metric="accuracy", min_champion=-0.01)
WORKLOAD = Workload(name="job", command=("true",), gate=(GATE,))


def evaluated(folder: Path, accuracy: float, *, run: str = "") -> Path:
    file = folder / f"evaluation-{accuracy}{run}.json"
    gate = GateResult(metric="accuracy", value=accuracy, min_champion=-0.01, passed=True)
    record = Evaluation(
        passed=True, gates=(gate,), metrics={"accuracy": accuracy}, model_uri=f"pvc://runs/{run}"
    )
    write_json(file, record)
    return file


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "champions"
    made.mkdir()
    return made


def in_use(folder: Path) -> dict[str, float] | None:
    return champion_metrics(str(folder), workload=WORKLOAD, region=None)


def test_champion_of_meanwhile_is_one_to_be_held_against(tmp_path, folder):
    worse, better = evaluated(tmp_path, 0.95), evaluated(tmp_path, 0.97)
    promote(better, named=str(folder))
    with pytest.raises(GateError, match=r"accuracy is 0.95, asked for at least 0.96") as caught:
        promote(worse, named=str(folder))
    assert "000001.json" in caught.value.where
    assert in_use(folder) == {"accuracy": 0.97}


def test_step_that_is_tried_again_makes_no_second_champion(tmp_path, folder):
    first, second = evaluated(tmp_path, 0.95), evaluated(tmp_path, 0.96)
    assert in_use(folder) is None
    promote(first, named=str(folder))
    promote(second, named=str(folder))
    assert "it is champion 1 already" in promote(first, named=str(folder))
    assert sorted(file.name for file in folder.iterdir()) == ["000001.json", "000002.json"]


def test_runs_that_end_at_once_become_champions_one_after_the_other(tmp_path, folder):
    files = [evaluated(tmp_path, 0.90 + n / 100, run=f"r{n}") for n in range(8)]
    barrier = threading.Barrier(len(files))
    behind: list[StokerError] = []

    def run(file: Path) -> None:
        barrier.wait()
        try:
            promote(file, named=str(folder))
        except GateError as err:
            behind.append(err)

    threads = [threading.Thread(target=run, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    names = sorted(file.name for file in folder.iterdir())
    assert names == [f"{n + 1:06}.json" for n in range(len(files) - len(behind))]
    line = [read_json(folder / name, Evaluation).metrics["accuracy"] for name in names]
    assert all(later >= earlier - 0.01 - 1e-9 for earlier, later in itertools.pairwise(line))
    assert max(line) == pytest.approx(0.97)


def test_deleting_the_newest_brings_the_model_before_it_back(tmp_path, folder):
    promote(evaluated(tmp_path, 0.95), named=str(folder))
    promote(evaluated(tmp_path, 0.96), named=str(folder))
    (folder / "000002.json").unlink()
    assert in_use(folder) == {"accuracy": 0.95}


def test_file_and_registry_are_peoples_to_choose(tmp_path):
    file = evaluated(tmp_path, 0.95)
    for named in (str(file), "registry:mnist"):
        assert "people choose it" in promote(file, named=named)
    assert champion_metrics(str(file), workload=WORKLOAD, region=None) == {"accuracy": 0.95}


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("", "gate accuracy compares with the champion, but no champion is configured"),
        ("missing.json", "no such file"),
        ("broken.json", "JSON"),
    ],
)
def test_champion_that_cannot_be_read_is_told_in_words(tmp_path, monkeypatch, named, words):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    with pytest.raises(UsageError, match=words):
        champion_metrics(named, workload=WORKLOAD, region=None)
    plain = Workload(name="job", command=("true",))
    assert champion_metrics(named, workload=plain, region=None) is None


def test_folder_that_takes_no_champion_is_told_in_words(tmp_path, folder, monkeypatch):
    def refused(self: Path, target: Path) -> None:
        raise OSError(1, "refused")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    with pytest.raises(UsageError, match="cannot be written: refused") as caught:
        promote(evaluated(tmp_path, 0.95), named=str(folder))
    assert "has hard links" in caught.value.fix
    assert list(folder.iterdir()) == []
    with pytest.raises(UsageError, match="folder of champions cannot be read"):
        promote(evaluated(tmp_path, 0.95), named=str(tmp_path / "none"))
