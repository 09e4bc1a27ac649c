"""A training script over iterable datasets. Argument: one JSON object, see `DEFAULTS`.

Prints one JSON line per batch: loader, epoch, batch, hash over its bytes, ids. With `pause_at`, it
prints {"pause": n} before batch n of epoch `pause_epoch` is asked for and goes on after a line on
stdin; with `pause_before`, before that epoch begins. `left` has the epochs that are left early, and
after how many batches. With `until`, a file, it takes up epochs until that is there. With `save`, a
file, it saves its loader's state there before batch `save_at` of epoch `save_epoch`, or before
epoch `save_before`, and ends; with `load` it begins from such a file. With `group`, a file, ranks
form a process group.
"""

import hashlib
import json
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

import stoker

# Numbers of samples or batches, a file, a length: none, unless they are given.
_PLACES = ("pause_at", "pause_before", "break_at", "raise_at", "die_at", "until", "length")
_FILES = ("save", "load", "save_at", "group")
DEFAULTS = dict.fromkeys((*_PLACES, *_FILES)) | {
    "kind": "sharded",
    "samples": 40,
    "epochs": 2,
    "num_workers": 2,
    "sample_seconds": 0.0,
    "pause_epoch": 0,
    "save_epoch": 0,
    "left": {},
    "loaders": 1,
    "rank": 0,
    "world": 1,
    "loader": {"batch_size": 4},
    **dict.fromkeys(("torch", "ask_length"), False),
}


class Stream(IterableDataset):
    def __init__(self, given: dict, salt: int) -> None:
        self.given = given
        self.salt = salt
        self.rng: np.random.Generator | None = None

    def ids(self) -> list[int]:
        given, info = self.given, get_worker_info()
        mine = list(range(given["rank"], given["samples"], given["world"]))
        if given["kind"] == "by group":
            assert torch.distributed.is_initialized()
            assert torch.distributed.get_backend() == "gloo"
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            mine = list(range(rank, given["samples"], world))
        if info is None:
            return mine
        assert info.dataset is self
        if given["kind"] == "unequal":
            return mine[: 5 * (info.id + 1)]
        if given["kind"] == "first empty" and info.id == 0:
            return []
        return mine[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[object]:
        given = self.given
        if given["kind"] == "no iterator":
            raise OSError("the archive is not there")
        for index in self.ids():
            if given["sample_seconds"]:
                time.sleep(given["sample_seconds"])
            if index == given["raise_at"]:
                raise LookupError(f"sample {index} is broken")
            if given["die_at"] == index:
                os._exit(7)
            noise = random.random()
            info = get_worker_info()
            if given["kind"] == "holding":
                if self.rng is None:
                    self.rng = np.random.default_rng(info.seed)
                noise = self.rng.random()
            drawn = {"id": index, "python": noise, "numpy": np.random.rand(2)}
            drawn["image"] = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
            yield {**drawn, "seed": -1 if info is None else info.seed}


class Stateful(Stream):
    """A dataset with a state: how many samples it gave."""

    place = 0

    def __iter__(self) -> Iterator[object]:
        ids = self.ids()
        for place in range(self.place, len(ids)):
            time.sleep(self.given["sample_seconds"])
            self.place = place + 1
            yield {"id": ids[place], "python": random.random()}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Resilient(Stream):
    def __iter__(self) -> "Resilient":
        self.left = iter(self.ids())
        return self

    def __next__(self) -> dict[str, object]:
        index = next(self.left)
        if index == self.given["raise_at"]:
            raise LookupError(f"sample {index} is broken")
        return {"id": index}


class Sized(Stream):
    def __len__(self) -> int:
        return self.given["length"]


def dataset_of(given: dict, number: int) -> object:
    if given["kind"] == "stateful":
        return Stateful(given, number)
    if given["kind"] == "resilient":
        return Resilient(given, number)
    return (Stream if given["length"] is None else Sized)(given, number)


def digest(value: object) -> str:
    whole = hashlib.sha256()
    for key, part in value.items():
        whole.update(key.encode())
        if isinstance(part, torch.Tensor):
            part = part.numpy()
        if isinstance(part, np.ndarray):
            whole.update(str(part.dtype).encode() + str(part.shape).encode() + part.tobytes())
        else:
            whole.update(pickle.dumps(part))
    return whole.hexdigest()[:16]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    seed = 7 + given["rank"]
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    if given["group"] is not None:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{given['group']}",
            rank=given["rank"],
            world_size=given["world"],
        )
    make = torch.utils.data.DataLoader if given["torch"] else stoker.DataLoader
    loaders: list = [
        make(
            dataset_of(given, number),
            num_workers=given["num_workers"],
            **given["loader"],
        )
        for number in range(given["loaders"])
    ]
    first_epoch = 0
    if given["load"] is not None:
        load(loaders[0], given)
        state = loaders[0].state_dict()
        first_epoch, given["first"] = state["epoch"], state["num_yielded"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(first_epoch, given["epochs"]):
            if epoch == given["pause_before"]:
                say(pause=epoch)
                sys.stdin.readline()
            run_epoch(given, epoch, loaders)
            if given["until"] is not None and os.path.exists(given["until"]):
                break
    texts = [str(warning.message) for warning in caught]
    if text := next((text for text in texts if "IterableDataset" in text), ""):
        say(warning=text[text.index("was reported") :])
    say(state=digest({"state": torch.get_rng_state()}))


def load(loader: "stoker.DataLoader[object]", given: dict) -> None:
    loader.load_state_dict(torch.load(given["load"], weights_only=True))


def run_epoch(given: dict, epoch: int, loaders: list) -> None:
    if given["ask_length"]:
        say(lengths=[len(loader) for loader in loaders])
    iterators = [iter(loader) for loader in loaders]
    batch = given.pop("first", 0)
    left_at = given["left"].get(str(epoch))
    while any(iterator is not None for iterator in iterators):
        for number, iterator in enumerate(iterators):
            if iterator is None:
                continue
            facts = {"loader": number, "epoch": epoch, "batch": batch}
            if (batch, epoch, number) == (given["pause_at"], given["pause_epoch"], 0):
                say(pause=batch)
                sys.stdin.readline()
            if batch == left_at:
                return
            if (batch, epoch) == (given["save_at"], given["save_epoch"]):
                torch.save(loaders[0].state_dict(), given["save"])
                raise SystemExit
            try:
                value = next(iterator)
            except StopIteration:
                iterators[number] = None
            except Exception as err:
                has_trace = "in __iter__" in str(err) or "in __next__" in str(err)
                say(**facts, error=type(err).__name__, text=str(err)[-80:], trace=has_trace)
                if not isinstance(err, LookupError | OSError):
                    raise
                if isinstance(err, OSError):
                    return
            else:
                ids = value["id"]
                ids = ids.tolist() if isinstance(ids, torch.Tensor) else [ids]
                say(**facts, hash=digest(value), ids=ids)
        batch += 1
        if batch == given["break_at"]:
            return


if __name__ == "__main__":
    main()
