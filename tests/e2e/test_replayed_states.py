"""A script is profiled on a device of known cost: transfers, neighbours, and what ends them."""

import socket
import sys
from pathlib import Path

import psutil
import pytest
import torch

from stoker.profile.explain import explain
from stoker.profile.rank_results import RankResult, read_ranks
from support.profiled_ranks import changed, profile_of
from support.warm_python import WarmProcess, clean_environ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "support" / "device_script.py"


def profiled(folder: Path, *, ranks: int, script: Path = SCRIPT) -> list[RankResult]:
    """Runs a script under the profiler to its end, as several ranks with gloo if asked."""
    environs = [
        clean_environ(
            STOKER_OUTPUT=str(folder / "out"), STOKER_PROFILE='{"budget_seconds": 40}', **variables
        )
        for variables in variables_of(ranks)
    ]
    processes = []
    try:
        for environ in environs:
            with (folder / "log").open("ab") as log:
                processes.append(WarmProcess([str(script)], environ, log=log))
        codes = [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, (folder / "log").read_text()
    return read_ranks(folder / "out")


def variables_of(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    of_all["LOCAL_WORLD_SIZE"] = of_all["WORLD_SIZE"]
    return [{**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def has_left_nothing() -> bool:
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    return [sys.executable, str(SCRIPT)] not in [words[:2] for words in commands if words]


def test_transfers_and_neighbours_are_measured_in_the_scripts_own_loop(tmp_path):
    (rank,) = profiled(tmp_path, ranks=1)
    variants = rank.variants
    assert variants is not None, rank.notes
    cached = rank.accelerator.step_seconds.median
    assert cached - variants.on_device.median == pytest.approx(0.020, abs=0.006)
    assert cached - variants.pinned.median == pytest.approx(0.016, abs=0.006)
    # Other programs slow down the workers, and so the step beside them: what the script adds is the
    # least of it.
    assert variants.beside_workers.median - cached > 0.003
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
    assert has_left_nothing()


@pytest.mark.alone
def test_ranks_go_through_the_variants_together(tmp_path):
    ranks = profiled(tmp_path, ranks=2)
    assert len(ranks) == 2
    for rank in ranks:
        assert not [note for note in rank.notes if "lockstep" in note or "not all ranks" in note]
        # One that were in another variant would wait for the other one's copies in all-reduce, and
        # save less; other programs make the copies longer.
        cached = rank.accelerator.step_seconds.median
        assert cached - rank.variants.on_device.median > 0.012
        assert cached - rank.variants.pinned.median > 0.008
        assert rank.variants.beside_workers is not None
        assert rank.drains
    assert has_left_nothing()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_that_waits_for_copies_is_told_what_ends_it(tmp_path):
    script = SCRIPT.with_name("cuda_transfer_script.py")
    (rank,) = profiled(tmp_path, ranks=1, script=script)
    variants = rank.variants
    assert variants is not None, rank.notes
    cached = rank.accelerator.step_seconds.median
    # The images and their labels; the copies are most of the step.
    assert variants.copied_bytes == 128 * (3 * 224 * 224 * 4 + 8)
    assert variants.is_waiting
    assert not variants.is_pinned
    assert variants.on_device.median < 0.7 * cached
    assert variants.pinned.median < cached
    assert variants.beside_workers is not None
