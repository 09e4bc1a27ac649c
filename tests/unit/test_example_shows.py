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
NEEDED = {
    "images": ("PIL",),
    "robot_episodes": ("av", "pyarrow"),
    "vision_language": ("PIL",),
}
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
        for needed in NEEDED[folder]:
            if importlib.util.find_spec(needed) is None:
                pytest.skip(f"examples/{folder} needs {needed}")
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
    maker.make_episodes(tmp_path / "episodes", count=2, frames=9)
    cameras = ["observation.images.top", "observation.images.side"]
    # Two frames of a camera, as policies with a history read them.
    deltas = {"action": [0.0, 1 / 30, 2 / 30, 3 / 30], cameras[1]: [-2 / 30, 0.0]}
    data = script.Episodes(tmp_path / "episodes", delta_timestamps=deltas, cameras=cameras)
    assert len(data) == 18
    for index in range(len(data)):
        sample = data[index]
        assert sample["episode_index"] == index // 9
        assert sample["frame_index"] == index % 9
        before = max(index - 2, index // 9 * 9)
        seen = [(index, 0, sample[cameras[0]])]
        seen += [(at, 2, sample[cameras[1]][place]) for place, at in enumerate((before, index))]
        for at, view, pixels in seen:
            state = data.columns["observation.state"][at].numpy()
            rows, columns = np.nonzero((pixels[0] > 200).numpy())
            x = (state[view] + 1) / 2 * (maker.WIDTH - 40) + 20
            y = (state[view + 1] + 1) / 2 * (maker.HEIGHT - 40) + 20
            assert (columns.mean(), rows.mean()) == pytest.approx((x, y), abs=2)
        assert sample[f"{cameras[1]}_is_pad"].tolist() == [index % 9 < 2, False]
    assert data[8]["action_is_pad"].tolist() == [False, True, True, True]
    assert data[0]["action"].shape == (4, maker.JOINTS)
    # The action of a frame is the state of the next one.
    assert torch.equal(data[0]["action"][0], data[1]["observation.state"])


def test_statistics_of_robot_episodes_are_of_all_columns_and_cameras_as_lerobot_reads_them(
    example, tmp_path
):
    script = example("robot_episodes")
    maker = example("robot_episodes", "make_episodes")
    maker.make_episodes(tmp_path / "episodes", count=2, frames=9)
    stats = json.loads((tmp_path / "episodes/meta/stats.json").read_text())
    data = script.Episodes(tmp_path / "episodes", delta_timestamps={}, cameras=())
    cameras = [maker.video_key(camera) for camera in maker.CAMERAS]
    assert stats.keys() == data.columns.keys() | set(cameras)
    # LeRobot refuses other shapes: of a picture's figures (channels, 1, 1), of all counts (1,).
    for feature, of_feature in stats.items():
        assert of_feature["count"] == [18]
        shape = (3, 1, 1) if feature in cameras else (data.columns[feature][0].numel(),)
        assert {np.shape(of_feature[kind]) for kind in of_feature.keys() - {"count"}} == {shape}
        assert {"min", "max", "mean", "std", "q01", "q99"} < of_feature.keys()
    seen = script.Episodes(tmp_path / "episodes", delta_timestamps={}, cameras=cameras)
    for camera in cameras:
        colours = torch.stack([seen[index][camera] for index in range(18)]).double() / 255
        # A video loses some of the colours that it was given.
        assert np.ravel(stats[camera]["mean"]) == pytest.approx(colours.mean((0, 2, 3)), abs=0.03)
        assert np.ravel(stats[camera]["std"]) == pytest.approx(colours.std((0, 2, 3)), abs=0.05)


def test_a_frame_beyond_the_video_is_refused(example, tmp_path):
    script = example("robot_episodes")
    example("robot_episodes", "make_episodes").make_episodes(tmp_path / "few", count=1, frames=3)
    (file,) = (tmp_path / "few" / "videos/observation.images.top").rglob("*.mp4")
    with pytest.raises(ValueError, match=r"no frame at 9\.000 s"):
        script.decoded(file, np.array([9.0]))


def test_a_processors_batch_has_a_token_for_each_patch_and_text_is_learned(example):
    script = example("vision_language")
    processor = example("vision_language", "processor")
    from PIL import Image

    pictures = [Image.new("RGB", size) for size in ((900, 300), (200, 640))]
    documents = [
        {"pictures": pictures, "question": "What?", "answer": "a"},
        {"pictures": pictures[:1], "question": "What?", "answer": "a longer answer"},
    ]
    batch = script.Collate(processor.Processor(max_patches=16))(documents)
    num_pictures = int((batch["input_ids"] == processor.PICTURE).sum())
    assert batch["pixel_values"].shape == (num_pictures, processor.PATCH_NUMBERS)
    learned = [row[row != script.IGNORED].tolist() for row in batch["labels"]]
    texts = [bytes(token for token in row if token < 256).decode() for row in learned]
    assert texts == ["What?a", "What?a longer answer"]
    assert batch["attention_mask"].sum(1).tolist() == [
        int((row != processor.PAD).sum()) for row in batch["input_ids"]
    ]


@pytest.mark.parametrize("width", [1, 28, 300, 5000])
@pytest.mark.parametrize("height", [1, 28, 300, 5000])
def test_a_picture_of_any_shape_has_no_more_patches_than_allowed(example, width, height):
    processor = example("vision_language", "processor").Processor(max_patches=16)
    columns, rows = processor.grid_of(width, height)
    assert 1 <= columns * rows <= 16


def test_pictures_that_would_be_cut_off_are_refused(example):
    from PIL import Image

    processor = example("vision_language", "processor").Processor(max_patches=4)
    pictures = [Image.new("RGB", (99, 99))]
    with pytest.raises(ValueError, match="beyond its 8 tokens"):
        processor(text=["What is it? <|image|>"], images=[pictures], max_length=8)
