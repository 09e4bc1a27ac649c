"""Inputs of a pipeline's steps are packed under an address that names their content."""

import io
import json
import tarfile
from pathlib import Path

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.pipelines.base import Inputs, pack_inputs
from stoker.records import SageMakerSettings, Workload

ROLE = "arn:aws:iam::123456789012:role/stoker"


def workload(**settings: object) -> Workload:
    return Workload(
        name="mnist",
        command=("python", "train.py"),
        sagemaker=SageMakerSettings(role=ROLE, output_uri="s3://b/out/", **settings),  # type: ignore[arg-type]
    )


def packed(folder: Path, text: str = "print(1)") -> Inputs:
    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "code" / "train.py").write_text(text)
    return pack_inputs(workload(source="code"), folder=folder)


@pytest.mark.parametrize("settings", [{}, {"source": "s3://b/mine.tar.gz"}])
def test_a_workload_without_code_or_with_code_in_s3_is_one_file(settings):
    inputs = pack_inputs(workload(**settings))
    assert set(inputs.files) == {"workload.json"}
    assert inputs.uri.startswith("s3://b/out/stoker/inputs/")
    assert len(inputs.uri.rpartition("/")[2]) == 16
    assert inputs.workload == workload(**settings)


def test_code_is_packed_and_the_workload_names_its_address(tmp_path):
    inputs = packed(tmp_path)
    address = f"{inputs.uri}/code.tar.gz"
    assert inputs.workload.sagemaker
    assert inputs.workload.sagemaker.source == address
    assert json.loads(inputs.files["workload.json"])["sagemaker"]["source"] == address
    with tarfile.open(fileobj=io.BytesIO(inputs.files["code.tar.gz"])) as archive:
        assert archive.getnames() == ["train.py"]


def test_the_address_names_the_content(tmp_path):
    first = packed(tmp_path / "a")
    assert packed(tmp_path / "b") == first
    assert packed(tmp_path / "b", "print(2)").uri != first.uri
    other = msgspec.structs.replace(workload(), hyperparameters={"lr": 0.1})
    assert pack_inputs(workload()).uri != pack_inputs(other).uri


def test_settings_for_sagemaker_are_needed():
    with pytest.raises(UsageError, match="no settings for SageMaker"):
        pack_inputs(Workload(name="x", command=("true",)))
