"""Whole decisions equal their files: a diff shows what a change of the model or of the words does.

Write them again with: PYTHONPATH=tests python tests/contract/test_decision_golden.py
"""

import json
from datetime import date
from pathlib import Path

import pytest

from stoker.catalog import load_catalog
from stoker.decide import DecisionInputs, decide, explain
from stoker.records import Check, Constraints, ProfiledHost, TrainingSize, to_document
from support import builders

FILE = Path(__file__).with_suffix(".json")
TODAY = date(2026, 11, 1)


def _one_core():
    profile = builders.profile(
        host=ProfiledHost(instance_type="local.c1", count=1, vcpus=1, accelerators=0),
        step_seconds=0.064,
        wait_seconds=0.03,
        accelerator_step_seconds=0.022,
        loader_cpu_seconds=0.040,
        loader_wall_seconds=0.041,
        receive_seconds=0.0005,
        receive_cpu_seconds=0.0015,
        trainer_cpu_seconds=0.022,
        num_workers=1,
        global_batch_size=64,
        batch_bytes=2.36e6,
        check=Check(predicted_step_seconds=0.062, error=-0.031, explained=True),
    )
    types = ("local.c1",)
    return decide(
        DecisionInputs(
            profile=profile,
            catalog=load_catalog("local", cores=2),
            constraints=Constraints(
                objective="time", max_data_hosts=1, allowed_instance_types=types
            ),
            training=TrainingSize(epochs=10, samples_per_epoch=8000, global_batch_size=64),
            today=TODAY,
        )
    )


def _starved_p4d():
    terms = {"step_seconds": 0.192, "accelerator_step_seconds": 0.064, "global_batch_size": 8192}
    return decide(
        DecisionInputs(
            profile=builders.profile("ml.p4d.24xlarge", **terms),
            catalog=load_catalog("sagemaker"),
            constraints=Constraints(max_data_hosts=3),
            training=TrainingSize(steps=100_000),
            today=TODAY,
        )
    )


CASES = {"one core": _one_core, "p4d": _starved_p4d}


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _written(decision):
    document = to_document(decision)
    # The profiles are not what this file is about.
    assert len(document.pop("profile_sha256")) == 64
    return {"decision": _rounded(document), "text": explain(decision).splitlines()}


@pytest.mark.parametrize("name", list(CASES))
def test_decision_is_the_one_on_file(name):
    assert _written(CASES[name]()) == json.loads(FILE.read_text(encoding="utf-8"))[name]


if __name__ == "__main__":
    document = {name: _written(make()) for name, make in CASES.items()}
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
