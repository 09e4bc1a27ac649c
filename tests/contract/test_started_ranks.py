"""Ranks that a script starts itself have their own bad samples, timelines and seeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.environment import ProcessSettings
from stoker.feed.bad_samples import join_files
from stoker.feed.started_ranks import with_rank
from stoker.feed.timeline import timeline_ranks
from stoker.records import FeedSettings
from support.bad_sample_rows import rows_of

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import Dataset, DistributedSampler

from stoker import DataLoader


class Damaged(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index in (2, 3, 9):
            raise ValueError(f"{index}.jpg is truncated")
        return torch.rand(4)


def train(rank, store):
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sampler = DistributedSampler(Damaged(), 2, rank, shuffle=False)
    for _ in DataLoader(Damaged(), 4, sampler=sampler, num_workers=0):
        pass


if __name__ == "__main__":
    mp.spawn(train, args=tuple(sys.argv[1:]), nprocs=2)
"""


@pytest.mark.parametrize("has_group", [False, True])
def test_ranks_of_spawn_do_not_overwrite_each_other(tmp_path, has_group):
    output = tmp_path / "output"
    output.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = ProcessSettings(feed=FeedSettings(on_error="skip", max_errors=9), output=output)
    store = str(tmp_path / "store") if has_group else ""
    subprocess.run(
        [sys.executable, str(script), store],
        env={**os.environ, **settings.to_environ()},
        check=True,
        timeout=120,
    )
    assert timeline_ranks(output) == [0, 1]
    assert join_files(output) == 3
    assert rows_of(output, "rank", "index") == [("0", "2"), ("1", "3"), ("1", "9")]
    assert usage_files(output) == ["usage-rank0.json", "usage-rank1.json"]


def usage_files(output: Path) -> list[str]:
    return sorted(file.name for file in output.glob("usage-rank*.json"))


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({}, 0),
        # torchrun's.
        ({"rank": 3, "local_rank": 1, "world_size": 4}, 3),
        ({"rank": 0, "local_rank": 0, "world_size": 4}, 0),
        # Lightning's child.
        ({"local_rank": 1, "world_size": 2}, 1),
    ],
)
def test_the_rank_is_that_of_the_variables_where_there_are_any(given, rank):
    settings = ProcessSettings(**given)
    assert with_rank(settings) == ProcessSettings(**{**given, "rank": rank})
