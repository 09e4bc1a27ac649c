"""Verbs that delete or replace ask on a terminal first, unless --yes or --json is given."""

import io
import json
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from stoker import terminal
from stoker.cli import prune, schedule
from stoker.cli.options import Reach
from stoker.cli.schedule import ScheduleFlags
from stoker.errors import UsageError
from stoker.pipelines.sagemaker import prune as left_behind
from stoker.pipelines.sagemaker.prune import LeftFolder

WORKLOAD = {
    "name": "mnist",
    "command": ["true"],
    "sagemaker": {
        "role": "arn:aws:iam::123456789012:role/stoker",
        "output_uri": "s3://b/out/",
        "region": "eu-west-1",
    },
}
WITHOUT_A_QUESTION = [{"yes": True}, {"as_json": True}]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps(WORKLOAD))
    return str(path)


@pytest.fixture
def answering(monkeypatch):
    """A terminal at which a person answers; no service is there."""
    monkeypatch.setattr(terminal, "is_interactive", lambda: True)
    return lambda word: monkeypatch.setattr(sys, "stdin", io.StringIO(f"{word}\n"))


@pytest.fixture
def deleted(monkeypatch):
    folder = LeftFolder(
        uri="s3://b/out/old/", kind="inputs", num_bytes=7, num_objects=1, changed=datetime.now(UTC)
    )
    done = []
    monkeypatch.setattr(left_behind, "left_folders", lambda *_, **__: [folder])
    monkeypatch.setattr(left_behind, "delete_folder", lambda _, folder: done.append(folder.uri))
    monkeypatch.setattr(schedule, "early_schedules", lambda *_, **__: [])
    return done


@pytest.fixture
def replaced(monkeypatch):
    """A client whose schedule differs from what is asked."""
    done = []
    change = SimpleNamespace(
        action="changed", lines=["cron: a -> b"], wanted="the new one", document={}
    )
    client = SimpleNamespace(
        target="kubeflow",
        plan_schedule=lambda *_: change,
        put_schedule=lambda _, wanted: done.append(wanted),
    )
    monkeypatch.setattr(schedule, "client_of", lambda *_, **__: client)
    monkeypatch.setattr(schedule, "heartbeat_line", lambda *_, **__: "")
    monkeypatch.setattr(schedule, "early_schedules", lambda *_, **__: [])
    return done, change


def test_prune_asks_before_it_deletes(file, answering, deleted, capsys):
    answering("n")
    with pytest.raises(UsageError, match="nothing deleted"):
        prune.prune_verb("sagemaker", file, delete=True)
    assert deleted == []
    assert "s3://b/out/old/" in capsys.readouterr().err
    answering("y")
    prune.prune_verb("sagemaker", file, delete=True)
    assert deleted == ["s3://b/out/old/"]


@pytest.mark.parametrize("given", WITHOUT_A_QUESTION)
def test_prune_does_not_ask(given, file, answering, deleted):
    answering("n")
    prune.prune_verb("sagemaker", file, delete=True, **given)
    assert deleted == ["s3://b/out/old/"]


def test_prune_that_only_lists_does_not_ask(file, answering, deleted):
    answering("n")
    prune.prune_verb("sagemaker", file)
    assert deleted == []


def test_schedule_asks_before_it_changes_one(file, answering, replaced, capsys):
    done, _ = replaced
    answering("n")
    with pytest.raises(UsageError, match="schedule not changed"):
        schedule.schedule_verb("kubeflow", file, flags=ScheduleFlags(), reach=Reach())
    assert done == []
    assert "cron: a -> b" in capsys.readouterr().err
    answering("y")
    schedule.schedule_verb("kubeflow", file, flags=ScheduleFlags(), reach=Reach())
    assert done == ["the new one"]


@pytest.mark.parametrize("given", WITHOUT_A_QUESTION)
def test_schedule_does_not_ask(given, file, answering, replaced):
    done, _ = replaced
    answering("n")
    schedule.schedule_verb("kubeflow", file, flags=ScheduleFlags(), reach=Reach(), **given)
    assert done == ["the new one"]


@pytest.mark.parametrize(("action", "made"), [("created", ["the new one"]), ("unchanged", [])])
def test_a_new_schedule_and_the_same_one_are_no_question(action, made, file, answering, replaced):
    done, change = replaced
    change.action = action
    answering("n")
    schedule.schedule_verb("kubeflow", file, flags=ScheduleFlags(), reach=Reach())
    assert done == made
