"""Saves and loads the state of a stream of a library in mid-epoch. Argument: one JSON object.

Prints a line per batch. `folder` holds the data, which the first run writes; with `save`, a file,
it saves there before batch `save_at`, and ends; with `load` it begins there. With `sets_epoch` it
is told each epoch before that begins; with `persists` its workers outlive it.
"""

import hashlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

import stoker

COUNT = 60


def rows() -> list[dict[str, int]]:
    return [{"id": index, "value": index * index} for index in range(COUNT)]


def datasets_stream(folder: Path) -> object:
    """Returns a stream of Hugging Face, shuffled with a buffer, of several files."""
    import datasets

    data = datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=6)
    return data.shuffle(seed=3, buffer_size=8).with_format("torch")


def datasets_in_order(folder: Path) -> object:
    """Returns a stream of Hugging Face without a shuffle buffer, which its state forgets."""
    import datasets

    data = datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=6)
    return data.with_format("torch")


def webdataset_stream(folder: Path) -> object:
    import webdataset

    if not (folder / "0.tar").exists():
        for number in range(4):
            with webdataset.TarWriter(str(folder / f"{number}.tar")) as tar:
                for row in rows()[number::4]:
                    tar.write({"__key__": f"{row['id']:04}", "id": str(row["id"]).encode()})
    urls = [str(folder / f"{number}.tar") for number in range(4)]
    data = webdataset.WebDataset(
        urls, shardshuffle=False, nodesplitter=webdataset.split_by_node, empty_check=False
    )
    return data.shuffle(10, initial=10, rng=random.Random(5)).map(id_of)


def id_of(sample: dict[str, bytes]) -> dict[str, object]:
    return {"id": int(sample["id"]), "noise": random.random()}


def litdata_stream(folder: Path) -> object:
    import litdata

    out = folder / "litdata"
    if not out.exists():
        from litdata.streaming.writer import BinaryWriter

        out.mkdir()
        writer = BinaryWriter(str(out), chunk_size=7)
        for row in rows():
            writer[row["id"]] = row
        writer.done()
        writer.merge()
    return litdata.StreamingDataset(str(out), shuffle=True, seed=6)


def torchdata_stream(folder: Path) -> object:
    return Nodes()


class Nodes(IterableDataset[dict[str, object]]):
    """A pipeline of torchdata's nodes as a dataset."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        from torchdata.nodes import IterableWrapper, Loader, Mapper

        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from Loader(Mapper(IterableWrapper(rows()[first::step]), noised))


def noised(row: dict[str, int]) -> dict[str, object]:
    return {**row, "noise": np.random.rand()}


def grain_stream(folder: Path) -> object:
    return Grains()


class Grains(IterableDataset[dict[str, object]]):
    """Grain's iterator as a dataset, with the state that it has."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        import grain

        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        data = grain.MapDataset.source(rows()[first::step]).shuffle(seed=7)
        yield from data.to_iter_dataset()


def tfrecord_stream(folder: Path) -> object:
    """Returns a stream of one file of TensorFlow's records, which does not divide itself."""
    from tfrecord.torch.dataset import TFRecordDataset
    from tfrecord.writer import TFRecordWriter

    path = folder / "rows.tfrecord"
    if not path.exists():
        writer = TFRecordWriter(str(path))
        for row in rows():
            writer.write({key: (value, "int") for key, value in row.items()})
        writer.close()
    return Divided(TFRecordDataset(str(path), None, {"id": "int", "value": "int"}))


class Divided(IterableDataset[dict[str, object]]):
    """Every n-th sample of a dataset for each worker."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, object]]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for row in itertools.islice(self.data, first, None, step):
            yield {"id": int(row["id"][0]), "noise": random.random()}


STREAMS = {
    "datasets in order": datasets_in_order,
    "tfrecord": tfrecord_stream,
    "datasets": datasets_stream,
    "grain": grain_stream,
    "litdata": litdata_stream,
    "torchdata": torchdata_stream,
    "webdataset": webdataset_stream,
}


def digest(batch: dict[str, object]) -> str:
    whole = hashlib.sha256()
    for key, part in sorted(batch.items()):
        content = part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
        whole.update(key.encode() + content)
    return whole.hexdigest()[:16]


def save_and_end(loader: Any, given: dict[str, Any]) -> None:
    torch.save(loader.state_dict(), given["save"])
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    given: dict[str, Any] = {"save": None, "load": None, "save_at": None}
    given |= {"sets_epoch": False, "persists": False}
    given |= json.loads(sys.argv[1])
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    dataset: Any = STREAMS[given["library"]](Path(given["folder"]))
    loader: Any = stoker.DataLoader(
        dataset,
        batch_size=4,
        num_workers=given["num_workers"],
        persistent_workers=given["persists"],
    )
    first_epoch = first = 0
    if given["load"]:
        state = torch.load(given["load"], weights_only=True)
        first_epoch, first = state["epoch"], state["num_yielded"]
        loader.load_state_dict(state)
    for epoch in range(first_epoch, 2):
        if given["sets_epoch"]:
            dataset.set_epoch(epoch)
        iterator = iter(loader)
        for batch in range(first, COUNT):
            if (epoch, batch) == (0, given["save_at"]):
                save_and_end(loader, given)
            value = next(iterator, None)
            if value is None:
                break
            facts = {"epoch": epoch, "batch": batch, "hash": digest(value)}
            print(json.dumps(facts | {"ids": value["id"].tolist()}), flush=True)
        first = 0


if __name__ == "__main__":
    main()
