"""A training under a data group that takes no batches from it is told so."""

import io
from pathlib import Path

import pytest

from stoker.environment import from_environment
from stoker.feed.bookkeeping import _process
from stoker.feed.engine.run_messages import FeedWork, HostWork, Progress
from stoker.feed.rank_reports import (
    ENOUGH_STEPS,
    NOT_LOADED,
    Loading,
    OptimizerWatch,
    why_unfed,
)
from stoker.logs import Log


def test_a_training_without_batches_of_stoker_says_so_once(tmp_path):
    _process.cache_clear()
    said = io.StringIO()
    settings = from_environment({"STOKER_OUTPUT": str(tmp_path)})
    watch = OptimizerWatch(settings, Log(run="test", host="algo-1", stream=said))
    # An optimizer's hook is called where torch is.
    pytest.importorskip("torch")
    for _ in range(2 * ENOUGH_STEPS):
        watch.step()
    assert "feed.replace_dataloader is false" in said.getvalue()
    assert "--replace-dataloader" in said.getvalue()
    assert said.getvalue().count("feed_unused") == 1


def say(folder: Path, *loadings: Loading) -> Path:
    for pid, loading in enumerate(loadings):
        loading.write(folder, pid=pid)
    return folder


HERE = HostWork(host="algo-2", is_local=True, batches=7)
THERE = HostWork(host="algo-1", batches=1)
OWN = Loading(optimizer_steps=9, why="no loader was read")


@pytest.mark.parametrize(
    ("loadings", "hosts", "why"),
    [
        ((), (), NOT_LOADED),
        ((Loading(why="no stoker"), OWN), (), "no loader was read"),
        ((Loading(made_here=("a", "b", "a")),), (HERE,), "made all batches: a; b"),
        ((Loading(),), (HERE,), ""),
        ((Loading(made_here=("a",)),), (HERE, THERE), ""),
    ],
)
def test_a_run_that_data_hosts_did_not_help_says_why(tmp_path, loadings, hosts, why):
    progress = {}
    if hosts:
        work = FeedWork(seconds=1.0, hosts=hosts)
        progress[0] = Progress(
            rank=0, steps=7, samples=28, wait_seconds=0.1, compute_seconds=0.1, feed=work
        )
    words = why_unfed(say(tmp_path, *loadings), progress)
    assert words.endswith(why)
    assert words.startswith("no batch came from its data hosts: ") is bool(why)
