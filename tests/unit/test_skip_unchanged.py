"""A run is skipped only if all that it is made of is known and is that of the last good run."""

import os
import platform

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.host.listing import listing_version
from stoker.host.packages import packages_here
from stoker.pipelines.sagemaker.compile import check_comparable
from stoker.records import write_json
from stoker.records.training import InputVersion, Lineage
from stoker.run.unchanged import code_here, since_last_run
from support import builders, sample_records

replace = msgspec.structs.replace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / ".stokerignore").write_text("data\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("1\n")
    return tmp_path


def workload(*overrides):
    channels = {"train": {"uri": "data"}}
    return builders.workload("mnist", "skip_unchanged=true", *overrides, channels=channels)


def trained(folder, name="mnist-1", *, passed=True, of=None, **lineage):
    own = of or workload()
    known = {
        "code": code_here(own).digest or None,
        "python": platform.python_version(),
        "packages": packages_here(),
        "inputs": {"train": InputVersion(address="x", version=listing_version(folder / "data"))},
        **lineage,
    }
    run = folder / "runs" / name
    run.mkdir(parents=True)
    write_json(run / "workload.json", own)
    write_json(run / "training.json", replace(sample_records.training(), lineage=Lineage(**known)))
    write_json(run / "evaluation.json", replace(sample_records.evaluation(), passed=passed))


def since(folder, own=None):
    return since_last_run(own or workload(), runs=folder / "runs")


def test_a_run_without_a_change_is_skipped_and_tells_what_would_be_one(folder):
    trained(folder)
    found = since(folder)
    assert found.is_unchanged
    assert found.words.startswith("nothing changed since mnist-1 of 2026-11-20: skipped")
    assert "the files of its channels" in found.words
    assert "\n" not in found.words


CHANGES = {
    "code": lambda at: (at / "train.py").write_text("print(2)\n"),
    "new code": lambda at: (at / "model.py").write_text(""),
    "new data": lambda at: (at / "data" / "b.csv").write_text("2\n"),
    "changed data": lambda at: (at / "data" / "a.csv").write_text("10\n"),
    "touched data": lambda at: os.utime(at / "data" / "a.csv", (1, 1)),
    "less data": lambda at: (at / "data" / "a.csv").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_trains(folder, change):
    trained(folder)
    change(folder)
    found = since(folder)
    assert not found.is_unchanged
    assert "mnist-1" in found.words


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.epochs=7", "training"),
        ("hyperparameters.lr=0.5", "hyperparameters"),
        ("constraints.max_data_hosts=3", "constraints"),
        ("environment.DEBUG=yes-please", "environment"),
        ("image=mine:2", "image"),
    ],
)
def test_a_changed_key_of_the_workload_trains_and_is_named(folder, override, key):
    trained(folder)
    found = since(folder, workload(override))
    assert not found.is_unchanged
    assert key in found.words


UNKNOWN = {
    "code": {"code": None},
    "packages": {"packages": {}},
    "python": {"python": None},
    "channel": {"inputs": {}},
    "version": {"inputs": {"train": InputVersion(address="x")}},
}


@pytest.mark.parametrize("lineage", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_of_the_last_run_trains(folder, lineage):
    trained(folder, **lineage)
    assert not since(folder).is_unchanged


def linked(at):
    (at / "else").mkdir()
    (at / "data" / "more").symlink_to(at / "else")


UNREADABLE = {
    "a secret in the code": lambda at: (at / ".env").write_text("TOKEN=abcdefghijklmnop\n"),
    "a linked folder": linked,
    "no record": lambda at: (at / "runs" / "mnist-1" / "training.json").unlink(),
    "a newer record": lambda at: (at / "runs" / "mnist-1" / "training.json").write_text(
        '{"schema": "stoker.training/v9"}'
    ),
}


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_trains_and_is_told(folder, change):
    trained(folder)
    change(folder)
    found = since(folder)
    assert not found.is_unchanged
    assert found.words


def test_a_workload_without_channels_is_never_skipped(folder):
    own = builders.workload("mnist", "skip_unchanged=true")
    trained(folder, of=own)
    assert "names no channels" in since(folder, own).words


def test_the_first_run_and_one_after_a_refused_model_train(folder):
    assert not since(folder).is_unchanged
    trained(folder, passed=False)
    assert not since(folder).is_unchanged


def test_a_forced_run_counts_as_the_last_one(folder):
    trained(folder)
    assert since(folder, workload("notify.on=always")).is_unchanged


ECR = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/mnist:1"


def in_pipeline(image=ECR, **channel):
    channels = (
        {"train": {"uri": "s3://bucket/data/", **channel}} if channel != {"uri": None} else {}
    )
    return builders.workload("mnist", "skip_unchanged=true", f"image={image}", channels=channels)


def test_a_pipeline_on_sagemaker_takes_the_key_where_its_inputs_can_be_compared():
    check_comparable(in_pipeline())
    check_comparable(in_pipeline(image=f"registry.example.com/a@sha256:{'0' * 64}"))
    # Without the key, nothing is compared.
    check_comparable(builders.workload("mnist", "image=mine:1"))


NEVER_COMPARED = {
    "no channel": ({"uri": None}, "names none"),
    "a file system": ({"uri": "fsx://fs-1/data"}, "files of channel train"),
    "a manifest": ({"data_type": "ManifestFile"}, "files of channel train"),
    "a tag of another registry": ({"image": "registry.example.com/a:1"}, "the image registry"),
}


@pytest.mark.parametrize(("change", "words"), NEVER_COMPARED.values(), ids=NEVER_COMPARED)
def test_a_pipeline_that_would_always_train_is_refused(change, words):
    with pytest.raises(UsageError, match=words):
        check_comparable(in_pipeline(**change))
