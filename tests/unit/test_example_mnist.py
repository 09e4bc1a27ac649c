import importlib.util
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.workload_file import read_workload

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mnist"


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("PIL", reason="the example needs Pillow")
    spec = importlib.util.spec_from_file_location("mnist_train", EXAMPLE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_import_of_the_loader_is_the_only_stoker_line_of_the_code():
    code = (EXAMPLE / "train.py").read_text().split('"""', 2)[2]
    lines = [line for line in code.splitlines() if re.search(r"\bstoker\b", line)]
    assert lines == ["from stoker import DataLoader"]


def test_bundled_digits_are_split_without_overlap_and_the_same_every_time(script):
    train, test = script.read_split(EXAMPLE / "data")
    again, _ = script.read_split(EXAMPLE / "data")
    assert (len(train), len(test)) == (8000, 2000)
    assert np.array_equal(train.images, again.images)
    labels = np.concatenate([train.labels, test.labels])
    assert min(np.bincount(labels, minlength=10)) > 900
    pictures = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in pictures for image in test.images)


def test_a_picture_depends_on_the_random_state_and_on_nothing_else(script):
    train, test = script.read_split(EXAMPLE / "data")
    random.seed(3)
    first, other = train[0][0], train[0][0]
    assert (first.dtype, tuple(first.shape)) == (torch.uint8, (1, 96, 96))
    random.seed(3)
    assert torch.equal(train[0][0], first)
    assert not torch.equal(first, other)
    assert torch.equal(test[0][0], test[0][0])


def test_a_broken_file_is_named(script, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"t10k-images-idx3-ubyte\.gz"):
        script.read_split(tmp_path)


def test_the_channel_of_the_platform_is_the_default_folder(script, tmp_path, monkeypatch):
    assert script.parse([]).data == EXAMPLE / "data"
    monkeypatch.setenv("SM_CHANNEL_TRAINING", str(tmp_path))
    assert script.parse([]).data == tmp_path
    assert script.parse(["--data", "elsewhere"]).data == Path("elsewhere")


def test_the_workload_says_what_the_script_does(script):
    workload = read_workload(ROOT / "configs" / "mnist.yaml")
    assert workload.command == ("python", "examples/mnist/train.py", "--workers", "0")
    options = script.parse(workload.command[2:])
    train, _ = script.read_split(options.data)
    assert workload.training.epochs == options.epochs
    assert workload.training.samples_per_epoch == len(train)
    assert workload.training.global_batch_size == options.batch_size
    assert workload.training.total_steps() == options.epochs * len(train) // options.batch_size
    assert [(gate.metric, gate.min) for gate in workload.gate] == [("accuracy", 0.94)]
