from pathlib import Path

import pytest

from stoker.feed.loading import Loading, counted_steps, discard_loadings, read_loadings, why_unfed
from stoker.feed.timeline import COLUMNS, FILE, MeasuredStep
from stoker.feed.wire.protocol import Progress

TORCHS = "torch.utils.data.dataloader.DataLoader"
TIMELINE = {0: [MeasuredStep(loader=0, epoch=0, wait_seconds=0.1, compute_seconds=0.1, samples=4)]}
# Rank 1 is on another host: its timeline is there.
PROGRESS = {1: Progress(rank=1, steps=7, samples=28, wait_seconds=0.1, compute_seconds=0.1)}


def say(folder: Path, *loadings: Loading) -> Path:
    for pid, loading in enumerate(loadings):
        loading.write(folder, pid=pid)
    return folder


@pytest.mark.parametrize(
    ("loadings", "steps"),
    [
        ((), None),
        # A process that imports torch for something else is no training without steps.
        ((Loading(),), None),
        ((Loading(has_optimizer=True),), 0),
        # A launcher beside the rank, of the same rank's number.
        ((Loading(), Loading(optimizer_steps=125, has_optimizer=True, seen=TORCHS)), 125),
        ((Loading(optimizer_steps=None, has_optimizer=True),), None),
        # It read batches, and updated its model without an optimizer of torch's.
        ((Loading(has_optimizer=True, seen=TORCHS),), None),
    ],
)
def test_steps_are_counted_whichever_loader_made_the_batches(tmp_path, loadings, steps):
    assert counted_steps(say(tmp_path, *loadings), {}, {}) == steps


def test_batches_of_the_main_loader_come_before_optimizer_steps(tmp_path):
    # Gradients that are accumulated: two batches for an optimizer's step.
    (tmp_path / FILE.format(rank=0)).write_text(COLUMNS + "\n")
    assert counted_steps(tmp_path, {}, {}) == 0, "a loader was made and never read"
    say(tmp_path, Loading(optimizer_steps=3, has_optimizer=True))
    assert counted_steps(tmp_path, TIMELINE, {}) == 1
    assert counted_steps(tmp_path, TIMELINE, PROGRESS) == 7


@pytest.mark.parametrize(
    ("loadings", "why"),
    [
        ((), "no loader of torch or stoker was read"),
        ((Loading(),), "no loader of torch or stoker was read"),
        (
            (Loading(), Loading(optimizer_steps=9, seen=TORCHS), Loading()),
            f"{TORCHS} is read without stoker; train with --replace-dataloader true",
        ),
        (
            (Loading(optimizer_steps=9, own=("litdata.StreamingDataLoader",)),),
            "litdata.StreamingDataLoader makes batches in its own way",
        ),
        ((Loading(is_fed=True, epochs=3, has_optimizer=True),), "gave no batch; is its dataset"),
        # Its own loader was made; what it trained on was another one.
        ((Loading(is_fed=True, optimizer_steps=9, seen=TORCHS),), f"{TORCHS} is read"),
        # A training that goes on from its last epoch: nothing is wrong with its loaders.
        ((Loading(is_fed=True, has_optimizer=True),), ""),
    ],
)
def test_a_run_without_a_fed_batch_is_told_by_its_cause(tmp_path, loadings, why):
    words = why_unfed(say(tmp_path, *loadings), {})
    assert why in words
    assert words.startswith("no batch came from its data hosts: ") is bool(why)


def test_batches_of_the_feed_count_wherever_they_were_made(tmp_path):
    say(tmp_path, Loading(is_fed=True, optimizer_steps=9))
    assert why_unfed(tmp_path, PROGRESS) == ""
    (tmp_path / FILE.format(rank=0)).write_text("0,0,0,0,0.1,0.1,4,1,1")
    assert why_unfed(tmp_path, {}) == ""
    # Batches that are only timed are none of the feed's.
    say(tmp_path, Loading(optimizer_steps=9, own=("x.Loader",)))
    assert "x.Loader makes batches in its own way" in why_unfed(tmp_path, {})


def test_what_an_earlier_attempt_said_is_forgotten(tmp_path):
    say(tmp_path, Loading(optimizer_steps=9))
    (tmp_path / "loading-7.json").write_text("cut off")
    assert len(read_loadings(tmp_path)) == 1
    discard_loadings(tmp_path)
    assert list(tmp_path.iterdir()) == []
