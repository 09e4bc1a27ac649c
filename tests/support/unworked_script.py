"""Reads loaders of torch's class without workers, fed as `replace_dataloader` has it.

Prints for each a JSON line: kind, the samples, and what `get_worker_info()` says in the dataset.
"""

import json

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import stoker.feed.replace


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        info = get_worker_info()
        return index, -1 if info is None else info.num_workers


class Holding(Numbers):
    def __init__(self):
        self.file = open(__file__)  # noqa: SIM115


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(12):
            yield index, -1


stoker.feed.replace.install(DataLoader)
for dataset in (Numbers(), Holding(), Stream()):
    samples, workers = [], set()
    for indices, infos in DataLoader(dataset, batch_size=3):
        samples += indices.tolist()
        workers |= {*infos.tolist()}
    print(json.dumps({"kind": type(dataset).__name__, "samples": samples, "workers": [*workers]}))
