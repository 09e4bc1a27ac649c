"""Files of values, one per environment, are merged into the workload as --set is, and before it."""

import json

import pytest
import typer.main
import yaml

from stoker.cli.app import VERBS, app_for
from stoker.cli.compile import again_words
from stoker.errors import UsageError
from stoker.workload_file import read_workload
from support.command import succeeds

WORKLOAD = """\
name: mnist
command: [python, train.py]
cluster: {dnn: {instance_type: local.c2, count: 1}}
gate:
- {metric: accuracy, min: 0.9}
feed: {credits: 2, port: 29610}
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
        "name: mnist-prod\ngate:\n- {metric: loss, max: 0.2}\nfeed: {credits: 7}\n"
        "cluster: {dnn: {count: 4}}\n",
    )
    found = read_workload("w.yaml", values=[prod])
    assert found.name == "mnist-prod"
    assert [gate.metric for gate in found.gate] == ["loss"]
    assert (found.feed.credits, found.feed.port) == (7, 29610)
    assert found.cluster.dnn.instance_type == "local.c2"
    assert found.cluster.dnn.count == 4


def test_a_later_file_and_set_win_in_this_order(project):
    one = write(project, "a.yaml", "feed: {credits: 3, port: 29700}\n")
    two = write(project, "b.yaml", "feed: {credits: 4}\n")
    both = read_workload("w.yaml", values=[one, two]).feed
    assert (both.credits, both.port) == (4, 29700)
    assert (
        read_workload("w.yaml", values=[one, two], overrides=["feed.credits=5"]).feed.credits == 5
    )


def test_hyperparameters_are_merged_as_they_are_written(project):
    prod = write(
        project, "prod.yaml", "hyperparameters: {version: 1.20, lr: 1e-4, n.layers: 3, amp: yes}\n"
    )
    found = read_workload("w.yaml", values=[prod]).hyperparameters
    assert dict(found) == {"version": "1.20", "lr": 1e-4, "n.layers": 3, "amp": "yes"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "---\n"])
def test_an_empty_file_changes_nothing(project, text):
    assert read_workload("w.yaml", values=[write(project, "e.yaml", text)]) == read_workload(
        "w.yaml"
    )


def test_json_and_anchors_and_nulls_are_taken(project):
    name = write(project, "prod.json", json.dumps({"cluster": None}))
    assert read_workload("w.yaml", values=[name]).cluster is None
    text = "feed: &feed {credits: 9}\nx: &y 1\n"
    with pytest.raises(UsageError, match="unknown key x"):
        read_workload("w.yaml", values=[write(project, "a.yaml", text)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("feed:\n  credit: 4\n", "prod.yaml:2, key feed.credit"),
        ("gate:\n- {metric: a, min: high}\n", "prod.yaml:2, key gate[0].min"),
        ("feed: {credits: 1}\nfeed: {credits: 2}\n", "duplicate key feed"),
        ("- a\n", "where: prod.yaml"),
        ("a: [\n", "not YAML"),
        ("sagemaker: {role: 'arn:aws:iam::ACCOUNT:role/a', output_uri: 's3://b'}", "ACCOUNT"),
        ("a: &a {b: *a}\n", "an alias"),
    ],
)
def test_errors_name_the_file_and_its_line(project, text, words):
    with pytest.raises(UsageError) as caught:
        read_workload("w.yaml", values=[write(project, "prod.yaml", text)])
    assert words in str(caught.value)


def test_a_missing_file_is_named(project):
    with pytest.raises(UsageError, match=r"nowhere\.yaml"):
        read_workload("w.yaml", values=["nowhere.yaml"])


def test_the_same_error_in_the_workload_itself_names_the_workload(project):
    prod = write(project, "prod.yaml", "feed: {credits: 4}\n")
    (project / "w.yaml").write_text(WORKLOAD.replace("port: 29610", "prot: 1"))
    with pytest.raises(UsageError, match="prot") as caught:
        read_workload("w.yaml", values=[prod])
    assert "w.yaml:6" in caught.value.where


def test_all_verbs_that_take_set_take_values(project):
    commands = typer.main.get_command(app_for(*VERBS)).commands
    with_set = 0
    for verb, command in commands.items():
        flags = {flag for param in command.params for flag in param.opts}
        assert ("--set" in flags) == ("--values" in flags), verb
        with_set += "--set" in flags
    assert with_set >= 9


def test_a_terminal_merges_files_and_tells_the_next_command_with_them(project, monkeypatch):
    write(project, "my prod.yaml", "feed: {credits: 11}\n")
    done = succeeds(
        *("train", "--set", "feed.port=29800", "--values", "my prod.yaml", "--dry-run", "w.yaml")
    )
    assert json.loads(done.stdout)["feed"]["credits"] == 11
    assert again_words(["@my prod.yaml", "feed.port=1"]) == (
        " --values 'my prod.yaml' --set feed.port=1"
    )


def test_two_environments_differ_in_what_their_files_say(project):
    for name, role in (("stage", "111122223333"), ("prod", "444455556666")):
        keys = {
            "name": f"mnist-{name}",
            "platform": "sagemaker",
            "image": f"{role}.dkr.ecr.eu-west-1.amazonaws.com/stoker:1",
            "sagemaker": {
                "role": f"arn:aws:iam::{role}:role/a",
                "output_uri": f"s3://acme-{name}/stoker",
            },
        }
        found = read_workload(
            "w.yaml", values=[write(project, f"{name}.yaml", yaml.safe_dump(keys))]
        )
        assert found.name == f"mnist-{name}"
        assert found.sagemaker.output_uri == f"s3://acme-{name}/stoker"


@pytest.mark.parametrize("key", ["gate.0.min=0.99", "gate={metric: accuracy, min: 0.99}"])
def test_a_list_that_is_written_as_a_mapping_is_shown_as_a_list(project, key):
    with pytest.raises(UsageError, match="expected a list") as caught:
        read_workload("w.yaml", overrides=[key])
    assert "gate: [{...}]" in caught.value.fix
