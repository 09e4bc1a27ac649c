"""What is shipped: a workload of configs/ runs as it stands, wheel and sdist hold the same."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from support.short_run import short_run
from support.wheels import ROOT, built


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_two_ranks_train_beside_a_data_host(tmp_path):
    groups = ("dnn=local.c1:1", "data=local.c1:1:1")
    training = short_run("mnist-ddp.yaml", tmp_path, groups=groups, batch_size=32)
    assert training.strategy == "torchrun"


@pytest.mark.e2e
def test_wheel_and_sdist_have_the_same_package(tmp_path):
    wheel = built(ROOT, tmp_path / "wheel", "wheel")
    sdist = built(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = built(source, tmp_path / "again", "wheel")

    def names(file: Path) -> set[str]:
        return set(zipfile.ZipFile(file).namelist())

    assert names(again) == names(wheel)
    assert "stoker/py.typed" in names(wheel)
    assert not [name for name in names(wheel) if "__pycache__" in name or "/runs/" in name]
