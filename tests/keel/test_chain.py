"""An unchanged script goes through `stoker run`: four records, a report, gates; and on hosts."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.records import Decision, Evaluation, Profile, Training, read_json
from support.black_box import as_json, read, stoker, verbs
from support.processes import until

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "plain_loop.py"
STEPS = 96
WORKLOAD = """\
name: unchanged
command: [python, plain_loop.py, "4"]
cluster: {dnn: {instance_type: local.c1, count: 1}}
training: {epochs: 4, samples_per_epoch: 384, global_batch_size: 16}
constraints: {objective: time, max_data_hosts: 1, allowed_instance_types: [local.c1]}
gate: [{metric: loss, max: 10, regex: 'loss ([0-9.]+)'}]
profile: {budget_seconds: 5}
"""
HIGHER = ("--set", "gate=[{metric: loss, max: 0.000001, regex: 'loss ([0-9.]+)'}]")
# The scripts' Python is that of the tests.
ENV = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

pytestmark = pytest.mark.timeout(400)


def losses(run: Path) -> list[str]:
    (log,) = (run / "logs").glob("dnn-*.log")
    return re.findall(r"loss (\d+\.\d+)", log.read_text())


def processes_of(folder: Path) -> list[str]:
    """Returns the commands of processes that were started with the folder in their variables."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values(), process.cwd()]
            if any(str(folder) in word for word in words):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder in which an unchanged script has gone through the whole chain."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(SCRIPT, folder)
    (folder / "workload.yaml").write_text(WORKLOAD)
    # Where other programs disturb the profile, it trains on these.
    groups = ("--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1")
    stoker("run", "workload.yaml", "--yes", *groups, cwd=folder, env=ENV)
    return folder


@pytest.fixture(scope="module")
def run(project):
    (found,) = (project / "runs").iterdir()
    return found


def test_a_run_leaves_four_records_of_one_workload(run):
    profile = read_json(run / "profile.json", Profile)
    decision = read_json(run / "decision.json", Decision)
    training = read_json(run / "training.json", Training)
    evaluation = read_json(run / "evaluation.json", Evaluation)
    assert profile.workload_keys == decision.workload_keys
    assert training.workload_keys.items() <= profile.workload_keys.items()
    assert profile.step.step_seconds > 0
    assert (training.status, training.exit_code, training.steps) == ("succeeded", 0, STEPS)
    assert training.metrics.keys() == {"loss"}
    assert decision.plan in decision.plans
    assert evaluation.passed


def test_the_report_opens_without_a_network(run):
    page = (run / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=.?https?:", page)
    assert "@import" not in page


def test_nothing_of_a_run_is_left(run, project):
    until(lambda: not processes_of(project), what="all processes have ended", seconds=45)


def test_a_gate_that_fails_ends_with_3_and_the_training_is_judged_again(run, project):
    trained = (run / "training.json").read_bytes()
    words = ("run", "workload.yaml", "--from", "evaluate", "--yes")
    stoker(*words, *HIGHER, cwd=project, env=ENV, code=3)
    assert not read(run / "evaluation.json")["passed"]
    stoker(*words, cwd=project, env=ENV)
    assert read(run / "evaluation.json")["passed"]
    assert (run / "training.json").read_bytes() == trained


def test_evaluate_judges_the_records_of_a_run(run, project):
    names = ("profile", "decision", "training")
    records = [word for name in names for word in (f"--{name}", str(run / f"{name}.json"))]
    words = ("evaluate", "workload.yaml", *records, "--out", "again.json")
    assert as_json(*words, cwd=project)["passed"]
    assert not as_json(*words, *HIGHER, cwd=project, code=3)["passed"]


def test_a_report_is_written_again_and_a_run_is_shown(run, project):
    page = run / "report.html"
    page.unlink()
    stoker("report", str(run), cwd=project)
    assert page.is_file()
    assert json.loads(stoker("watch", str(run), "--json", cwd=project).splitlines()[-1])


def test_losses_are_equal_on_todays_hosts_and_with_a_data_host(run, project):
    train = ("train", "workload.yaml", "--yes", "--name")
    groups = ("--group", "dnn=local.c1:1:0", "--group", "data=local.c1:1:1")
    stoker(*train, "fed", *groups, cwd=project, env=ENV)
    stoker(*train, "alone", cwd=project, env=ENV)
    fed, alone = (project / "runs" / name for name in ("fed", "alone"))
    roles = {each["role"] for each in read(fed / "training.json")["groups"]}
    assert roles == {"dnn", "data"}
    assert len(losses(alone)) == STEPS
    assert losses(alone) == losses(fed) == losses(run)


def bare(folder: Path, code: str, *words: str) -> dict[str, Any]:
    (folder / "script.py").write_text(code)
    return {"words": ("train", *words, "--name", "one", "--", "python", "script.py"), "cwd": folder}


def test_a_script_that_fails_ends_with_6_and_the_record_has_its_code_and_reason(tmp_path):
    how = bare(tmp_path, "import sys\nprint('begun')\nsys.exit('no such layer')\n")
    stoker(*how["words"], cwd=how["cwd"], env=ENV, code=6)
    record = read(tmp_path / "runs" / "one" / "training.json")
    assert (record["status"], record["exit_code"]) == ("failed", 1)
    assert "no such layer" in record["failure"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_stopped_training_may_save_and_leaves_nothing(tmp_path, number, code):
    script = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path('saved').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('begun', flush=True)\n"
        "time.sleep(300)\n"
    )
    how = bare(tmp_path, script, "--group", "dnn=1", "--group", "data=1:1")
    with verbs(tmp_path, ENV) as begun:
        train = begun.start(*how["words"])
        train.until_it_says("begun")
        train.send(number)
        train.ends_with(code)
    assert (tmp_path / "saved").exists()
    until(lambda: not processes_of(tmp_path), what="all processes have ended", seconds=45)


def test_a_dry_run_starts_nothing(tmp_path):
    how = bare(tmp_path, "raise SystemExit(1)", "--group", "dnn=1", "--group", "data=1:1")
    words = [*how["words"]]
    words[1:1] = ["--dry-run"]
    assert json.loads(stoker(*words, cwd=tmp_path, env=ENV))
    assert not (tmp_path / "runs").exists()
