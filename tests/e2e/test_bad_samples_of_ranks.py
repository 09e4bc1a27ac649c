"""Ranks with bad samples keep the same number of steps, whoever makes their batches."""

import json
import math
from pathlib import Path

import pytest

from stoker.records import FeedSettings
from support.bad_ranks_script import (
    BAD_BATCH,
    BATCH_SIZE,
    CRASHING,
    HANGING,
    NUM_SAMPLES,
    RAISING,
)
from support.bad_sample_rows import rows_of
from support.local_job import LocalJob

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "bad_ranks_script.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def train(folder: Path, *words: str, ranks: int, data: int, epochs: int = 1, **feed):
    """Returns the batches of each rank, by epoch, and (epoch, rank, index, error) of bad samples.

    Two ranks are those of one host, three of three hosts.
    """
    folder.mkdir()
    settings = FeedSettings(
        lease_seconds=20, on_error="skip", max_errors=99, sample_timeout_seconds=4.0, **feed
    )
    hosts = {"processes": 2} if ranks == 2 else {"dnn": ranks}
    command = ("python", str(SCRIPT), str(folder), str(epochs), *words)
    with LocalJob(folder / "job", command, data=data, feed=settings, **hosts) as job:
        job.succeeds()
        record = job.training()
        rows = rows_of(job.spec.run_dir, "epoch", "rank", "index", "error")
    assert record.bad_samples == len(rows)
    steps = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return steps, rows


def indices_of(rank: int, *, ranks: int) -> list[int]:
    """What DistributedSampler deals to a rank: its last ones are the first samples again."""
    total = math.ceil(NUM_SAMPLES / ranks) * ranks
    return [place % NUM_SAMPLES for place in range(rank, total, ranks)]


def bad_of(ranks: int) -> set[int]:
    batch = indices_of(0, ranks=ranks)[BAD_BATCH * BATCH_SIZE :][:BATCH_SIZE]
    return {CRASHING, HANGING, *RAISING, *batch}


def expected_of(rank: int, *, ranks: int, drops_last: bool) -> list[list[int] | None]:
    """The good samples of a rank's batches; None: another one is in the place of the first."""
    indices, bad = indices_of(rank, ranks=ranks), bad_of(ranks)
    batches = [indices[begin : begin + BATCH_SIZE] for begin in range(0, len(indices), BATCH_SIZE)]
    if drops_last and len(batches[-1]) < BATCH_SIZE:
        del batches[-1]
    good = [[index for index in batch if index not in bad] for batch in batches]
    return [batch or None for batch in good]


def check(steps: list[list[list[list[float]]]], *, ranks: int, drops_last: bool) -> None:
    for rank, (batches,) in enumerate(steps):
        expected = expected_of(rank, ranks=ranks, drops_last=drops_last)
        assert len(batches) == len(expected)
        for batch, good in zip(batches, expected, strict=True):
            if good is None:
                (replacing,) = batch
                assert int(replacing) not in bad_of(ranks)
            else:
                assert [int(value) for value in batch] == good


@pytest.mark.parametrize(("ranks", "words"), [(2, ["--drop-last"]), (3, [])])
def test_ranks_have_the_steps_and_bytes_that_they_have_without_data_hosts(tmp_path, ranks, words):
    alone, bad = train(tmp_path / "alone", *words, ranks=ranks, data=0)
    check(alone, ranks=ranks, drops_last=bool(words))
    assert {len(steps[0]) for steps in alone} == {len(alone[0][0])}
    errors = {(rank, error) for _, rank, index, error in bad if int(index) in (CRASHING, HANGING)}
    assert errors == {("1", "ProcessDiedError"), ("1", "SampleTimeoutError")}
    assert {int(index) for _, _, index, _ in bad} == bad_of(ranks)
    assert train(tmp_path / "fed", *words, ranks=ranks, data=1) == (alone, bad)


# Steps with a shorter last batch, dealt by cost: unit/test_balance, e2e/test_balanced_ranks.
@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.soak), ["--drop-last"]])
def test_ranks_whose_samples_are_dealt_by_cost_have_the_same_number_of_steps(tmp_path, words):
    steps, bad = train(
        tmp_path / "balanced", "--batches", *words, ranks=2, data=1, epochs=2, balance="cost"
    )
    # Also in the second epoch, of which the first one has measured the costs.
    indices = len(indices_of(0, ranks=2))
    num_steps = indices // BATCH_SIZE if words else math.ceil(indices / BATCH_SIZE)
    assert [[len(epoch) for epoch in epochs] for epochs in steps] == [[num_steps] * 2] * 2
    for epoch in range(2):
        delivered = [value for epochs in steps for batch in epochs[epoch] for value in batch]
        assert not {int(value) for value in delivered} & bad_of(2)
        listed = {int(index) for number, _, index, _ in bad if int(number) == epoch}
        assert listed <= bad_of(2)
        assert len(delivered) <= 2 * len(indices_of(0, ranks=2))
