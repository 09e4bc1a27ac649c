import os
import tempfile
from pathlib import Path

import pytest

from stoker.cli.workloads import groups_of, named_run_dir, new_run_dir, parse_groups, resolve
from stoker.errors import UsageError
from stoker.records import groups_in_words


def test_type_hosts_and_workers_are_read():
    data, dnn = "data=ml.c7i.8xlarge:2:30", "dnn=ml.g5.xlarge:1"
    groups = parse_groups([data, dnn], default_type=None)
    assert [(g.role, g.instance_type, g.count, g.workers_per_host) for g in groups] == [
        ("dnn", "ml.g5.xlarge", 1, None),
        ("data", "ml.c7i.8xlarge", 2, 30),
    ]
    dnn, _ = parse_groups(["dnn=1:0", "data=2:1"], default_type="local.c1")
    assert (dnn.instance_type, dnn.count, dnn.workers_per_host) == ("local.c1", 1, 0)
    assert groups_in_words(groups) == "dnn 1 x ml.g5.xlarge, data 2 x ml.c7i.8xlarge"


@pytest.mark.parametrize(
    "text",
    ["dnn", "dnn=", "dnn=a:b", "dnn=1:2:3", "dnn=-1", "dnn=local.c1", "gpu=1", "dnn=t:1:2:3"],
)
def test_anything_else_is_refused_with_the_text_named(text):
    with pytest.raises(UsageError, match=text):
        parse_groups([text], default_type="local.c1")


def test_a_data_group_needs_workers_and_each_role_stands_there_once():
    with pytest.raises(UsageError, match="need workers"):
        parse_groups(["dnn=1", "data=1:0"], default_type="local.c1")
    with pytest.raises(UsageError, match="twice"):
        parse_groups(["dnn=1", "dnn=1"], default_type="local.c1")


def test_the_ranks_of_a_bare_command_need_no_workload_file():
    ranks = ["cluster.dnn.processes_per_host=2"]
    workload = resolve(["python", "-c", "pass"], overrides=ranks)
    assert workload.cluster is not None
    for group in ("local.c1:1", "1"):
        (dnn,) = groups_of(workload, [f"dnn={group}"])
        assert dnn.processes_per_host == 2
    typed = resolve(["true"], overrides=[*ranks, "cluster.dnn.instance_type=local.c7"])
    assert typed.cluster is not None
    assert typed.cluster.dnn.instance_type == "local.c7"
    assert resolve(["true"], overrides=["feed.credits=3"]).cluster is None


def test_runs_are_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named_run_dir("mini-1") == Path("runs/mini-1")
    assert new_run_dir("mini").parent == Path("runs")


def test_a_step_that_may_not_write_there_keeps_its_runs_in_a_temporary_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for made in (named_run_dir("mini-1"), new_run_dir("mini")):
        assert made.parent == tmp_path / "tmp" / "runs"
        assert made.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
