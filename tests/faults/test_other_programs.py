"""Other programs that come while a run trains are in its record, and its times do not count."""

import contextlib
import os
import subprocess
import sys

import pytest

from stoker.record_words import training_words
from stoker.records import FeedSettings
from stoker.records.training import BUSY
from support.local_job import LocalJob

pytestmark = pytest.mark.fault

SCRIPT = """
import os, pathlib, time
import torch
from torch.utils.data import DataLoader, TensorDataset
folder = pathlib.Path(os.environ["STOKER_TEST_DIR"])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
def train(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for (batch,) in DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=4):
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
train(QUIET)
(folder / "half").write_text("half")
while not (folder / "go").exists():
    time.sleep(0.01)
train(8)
"""


@contextlib.contextmanager
def programs_on_all_cores():
    """Programs that want three times what a core has."""
    burning = (sys.executable, "-c", "while True: pass")
    burners = [subprocess.Popen(burning) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


# Also where they come for the second half only.
@pytest.mark.parametrize(
    ("quiet", "data"), [(0, 0), (8, 1), pytest.param(8, 0, marks=pytest.mark.soak)]
)
def test_other_programs_that_come_while_it_trains_are_seen(tmp_path, quiet, data):
    script = SCRIPT.replace("QUIET", str(quiet))
    settings = {"feed": FeedSettings(), "replace_dataloader": "auto", "strategy": "none"}
    with LocalJob(tmp_path, script, data=data, **settings) as job:
        job.wait_for_file("half")
        with programs_on_all_cores():
            (tmp_path / "go").touch()
            job.succeeds()
        training = job.training()
    found = {each.host: each for each in training.others}
    assert job.leader in found
    assert len(found) == 1 + data
    if "not comparable" not in " ".join(event.what for event in training.events):
        assert "other programs were using" in training.busy
        assert BUSY in training_words(training)
