"""The main job runs through the command line; it is short, but every part is real."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.records import Decision, Evaluation, Profile, Training, read_json, write_json
from support.command import process, stoker, succeeds
from support.few_digits import few_digits
from support.local_job import assert_nothing_left, marked_processes, until
from support.warm_python import run_warm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mnist" / "train.py"
TIMEOUT_SECONDS = 240

# A loader that waits as one of files does; the digits of examples/mnist cost a core. These go
# through the whole chain as `make run`.
SCRIPT = """
import sys, time
import torch
import stoker

class Waiting(torch.utils.data.Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        time.sleep(0.006)
        return torch.full((8,), index % 2 - 0.5), float(index % 2)

if __name__ == "__main__":
    weight = torch.zeros(8, requires_grad=True)
    right = []
    batches = stoker.DataLoader(Waiting(), batch_size=16, shuffle=True, num_workers=0)
    for epoch in range(int(sys.argv[1])):
        for numbers, wanted in batches:
            guess = (numbers @ weight).sigmoid()
            right.append(((guess > 0.5) == (wanted > 0.5)).float().mean().item())
            (guess - wanted).square().mean().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
    stoker.log_metrics(accuracy=sum(right) / len(right))
"""
WORKLOAD = """\
name: mini
command: [python, train.py, "{epochs}"]
cluster: {{dnn: {{instance_type: local.c1, count: 1}}}}
training: {{epochs: {epochs}, samples_per_epoch: 384, global_batch_size: 16}}
constraints: {{objective: time, max_data_hosts: 1, allowed_instance_types: [local.c1]}}
gate: [{{metric: accuracy, min: 0.05}}]
profile: {{budget_seconds: 5}}
"""


def project(folder: Path, *, epochs: int = 2) -> Path:
    """Writes a script and a small workload to the folder."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "mini.yaml").write_text(WORKLOAD.format(epochs=epochs))
    return folder


def only_run(folder: Path) -> Path:
    (run,) = [f.parent for f in (folder / "runs").glob("*/workload.json")]
    return run


def losses(folder: Path, name: str, *arguments: str) -> list[str]:
    """Returns each step's loss on digits, under `stoker train` if there are arguments for it."""
    words = [str(EXAMPLE), "--epochs", "1", "--samples", "128", "--batch-size", "8"]
    words += ["--data", str(folder / "data"), "--loss-log", str(folder / name), "--workers", "0"]
    if arguments:
        succeeds("train", *arguments, "--", "python", *words, cwd=folder)
    else:
        # The same under `stoker train` without a data group: test_checkpoint_resume.py.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
        environ = clean | {"OMP_NUM_THREADS": "1"}
        code, said = run_warm(words, environ, timeout=TIMEOUT_SECONDS)
        assert code == 0, said
    return (folder / name).read_text().split()


def test_a_run_leaves_records_logs_and_a_report_resumes_and_judges(tmp_path):
    folder = project(tmp_path)
    done = process("run", "mini.yaml", "--yes", cwd=folder, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    verbs = [line.split()[0] for line in done.stderr.splitlines() if line.strip()]
    wanted = ["profile", "decide", "train", "evaluate", "report"]
    assert [verb for verb in verbs if verb in wanted] == wanted
    # The profile is followed live, as by `stoker profile`.
    assert verbs.index("begins") < verbs.index("as") < verbs.index("profile")
    (address,) = (line.split()[1] for line in done.stderr.splitlines() if line[:6] == "report")
    assert address == (only_run(folder) / "report.html").resolve().as_uri()
    assert "next:" in verbs
    run = only_run(folder)
    listed = (ROOT / "docs" / "reference" / "files.md").read_text()
    assert [each.name for each in run.iterdir() if f"`{each.name}" not in listed] == []
    profile = read_json(run / "profile.json", Profile)
    decision = read_json(run / "decision.json", Decision)
    training = read_json(run / "training.json", Training)
    evaluation = read_json(run / "evaluation.json", Evaluation)
    digests = {r.workload_sha256 for r in (profile, decision, training, evaluation)}
    assert len(digests) == 1
    assert (profile.step.wait_seconds or 0.0) > 0
    assert decision.plan in decision.plans
    assert training.measured is not None
    assert training.measured.steps == 48
    assert training.measured.timeline_file
    assert (run / training.measured.timeline_file).read_text().count("\n") > 48
    assert set(training.metrics) == {"accuracy"}
    assert evaluation.passed
    assert "<svg" in (run / "report.html").read_text()
    logs = {file.name for file in (run / "logs").iterdir()}
    assert logs == {f"{host.group}-{host.host}.log" for host in training.hosts}
    assert_nothing_left(run, set())

    # What was trained says of itself what the next decision needs.
    passive = read_json(run / "passive-profile.json", Profile)
    assert passive.workload_sha256 == profile.workload_sha256
    assert passive.timed_step.step_seconds == training.measured.step_seconds
    assert (passive.timed_step.loader_cpu_seconds or 0.0) > 0
    assert (passive.timed_step.trainer_cpu_seconds or 0.0) > 0
    assert passive.timed_step.global_batch_size == 16
    data = [group for group in training.groups if group.role == "data"]
    assert [(each.instance_type, each.count) for each in passive.data] == [
        (each.instance_type, each.count) for each in data
    ]
    file = str(run / "passive-profile.json")
    succeeds("decide", file, "--workload", "mini.yaml", "--out", "again.json", cwd=folder)
    again = read_json(folder / "again.json", Decision)
    (keep,) = [plan for plan in again.plans if plan.action == "keep"]
    assert [(each.role, each.count) for each in keep.groups] == [
        (each.role, each.count) for each in training.groups
    ]

    profiled_at = (run / "profile.json").stat().st_mtime_ns
    again = succeeds("run", "mini.yaml", "--from", "train", cwd=folder)
    assert only_run(folder) == run
    assert (run / "profile.json").stat().st_mtime_ns == profiled_at
    assert "re-used" in again.stderr

    # Another gate is the same workload: what was trained is judged again.
    missed = ["--from", "evaluate", "--set", "gate=[{metric: accuracy, min: 0.9999}]"]
    done = stoker("run", "mini.yaml", *missed, cwd=folder)
    assert done.returncode == 3, done.stderr
    assert "gate failed: accuracy" in done.stderr
    assert not read_json(run / "evaluation.json", Evaluation).passed
    unknown = ["--from", "evaluate", "--set", "gate=[{metric: recall, min: 0.5}]"]
    done = stoker("run", "mini.yaml", *unknown, cwd=folder)
    assert done.returncode == 3, done.stderr
    assert "recall was not reported" in done.stderr

    # On a busy machine, the hosts that were asked for are trained on, and the figures do not count.
    observed = msgspec.structs.replace(profile.observed, elsewhere_vcpus=64.0)
    write_json(run / "profile.json", msgspec.structs.replace(profile, observed=observed))
    groups = ["--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1"]
    done = succeeds("run", "mini.yaml", "--from", "decide", *groups, cwd=folder)
    said = " ".join(done.stderr.split())
    assert said.count("so the measurement is not reliable; profile again") == 1
    assert "the figures do not count" in said
    roles = [group.role for group in read_json(run / "training.json", Training).groups]
    assert roles == ["dnn", "data"]


# With a worker next to the trainer as well: test_checkpoint_resume.py.
@pytest.mark.parametrize("local", [pytest.param(1, marks=pytest.mark.soak), 0])
def test_with_and_without_a_data_group_the_losses_are_equal_step_for_step(tmp_path, local):
    few_digits(tmp_path / "data")
    alone = losses(tmp_path, "alone.txt")
    fed = losses(tmp_path, "fed.txt", "--group", f"dnn=1:{local}", "--group", "data=1:1")
    assert len(alone) == 16
    assert alone == fed


@pytest.mark.soak
def test_two_ranks_with_a_data_group_lose_the_same_as_without(tmp_path):
    few_digits(tmp_path / "data")
    ranks = ["--set", "cluster={dnn: {instance_type: local.c1, processes_per_host: 2}}"]
    alone = losses(tmp_path, "alone.txt", *ranks, "--group", "dnn=1")
    fed = losses(tmp_path, "fed.txt", *ranks, "--group", "dnn=1:0", "--group", "data=1:1")
    assert len(alone) == 16
    assert alone == fed


def test_a_failing_training_is_exit_code_6_with_its_traceback_and_code(tmp_path):
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('too hot')\n\n\nf()\n")
    done = stoker(
        "train", "--group", "dnn=1", "--out", "t.json", "--", "python", "bad.py", cwd=tmp_path
    )
    assert done.returncode == 6, done.stderr
    training = read_json(tmp_path / "t.json", Training)
    assert training.exit_code == 1
    assert training.failure is not None
    assert "ValueError: too hot" in training.failure
    assert "in f" in training.failure


def test_a_dry_run_prints_the_request_and_starts_nothing(tmp_path):
    done = succeeds(
        "train", "--dry-run", "--group", "dnn=1", "--group", "data=2:1", "--", "python", "-V",
        cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(done.stdout)
    assert not (tmp_path / "runs").exists()


# Of SIGTERM without a data group: tests/faults/test_stopped_by_hand.py.
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_asked_to_stop_it_leaves_nothing_running(tmp_path, number):
    folder = project(tmp_path, epochs=50)
    command = ["train", "--group", "dnn=1", "--group", "data=1:1", "mini.yaml"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", *command],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: bool(list(folder.glob("runs/*/hosts/*/output/data/stoker/timeline*"))),
              what="the training reports steps")  # fmt: skip
        (run,) = folder.glob("runs/*")
        pids = marked_processes(run.resolve()) | {process.pid}
        # As a terminal does: the whole foreground group gets Ctrl-C.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else 143)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    until(lambda: not marked_processes(run.resolve()), what="all processes have ended")
    assert_nothing_left(run.resolve(), pids - {process.pid})
