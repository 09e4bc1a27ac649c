"""A verdict is one of four kinds, and an uncertain gain is no "no"."""

import msgspec
import pytest

from stoker.decide import TakeAs
from stoker.records import Observed
from support import decisions
from support.gpu_profiles import H100, changed, here, names, words

THERE = TakeAs(instance_type="ml.g6e.xlarge", accelerator_step_seconds=0.1)
# Slower steps that wait less: more cores gain, by less than other programs may have cost.
UNCERTAIN = msgspec.structs.replace(
    changed(
        H100,
        step_seconds=0.16,
        accelerator_step_seconds=0.12,
        loader_cpu_seconds=0.45,
        num_workers=4,
    ),
    observed=Observed(cpu_utilization=0.883, others_vcpus=0.8),
)


def taken(**constraints):
    return decisions.decided(H100, take_as=THERE, objective="time", **constraints)


def test_a_gain_within_its_band_is_probable_and_how_to_make_sure_is_said():
    decision = taken()
    assert (decision.verdict, decision.action) == ("probable", "keep")
    assert names(decision.probable) == ["1 ml.g6e.2xlarge"]
    assert decision.probable.predicted.speedup == pytest.approx(1.6, abs=0.02)
    text = words(decision)
    assert text.startswith("Probably worth it: take a larger type: dnn 1 x ml.g6e.2xlarge.")
    assert "33% cheaper" in text
    assert "within the error band of" in text
    assert "help here" not in text
    assert f"To make sure: {decision.trial}" in text
    (worth,) = [answer for answer in decision.path if "worth more" in answer.question]
    assert worth.answer == "unknown"


def test_a_try_is_free_on_this_machine_and_followed():
    decision = here(UNCERTAIN)
    assert (decision.verdict, decision.action) == ("probable", "heterogeneous")
    assert "A try costs nothing here" in words(decision)
    assert decision.trial.startswith("stoker train --group dnn=local.c4:1")
