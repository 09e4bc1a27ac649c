"""Bad samples are the same ones with any workers and data hosts, and whatever dies."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from stoker.records import FeedSettings
from support.bad_samples_script import BAD, NUM_SAMPLES
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
    """Returns the batches, and the list of bad samples."""
    file = folder / f"{on_error}-{workers}-{data}-{kills}.json"
    feed = FeedSettings(lease_seconds=20, on_error=on_error, max_errors=99, **more)
    flags = [*(["--kill"] * kills), *(["--slow"] * bool(more)), *(["--deadly"] * is_deadly)]
    command = ("python", str(SCRIPT), str(file), str(workers), *flags)
    with LocalJob(folder / file.stem, command, data=data, feed=feed) as job:
        job.succeeds()
        record = job.training()
        (path,) = job.base_dir(job.leader).rglob("bad_samples.csv")
    with path.open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert record.bad_samples == len(rows) == 2 * (len(BAD) + 2 * is_deadly)
    return json.loads(file.read_text()), rows


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
    ],
)
def test_batches_and_bad_samples_do_not_depend_on_who_makes_them(
    tmp_path, alone, on_error, workers, data, kills
):
    batches, rows = run(tmp_path, on_error, workers=workers, data=data, kills=kills)
    assert rows == alone[on_error][1]
    assert batches == alone[on_error][0]


def test_each_bad_sample_is_listed_once_an_epoch(alone):
    batches, rows = alone["skip"]
    for epoch in "01":
        bad = sorted(int(row["index"]) for row in rows if row["epoch"] == epoch)
        assert bad == sorted(BAD)
    assert sum(len(batch) for batch in batches) == 2 * (NUM_SAMPLES - len(BAD))
    whole, replaced = alone["replace"]
    assert sum(len(batch) for batch in whole) == 2 * NUM_SAMPLES
    assert all(int(row["replaced_by"]) not in BAD for row in replaced)
