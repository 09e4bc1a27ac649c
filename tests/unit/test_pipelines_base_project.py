"""The project folder's pipelines are loaded by path, and forgotten afterwards."""

import sys
from pathlib import Path

import pytest

from stoker.errors import UsageError, install_command
from stoker.pipelines.base import project_pipeline

PIPELINE = "from pipelines.steps import said\n\ndef build():\n    return said\n"


def project(folder: Path, *, say: str = "project", pipeline: str = PIPELINE) -> Path:
    """Makes a project whose pipeline builds what a module next to it says."""
    (folder / "pipelines").mkdir(parents=True, exist_ok=True)
    (folder / "pipelines" / "sagemaker.py").write_text(pipeline)
    (folder / "pipelines" / "steps.py").write_text(f"said = {say!r}\n")
    return folder


def built(folder: Path, *, carried: Path | None = None) -> object:
    roots = [carried] if carried else []
    with project_pipeline("sagemaker", folder=folder, carried=roots) as module:
        return module.build()


def test_two_folders_in_one_process_do_not_meet(tmp_path):
    before = list(sys.path)
    first, second = project(tmp_path / "a", say="first"), project(tmp_path / "b", say="second")
    found = [built(first, carried=second), built(second), built(first)]
    assert found == ["first", "second", "first"]
    assert sys.path == before
    assert not [n for n in sys.modules if n.partition(".")[0] == "pipelines"]


def test_modules_of_the_same_name_are_back_afterwards(tmp_path, monkeypatch):
    theirs = type(sys)("pipelines")
    monkeypatch.setitem(sys.modules, "pipelines", theirs)
    assert built(project(tmp_path)) == "project"
    assert sys.modules["pipelines"] is theirs


def test_what_a_folder_lacks_comes_from_the_installation(tmp_path):
    carried = project(tmp_path / "carried", say="carried")
    (tmp_path / "empty").mkdir()
    assert built(tmp_path / "empty", carried=carried) == "carried"


def test_without_any_pipeline_the_way_to_one_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"pipelines/sagemaker\.py not found") as caught:
        built(tmp_path)
    assert "stoker init" in caught.value.fix


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("import pipelines.missing", r"pipelines\.missing"),
        ("from stoker.errors import no_such_name", "no_such_name"),
    ],
)
def test_what_the_pipeline_cannot_import_of_the_project_or_stoker_is_named(tmp_path, line, missing):
    folder = project(tmp_path, pipeline=f"{line}\n")
    with pytest.raises(UsageError, match=f"cannot be imported: .*{missing}") as caught:
        built(folder)
    assert str(folder) in caught.value.where
    assert "docs/sagemaker.md" in caught.value.fix


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path):
    folder = project(tmp_path, pipeline="x = 1\ndef build(:\n")
    with pytest.raises(UsageError, match="not Python") as caught:
        built(folder)
    assert caught.value.where.endswith("pipelines/sagemaker.py:2")


@pytest.mark.parametrize("line", ["import kfp.no_such_module", "from kfp import no_such_name"])
def test_a_missing_or_older_sdk_is_a_matter_of_installing_it(tmp_path, line):
    folder = project(tmp_path, pipeline=f"{line}\n")
    with pytest.raises(UsageError, match="kfp is not installed") as caught:
        built(folder)
    assert caught.value.fix == install_command("kubeflow")


def test_other_missing_modules_are_not_explained_away(tmp_path):
    folder = project(tmp_path, pipeline="import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError):
        built(folder)
