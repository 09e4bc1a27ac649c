"""JPEGs that a worker of the loader opens, decoded on the accelerator or by its double."""

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from stoker.profile import inventory
from stoker.profile.inventory import JpegDecoder, measure_gpu_decoding


class Computed(Dataset):
    """Names no file anywhere; opens one when a sample is made."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        with Image.open(f"{self.folder}/{index:03}.jpg") as picture:
            return torch.tensor(picture.size[0])


@pytest.fixture
def files(tmp_path):
    names = [tmp_path / f"{number:03}.jpg" for number in range(24)]
    for name in names:
        Image.new("RGB", (32, 24), (int(name.stem), 0, 255)).save(name)
    return names


@pytest.fixture
def calls(monkeypatch):
    """Pictures of each call of a double that decodes as fast as it is asked."""
    seen = []

    def decode(data):
        seen.append([picture.numel() for picture in data])
        return data

    decoder = JpegDecoder(decode, list, lambda: None, "cuda:0", "torchvision")
    monkeypatch.setattr(inventory, "find_decoder", lambda: decoder)
    return seen


def test_files_that_no_list_names_are_those_that_a_worker_opens(files, tmp_path, calls):
    loader = DataLoader(Computed(tmp_path), batch_size=8)
    found, notes = measure_gpu_decoding(loader, seconds=0.5, iterate=DataLoader.__iter__)
    assert notes == []
    assert found.pictures >= 8
    assert calls[0][0] == files[0].stat().st_size


def test_a_dataset_in_memory_has_nothing_to_decode(calls):
    loader = DataLoader([torch.zeros(3)] * 16, batch_size=4)
    found = measure_gpu_decoding(loader, seconds=0.5, iterate=DataLoader.__iter__)
    assert found == (None, [])
    assert calls == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_decodes_the_files_of_a_folder(files, tmp_path):
    pytest.importorskip("torchvision")
    torch.zeros(1, device="cuda")
    loader = DataLoader(Computed(tmp_path), batch_size=8)
    found, notes = measure_gpu_decoding(loader, seconds=0.5, iterate=DataLoader.__iter__)
    assert notes == []
    assert found.pictures >= 8
    assert found.pictures_per_second > found.augmented_per_second > 10
