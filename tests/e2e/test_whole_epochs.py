"""A real run of short epochs: its record adds up to the time that the script itself sees."""

import json
from statistics import median

import pytest

from stoker.feed.step_times import read_timelines, whole_run
from stoker.feed.timeline import block_means, steady
from stoker.record_words import training_words
from stoker.records import Training, read_json
from support.command import stoker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EPOCHS, STEPS = 5, 8
# A worker makes a batch in 0.12 s; validation and a checkpoint follow each epoch. The last step of
# the run is longer, as it may be on a busy machine.
SCRIPT = f"""
import json, sys, time
import torch
from stoker import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return {STEPS} * 4

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.zeros(8)

def main():
    train = DataLoader(Slow(), batch_size=4, num_workers=4, persistent_workers=True)
    check = DataLoader(torch.utils.data.TensorDataset(torch.zeros(16, 2)), batch_size=4)
    times, waited, asked = [], 0.0, time.monotonic()
    for epoch in range({EPOCHS}):
        asked = time.monotonic()
        for batch in train:
            got = time.monotonic()
            if len(times) > 1:
                waited += got - asked
            time.sleep(0.02)
            if len(times) == 11:
                # Validation in mid-epoch.
                for _ in check:
                    time.sleep(0.05)
            if len(times) == {EPOCHS * STEPS - 1}:
                time.sleep(0.3)
            asked = time.monotonic()
            times.append(asked)
        for _ in check:
            time.sleep(0.02)
        time.sleep(0.2)
    seen = {{"seconds": times[-1] - times[1], "steps": len(times) - 2, "waited": waited}}
    with open(sys.argv[1], "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    main()
"""


def trained(folder, *groups):
    """Runs the script; returns what it saw, the run's record, and its folder."""
    (folder / "train.py").write_text(SCRIPT)
    seen = folder / "seen.json"
    command = ("train", *groups, "--yes", "--", "python", "train.py", str(seen))
    done = stoker(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return json.loads(seen.read_text()), read_json(run / "training.json", Training), run


def test_record_adds_up_to_the_time_that_the_script_sees(tmp_path):
    groups = ("--group", "dnn=local.c1:1:1", "--group", "data=local.c1:1:3")
    seen, training, run = trained(tmp_path, *groups)
    measured = training.measured
    times = measured.epochs
    assert measured.steps == EPOCHS * STEPS == seen["steps"] + 2
    # The same clock, read a few lines apart: equal but for what runs between them.
    (rows,) = read_timelines(next(run.rglob("timeline-rank0.csv")).parent).values()
    whole = whole_run(rows)
    assert whole.seconds == pytest.approx(seen["seconds"], rel=0.02, abs=0.05)
    waited = sum(row.wait_seconds for row in rows[2:])
    assert waited == pytest.approx(seen["waited"], rel=0.05, abs=0.05)
    # The record's parts give the whole again: four pauses, all steps, and the end of the last one,
    # which is longer: what is beyond a usual one's follows its epoch.
    assert times == whole.times
    last = rows[-1].compute_seconds
    assert last >= 0.02 + 0.3
    each = sum(pause.seconds for pause in times.pauses)
    pauses = (EPOCHS - 1) * each
    inside = measured.whole_step_seconds - each / times.steps
    usual = median(block_means(steady(rows), lambda row: row.compute_seconds))
    end = max(0.0, last - usual)
    assert seen["steps"] * inside + pauses == pytest.approx(whole.seconds - end)
    assert (times.steps, times.start.count, times.between.count) == (STEPS, 4, 4)
    assert times.start.seconds > 0
    # Sleeps are never shorter.
    assert times.between.count * times.between.seconds >= (EPOCHS - 1) * (0.2 + 4 * 0.02)
    assert inside >= 0.02 + 4 * 0.05 / seen["steps"]
    assert "over whole epochs" in training_words(training)
    assert measured.samples_per_second == pytest.approx(4 / measured.whole_step_seconds)
