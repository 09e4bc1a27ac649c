"""Decoding of a dataset's own JPEGs on the accelerator, tried with a double of the device."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from stoker.profile import inventory
from stoker.profile.explain import explain
from stoker.profile.inventory import (
    EncodedPictures,
    JpegDecoder,
    calls_of,
    decoding_rate,
    find_decoder,
    measure_gpu_decoding,
    named_files,
    read_pictures,
)
from stoker.records import GpuDecoding
from support import builders


class Folder(Dataset):
    """As ImageFolder: rows of a path and a label."""

    def __init__(self, files):
        self.samples = [(str(file), number % 2) for number, file in enumerate(files)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        with Image.open(self.samples[index][0]) as picture:
            return torch.tensor(picture.size[0])


class Paths(Dataset):
    """Names below a root, as a list of annotations has them."""

    def __init__(self, root, files):
        self.root = root
        self.names = [Path(file).name for file in files]


class Clock:
    """Seconds that pass only while the double decodes."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def files(tmp_path):
    names = [tmp_path / f"{number:03}.jpg" for number in range(24)]
    for name in names:
        Image.new("RGB", (32, 24), (int(name.stem), 0, 255)).save(name)
    return names


def decoder_of(clock, *, seconds_each, augment_seconds_each=0.0):
    calls = []

    def decode(data):
        calls.append(len(data))
        clock.now += seconds_each * len(data)
        return data

    def augment(pictures):
        clock.now += augment_seconds_each * len(pictures)

    return JpegDecoder(decode, augment, lambda: None, "cuda:0", "torchvision"), calls


def pictures_of(sizes):
    data = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    return EncodedPictures(data, 0.0001)


def test_the_rate_is_of_the_pictures_decoded_after_the_first_call():
    clock = Clock()
    decoder, calls = decoder_of(clock, seconds_each=1 / 14036, augment_seconds_each=1 / 5000)
    found = decoding_rate(decoder, pictures_of([80_000] * 200), seconds=2.0, clock=clock)
    assert found.pictures_per_second == pytest.approx(14036)
    assert found.augmented_per_second == pytest.approx(1 / (1 / 14036 + 1 / 5000))
    assert (found.pictures, found.picture_bytes, found.device) == (200, 80_000, "cuda:0")
    assert calls[:3] == [128, 128, 72]


def test_decoding_ends_with_the_call_in_which_its_time_is_over():
    clock = Clock()
    decoder, _ = decoder_of(clock, seconds_each=0.01)
    decoding_rate(decoder, pictures_of([1000] * 64), seconds=3.0, clock=clock)
    # For each half one call before, and the last one may begin just before the end.
    assert clock.now <= 3.0 + 4 * 0.64


def test_a_call_fits_in_the_devices_memory_however_large_the_files_are():
    calls = list(calls_of(pictures_of([9 << 20] * 3 + [1000] * 300).data))
    assert [len(call) for call in calls] == [1, 1, 128, 128, 45]
    assert list(calls_of([])) == []


def test_a_dataset_of_named_jpegs_is_known_whatever_wraps_it(files):
    folder = Folder(files)
    wrapped = ConcatDataset([Subset(folder, range(4)), folder])
    for dataset in (folder, Subset(folder, range(4)), wrapped):
        assert named_files(dataset) == [str(file) for file in files]


def test_names_below_a_root_are_found(files, tmp_path):
    assert named_files(Paths(tmp_path, files)) == [str(file) for file in files]


@pytest.mark.parametrize("value", [[], [1] * 50, ["x" * 9] * 50, [None] * 50, "text" * 50, 7])
def test_lists_of_other_things_name_no_files(value):
    dataset = Paths("/nowhere", [])
    dataset.names = value
    assert named_files(dataset) == []
    assert named_files(value) == []


def test_files_of_another_format_are_no_jpegs(tmp_path):
    names = [tmp_path / f"{number}.jpg" for number in range(12)]
    for name in names:
        Image.new("RGB", (8, 8)).save(name, format="PNG")
    assert named_files(Folder(names)) == []


def test_what_is_read_ends_at_a_number_of_bytes(files, monkeypatch):
    size = files[0].stat().st_size
    monkeypatch.setattr(inventory, "_MOST_BYTES", int(3.5 * size))
    assert len(read_pictures([str(file) for file in files]).data) == 3


def test_without_cuda_nothing_is_looked_for():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert find_decoder() is None
    loader = DataLoader([0] * 16, batch_size=4)
    assert measure_gpu_decoding(loader, seconds=1, iterate=DataLoader.__iter__) == (None, [])


def test_the_profile_says_what_the_accelerator_decodes():
    found = builders.profile(
        step_seconds=0.16,
        gpu_decoding=GpuDecoding(
            device="cuda:0",
            library="torchvision",
            pictures_per_second=14036.3,
            augmented_per_second=3810,
            pictures=256,
        ),
    )
    text = " ".join(explain(found).split())
    assert "cuda:0 decodes 14,036 JPEGs like these a second, 3,810 with crop, flip" in text
    assert "256 of the dataset's files" in text


class Rows(list[int]):
    """Rows that count how many of them are looked at."""

    looked_at = 0

    def __iter__(self):
        for row in super().__iter__():
            self.looked_at += 1
            yield row


class OfRows(Dataset[int]):
    def __init__(self) -> None:
        self.dataset_rows = Rows(range(10_000))


def test_a_dataset_that_holds_all_of_its_rows_is_not_walked_row_by_row():
    dataset = OfRows()
    assert named_files(dataset) == []
    assert 0 < dataset.dataset_rows.looked_at <= 100
