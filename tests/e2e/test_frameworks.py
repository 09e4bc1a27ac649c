"""Lightning and Accelerate train under the launcher, and data hosts feed them."""

import csv
import json
from pathlib import Path

import pytest

from support.local_job import LocalJob

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "spoken_digits" / "train.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ACCELERATED = """
import json, os, pathlib
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.tensor([float(index)]), os.environ["STOKER_HOST"]

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen, hosts = [], set()
for epoch in range(2):
    for numbers, names in loader:
        loss = model(numbers).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        seen.append(numbers.flatten().tolist())
        hosts.update(names)
rank = os.environ.get("RANK", "0")
place = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / f"rank-{rank}.json"
found = {"seen": seen, "hosts": sorted(hosts), "world": accelerator.num_processes}
place.write_text(json.dumps({**found, "kind": type(loader).__name__}))
"""


def test_lightning_trains_on_two_ranks_which_data_hosts_feed(tmp_path):
    words = ("--epochs", "1", "--copies", "1", "--batch-size", "24", "--workers", "0")
    command = ("python", str(DIGITS), *words)
    with LocalJob(tmp_path, command, data=1, processes=2) as job:
        end = job.end()
        assert end.status == "succeeded", end.failure or job.log(job.leader)
        training = job.training()
    assert training.strategy == "torchrun"
    assert [host.rank for host in training.hosts] == [0, None]
    joined = {event.host for event in training.events if event.what == "agent joined"}
    assert joined == {training.hosts[1].host}
    assert "agent_ended" in job.log(training.hosts[1].host)
    assert training.data_group_release_seconds is not None
    assert training.data_group_release_seconds < 10
    assert training.metrics["accuracy"] > 0.1
    # 360 recordings, 24 a step over both ranks: Lightning gave each rank its half.
    assert training.measured is not None
    assert training.measured.steps == 15
    with (job.base_dir(job.leader) / "output/data/stoker/feed.csv").open() as file:
        made = [row for row in csv.DictReader(file) if row["kind"] == "host"]
    assert sum(float(row["batches_per_second"]) for row in made) > 0


# A loader like its own, fed: `library_that_wraps` in tests/faults/test_loader_dropin_fed.py.
@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
def test_accelerates_own_loader_is_fed_by_data_hosts_where_it_is_replaced(tmp_path, world):
    with LocalJob(tmp_path, ACCELERATED, data=1, processes=world, replace_dataloader="auto") as job:
        end = job.end()
        assert end.status == "succeeded", end.failure or job.log(job.leader)
        data_hosts = {host.name for host in job.request.hosts if host.group == "data"}
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world)]
    assert [rank["kind"] for rank in ranks] == ["DataLoaderShard"] * world
    assert [rank["world"] for rank in ranks] == [world] * world
    assert {host for rank in ranks for host in rank["hosts"]} & data_hosts
    steps = 12 // world
    for epoch in range(2):
        numbers = [
            number
            for rank in ranks
            for batch in rank["seen"][epoch * steps : (epoch + 1) * steps]
            for number in batch
        ]
        assert sorted(numbers) == list(range(48))
