"""The published results are reproduced from their inputs.

AWS's two jobs (prices of 2022, us-east-1, on demand, SageMaker; the source prints its cost per step
in US cents: here all costs are dollars), and FastFlow's ratios of training time with and without
remote hosts (VLDB 2023; its accelerator hosts are containers of 7 vCPUs given to loading alone).
"""

from datetime import date

import pytest

from stoker.catalog import load_catalog
from support import builders, decisions

TODAY = date(2022, 12, 1)
PRICES_2022 = """instance_type,sagemaker_usd_per_hour_us_east_1,priced_on
ml.p4d.24xlarge,37.688,2022-11-01
ml.p3.2xlarge,3.825,2022-11-01
ml.c5.18xlarge,3.672,2022-11-01
ml.c5.9xlarge,1.836,2022-11-01
"""
CONTAINERS = """instance_type,vcpus,gpus,gpu_model,usd_per_hour
box.gpu,7,1,RTX,1
box.cpu,7,0,,0.2
"""


@pytest.fixture
def catalog_2022(tmp_path):
    file = tmp_path / "prices-2022.csv"
    file.write_text(PRICES_2022)
    return load_catalog("sagemaker", file)


@pytest.fixture
def containers(tmp_path):
    file = tmp_path / "containers.csv"
    file.write_text(CONTAINERS)
    return load_catalog("kubernetes", file)


def _decided(catalog, groups, *, today=TODAY, **profile):
    found = builders.profile(groups[0].instance_type, **profile)
    return decisions.decided(found, catalog=catalog, extra_clusters=[groups], today=today)


def _tensorflow(catalog, today=TODAY):
    return _decided(
        catalog,
        builders.clusters("ml.p4d.24xlarge", "ml.c5.18xlarge", 2),
        today=today,
        step_seconds=0.192,
        accelerator_step_seconds=0.064,
        global_batch_size=8192,
        gpu_utilization=0.45,
    )


def _pytorch(catalog, cpu=None):
    return _decided(
        catalog,
        # The data host did all preprocessing, with 32 workers.
        builders.clusters("ml.p3.2xlarge", "ml.c5.9xlarge", workers_per_host=0),
        step_seconds=1.193,
        accelerator_step_seconds=0.06,
        loader_cpu_seconds=cpu,
        num_workers=8,
        global_batch_size=8192,
    )


def _fastflow(catalog, *, gpus, data):
    decision = _decided(
        catalog,
        (builders.group("dnn", "box.gpu", gpus), builders.group("data", "box.cpu", data)),
        count=gpus,
        step_seconds=1.0,
        accelerator_step_seconds=0.05,
        trainer_cpu_seconds=0.0,
        global_batch_size=32,
    )
    return _named(decision).step_seconds


def _named(decision):
    found = [p for p in decision.plans if p.reason == "asked for"] or [decision.plan]
    assert len(found) == 1
    return found[0].predicted


def _keep(decision):
    return next(plan for plan in decision.plans if plan.action == "keep").predicted


def test_tensorflow_on_p4d_with_two_c5_is_within_6_percent_and_costs_as_published(catalog_2022):
    decision = _tensorflow(catalog_2022)
    assert (decision.bottleneck, decision.action) == ("cpu", "heterogeneous")
    named = _named(decision)
    assert named.step_seconds == pytest.approx(0.086, rel=0.06)
    assert _keep(decision).usd_per_1000_steps == pytest.approx(2.010, abs=0.001)
    assert named.usd_per_hour == pytest.approx(45.032, abs=0.001)
    assert named.usd_per_1000_steps == pytest.approx(1.076, rel=0.06)
    assert named.cost_change == pytest.approx(-0.46, abs=0.03)
    now = _named(_tensorflow(load_catalog("sagemaker"), date(2026, 11, 1)))
    assert now.cost_change == pytest.approx(-0.42, abs=0.03)
    assert now.break_even_speedup == pytest.approx(1.291, abs=0.001)


@pytest.mark.parametrize("cpu", [None, 9.54])
def test_pytorch_on_p3_with_one_c5_is_within_twelve_percent(catalog_2022, cpu):
    decision = _pytorch(catalog_2022, cpu)
    assert decision.action == "heterogeneous"
    named = _named(decision)
    assert named.step_seconds == pytest.approx(0.184, rel=0.12)
    assert named.usd_per_hour == pytest.approx(5.661, abs=0.001)
    assert _keep(decision).usd_per_1000_steps == pytest.approx(1.268, abs=0.001)
    assert named.usd_per_1000_steps == pytest.approx(0.289, rel=0.12)
    assert named.cost_change == pytest.approx(-0.77, abs=0.03)


FASTFLOW = [
    ("Speaker, 7 and 28 vCPUs", 1, 4, 0.230),
    ("Speaker, 7 and 7", 1, 1, 0.529),
    ("Speaker, 2 GPUs", 2, 2, 0.578),
    ("Speaker, 4 GPUs", 4, 4, 0.599),
    ("Transformer ASR, 7 and 7", 1, 1, 0.441),
    ("Transformer ASR, 2 GPUs", 2, 2, 0.521),
    ("Transformer ASR, 4 GPUs", 4, 4, 0.546),
    ("CTC ASR, 7 and 7", 1, 1, 0.600),
]


def test_ten_published_points_have_a_small_mean_error(catalog_2022, containers):
    errors = [
        _named(_tensorflow(catalog_2022)).step_seconds / 0.086 - 1,
        _named(_pytorch(catalog_2022)).step_seconds / 0.184 - 1,
    ]
    errors += [
        _fastflow(containers, gpus=gpus, data=data) / ratio - 1 for _, gpus, data, ratio in FASTFLOW
    ]
    assert len(errors) == 10
    assert sum(map(abs, errors)) / len(errors) <= 0.065
    assert max(map(abs, errors)) <= 0.25


@pytest.mark.parametrize(
    ("today", "larger"),
    [
        ("ml.g5.8xlarge", "ml.g5.16xlarge"),
        ("ml.g5.12xlarge", "ml.g5.24xlarge"),
        ("ml.p4d.24xlarge", None),
        ("ml.trn1.32xlarge", None),
    ],
)
def test_a_larger_sister_is_priced_beside_its_heterogeneous_rival(today, larger):
    profile = builders.profile(
        today, step_seconds=0.3, accelerator_step_seconds=0.1, global_batch_size=512
    )
    decision = decisions.decided(profile)
    offered = {plan.groups[0].instance_type for plan in decision.plans if plan.action == "scale_up"}
    assert larger in offered if larger else not offered
    assert any(plan.action == "heterogeneous" and plan.feasible for plan in decision.plans)
