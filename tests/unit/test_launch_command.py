"""Checks which command `stoker launch train` runs."""

import json

import pytest

from stoker.errors import UsageError
from stoker.launch import launch
from stoker.launch.code import LaunchedCommand, check_words, order_of
from stoker.platforms.sagemaker.submit import pack
from stoker.settings import from_environment


def order(tmp_path, *words, **environ):
    environ = {"STOKER_BASE_DIR": str(tmp_path), **environ}
    return order_of(words, settings=from_environment(environ), environ=environ)


def give_hyperparameters(tmp_path, **values):
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    encoded = {f"sagemaker_{name}": json.dumps(value) for name, value in values.items()}
    (folder / "hyperparameters.json").write_text(json.dumps(encoded))


@pytest.mark.parametrize("command", [("train", "--fast"), ("/usr/bin/train",)])
def test_any_other_command_than_train_alone_is_run_as_it_is_given(tmp_path, command):
    assert order(tmp_path, *command) == LaunchedCommand(command=command, folder=None)


def test_train_alone_is_the_command_that_the_job_names(tmp_path):
    give_hyperparameters(tmp_path, program="other.py")
    found = order(tmp_path, "train", STOKER_COMMAND='["python", "-m", "package.train"]')
    assert found == LaunchedCommand(command=("python", "-m", "package.train"), folder=None)


@pytest.mark.parametrize(
    ("program", "command"), [("go.py", ("python", "go.py")), ("go.sh", ("./go.sh",))]
)
def test_train_alone_is_else_the_program_that_the_sdk_or_the_image_names(
    tmp_path, program, command
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / program).touch()
    expected = LaunchedCommand(command=command, folder=tmp_path / "code")
    assert order(tmp_path, "train", SAGEMAKER_PROGRAM=program) == expected
    give_hyperparameters(tmp_path, program=program)
    assert order(tmp_path, "train") == expected


def test_packed_code_is_where_the_command_runs(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("1")
    (tmp_path / "code.tar.gz").write_bytes(pack(source))
    give_hyperparameters(tmp_path, program="train.py", submit_directory="s3://bucket/old.tar.gz")
    for words in (("python", "train.py"), ("train",)):
        found = order(tmp_path, *words, STOKER_CODE_FILE=str(tmp_path / "code.tar.gz"))
        assert found == LaunchedCommand(command=("python", "train.py"), folder=tmp_path / "code")
        assert (tmp_path / "code" / "train.py").read_text() == "1"


def test_train_alone_with_no_command_anywhere_says_how_to_name_one(tmp_path):
    with pytest.raises(UsageError, match="does not know what to train") as caught:
        order(tmp_path, "train")
    assert "STOKER_COMMAND" in caught.value.fix
    assert "full path" in caught.value.fix


def test_code_that_would_have_to_be_fetched_is_refused(tmp_path):
    give_hyperparameters(tmp_path, program="go.py", submit_directory="s3://bucket/source.tar.gz")
    with pytest.raises(UsageError, match="does not download code: s3://bucket") as caught:
        order(tmp_path, "train")
    assert "sagemaker.source" in caught.value.fix


def test_a_program_that_is_not_there_is_named_with_its_folder(tmp_path):
    give_hyperparameters(tmp_path, program="go.py")
    with pytest.raises(UsageError, match=r"program go\.py not found") as caught:
        order(tmp_path, "train")
    assert str(tmp_path / "code") in caught.value.where


def test_serving_is_refused_before_anything_else(tmp_path):
    with pytest.raises(UsageError, match="does not serve"):
        launch(["serve"], {"STOKER_BASE_DIR": str(tmp_path)})
    check_words(["serve", "files"])
    assert not list(tmp_path.iterdir())
