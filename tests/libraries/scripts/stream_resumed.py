"""Saves and loads the state of a stream of a library in mid-epoch. Argument: one JSON object.

Prints a line per batch. `folder` holds the data, which the first run writes; with `save`, a file,
it saves there before batch `save_at` of epoch `save_epoch`, and ends; with `load` it begins there.
With `save_before` it saves before that epoch. With `asks_at_once` a dataset is asked for its own
state after each batch; with `sets_epoch` it is told each epoch before that begins; with `persists`
its workers outlive it. `left` has the epochs that are left early, and after how many batches. With
`pause_at` it prints a line before that batch of the last epoch, and goes on after one on stdin.
With `torch` the loader is torch's. With `world` it is the part of rank `rank`, and `load` has the
files of all ranks that saved it.
"""

import functools
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
from stoker.feed import stream_progress
from stoker.feed.workers import own_states

COUNT = 60


def rows() -> list[dict[str, int]]:
    return [{"id": index, "value": index * index} for index in range(COUNT)]


def datasets_stream(folder: Path) -> object:
    """Returns a stream of Hugging Face, shuffled with a buffer, of several files."""
    import datasets

    data = datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=6)
    return data.shuffle(seed=3, buffer_size=8).with_format("torch")


def datasets_drawing(folder: Path) -> object:
    """Returns a stream of Hugging Face that draws random numbers, for each sample another many."""
    data: Any = datasets_stream(folder)
    return data.map(drawn)


def drawn(row: dict[str, int]) -> dict[str, object]:
    noise = sum(random.random() for _ in range(1 + int(row["id"]) % 3))
    return {**row, "noise": noise}


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


def streaming_stream(folder: Path) -> object:
    import streaming

    if not (folder / "mds").exists():
        columns = {"id": "int", "value": "int"}
        with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
            for row in rows():
                writer.write(row)
    return streaming.StreamingDataset(
        local=str(folder / "mds"), shuffle=True, shuffle_seed=4, batch_size=4
    )


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


def squared(row: dict[str, int]) -> dict[str, object]:
    return {**row, "square": row["id"] ** 2}


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


class Within(IterableDataset[dict[str, object]]):
    """The script's own class around a stream, which it passes epochs to."""

    def __init__(self, data: Any) -> None:
        self.parts = {"data": data}

    def set_epoch(self, epoch: int) -> None:
        self.parts["data"].set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, object]]:
        yield from self.parts["data"]


# With states of their own, which lead to where they were taken.


def datasets_in_order(folder: Path) -> object:
    """Returns a stream of Hugging Face without a shuffle buffer, which its state forgets."""
    import datasets

    data = datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=6)
    return data.with_format("torch")


class GrainItself(IterableDataset[dict[str, object]]):
    """A dataset whose iterator is Grain's."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        import grain

        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        data = grain.MapDataset.source(rows()[first::step]).shuffle(seed=7)
        iterator: Iterator[dict[str, object]] = iter(data.to_iter_dataset())
        return iterator


class NodesWithState(IterableDataset[dict[str, object]]):
    """A pipeline of torchdata's nodes, with its loader's state.

    It draws nothing: the loader looks one sample ahead, whose random numbers a state leaves out.
    """

    def __init__(self) -> None:
        self.loader: Any = None

    def begun(self) -> Any:
        from torchdata.nodes import IterableWrapper, Loader, Mapper

        if self.loader is None:
            info = torch.utils.data.get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            self.loader = Loader(Mapper(IterableWrapper(rows()[first::step]), squared))
        return self.loader

    def __iter__(self) -> Iterator[dict[str, object]]:
        iterator: Iterator[dict[str, object]] = iter(self.begun())
        return iterator

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = self.begun().state_dict()
        return state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.begun().load_state_dict(state)


STREAMS = {
    "datasets in order": datasets_in_order,
    "grain itself": lambda folder: GrainItself(),
    "torchdata with state": lambda folder: NodesWithState(),
    "tfrecord": tfrecord_stream,
    "datasets": datasets_stream,
    "datasets drawing": datasets_drawing,
    "datasets within": lambda folder: Within(datasets_drawing(folder)),
    "grain": grain_stream,
    "litdata": litdata_stream,
    "streaming": streaming_stream,
    "torchdata": torchdata_stream,
    "webdataset": webdataset_stream,
}


def digest(batch: dict[str, object]) -> str:
    whole = hashlib.sha256()
    for key, part in sorted(batch.items()):
        content = part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
        whole.update(key.encode() + content)
    return whole.hexdigest()[:16]


def dataset_of(given: dict[str, Any], rank: int, world_size: int) -> Any:
    """Returns a stream, or a rank's part of one of Hugging Face."""
    dataset = STREAMS[given["library"]](Path(given["folder"]))
    if world_size == 1:
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank, world_size)


def save_and_end(loader: Any, given: dict[str, Any]) -> None:
    torch.save(loader.state_dict(), given["save"])
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    given: dict[str, Any] = {"save": None, "load": None, "save_at": None, "asks_at_once": False}
    given |= {"save_epoch": 0, "sets_epoch": False, "persists": False, "rank": 0, "world": 1}
    given |= {"epochs": 2, "left": {}, "save_before": None, "pause_at": None, "torch": False}
    given |= json.loads(sys.argv[1])
    if given["asks_at_once"]:
        own_states.MIN_SECONDS = own_states._SHARE = 0.0
        stream_progress.MIN_COMPARED = 1
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    dataset: Any = dataset_of(given, given["rank"], given["world"])
    make: Any = torch.utils.data.DataLoader if given["torch"] else stoker.DataLoader
    loader = make(
        dataset,
        batch_size=4,
        num_workers=given["num_workers"],
        persistent_workers=given["persists"],
    )
    first_epoch = first = 0
    if isinstance(given["load"], list):
        states = [torch.load(path, weights_only=True) for path in given["load"]]
        loader.load_state_dict(states, dataset_of=functools.partial(dataset_of, given))
    elif given["load"]:
        state = torch.load(given["load"], weights_only=True)
        first_epoch, first = state["epoch"], state["num_yielded"]
        loader.load_state_dict(state)
    for epoch in range(first_epoch, given["epochs"]):
        if epoch == given["save_before"]:
            save_and_end(loader, given)
        if given["sets_epoch"]:
            dataset.set_epoch(epoch)
        iterator = iter(loader)
        for batch in range(first, given["left"].get(str(epoch), COUNT)):
            if (epoch, batch) == (given["save_epoch"], given["save_at"]):
                save_and_end(loader, given)
            if (epoch, batch) == (given["epochs"] - 1, given["pause_at"]):
                print(json.dumps({"pause": batch}), flush=True)
                sys.stdin.readline()
            value = next(iterator, None)
            if value is None:
                break
            facts = {"epoch": epoch, "batch": batch, "hash": digest(value)}
            print(json.dumps(facts | {"ids": value["id"].tolist()}), flush=True)
        first = 0


if __name__ == "__main__":
    main()
