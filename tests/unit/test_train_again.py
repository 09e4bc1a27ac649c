"""How a command that was stopped is typed again, and what a second training of a name leaves."""

import json
from pathlib import Path

import msgspec
import pytest

from stoker.cli.train import command_line
from stoker.errors import PlatformError
from stoker.platforms.base import JobSpec
from stoker.records import Evaluation, Training, write_json
from support.command import stoker
from support.sample_records import training


@pytest.mark.parametrize(
    ("arguments", "from_step", "expected"),
    [
        (["train", "--", "python", "my script.py"], None, "stoker train -- python 'my script.py'"),
        (["run", "w.yaml"], "train", "stoker run w.yaml --from train"),
        (["run", "w.yaml", "--from", "decide"], "train", "stoker run w.yaml --from train"),
        (["run", "--from=decide", "w.yaml"], "train", "stoker run w.yaml --from train"),
    ],
)
def test_the_command_that_goes_on_has_the_words_of_the_first(
    arguments: list[str], from_step: str | None, expected: str
) -> None:
    assert command_line(arguments, from_step=from_step) == expected


@pytest.mark.parametrize("is_refused", [True, False])
def test_the_evaluation_of_a_name_goes_with_the_training_that_it_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    folder = tmp_path / "runs" / "mnist-1"
    write_json(folder / "training.json", training())
    write_json(folder / "evaluation.json", Evaluation(passed=True))

    def train_again(job: JobSpec, **_: object) -> Training:
        if is_refused:
            raise PlatformError("refused")
        again = msgspec.structs.replace(training(), metrics={"accuracy": 0.5})
        write_json(job.run_dir / "training.json", again)
        return again

    monkeypatch.setattr("stoker.cli.train.train_and_keep", train_again)
    workload = json.dumps({"name": "mnist", "command": ["true"]})
    stoker("train", workload, "--name", "mnist-1", cwd=tmp_path)
    assert (folder / "evaluation.json").exists() == is_refused
