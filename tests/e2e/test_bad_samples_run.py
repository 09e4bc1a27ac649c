"""Bad samples are the same ones with any workers and data hosts, and whatever dies."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.records import FeedSettings
from stoker.train import _with_all_bad_samples
from support.bad_samples_script import BAD, CRASHING, HANGING, NUM_SAMPLES
from support.local_job import LocalJob

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "bad_samples_script.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def run(
    folder: Path,
    on_error: Any,
    *,
    workers: int,
    data: int,
    kills: bool = False,
    is_deadly: bool = False,
    **more: Any,
):
    """Returns the batches, and the list of bad samples without who made them."""
    file = folder / f"{on_error}-{workers}-{data}-{kills}.json"
    feed = FeedSettings(lease_seconds=20, on_error=on_error, max_errors=99, **more)
    flags = [*(["--kill"] * kills), *(["--slow"] * bool(more)), *(["--deadly"] * is_deadly)]
    command = ("python", str(SCRIPT), str(file), str(workers), *flags)
    with LocalJob(folder / file.stem, command, data=data, feed=feed) as job:
        job.succeeds()
        record = job.training()
        (path,) = job.base_dir(job.leader).rglob("bad_samples.csv")
        kept = folder / "kept"
        kept.mkdir(exist_ok=True)
        _with_all_bad_samples(path.parent, replace(job.spec, run_dir=kept), None)
        assert (kept / "bad_samples.csv").read_text() == path.read_text()
    with path.open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert record.bad_samples == len(rows) == 2 * (len(BAD) + 2 * is_deadly)
    if data and not workers:
        assert {row["host"] for row in rows} <= {host.name for host in job.request.hosts}
    return json.loads(file.read_text()), [{**row, "host": "", "worker": ""} for row in rows]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {how: run(folder, how, workers=0, data=0) for how in ("skip", "replace")}


@pytest.mark.parametrize(
    ("on_error", "workers", "data", "kills"),
    [
        ("skip", 2, 0, False),
        ("replace", 1, 1, False),
        ("skip", 0, 2, True),
        ("replace", 0, 2, True),
        # Both ways with any number of workers, and kills: contract/test_lost_samples.
        pytest.param("replace", 2, 0, False, marks=pytest.mark.soak),
        pytest.param("skip", 1, 1, False, marks=pytest.mark.soak),
        pytest.param("skip", 4, 0, False, marks=pytest.mark.soak),
        pytest.param("replace", 4, 0, False, marks=pytest.mark.soak),
        pytest.param("skip", 2, 2, True, marks=pytest.mark.soak),
        pytest.param("replace", 2, 2, True, marks=pytest.mark.soak),
    ],
)
def test_batches_and_bad_samples_do_not_depend_on_who_makes_them(
    tmp_path, alone, on_error, workers, data, kills
):
    batches, rows = run(tmp_path, on_error, workers=workers, data=data, kills=kills)
    assert rows == alone[on_error][1]
    assert batches == alone[on_error][0]


# Replaced ones, too: contract/test_lost_samples, in parts.
@pytest.mark.parametrize("on_error", ["skip", pytest.param("replace", marks=pytest.mark.soak)])
def test_a_batch_that_several_workers_make_has_the_same_ones(tmp_path, alone, on_error):
    split = run(tmp_path, on_error, workers=3, data=1, kills=True, split_batches=True)
    assert split == alone[on_error]


def test_each_bad_sample_is_listed_once_an_epoch(alone):
    batches, rows = alone["skip"]
    for epoch in "01":
        bad = sorted(int(row["index"]) for row in rows if row["epoch"] == epoch)
        assert bad == sorted(BAD)
    assert sum(len(batch) for batch in batches) == 2 * (NUM_SAMPLES - len(BAD))
    whole, replaced = alone["replace"]
    assert sum(len(batch) for batch in whole) == 2 * NUM_SAMPLES
    assert all(int(row["replaced_by"]) not in BAD for row in replaced)


def test_samples_that_end_or_block_their_process_are_left_out_by_any_workers(tmp_path):
    alone = run(tmp_path, "skip", workers=0, data=1, is_deadly=True, sample_timeout_seconds=8.0)
    errors = {row["index"]: row["error"] for row in alone[1]}
    assert errors[str(CRASHING)] == "ProcessDiedError"
    assert errors[str(HANGING)] == "SampleTimeoutError"
    several = run(
        tmp_path,
        "skip",
        workers=2,
        data=1,
        kills=True,
        is_deadly=True,
        sample_timeout_seconds=8.0,
    )
    assert several == alone
