"""The main job runs through the command line; it is short, but every part is real."""

import json
from pathlib import Path

import msgspec
import pytest

from stoker.records import Decision, Evaluation, Profile, Training, read_json, write_json
from support.command import process, stoker, succeeds
from support.few_digits import few_digits
from support.local_job import assert_nothing_left
from support.warm_python import ends_well

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mnist" / "train.py"
TIMEOUT_SECONDS = 240

# A loader that waits as one of files does; the digits of examples/mnist cost a core. These go
# through the whole chain as `make run`. On a busy machine a slow step begins the profile's warm-up
# again: there are twice as many steps as it needs.
SCRIPT = """
import sys, time
import torch
import stoker

class Waiting(torch.utils.data.Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        time.sleep(0.003)
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
command: [python, train.py, "4"]
cluster: {dnn: {instance_type: local.c1, count: 1}}
training: {epochs: 4, samples_per_epoch: 384, global_batch_size: 16}
constraints: {objective: time, max_data_hosts: 1, allowed_instance_types: [local.c1]}
gate: [{metric: accuracy, min: 0.05}]
profile: {budget_seconds: 5}
"""


def only_run(folder: Path) -> Path:
    (run,) = [f.parent for f in (folder / "runs").glob("*/workload.json")]
    return run


def test_a_run_leaves_records_logs_and_a_report_resumes_and_judges(tmp_path):
    folder = tmp_path
    (folder / "train.py").write_text(SCRIPT)
    (folder / "mini.yaml").write_text(WORKLOAD)
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
    assert training.measured.steps == 96
    assert training.measured.timeline_file
    assert (run / training.measured.timeline_file).read_text().count("\n") > 96
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
    assert "reused" in again.stderr

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
    assert said.count("the measurement is not reliable: other programs were using") == 1
    assert "the figures do not count" in said
    roles = [group.role for group in read_json(run / "training.json", Training).groups]
    assert roles == ["dnn", "data"]


def test_with_and_without_a_data_group_the_losses_are_equal_step_for_step(tmp_path):
    few_digits(tmp_path / "data")
    script = [str(EXAMPLE), "--epochs", "1", "--samples", "128", "--batch-size", "8"]
    script += ["--data", str(tmp_path / "data"), "--workers", "0", "--loss-log"]
    # The same under `stoker train` without a data group: test_checkpoint_resume.py.
    ends_well(*script, str(tmp_path / "alone"), timeout=TIMEOUT_SECONDS)
    words = ("--group", "dnn=1:0", "--group", "data=1:1", "--", "python", *script)
    succeeds("train", *words, str(tmp_path / "fed"), cwd=tmp_path)
    alone = (tmp_path / "alone").read_text()
    assert len(alone.split()) == 16
    assert alone == (tmp_path / "fed").read_text()


def test_a_dry_run_prints_the_request_and_starts_nothing(tmp_path):
    words = ("--group", "dnn=1", "--group", "data=2:1", "--", "python", "-V")
    assert json.loads(succeeds("train", "--dry-run", *words, cwd=tmp_path).stdout)
    assert not (tmp_path / "runs").exists()
