"""Streams without workers that change themselves: each epoch on data hosts is that of PyTorch."""

import functools

import pytest

from support.cluster import Line, reference, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "self_changing_script.py"
KINDS = ["Counting", "Told", "Shuffling", "Drawing", "Lazy", "Global", "Buffering", "Reordering"]
torchs = functools.partial(reference, script=SCRIPT, torch=True)


def test_each_epoch_begins_with_what_the_last_one_changed(host):
    fed = host.train(workers=0, script=SCRIPT, kinds=KINDS)
    assert fed.finish() == torchs(kinds=KINDS)
    assert "stream_not_carried" not in fed.errors


@pytest.mark.parametrize("left", [{}, {"0": 2}])
def test_what_cannot_be_carried_is_named(host, left):
    fed = host.train(workers=0, script=SCRIPT, kinds=["Keeping"], left=left)
    fed.finish()
    assert fed.errors.count("stream_not_carried") == 1
    assert "dataset.source is an iterator" in fed.errors


def test_an_epoch_that_is_left_counts(host):
    given = {"kinds": ["Counting", "Told", "Shuffling", "Global"], "left": {"0": 1, "1": 2, "2": 3}}
    fed = host.train(workers=0, script=SCRIPT, epochs=4, **given)
    assert _batches(fed.finish()) == _batches(torchs(epochs=4, **given))
    assert "stream_not_carried" not in fed.errors


def test_what_moves_with_each_sample_is_named_where_an_epoch_is_left(host):
    fed = host.train(workers=0, script=SCRIPT, kinds=["Drawing"], left={"0": 3})
    fed.finish()
    assert fed.errors.count("stream_not_carried") == 1
    assert "dataset.rng" in fed.errors


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["Shuffling", "Drawing"])
def test_a_state_in_mid_epoch_has_what_earlier_epochs_changed(host, tmp_path, kind, batch):
    path = tmp_path / "state.pt"
    expected = torchs(kinds=[kind])
    host.train(workers=0, script=SCRIPT, kinds=[kind], save=str(path), save_at=[1, batch]).finish()
    load = {"kinds": [kind], "load": [str(path)]}
    begin = next(
        n for n, line in enumerate(expected) if (line["epoch"], line.get("batch")) == (1, batch)
    )
    fed = host.train(workers=0, script=SCRIPT, **load)
    assert _batches(fed.finish()) == _batches(expected[begin:])
    alone = run_script(load | {"epochs": 2}, script=SCRIPT).finish()
    assert _batches(alone) == [line for line in _batches(expected[begin:]) if line["epoch"] == 1]


def test_what_a_host_changes_that_no_state_can_have_is_said_once(host, tmp_path):
    given = {"kinds": ["Reordering"], "save": str(tmp_path / "state.pt")}
    # Its second epoch needs what the first one has made of it.
    fed = host.train(workers=0, script=SCRIPT, save_at=[1, 2], **given)
    fed.finish()
    assert fed.errors.count("stream_state_refused") == 1
    assert "no state has: dataset.order, an array of 1.6 MB, changes in each epoch" in fed.errors


def test_a_killed_process_changes_nothing(host):
    given = {"kinds": ["Shuffling", "Drawing"]}
    trainer = host.paused(workers=0, script=SCRIPT, pause_at=[1, 0], **given)
    host.kill_worker(0)
    trainer.go_on()
    trainer.until("pause")
    host.kill_worker(0)
    trainer.go_on()
    lines = trainer.finish()
    assert _batches(lines) == _batches(torchs(**given))


def test_a_state_of_other_ranks_has_it_too(host, tmp_path):
    paths = [str(tmp_path / f"{rank}.pt") for rank in range(2)]
    expected = torchs(kinds=["Shuffling"])
    ranks = [
        host.train(
            rank=rank,
            world=2,
            workers=0,
            script=SCRIPT,
            kinds=["Shuffling"],
            save=paths[rank],
            save_at=[1, 1],
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.finish()
    fed = host.train(workers=0, script=SCRIPT, kinds=["Shuffling"], load=paths, epochs=2)
    rest = [line["value"] for line in _batches(expected) if line["epoch"] == 1][1:]
    assert [line["value"] for line in _batches(fed.finish())] == [
        value for value in rest for _ in range(2)
    ]


def _batches(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "batch" in line]
