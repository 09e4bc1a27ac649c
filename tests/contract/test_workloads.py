"""Files of values, one per environment, are merged into the workload as --set is, and before it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.records.hyperparameters import arguments
from stoker.run.workloads import parted_command
from stoker.workload_file import read_workload
from support.command import stoker, succeeds
from support.examples import project as example_project

WORKLOAD = """\
name: mnist
command: [python, train.py]
cluster: {dnn: {instance_type: local.c2, count: 1}}
gate:
- {metric: accuracy, min: 0.9}
feed: {max_errors: 2, port: 29610}
hyperparameters: {version: "1.10", lr: 0.1, n.layers: 2}
tracking: {tags: {"stoker.team": vision}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "w.yaml").write_text(WORKLOAD.replace("tracking:", "# tracking:"))
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, name, text):
    (folder / name).write_text(text)
    return name


def test_mappings_are_merged_and_all_else_replaces(project):
    prod = write(
        project,
        "prod.yaml",
        "name: mnist-prod\ngate:\n- {metric: loss, max: 0.2}\nfeed: {max_errors: 7}\n"
        "cluster: {dnn: {count: 4}}\n",
    )
    found = read_workload("w.yaml", overrides=[f"@{prod}"])
    assert found.name == "mnist-prod"
    assert [gate.metric for gate in found.gate] == ["loss"]
    assert (found.feed.max_errors, found.feed.port) == (7, 29610)
    assert found.cluster.dnn.instance_type == "local.c2"
    assert found.cluster.dnn.count == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("feed:\n  credit: 4\n", "prod.yaml:2, key feed.credit"),
        ("feed: {max_errors: 1}\nfeed: {max_errors: 2}\n", "duplicate key feed"),
        ("- a\n", "where: prod.yaml"),
    ],
)
def test_errors_name_the_file_and_its_line(project, text, words):
    with pytest.raises(UsageError) as caught:
        read_workload("w.yaml", overrides=[f"@{write(project, 'prod.yaml', text)}"])
    assert words in str(caught.value)


def test_a_terminal_merges_files(project):
    write(project, "my prod.yaml", "hyperparameters: {lr: 0.2}\n")
    done = succeeds("train", "--values", "my prod.yaml", "--dry-run", "w.yaml")
    assert json.loads(done.stdout)["hyperparameters"]["lr"] == "0.2"


ROOT = Path(__file__).parents[2]


FILES = sorted(file.name for file in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_each_workload_is_a_request_that_its_platform_takes(name, tmp_path):
    succeeds("train", f"configs/{name}", "--dry-run", cwd=example_project(tmp_path))


@pytest.mark.parametrize("flags", [[], ["--replace-dataloader", "false"]])
def test_the_option_says_which_loaders_a_job_replaces(flags, tmp_path):
    words = ["train", "configs/mnist-sagemaker.yaml", "--dry-run", "--json", *flags]
    shown = succeeds(*words, cwd=example_project(tmp_path))
    found = re.findall(r'replace_dataloader\\?": ?\\?"?(\w+)', shown.stdout)
    assert sorted(set(found)) == [(flags or ["true"])[-1]]


def test_a_command_becomes_a_workload(tmp_path):
    (tmp_path / "Train It.py").write_text("")
    words = ("--", "python", "-u", "Train It.py", "--lr", "0.1", "--name", "007")
    done = succeeds("init", *words, cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"Train It.py", "train-it.yaml"}
    workload = read_workload(tmp_path / "train-it.yaml")
    assert workload.command == ("python", "-u", "Train It.py")
    assert workload.hyperparameters == {"lr": 0.1, "name": "007"}
    assert "stoker run train-it.yaml" in done.stdout
    assert "made: mine/train-it.yaml" in succeeds("init", "mine", *words, cwd=tmp_path).stdout
    (tmp_path / "train-it.yaml").write_text("name: mine")
    assert "train-it.yaml exists" in stoker("init", *words, cwd=tmp_path).stderr
    assert (tmp_path / "train-it.yaml").read_text() == "name: mine"


@pytest.mark.parametrize(
    ("line", "kept", "values"),
    [
        ("python train.py --lr 0.1 --epochs=3", "python train.py", {"lr": 0.1, "epochs": 3}),
        ("python -m pkg.train fit --by -3", "python -m pkg.train fit", {"by": -3}),
        ("python train.py --sizes 1 2 --kk 3", "python train.py --sizes 1 2", {"kk": 3}),
        ("python train.py -n 3 --on true", "python train.py -n 3", {"on": "true"}),
        ("python train.py --lr 1 --amp", "python train.py --lr 1 --amp", {}),
        ("python train.py --aa=1 2", "python train.py --aa=1 2", {}),
        ("python train.py --xx 1 --xx 2", "python train.py --xx 1", {"xx": 2}),
        ("python train.py --x 1", "python train.py --x 1", {}),
        ("python train.py --version 1.10", "python train.py", {"version": "1.10"}),
        ("accelerate launch --mixed bf16 t.py", "accelerate launch --mixed bf16 t.py", {}),
        ("/opt/train --lr 0.1", "/opt/train", {"lr": 0.1}),
    ],
)
def test_options_with_one_value_are_hyperparameters(line, kept, values):
    command, found = parted_command(shlex.split(line))
    assert " ".join(command) == kept
    assert found == values
    typed = [part for word in line.split() for part in word.split("=")]
    assert sorted(typed) == sorted(
        part for word in [*command, *arguments(found)] for part in word.split("=")
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine"], "expected a folder if any"),
        (["mine", "train.py", "--", "true"], "expected a folder if any"),
        (["mine", "--from-training-job", "j", "--", "true"], "expected a folder if any"),
    ],
)
def test_init_says_what_is_missing(tmp_path, words, said):
    done = stoker("init", *words, cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert said in done.stderr
