"""A script is profiled on a device of known cost: transfers, neighbours, and what ends them."""

import sys
from pathlib import Path

import psutil
import pytest

from stoker.profile.explain import explain
from stoker.profile.rank_results import read_ranks
from support.profiled_ranks import changed, profile_of
from support.warm_python import WarmProcess, clean_environ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[1] / "support" / "device_script.py"


@pytest.fixture
def rank(tmp_path):
    environ = clean_environ(STOKER_OUTPUT=str(tmp_path / "out"))
    environ["STOKER_PROFILE"] = '{"budget_seconds": 40}'
    with (tmp_path / "log").open("wb") as log:
        process = WarmProcess([str(SCRIPT)], environ, log=log)
    try:
        code = process.wait(180)
    finally:
        process.kill()
    assert code == 0, (tmp_path / "log").read_text()
    (found,) = read_ranks(tmp_path / "out")
    return found


def test_transfers_and_neighbours_are_measured_in_the_scripts_own_loop(rank):
    variants = rank.variants
    assert variants is not None, rank.notes
    cached = rank.accelerator.step_seconds.median
    assert cached - variants.on_device.median == pytest.approx(0.020, abs=0.006)
    assert cached - variants.pinned.median == pytest.approx(0.016, abs=0.006)
    assert variants.beside_workers.median - cached == pytest.approx(0.006, abs=0.003)
    assert variants.copied_bytes == 4 * 16 * 4
    assert variants.is_waiting
    # The parts are those of a quiet machine: other programs are no part of what is claimed here.
    profile = profile_of(changed(rank, others_vcpus=0.0))
    whole = cached + profile.step.neighbour_seconds
    assert profile.check.predicted_step_seconds == pytest.approx(whole, abs=0.004)
    states = {state.id for state in profile.states}
    assert {"transfer", "neighbour"} <= states
    saved = {fix.id: fix.saves_seconds for fix in profile.fixes}
    assert saved["pin_memory"] == pytest.approx(0.016, abs=0.006)
    assert saved["to_device"] == pytest.approx(0.020, abs=0.006)
    assert "competes" not in explain(profile)
    # The loader alone was measured after them, with none of their workers left.
    assert rank.drains
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert [sys.executable, str(SCRIPT)] not in [words[:2] for words in left if words]
