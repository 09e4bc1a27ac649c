"""Checks what numbers `stoker decide` takes from the user where there is no profile."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.errors import UsageError
from stoker.records import Decision, read_json, write_json
from support import sample_records

P4D = ["--instance-type", "ml.p4d.24xlarge"]
STEP = ["--step-seconds", "0.192"]
ACCELERATOR = ["--accelerator-step-seconds", "0.064"]


def decided(*words):
    done = CliRunner().invoke(app_for("decide"), ["decide", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return read_json(Path("decision.json"), Decision)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "no profile to decide on"),
        (P4D, "no profile, and no --step-seconds either"),
        (STEP, "no profile, and no --instance-type either"),
        (["--instance-type", "ml.p4d.24xlarg", *STEP], "no instance type 'ml.p4d.24xlarg'"),
        ([*P4D, "--step-seconds", "-1"], "-1 is not a number above 0"),
        ([*P4D, "--step-seconds", "nan"], "nan is not a number above 0"),
        ([*P4D, "--step-seconds", "1e9"], "out of range"),
        ([*P4D, *STEP, "--accelerator-step-seconds", "0"], "0 is not a number above 0"),
        ([*P4D, *STEP, "--accelerator-step-seconds", "0.3"], "cannot be longer"),
        ([*P4D, *STEP, "--vcpus-needed", "100"], "needs the accelerator's speed"),
        ([*P4D, *STEP, *ACCELERATOR, "--vcpus-needed", "0"], "0 is not a number above 0"),
        (["profile.json", *STEP], "profile.json cannot be used with --step-seconds"),
    ],
)
def test_numbers_that_cannot_be_are_named(words, what):
    write_json(Path("profile.json"), sample_records.profile())
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app_for("decide"), ["decide", *words], catch_exceptions=False)
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("words", "bottleneck", "action", "advice"),
    [
        (STEP, "unexplained", "keep", "profile-again"),
        ([*STEP, *ACCELERATOR], "cpu", "heterogeneous", "profile"),
        ([*STEP, *ACCELERATOR, "--vcpus-needed", "250"], "cpu", "heterogeneous", "profile"),
        # 10 vCPUs feed the accelerator's 64 ms, and today's 96 vCPUs are said to take 192 ms.
        ([*STEP, *ACCELERATOR, "--vcpus-needed", "10"], "unexplained", "keep", "profile-again"),
    ],
)
def test_step_and_accelerator_are_enough_to_see_who_waits(words, bottleneck, action, advice):
    decision = decided(*P4D, *words)
    assert (decision.bottleneck, decision.action) == (bottleneck, action)
    assert advice in [each.id for each in decision.advice]


def test_a_workload_says_which_hosts_train_today():
    Path("w.yaml").write_text(
        "schema: stoker.workload/v1\nname: w\ncommand: [python, train.py]\nplatform: sagemaker\n"
        "image: an.image/w:1\n"
        "cluster: {dnn: {instance_type: ml.g5.12xlarge, count: 2, processes_per_host: 4}}\n"
        "training: {steps: 1000, global_batch_size: 256}\n"
    )
    made = decided("--workload", "w.yaml", *STEP, *ACCELERATOR)
    keep = next(plan for plan in made.plans if plan.action == "keep")
    assert [(g.instance_type, g.count, g.processes_per_host) for g in keep.groups] == [
        ("ml.g5.12xlarge", 2, 4)
    ]
    assert keep.predicted.total_hours == pytest.approx(1000 * 0.192 / 3600)
    other = decided("--workload", "w.yaml", "--instance-type", "ml.g5.24xlarge", *STEP)
    assert other.plan.groups[0].instance_type == "ml.g5.24xlarge"


def test_prices_of_an_own_cluster_join_the_catalog_and_old_ones_are_said_to_be():
    Path("own.csv").write_text(
        "instance_type,vcpus,gpus,coremark_per_vcpu,network_gbps,usd_per_hour,priced_on\n"
        "big.box,64,0,20000,25,0.2,2020-01-01\n"
    )
    decision = decided(*P4D, *STEP, *ACCELERATOR, "--prices", "own.csv")
    assert [group.instance_type for group in decision.plan.groups][1:] == ["ml.big.box"]
    assert decision.prices.stale
    assert any("older than 90 days" in text for text in decision.warnings)
