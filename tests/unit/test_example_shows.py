"""The three examples that newcomers recognise train by themselves, on data that they make."""

import importlib.util
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.workload_file import read_workload

ROOT = Path(__file__).parents[2]
NEEDED = {"images": "PIL", "robot_episodes": "av", "vision_language": "PIL"}
# On data of a second or less.
TINY = {
    "images": ["--pictures", "8", "--batch-size", "4", "--side", "32", "--epochs", "1"],
    "robot_episodes": [
        *("--episodes", "1", "--frames", "6", "--cameras", "2"),
        *("--batch-size", "2", "--steps", "3"),
    ],
    "vision_language": ["--documents", "4", "--batch-size", "2", "--epochs", "1"],
}


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Returns a function that imports a module of an example; none of them is left imported."""
    before = set(sys.modules)
    state = random.getstate()
    monkeypatch.chdir(tmp_path)

    def imported(folder, module="train"):
        if importlib.util.find_spec(NEEDED[folder]) is None:
            pytest.skip(f"examples/{folder} needs {NEEDED[folder]}")
        monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
        return importlib.import_module(module)

    with torch.random.fork_rng(devices=[]):
        yield imported
    random.setstate(state)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(ROOT / "examples")):
            del sys.modules[name]


@pytest.mark.parametrize("folder", TINY)
def test_an_example_trains_the_same_way_each_time(example, folder, tmp_path):
    script = example(folder)
    words = [*TINY[folder], "--workers", "0", "--device", "cpu", "--record"]
    losses = []
    for number in (0, 1):
        file = tmp_path / f"{number}.json"
        script.main([*words, str(file)])
        record = json.loads(file.read_text())
        losses.append(record["losses"])
        assert record["steps"] == len(record["losses"]) > 1
        assert all(math.isfinite(float.fromhex(loss)) for loss in record["losses"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("folder", TINY)
def test_an_example_imports_nothing_of_stoker(folder):
    for file in (ROOT / "examples" / folder).glob("*.py"):
        code = file.read_text()
        assert "import stoker" not in code
        assert "from stoker" not in code


@pytest.mark.parametrize("folder", TINY)
def test_the_workload_of_an_example_says_what_its_script_does(example, folder):
    script = example(folder)
    workload = read_workload(ROOT / "configs" / f"{folder.replace('_', '-')}.yaml")
    assert workload.command[:2] == ("python", f"examples/{folder}/train.py")
    options = script.parse([*workload.command[2:], "--device", "cpu"])
    sizes = {
        "images": lambda: options.pictures,
        "robot_episodes": lambda: options.episodes * options.frames,
        "vision_language": lambda: options.documents,
    }
    samples = sizes[folder]()
    steps = samples // workload.training.global_batch_size * workload.training.epochs
    assert workload.training.samples_per_epoch == samples
    assert workload.training.total_steps() == steps
    epochs = getattr(options, "epochs", None) or options.steps / (steps / workload.training.epochs)
    assert workload.training.epochs == epochs


def test_a_picture_is_augmented_by_the_random_state_alone(example):
    small = example("images", "augment")
    changes = [small.RandomResizedCrop(24), small.RandomHorizontalFlip(), small.RandAugment()]
    augment = small.Compose([*changes, small.Normalize()])
    picture = example("images", "make_pictures").picture(3, 3)
    random.seed(5)
    first, other = augment(picture), augment(picture)
    random.seed(5)
    assert torch.equal(augment(picture), first)
    assert not torch.equal(first, other)
    assert (first.dtype, tuple(first.shape)) == (torch.float32, (3, 24, 24))


def test_each_change_of_randaugment_keeps_a_pictures_size(example):
    augment = example("images", "augment")
    picture = example("images", "make_pictures").picture(1, 1)
    for change in augment.CHANGES:
        for strength in (-0.3, 0.3, 1.0):
            assert change(picture, strength).size == picture.size


def test_a_frame_of_a_robots_video_is_the_one_of_its_joints(example, tmp_path):
    script = example("robot_episodes")
    maker = example("robot_episodes", "make_episodes")
    maker.make_episodes(tmp_path / "episodes", count=1, frames=9)
    data = script.Episodes(tmp_path / "episodes", cameras=("top", "side"), chunk=4)
    for index in range(len(data)):
        sample = data[index]
        state = sample["observation.state"].numpy()
        for view, camera in ((0, "top"), (2, "side")):
            red = sample[f"observation.images.{camera}"].float()
            rows, columns = np.nonzero((red[0] > 200).numpy())
            x = (state[view] + 1) / 2 * (maker.WIDTH - 40) + 20
            y = (state[view + 1] + 1) / 2 * (maker.HEIGHT - 40) + 20
            assert (columns.mean(), rows.mean()) == pytest.approx((x, y), abs=2)
    assert data[8]["action_is_pad"].tolist() == [True] * 4
    assert data[0]["action"].shape == (4, maker.JOINTS)


def test_a_frame_beyond_the_video_is_refused(example, tmp_path):
    script = example("robot_episodes")
    example("robot_episodes", "make_episodes").make_episodes(tmp_path / "few", count=1, frames=3)
    file = tmp_path / "few" / "episode-000-top.mp4"
    with pytest.raises(ValueError, match=r"no frame at 9\.000 s"):
        script.decoded(file, 9.0)


def test_a_processors_batch_has_a_token_for_each_patch_and_learns_the_answer(example):
    processor = example("vision_language", "processor")
    from PIL import Image

    pictures = [Image.new("RGB", size) for size in ((900, 300), (200, 640))]
    documents = [
        {"pictures": pictures, "question": "What?", "answer": "a"},
        {"pictures": pictures[:1], "question": "What?", "answer": "a longer answer"},
    ]
    batch = processor.Processor(max_patches=16, max_tokens=99)(documents)
    num_pictures = int((batch["input_ids"] == processor.PICTURE).sum())
    assert batch["pixel_values"].shape == (num_pictures, processor.PATCH_NUMBERS)
    learned = [row[row != processor.IGNORED].tolist() for row in batch["labels"]]
    assert [bytes(row[:-1]).decode() for row in learned] == ["a", "a longer answer"]
    assert batch["attention_mask"].sum(1).tolist() == [
        int((row != processor.PAD).sum()) for row in batch["input_ids"]
    ]


@pytest.mark.parametrize("width", [1, 28, 300, 5000])
@pytest.mark.parametrize("height", [1, 28, 300, 5000])
def test_a_picture_of_any_shape_has_no_more_patches_than_allowed(example, width, height):
    processor = example("vision_language", "processor").Processor(max_patches=16, max_tokens=99)
    columns, rows = processor.grid_of(width, height)
    assert 1 <= columns * rows <= 16


def test_a_question_that_is_too_long_is_refused(example):
    processor = example("vision_language", "processor").Processor(max_patches=4, max_tokens=8)
    with pytest.raises(ValueError, match="more than 8"):
        processor([{"pictures": [], "question": "What is it?", "answer": ""}])
