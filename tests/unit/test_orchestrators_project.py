"""The project folder's pipelines are loaded by path, and forgotten afterwards."""

import sys
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.orchestrators.base import project_pipeline

PIPELINE = """
from components.decide.sagemaker import said

def build():
    return said
"""


def project(folder: Path, *, say: str = "project", pipeline: str | None = None) -> Path:
    """A project whose pipeline builds what its component says."""
    (folder / "pipelines").mkdir(parents=True)
    (folder / "components" / "decide").mkdir(parents=True)
    text = (
        pipeline
        or "from components.decide.sagemaker import said\n\ndef build():\n    return said\n"
    )
    (folder / "pipelines" / "sagemaker.py").write_text(text)
    (folder / "components" / "decide" / "sagemaker.py").write_text(f"said = {say!r}\n")
    return folder


def built(folder: Path, *, components: Path | None = None, carried: Path | None = None) -> object:
    with project_pipeline(
        "sagemaker", folder=folder, components=components, carried=[carried] if carried else []
    ) as module:
        return module.build()


def test_two_folders_in_one_process_do_not_meet(tmp_path: Path) -> None:
    first, second = project(tmp_path / "a", say="first"), project(tmp_path / "b", say="second")
    assert [built(first), built(second), built(first)] == ["first", "second", "first"]


def test_afterwards_nothing_of_the_project_is_imported_or_on_the_path(tmp_path: Path) -> None:
    before = list(sys.path)
    built(project(tmp_path))
    assert sys.path == before
    assert not [n for n in sys.modules if n.partition(".")[0] in ("components", "pipelines")]


def test_modules_of_the_same_name_are_back_afterwards(tmp_path: Path) -> None:
    theirs = type(sys)("components")
    sys.modules["components"] = theirs
    try:
        assert built(project(tmp_path)) == "project"
        assert sys.modules["components"] is theirs
    finally:
        del sys.modules["components"]


def test_a_folder_of_components_takes_the_place_of_those_it_has(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "decide").mkdir(parents=True)
    (own / "decide" / "sagemaker.py").write_text("said = 'own'\n")
    folder = project(tmp_path / "project")
    assert built(folder, components=own) == "own"
    (own / "decide").rename(own / "other")
    assert built(folder, components=own) == "project"


def test_what_a_folder_lacks_comes_from_the_installation(tmp_path: Path) -> None:
    carried = project(tmp_path / "carried", say="carried")
    (tmp_path / "empty").mkdir()
    assert built(tmp_path / "empty", carried=carried) == "carried"


def test_the_folders_own_files_come_first(tmp_path: Path) -> None:
    carried = project(tmp_path / "carried", say="carried")
    assert built(project(tmp_path / "mine", say="mine"), carried=carried) == "mine"


def test_without_any_pipeline_the_way_to_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no pipelines/sagemaker\.py") as caught:
        built(tmp_path)
    assert "stoker init" in caught.value.fix


def test_a_component_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = project(tmp_path, pipeline="import components.missing\n")
    with pytest.raises(UsageError, match=r"no module components\.missing"):
        built(folder)


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path: Path) -> None:
    folder = project(tmp_path, pipeline="x = 1\ndef build(:\n")
    with pytest.raises(UsageError, match="not Python") as caught:
        built(folder)
    assert caught.value.where.endswith("pipelines/sagemaker.py:2")


def kubeflow(folder: Path, text: str) -> object:
    """What a project's pipeline for Kubeflow builds."""
    (folder / "pipelines").mkdir(parents=True)
    (folder / "pipelines" / "kubeflow.py").write_text(text)
    (folder / "pipelines" / "steps.py").write_text("said = 'mine'\n")
    with project_pipeline("kubeflow", folder=folder, carried=[]) as module:
        return module.build()


def test_a_pipeline_may_have_modules_next_to_it(tmp_path: Path) -> None:
    text = "from pipelines.steps import said\n\ndef build():\n    return said\n"
    assert kubeflow(tmp_path, text) == "mine"


@pytest.mark.parametrize("module", ["components.decide.kubeflow", "components.kubeflow_steps"])
def test_components_that_an_earlier_init_copied_are_refused_with_what_to_do(
    tmp_path: Path, module: str
) -> None:
    (tmp_path / "components" / "decide").mkdir(parents=True)
    (tmp_path / "components" / "decide" / "kubeflow.py").write_text("decide_step = None\n")
    with pytest.raises(UsageError, match=f"imports {module}") as caught:
        kubeflow(tmp_path, f"from {module} import decide_step\n")
    assert "stoker init" in caught.value.fix
    assert caught.value.where.endswith("pipelines/kubeflow.py")


@pytest.mark.parametrize("line", ["import kfp.no_such_module", "from kfp import no_such_name"])
def test_a_missing_or_older_sdk_is_a_matter_of_installing_it(tmp_path: Path, line: str) -> None:
    folder = project(tmp_path, pipeline=f"{line}\n")
    with pytest.raises(UsageError, match="kfp is not installed") as caught:
        built(folder)
    assert caught.value.fix == "pip install 'stoker[kubeflow]'"


def test_other_missing_modules_are_not_explained_away(tmp_path: Path) -> None:
    folder = project(tmp_path, pipeline="import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError):
        built(folder)
