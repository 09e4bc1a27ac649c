import os
import tempfile
from pathlib import Path

import pytest

from stoker.cli.run import next_step
from stoker.cli.workloads import resolve
from stoker.errors import DeclinedError, PlatformError, UsageError
from stoker.platforms.local import lock_run_folder
from stoker.records import groups_in_words
from stoker.run import STEPS
from stoker.run.chain import Chain, forget_later
from stoker.run.clusters import groups_of, parse_groups
from stoker.run.run_folders import named_run_dir, new_run_dir
from stoker.workload_file import workload_from
from support.command import stoker


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


TEXTS = ["dnn", "dnn=", "dnn=a:b", "dnn=1:2:3", "dnn=-1", "dnn=local.c1", "dnn=t:1:2:3"]


@pytest.mark.parametrize(
    ("texts", "words"),
    # A data group needs workers, and each role stands there once.
    [
        *(([text], text) for text in TEXTS),
        (["dnn=1", "data=1:0"], "need workers"),
        (["dnn=1", "dnn=1"], "twice"),
        (["gpu=1"], "no role 'gpu'"),
    ],
)
def test_anything_else_is_refused_with_the_text_named(texts, words):
    with pytest.raises(UsageError, match=words):
        parse_groups(texts, default_type="local.c1")


def test_the_ranks_of_a_bare_command_need_no_workload_file():
    ranks = ["cluster.dnn.processes_per_host=2"]
    workload = resolve(["python", "-c", "pass"], overrides=ranks)
    for group in ("local.c1:1", "1"):
        (dnn,) = groups_of(workload, [f"dnn={group}"])
        assert dnn.processes_per_host == 2
    typed = resolve(["true"], overrides=[*ranks, "cluster.dnn.instance_type=local.c7"])
    assert typed.cluster.dnn.instance_type == "local.c7"
    assert resolve(["true"], overrides=["feed.credits=3"]).cluster is None


def test_runs_are_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named_run_dir("mini-1") == Path("runs/mini-1")
    assert new_run_dir("mini").parent == Path("runs")


def test_a_step_that_may_not_write_keeps_its_runs_in_a_temporary_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for made in (named_run_dir("mini-1"), new_run_dir("mini")):
        assert made.parent == tmp_path / "tmp" / "runs"
        assert made.is_dir()
    note = f"note: {tmp_path} cannot be written: this run is kept in {tmp_path}/tmp/runs\n"
    assert capsys.readouterr().err == 2 * note
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


WORKLOAD = "name: mnist\ncommand: [python, train.py]\ncluster: {dnn: {instance_type: local.c1}}\n"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs" / "mnist-1"
    for name in ("hosts", "logs"):
        (folder / name).mkdir(parents=True)
    for name in ("profile.json", "decision.json", "training.json"):
        (folder / name).write_text("{}")
    return folder


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_that_still_runs_keeps_its_folders(run_dir):
    before = left_in(run_dir)
    lock = lock_run_folder(run_dir, run="mnist-1")
    try:
        with pytest.raises(PlatformError, match="run mnist-1 is still running on this machine"):
            forget_later(run_dir, STEPS.index("train"))
        assert left_in(run_dir) == before
    finally:
        os.close(lock)
    forget_later(run_dir, STEPS.index("train"))
    assert left_in(run_dir) == {"profile.json", "decision.json"}


@pytest.mark.parametrize(
    ("script", "code", "command"),
    [
        ("examples/mnist/train.py", 0, "stoker profile -- python YOUR_SCRIPT.py"),
        ("examples/mnist/train.py", 6, "stoker run w.yaml --from train     (trains again)"),
        ("train.py", 0, "stoker run w.yaml --from train     (trains again)"),
    ],
)
def test_after_an_example_comes_a_script_of_one_s_own(script, code, command):
    workload = workload_from({"name": "x", "command": ["python", script]})
    assert next_step(workload, "w.yaml", code) == f"next:      {command}"


def test_a_gate_against_a_champion_is_refused_before_the_first_step(tmp_path):
    gate = "gate: [{metric: accuracy, min_champion: -0.01}]\n"
    (tmp_path / "w.yaml").write_text(WORKLOAD + gate)
    (tmp_path / "train.py").write_text("")
    done = stoker("run", "w.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "gate accuracy compares with the champion" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("doing", "end", "code", "tracked"),
    [
        # Nothing has begun, so that nothing has failed.
        ("train", DeclinedError("cancelled"), 2, []),
        # The training is done: it would be under way for ever there.
        ("evaluate", KeyboardInterrupt(), 130, [True]),
        # It has written its own end.
        ("train", KeyboardInterrupt(), 130, []),
        ("train", PlatformError("refused"), 4, [False]),
    ],
)
def test_what_a_chain_ended_early_tells_mlflow(tmp_path, monkeypatch, doing, end, code, tracked):
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "train.py").write_text("")
    found: list[bool] = []

    def steps(chain: Chain) -> None:
        chain.doing = doing
        raise end

    def track(chain: Chain, report: Path, *, is_stopped: bool = False) -> str:
        found.append(is_stopped)
        return ""

    monkeypatch.setattr("stoker.run.chain.steps", steps)
    monkeypatch.setattr("stoker.run.chain.track", track)
    assert stoker("run", "w.yaml", cwd=tmp_path).returncode == code
    assert found == tracked
