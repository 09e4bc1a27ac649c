"""Strategies of the dnn group run for real: several hosts, several processes, and data hosts."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.records import FeedSettings, StrategySettings
from support.cluster import Cluster
from support.local_job import LocalJob, resource_config
from support.processes import ran
from support.warm_python import clean_environ, ends_well

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "strategy_script.py"
# Many processes that import torch on two cores: launchers may not be heard for seconds.
PATIENT = FeedSettings(lease_seconds=20)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("processes", "data", "step"), [(1, 1, 14), pytest.param(2, 2, 8, marks=pytest.mark.soak)]
)
def test_ranks_started_again_go_on_from_their_state_with_the_same_batches(
    tmp_path, processes, data, step
):
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks = 2 * processes
    whole.mkdir()
    ends_well(str(SCRIPT), str(whole), str(ranks), timeout=120)
    assert len(read(whole, "losses")) == 48 // ranks
    run.mkdir()
    # The first rank of the second host dies before that step.
    command = ("python", str(SCRIPT), str(run), str(processes), str(step))
    job = LocalJob(run, command, dnn=2, data=data, processes=processes, feed=PATIENT)
    strategy = StrategySettings(max_restarts=2)
    job.spec = replace(job.spec, settings=replace(job.spec.settings, strategy=strategy))
    with job:
        job.succeeds()
        record = job.training()
    # The rank died in the second epoch, and all were started again on both hosts. Until then it is
    # the curve of two hosts and data hosts, as they are without a death.
    assert "exitcode: -9" in job.log(job.request.hosts[1].name)
    assert job.log(job.leader).count("is done") == processes
    for rank in range(ranks):
        assert read(run, f"rank-{rank}") == read(whole, f"rank-{rank}")
    assert read(run, "losses") == pytest.approx(read(whole, "losses"), rel=1e-6)
    assert record.strategy == "torchrun"
    assert [host.rank for host in record.hosts] == [0, processes, *[None] * data]
    assert {e.host for e in record.events if e.what == "agent joined"} == {
        f"algo-{number}" for number in range(1, data + 1)
    }


SMDDP = """
import json, os
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group(timeout=__import__("datetime").timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
told = [dist.get_backend(), os.environ["STOKER_BACKEND"], total.item()]
Path(os.environ["STOKER_TEST_DIR"], "told").write_text(json.dumps(told))
dist.destroy_process_group()
"""
# Stands for SageMaker's library: importing it registers the backend, which is gloo below.
LIBRARY = """
import torch.distributed as dist
def make(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("smddp", make, devices=["cpu", "cuda"])
"""


# How a backend to fall back to is chosen: tests/contract/test_strategy_programs.py.
@pytest.mark.usefixtures("forked")
def test_the_script_gets_the_backend_of_smddp(tmp_path):
    base = tmp_path / "ml"
    (base / "input" / "config").mkdir(parents=True)
    config = json.loads(resource_config("algo-1", {"gpu": ["algo-1"]}))
    config["instance_groups"][0]["instance_type"] = "ml.p4d.24xlarge"
    (base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))
    library = tmp_path / "lib" / "smdistributed" / "dataparallel" / "torch"
    library.mkdir(parents=True)
    (library / "torch_smddp.py").write_text(LIBRARY)
    environ = {
        **clean_environ(),
        "STOKER_BASE_DIR": str(base),
        "STOKER_STRATEGY": '{"name": "smddp"}',
        "STOKER_PROCESSES_PER_HOST": "1",
        "STOKER_TEST_DIR": str(tmp_path),
        "PYTHONPATH": f"{tmp_path / 'lib'}:{os.environ.get('PYTHONPATH', '')}",
    }
    words = [sys.executable, "-P", "-m", "stoker.launch", "--", "python", "-c", SMDDP]
    done = ran(words, env=environ, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "told").read_text()) == ["smddp", "smddp", 1]
    record = json.loads((base / "output/data/stoker/training.json").read_text())
    assert record["strategy"] == "smddp"


REPLICAS = """
import hashlib, json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler
from stoker import DataLoader

class Noisy(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.randn(4), index

folder, rank = Path(os.environ["STOKER_TEST_DIR"]), int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
replica, part = divmod(rank, 2)
inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
across = [dist.new_group([0, 2]), dist.new_group([1, 3])][part]
sampler = DistributedSampler(Noisy(), 2, replica, shuffle=False)
found = {}
def options():
    return {"batch_size": 3, "sampler": sampler, "num_workers": 0,
            "generator": torch.Generator().manual_seed(7)}
# By two lines: later loaders of one line are made here while it is not known what they cost.
loaders = {
    "both": DataLoader(Noisy(), **options()),
    "first": DataLoader(Noisy(), **options()),
}
for who, batches in loaders.items():
    loads = who == "both" or part == 0
    source = iter(batches) if loads else None
    weight = torch.full((4,), float(part + 1), requires_grad=True)
    digests, ids = [], []
    for _ in range(len(batches)):
        numbers, wanted = next(source) if loads else (torch.empty(3, 4), torch.empty(3).long())
        if who == "first":
            dist.broadcast(numbers, src=2 * replica, group=inside)
            dist.broadcast(wanted, src=2 * replica, group=inside)
        # Each rank has half of the model: its outputs are summed inside the replica.
        output = numbers @ weight.detach()
        dist.all_reduce(output, group=inside)
        gradient = numbers.sum(0)
        dist.all_reduce(gradient, group=across)
        digests.append(hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
        ids += wanted.tolist()
    found[who] = [ids, digests]
(folder / f"rank-{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    script = folder / "script.py"
    script.write_text(REPLICAS)
    environ = {"STOKER_TEST_DIR": str(folder)}
    # As the shape with model_parallel_size=2, see tests/unit/test_launch_strategies.py.
    with Cluster(feed={"replicas": ((0, 1), (2, 3))}) as cluster:
        ranks = [
            cluster.train(rank=rank, world=4, env=environ, script=str(script)) for rank in range(4)
        ]
        assert [rank.end() for rank in ranks] == [0] * 4, [rank.errors for rank in ranks]
        log = cluster.log_of(0).read_text()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)], log


@pytest.mark.parametrize("who", ["both", "first"])
def test_ranks_of_a_replica_share_batches_or_leave_loading_to_one_of_them(replicas, who):
    ranks, log = replicas
    found = [each[who] for each in ranks]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(found[0][0] + found[2][0]) == list(range(24))
    assert not set(found[0][1]) & set(found[2][1]), "replicas have random states of their own"
    loader = ("both", "first").index(who)
    opened = {rank for rank in range(4) if f"session=r{rank}-l{loader}" in log}
    assert opened == ({0, 1, 2, 3} if who == "both" else {0, 2})
