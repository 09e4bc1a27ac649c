"""Prices of the catalog: estimated ones are marked, and rules bar what would not hold its speed."""

import csv
import io
import itertools
import json
from datetime import date
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.catalog.rules import price_ratio
from stoker.decide import DecisionInputs, decide, explain
from stoker.launch.spending import Spending
from stoker.logs import Log
from stoker.platforms.base import JobSpec
from stoker.record_words import training_words
from stoker.records import Constraints, Group, TrainingSize, read_json, to_document, write_json
from stoker.records.decision import Decision
from stoker.records.training import TrainingFacts, training_record
from stoker.train import budget_of
from support import builders, sample_records

TODAY = date(2026, 11, 26)
TABLE = "aws_training_instances.csv"


def rows():
    text = resources.files("stoker.catalog").joinpath(TABLE).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def table(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "prices.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_the_ratio_of_each_family_is_that_of_every_type_with_both_prices():
    both = [
        (row["instance_type"], float(ours) / float(ec2s))
        for row in rows()
        if (ours := row["sagemaker_usd_per_hour_us_east_1"])
        and (ec2s := row["ec2_usd_per_hour_us_east_1"])
    ]
    assert len(both) > 100
    for name, ratio in both:
        assert price_ratio(name) == pytest.approx(ratio, rel=0.005), name


def test_every_type_with_a_price_of_ec2_can_be_priced_on_sagemaker():
    catalog = load_catalog("sagemaker")
    unpriced = {row["instance_type"] for row in rows() if not row["ec2_usd_per_hour_us_east_1"]}
    assert {i.type for i in catalog.instances if i.usd_per_hour is None} == unpriced


@pytest.mark.parametrize(
    ("name", "usd", "how"),
    [
        ("p5en.48xlarge", 72.79, "EC2's $63.296 x 1.15"),
        ("p6-b200.48xlarge", 131.02, "EC2's $113.933 x 1.15"),
        ("c8i.8xlarge", 1.799, "EC2's $1.49936 x 1.20"),
        ("g7.4xlarge", 3.803, "EC2's $3.04208 x 1.25"),
        ("p2.xlarge", 1.125, "EC2's $0.9 x 1.25"),
        ("p3.2xlarge", 3.825, "EC2's $3.06 x 1.25"),
        ("g7e.2xlarge", 4.204, "another component or region"),
        ("g5.2xlarge", 1.52, ""),
        ("c7i.4xlarge", 0.857, ""),
    ],
)
def test_a_price_that_is_not_listed_is_estimated_and_says_how(name, usd, how):
    found = load_catalog("sagemaker").get(name)
    assert found.usd_per_hour == pytest.approx(usd, rel=0.001)
    assert how in found.estimate
    assert bool(found.estimate) == bool(how)
    # EC2's own price is no estimate.
    assert load_catalog("kubernetes").get(name).estimate == ""


@pytest.mark.parametrize("name", ["p5e.48xlarge", "trn2.48xlarge", "p6e-gb200.36xlarge"])
def test_a_type_that_neither_service_lists_has_no_price(name):
    found = load_catalog("sagemaker").get(name)
    assert (found.usd_per_hour, found.estimate) == (None, "")


@pytest.mark.parametrize("region", ["eu-west-1", "ap-southeast-2", "us-gov-west-1"])
def test_an_estimate_is_made_of_prices_of_one_region(tmp_path, region):
    place = region.replace("-", "_")
    head = f"instance_type,sagemaker_usd_per_hour_{place},ec2_usd_per_hour_{place},priced_on"
    file = table(tmp_path, head, "c8i.8xlarge,,2.0,2026-11-20", "c7i.8xlarge,2.5,2.0,2026-11-20")
    catalog = load_catalog("sagemaker", file)
    assert catalog.get("c8i.8xlarge").usd_per_hour == pytest.approx(2.4)
    assert catalog.get("c8i.8xlarge").estimate == "EC2's $2 x 1.20"
    assert (catalog.get("c7i.8xlarge").usd_per_hour, catalog.get("c7i.8xlarge").estimate) == (
        2.5,
        "",
    )
    # A type that the file lacks has the catalog's price, of another region.
    assert "us-east-1" in catalog.get("m7i.8xlarge").estimate


def test_a_blank_own_price_is_never_estimated(tmp_path):
    file = table(
        tmp_path, "instance_type,usd_per_hour,ec2_usd_per_hour_us_east_1", "c8i.8xlarge,,1.5"
    )
    assert load_catalog("sagemaker", file).get("c8i.8xlarge").usd_per_hour is None


BURST = ["t3.medium", "t3.2xlarge", "c7i-flex.4xlarge", "m8i-flex.16xlarge", "r8i-flex.2xlarge"]


@pytest.mark.parametrize("platform", ["sagemaker", "kubernetes"])
@pytest.mark.parametrize("name", BURST)
def test_burst_types_are_in_no_plan(platform, name):
    barred = load_catalog(platform).get(name)
    assert "burst type" in barred.barred
    line = next(line for line in load_catalog(platform).table().splitlines() if name in line)
    assert "burst" in line
    decision = starved("p4d.24xlarge", platform=platform, allowed=[name, "c7i.4xlarge"])
    types = {group.instance_type for plan in decision.plans for group in plan.groups}
    assert barred.type not in types
    assert any("burst type" in warning for warning in decision.warnings)


@pytest.mark.parametrize("name", ["c7i.4xlarge", "m8i.8xlarge", "trn1.2xlarge", "flex.large"])
def test_other_types_are_not_taken_for_burst_types(tmp_path, name):
    file = table(tmp_path, "instance_type,vcpus", "flex.large,4")
    assert load_catalog("sagemaker", file).get(name).barred == ""


def test_arm64_is_said_and_never_beside_another_architecture_in_a_job_of_one_image(tmp_path):
    name = "p6e-gb200.36xlarge"
    catalog = load_catalog("sagemaker")
    assert catalog.get(name).architecture == "arm64"
    assert "arm64" in next(line for line in catalog.table().splitlines() if name in line)
    # With a price, so that plans could be made.
    file = table(tmp_path, "instance_type,usd_per_hour,priced_on", f"{name},60,2026-11-20")
    priced = load_catalog("sagemaker", file)
    extra = builders.clusters(f"ml.{name}", "ml.c7i.8xlarge", 2)
    decision = starved(name, catalog=priced, extra=[extra])
    types = {g.instance_type for p in decision.plans if p.feasible for g in p.groups}
    assert types == {f"ml.{name}"}
    (asked,) = [plan for plan in decision.plans if plan.groups[1:]]
    assert "a job has one image" in asked.reason


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
    assert decision.plan.predicted.is_estimate
    assert decision.prices.estimated == {"ml.c8i.8xlarge": "EC2's $1.49936 x 1.20"}
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    assert not keep.predicted.is_estimate
    text = explain(decision)
    row = next(line for line in text.splitlines() if line.startswith("*heterogeneous"))
    assert "~" in row
    assert "~ estimated: ml.c8i.8xlarge: EC2's $1.49936 x 1.20" in " ".join(text.split())
    assert "~" not in next(line for line in text.splitlines() if "today: " in line)
    file = tmp_path / "decision.json"
    write_json(file, decision)
    assert read_json(file, Decision) == decision


def test_a_decision_by_listed_prices_marks_nothing():
    decision = starved("p4d.24xlarge", allowed=["c7i.8xlarge"])
    assert decision.prices.estimated is None
    assert "estimated" not in explain(decision)


def test_a_decision_of_version_1_without_these_fields_is_read(tmp_path):
    decision = starved("p4d.24xlarge", allowed=["c7i.8xlarge"])
    document = to_document(decision)
    document["prices"].pop("estimated", None)
    for plan in (document["plan"], *document["plans"]):
        plan["predicted"].pop("is_estimate", None)
    file = tmp_path / "decision.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    assert read_json(file, Decision) == decision


def test_todays_burst_type_is_kept_and_its_doubt_is_told():
    decision = starved("m7i-flex.8xlarge", allowed=["c7i.4xlarge"])
    keep = next(plan for plan in decision.plans if plan.action == "keep")
    assert keep.feasible
    assert any("burst type" in warning for warning in decision.warnings)


def test_the_price_of_a_cluster_says_which_part_is_estimated():
    catalog = load_catalog("sagemaker")
    groups = builders.clusters("ml.p5en.48xlarge", "ml.c7i.8xlarge", 2)
    assert catalog.estimates(groups) == {"ml.p5en.48xlarge": "EC2's $63.296 x 1.15"}
    unknown = [Group(name="dnn", role="dnn", instance_type="ml.trn2.48xlarge", count=1)]
    assert catalog.estimates(unknown) == {}


@pytest.mark.parametrize("is_estimate", [True, False])
def test_the_dollars_of_a_run_are_marked_from_its_leader_to_its_record(tmp_path, is_estimate):
    (dnn,) = builders.clusters("ml.p5en.48xlarge" if is_estimate else "ml.p4d.24xlarge")
    job = JobSpec(name="run", command=("true",), groups=(dnn,), run_dir=tmp_path)
    budget = budget_of(job, catalog=load_catalog("sagemaker"), decision=None)
    assert budget.estimated == (("dnn",) if is_estimate else ())
    now = itertools.chain([0.0], itertools.repeat(3600.0))
    limited = msgspec.structs.replace(budget, max_usd=1.0)
    log = Log(run="r", host="h", stream=io.StringIO())
    spending = Spending(limited, hosts={"dnn": 1}, log=log, clock=now.__next__)
    assert spending.tick()
    assert ("~$" in spending.failure) == is_estimate

    facts = TrainingFacts(
        job=sample_records.training().job,
        status="succeeded",
        groups=(dnn,),
        budget=budget,
        host_seconds={"dnn": 3600.0},
    )
    record = training_record(facts)
    assert record.is_estimate == is_estimate
    assert ("~$" in training_words(record)) == is_estimate


def test_the_report_marks_dollars_of_an_estimated_price(tmp_path):
    listed = sample_records.write_page(tmp_path)
    guessed = msgspec.structs.replace(sample_records.training(), is_estimate=True, spent_usd=3.0)
    decision = starved("p4d.24xlarge", allowed=["c8i.8xlarge"])
    page = sample_records.write_page(tmp_path, training=guessed, decision=decision)
    assert "~$" not in listed
    assert "~$" in page
    assert "EC2&#39;s $1.49936 x 1.20" in page
