"""`stoker.remote` gives a trainer datasets that only the data hosts can build."""

import pytest

from support.cluster import Cluster

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# The trainer cannot import it.
ONLY_THERE = """\
import os, pathlib
from torch.utils.data import Dataset, IterableDataset, get_worker_info

def note():
    with pathlib.Path(__file__).with_name("built").open("a") as file:
        file.write(f"{os.getpid()}\\n")

class Numbers(Dataset):
    def __init__(self, count):
        note()
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        held = get_worker_info().dataset
        assert self is (held.dataset.build() if hasattr(held, "dataset") else held)
        return index

class Stream(IterableDataset):
    def __init__(self, count):
        note()
        self.count = count
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.count, info.num_workers))

class Sized(Stream):
    def __len__(self):
        return self.count

def numbers(count):
    return Numbers(count)

def stream(count):
    return Stream(count)

def sized(count):
    return Sized(count)

def broken():
    raise LookupError("the archive is empty")
"""


def test_length_and_kind_come_from_a_data_host_and_the_trainer_builds_nothing(tmp_path):
    (tmp_path / "only_there.py").write_text(ONLY_THERE)
    with Cluster(agents=1, late=True) as cluster:
        # The trainer is there first, and waits.
        trainer = cluster.train(script="remote_script.py")
        trainer.until("pid")
        cluster.start_agent(0, folder=str(tmp_path))
        lines = trainer.finish()
    start, facts, *epochs, split, kind, sized, stream, no_length, broken, missing = lines
    assert start["can_import"] is False
    assert str(start["pid"]) not in (tmp_path / "built").read_text().split()
    assert (facts["length"], facts["batches"]) == (10, 3)
    # The order is the sampler's, which draws in the trainer.
    assert [sorted(line["ids"]) for line in epochs] == [list(range(10))] * 2
    assert epochs[0]["ids"] != epochs[1]["ids"]
    assert sorted(split["ids"]) == list(range(10))
    assert kind["is_iterable"] is True
    assert (sized["batches"], sized["ids"]) == (2, list(range(6)))
    assert stream["ids"] == [0, 1, 2]
    assert "stoker.remote('only_there:stream') has no len()" in no_length["no_length"]
    assert "LookupError" in broken["kinds"]
    assert "the archive is empty" in broken["text"]
    assert "in broken" in broken["text"]
    assert "UsageError" in missing["kinds"]
    assert "only_there:missing cannot be imported" in missing["text"]
