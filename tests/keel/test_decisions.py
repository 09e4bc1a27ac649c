"""Decisions equal their file: a diff shows what a change of the model does to the advice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.records import Profile, ProfiledHost, StepTerms, write_json
from support.black_box import as_json, refused
from support.goldens import DATA, check_golden
from support.workloads import write

ALLOWED = (
    *("ml.p4d.24xlarge", "ml.g5.xlarge", "ml.g5.2xlarge", "ml.g5.4xlarge", "ml.g5.8xlarge"),
    *("ml.c7i.2xlarge", "ml.c7i.4xlarge", "ml.c7i.8xlarge", "ml.c7i.12xlarge"),
)
WORKLOAD: Mapping[str, Any] = {
    "name": "job",
    "platform": "sagemaker",
    "command": ["python", "train.py"],
    "training": {"steps": 100_000},
    "constraints": {"allowed_instance_types": list(ALLOWED), "max_data_hosts": 3},
}
STARVED = {
    "step_seconds": 0.2,
    "accelerator_step_seconds": 0.08,
    "loader_cpu_seconds": 6.1,
    "trainer_cpu_seconds": 0.3,
    "num_workers": 32,
    "batch_bytes": 20e6,
    "global_batch_size": 256,
}
BOXES = """instance_type,vcpus,gpus,gpu_model,usd_per_hour
box.gpu,8,1,RTX,1.5
box.cpu,16,0,,0.3
box.free,16,0,,
"""
P4D = "ml.p4d.24xlarge"
# Name to type and terms of the profile, and more words of the command.
CASES: Mapping[str, tuple[str, Mapping[str, float], tuple[str, ...]]] = {
    "starved": ("ml.g5.8xlarge", STARVED, ()),
    "starved, for time": ("ml.g5.8xlarge", STARVED, ("--objective", "time")),
    "starved, of little money": ("ml.g5.8xlarge", STARVED, ("--max-usd-per-hour", "3.2")),
    "starved, asked for": (
        "ml.g5.8xlarge",
        STARVED,
        ("--group", "dnn=ml.g5.8xlarge:1", "--group", "data=ml.c7i.8xlarge:1:30"),
    ),
    "elsewhere": (
        "ml.g5.8xlarge",
        STARVED,
        ("--as", "ml.g5.4xlarge", "--accelerator-step-seconds", "0.08"),
    ),
    "eight accelerators": (
        P4D,
        {"step_seconds": 0.192, "accelerator_step_seconds": 0.064, "global_batch_size": 8192},
        (),
    ),
    "few workers": ("ml.g5.8xlarge", {**STARVED, "loader_cpu_seconds": 0.5, "num_workers": 2}, ()),
    "a small host": ("ml.g5.xlarge", {**STARVED, "loader_cpu_seconds": 0.7, "num_workers": 4}, ()),
    "at its accelerator": (
        "ml.g5.8xlarge",
        {**STARVED, "step_seconds": 0.081, "loader_cpu_seconds": 0.4},
        (),
    ),
}


def profiled(folder: Path, kind: str, terms: Mapping[str, float]) -> str:
    host = ProfiledHost(instance_type=kind, count=1)
    write_json(folder / "profile.json", Profile(host=host, step=StepTerms(**terms)))
    return "profile.json"


def short(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of a decision what it is about, with five digits."""
    return {
        "bottleneck": decision["bottleneck"],
        "action": decision["action"],
        "chosen": plan_line(decision["plan"]),
        "plans": [plan_line(plan) for plan in decision["plans"]],
    }


def plan_line(plan: Mapping[str, Any]) -> str:
    groups = [f"{each['role']}={each['instance_type']}:{each['count']}" for each in plan["groups"]]
    figures = plan.get("predicted") or {}
    keys = ("step_seconds", "step_seconds_low", "step_seconds_high", "usd_per_hour")
    numbers = [f"{key} {figures[key]:.5g}" for key in keys if figures.get(key) is not None]
    is_feasible = "" if plan["feasible"] else " (not feasible)"
    return f"{plan['action']}{is_feasible}: {' '.join(groups)}: {', '.join(numbers)}"


@pytest.mark.parametrize("name", CASES)
def test_the_decision_is_the_one_on_file(tmp_path, name):
    kind, terms, more = CASES[name]
    words = ("decide", profiled(tmp_path, kind, terms), "--workload", write(tmp_path, WORKLOAD))
    decision = as_json(*words, *more, cwd=tmp_path)
    text = json.dumps(short(decision), indent=1) + "\n"
    check_golden(f"decisions/{name.replace(', ', '-').replace(' ', '_')}.json", text)
    # The record that a training takes is the one that is printed.
    assert json.loads((tmp_path / "decision.json").read_text()) == decision


def test_every_file_has_a_case():
    files = {path.stem for path in (DATA / "decisions").iterdir()}
    assert files == {name.replace(", ", "-").replace(" ", "_") for name in CASES}


def test_figures_that_are_typed_are_decided_on_without_a_profile(tmp_path):
    typed = ("--instance-type", P4D, "--step-seconds", "0.192")
    words = ("decide", *typed, "--accelerator-step-seconds", "0.064")
    decision = as_json(*words, "--workload", write(tmp_path, WORKLOAD), cwd=tmp_path)
    assert (decision["bottleneck"], decision["action"]) == ("cpu", "heterogeneous")


def test_prices_of_ones_own_file_are_used_and_a_blank_one_takes_its_type_out(tmp_path):
    (tmp_path / "boxes.csv").write_text(BOXES)
    workload = {**WORKLOAD, "platform": "kubernetes"}
    boxes = ["box.gpu", "box.cpu", "box.free"]
    limits = {"max_data_hosts": 2, "prices_file": "boxes.csv", "allowed_instance_types": boxes}
    workload["constraints"] = limits
    terms = {**STARVED, "loader_cpu_seconds": 1.2, "num_workers": 8}
    words = ("decide", profiled(tmp_path, "box.gpu", terms))
    decision = as_json(*words, "--workload", write(tmp_path, workload), cwd=tmp_path)
    types = {each["instance_type"] for plan in decision["plans"] for each in plan["groups"]}
    assert types == {"box.gpu", "box.cpu"}
    assert decision["action"] == "heterogeneous"
    hosts = {each["role"]: each["count"] for each in decision["plan"]["groups"]}
    price = 1.5 * hosts["dnn"] + 0.3 * hosts["data"]
    assert decision["plan"]["predicted"]["usd_per_hour"] == pytest.approx(price)


def test_a_training_takes_the_groups_of_a_decision(tmp_path):
    kind, terms, _ = CASES["starved"]
    workload = {
        **WORKLOAD,
        "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/stoker:1",
        "cluster": {"dnn": {"instance_type": kind}},
        "sagemaker": {
            "role": "arn:aws:iam::123456789012:role/stoker",
            "output_uri": "s3://bucket/out",
        },
    }
    words = ("decide", profiled(tmp_path, kind, terms), "--workload", write(tmp_path, workload))
    decision = as_json(*words, "--objective", "time", cwd=tmp_path)
    words = ("train", "workload.yaml", "--decision", "decision.json", "--dry-run")
    request = as_json(*words, cwd=tmp_path)["CreateTrainingJob"]
    asked = {
        each["InstanceGroupName"]: (each["InstanceType"], each["InstanceCount"])
        for each in request["ResourceConfig"]["InstanceGroups"]
    }
    assert asked == {
        each["name"]: (each["instance_type"], each["count"]) for each in decision["plan"]["groups"]
    }


def test_a_decision_of_another_version_is_refused(tmp_path):
    kind, terms, _ = CASES["starved"]
    words = ("decide", profiled(tmp_path, kind, terms), "--workload", write(tmp_path, WORKLOAD))
    as_json(*words, cwd=tmp_path)
    decision = json.loads((tmp_path / "decision.json").read_text())
    decision["schema"] = decision["schema"] + "9"
    (tmp_path / "decision.json").write_text(json.dumps(decision))
    refused("train", "workload.yaml", "--decision", "decision.json", "--dry-run", cwd=tmp_path)
