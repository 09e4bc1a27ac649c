"""Checks what `stoker init` puts into a project folder, and what it never writes over."""

import os
import zipfile
from pathlib import Path

import pytest

from stoker.cli.init import (
    FOLDERS,
    INSTALL_EXAMPLE,
    init_verb,
    project_files,
    project_source,
    write_project,
)
from stoker.errors import UsageError
from stoker.settings import read_workload
from support.command import process, stoker

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Makes a small checkout."""
    for name in FOLDERS:
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / "README.md").write_text(name)
    script = tmp_path / "source" / "containers" / "build"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return tmp_path / "source"


def test_a_project_is_a_copy_of_the_parts_that_people_edit(source: Path, tmp_path: Path) -> None:
    files = project_files(source)
    write_project(tmp_path / "mine", files)
    assert {str(name) for name in files} == {
        "configs/README.md",
        "containers/README.md",
        "containers/build",
        "examples/README.md",
        "pipelines/README.md",
        "tools/README.md",
    }
    assert (tmp_path / "mine" / "pipelines" / "README.md").read_text() == "pipelines"
    assert os.access(tmp_path / "mine" / "containers" / "build", os.X_OK)


def test_what_work_leaves_behind_is_not_copied(source: Path) -> None:
    for name in ("__pycache__", ".mypy_cache", "wheels"):
        (source / "pipelines" / name).mkdir()
        (source / "pipelines" / name / "x").write_text("x")
    assert len(project_files(source)) == 6


def test_another_file_in_the_way_is_named_and_nothing_is_written(
    source: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    (mine / "configs").mkdir(parents=True)
    (mine / "configs" / "README.md").write_text("my own")
    with pytest.raises(UsageError, match=r"other files of these names: configs/README\.md"):
        write_project(mine, project_files(source))
    assert [p.name for p in mine.iterdir()] == ["configs"]
    assert (mine / "configs" / "README.md").read_text() == "my own"


def test_a_file_where_a_folder_is_needed_is_in_the_way(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pipelines").write_text("")
    with pytest.raises(UsageError, match=r"other files of these names: pipelines/README\.md"):
        write_project(tmp_path / "mine", project_files(source))


def test_many_files_in_the_way_are_counted(source: Path, tmp_path: Path) -> None:
    (source / "examples" / "train.py").write_text("")
    files = project_files(source)
    write_project(tmp_path / "mine", files)
    for name in files:
        (tmp_path / "mine" / name).write_text("changed")
    with pytest.raises(UsageError, match="and 2 more"):
        write_project(tmp_path / "mine", files)


def test_other_files_and_equal_ones_stay(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    write_project(mine, project_files(source))
    (mine / "notes.txt").write_text("mine")
    before = (mine / "configs" / "README.md").stat().st_mtime_ns
    write_project(mine, {**project_files(source), Path("configs") / "new.yaml": "name: new\n"})
    assert (mine / "configs" / "README.md").stat().st_mtime_ns == before
    assert (mine / "configs" / "new.yaml").read_text() == "name: new\n"
    assert (mine / "notes.txt").read_text() == "mine"


def test_a_file_is_no_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        write_project(tmp_path / "mine", project_files(source))


def test_an_editable_installation_takes_its_checkout() -> None:
    assert project_source() == ROOT


def test_the_checkouts_own_project_is_whole() -> None:
    names = {str(name) for name in project_files(ROOT)}
    assert {
        "pipelines/sagemaker.py",
        "pipelines/kubeflow.py",
        "containers/launcher/Dockerfile",
        "configs/mnist.yaml",
        "configs/mnist-sagemaker.yaml",
        "examples/mnist/train.py",
        "examples/lambda_start/handler.py",
    } <= names


def test_an_installed_wheel_makes_a_project(tmp_path: Path) -> None:
    wheels = pytest.importorskip("hatchling.builders.wheel", reason="make setup installs hatchling")
    (built,) = wheels.WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path / "dist"), versions=["standard"]
    )
    installed = tmp_path / "installed"
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(installed)
    done = process("init", "mine", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.stderr
    assert INSTALL_EXAMPLE in done.stdout
    assert INSTALL_EXAMPLE in (tmp_path / "mine" / "README.md").read_text()
    made = {str(p.relative_to(tmp_path / "mine")) for p in (tmp_path / "mine").rglob("*.*")}
    assert made >= {str(name) for name in project_files(ROOT) if name.suffix}
    assert read_workload(tmp_path / "mine" / "configs" / "mnist.yaml").name == "mnist"


def test_a_readme_of_ones_own_stays_and_is_not_in_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("mine")
    init_verb(tmp_path, script=None, platform="local", from_training_job=None, region=None)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "made:" in capsys.readouterr().out


def test_a_region_without_a_job_is_refused(tmp_path: Path) -> None:
    done = process("init", "mine", "--region", "eu-central-1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--region is only for --from-training-job" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_a_script_gets_a_workload_that_trains_it_and_a_gitignore(tmp_path: Path) -> None:
    (tmp_path / "Train It.py").write_text("")
    (tmp_path / "mine").mkdir()
    done = stoker("init", "--script", "Train It.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".gitignore", "Train It.py", "mine", "train-it.yaml")
    }
    workload = read_workload(tmp_path / "train-it.yaml")
    assert workload.command == ("python", "Train It.py")
    assert "stoker run train-it.yaml" in done.stdout
    assert "runs/" in (tmp_path / ".gitignore").read_text().splitlines()
    # From another folder, and never over a file that was edited.
    assert stoker("init", "mine", "--script", "Train It.py", cwd=tmp_path).returncode == 0
    assert read_workload(tmp_path / "mine" / "train-it.yaml").command[1] == "../Train It.py"
    (tmp_path / "train-it.yaml").write_text("name: mine")
    (tmp_path / ".gitignore").write_text("own")
    assert "other files" in stoker("init", "--script", "Train It.py", cwd=tmp_path).stderr
    assert (tmp_path / ".gitignore").read_text() == "own"


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "no folder and no script"), (["--script", "none.py"], "no such script: none.py")],
)
def test_init_says_what_is_missing(tmp_path: Path, words: list[str], said: str) -> None:
    done = stoker("init", *words, cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert said in done.stderr


@pytest.mark.parametrize(
    ("platform", "target"), [("sagemaker", "sagemaker"), ("kubernetes", "kubeflow")]
)
def test_a_script_s_workload_compiles_as_a_pipeline_once_its_names_are_written(
    tmp_path: Path, platform: str, target: str
) -> None:
    (tmp_path / "train.py").write_text("")
    done = stoker("init", "--script", "train.py", "--platform", platform, cwd=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if "stoker compile" in line]
    _, *words = line.partition("      the")[0].split()
    assert words[:3] == ["compile", target, "train.yaml"]
    file = tmp_path / "train.yaml"
    assert "a placeholder is left" in stoker(*words, cwd=tmp_path).stderr
    names = {"ACCOUNT": "123456789012", "REGION": "eu-west-1", "BUCKET": "mine", "REGISTRY": "r.io"}
    text = file.read_text()
    for word, name in names.items():
        text = text.replace(word, name)
    file.write_text(text)
    done = stoker(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_platform_is_for_a_script(tmp_path: Path) -> None:
    done = stoker("init", "mine", "--platform", "sagemaker", cwd=tmp_path)
    assert "--platform is only for --script" in done.stderr
