"""Prices of the catalog: estimated ones are marked, and rules bar what would not hold its speed."""

import csv
from datetime import date
from importlib import resources
from pathlib import Path

import pytest

import refresh_prices
from stoker.catalog import load_catalog
from stoker.decide import DecisionInputs, decide, explain
from stoker.records import Constraints, TrainingSize, read_json, write_json
from stoker.records.decision import Decision
from support import builders

TODAY = date(2026, 11, 26)
TABLE = "aws_training_instances.csv"


def table(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "prices.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_the_ratio_of_each_family_is_that_of_every_type_with_both_prices():
    text = resources.files("stoker.catalog").joinpath(TABLE).read_text(encoding="utf-8")
    both = [
        (row["instance_type"], float(ours) / float(ec2s))
        for row in csv.DictReader(text.splitlines())
        if (ours := row["sagemaker_usd_per_hour_us_east_1"])
        and (ec2s := row["ec2_usd_per_hour_us_east_1"])
        and not row["estimate"]
    ]
    assert len(both) > 100
    for name, ratio in both:
        assert refresh_prices.price_ratio(name.removeprefix("ml.")) == pytest.approx(
            ratio, rel=0.005
        ), name


@pytest.mark.parametrize(
    ("name", "usd", "how"),
    [
        ("p5en.48xlarge", 72.79, "EC2's $63.296 x 1.15"),
        ("c8i.8xlarge", 1.799, "EC2's $1.49936 x 1.20"),
        ("g7.4xlarge", 3.803, "EC2's $3.04208 x 1.25"),
        ("g7e.2xlarge", 4.204, "another component or region"),
        ("g5.2xlarge", 1.52, ""),
    ],
)
def test_a_price_that_is_not_listed_is_estimated_and_says_how(name, usd, how):
    found = load_catalog("sagemaker").get(name)
    assert found.usd_per_hour == pytest.approx(usd, rel=0.001)
    assert how in found.estimate
    assert bool(found.estimate) == bool(how)
    # EC2's own price is no estimate.
    assert load_catalog("kubernetes").get(name).estimate == ""


BURST = ["t3.medium", "c7i-flex.4xlarge"]


@pytest.mark.parametrize("platform", ["sagemaker", "kubernetes"])
@pytest.mark.parametrize("name", BURST)
def test_burst_types_are_in_no_plan(platform, name):
    barred = load_catalog(platform).get(name)
    assert barred.is_burst
    line = next(line for line in load_catalog(platform).table().splitlines() if name in line)
    assert "burst" in line
    decision = starved("p4d.24xlarge", platform=platform, allowed=[name, "c7i.4xlarge"])
    types = {group.instance_type for plan in decision.plans for group in plan.groups}
    assert barred.type not in types
    assert any("burst type" in warning for warning in decision.warnings)


def starved(name, *, platform="sagemaker", allowed=None, catalog=None, extra=(), **limits):
    prefix = "ml." if platform == "sagemaker" else ""
    terms = {"step_seconds": 0.192, "accelerator_step_seconds": 0.064, "global_batch_size": 8192}
    return decide(
        DecisionInputs(
            profile=builders.profile(f"{prefix}{name}", **terms),
            catalog=catalog or load_catalog(platform),
            constraints=Constraints(
                max_data_hosts=3,
                allowed_instance_types=None if allowed is None else tuple(allowed),
                **limits,
            ),
            training=TrainingSize(steps=100_000),
            extra_clusters=extra,
            today=TODAY,
        )
    )


def test_a_decision_by_an_estimated_price_says_so_everywhere(tmp_path):
    decision = starved("p4d.24xlarge", allowed=["c8i.8xlarge"])
    assert decision.action == "heterogeneous"
    assert decision.prices.estimated == {"ml.c8i.8xlarge": "EC2's $1.49936 x 1.20"}
    text = explain(decision)
    assert "~ estimated: ml.c8i.8xlarge: EC2's $1.49936 x 1.20" in " ".join(text.split())
    assert "~" not in next(line for line in text.splitlines() if "today: " in line)
    file = tmp_path / "decision.json"
    write_json(file, decision)
    assert read_json(file, Decision) == decision
