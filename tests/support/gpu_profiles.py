"""The profile of a training on a GPU that waits beside idle cores, and decisions on it."""

import msgspec

from stoker.catalog import load_catalog
from stoker.decide import explain
from stoker.records import Check, LoaderRate, Observed, ProfiledHost
from support import builders, decisions

# Measured on 2026-11-26 on one H100 beside 16 cores, of which the training had four: ResNet-50,
# batches of 128 augmented JPEGs. With three data hosts of four cores steps took 41.8 to 47.8 ms.
H100 = builders.profile(
    host=ProfiledHost(instance_type="local.c4", count=1, vcpus=4, accelerators=1),
    step_seconds=0.1596,
    wait_seconds=0.1216,
    accelerator_step_seconds=0.0452,
    loader_cpu_seconds=0.6025,
    loader_wall_seconds=0.6034,
    trainer_cpu_seconds=0.0591,
    used_cpu_seconds=0.5985,
    num_workers=4,
    global_batch_size=128,
    batch_bytes=77_071_360,
    loader_rates=(
        LoaderRate(workers=1, steps_per_second=1.615),
        LoaderRate(workers=2, steps_per_second=2.804),
        LoaderRate(workers=4, steps_per_second=5.712),
    ),
    observed=Observed(cpu_utilization=0.883, others_vcpus=0.017),
    check=Check(predicted_step_seconds=0.1508, error=-0.055, explained=True),
)


def changed(profile, *, host=None, **terms):
    step = msgspec.structs.replace(profile.step, **terms)
    told = msgspec.structs.replace(profile.host, **(host or {}))
    return msgspec.structs.replace(profile, step=step, host=told)


def here(profile, *, cores=16, **more):
    return decisions.decided(profile, catalog=load_catalog("local", cores=cores), **more)


def words(decision):
    return " ".join(explain(decision).split())


def best(decision, action):
    return next(plan for plan in decision.plans if plan.action == action and plan.feasible)


def names(plan):
    return [f"{group.count} {group.instance_type}" for group in plan.groups]
