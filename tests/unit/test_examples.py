"""The examples that newcomers recognise train by themselves, on data that they make."""

import importlib.util
import random
import re
from pathlib import Path

import pytest
import torch

from stoker.workload_file import read_workload

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["images", "vision_language"])
def test_an_example_imports_nothing_of_stoker(folder):
    for file in (ROOT / "examples" / folder).glob("*.py"):
        code = file.read_text()
        assert "import stoker" not in code
        assert "from stoker" not in code


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


def test_a_picture_depends_on_the_random_state_and_on_nothing_else(script):
    train, test = script.read_split(EXAMPLE / "data")
    random.seed(3)
    first, other = train[0][0], train[0][0]
    assert (first.dtype, tuple(first.shape)) == (torch.uint8, (1, 96, 96))
    random.seed(3)
    assert torch.equal(train[0][0], first)
    assert not torch.equal(first, other)
    assert torch.equal(test[0][0], test[0][0])


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
