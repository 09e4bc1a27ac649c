"""Trains as tests of the feed ask. Argument: one JSON object, see `DEFAULTS`.

Prints one JSON line a batch: loader, epoch, batch, hash over the bytes of every tensor, ids.
With `pause_at`, it prints {"pause": n} before batch n is asked for (-1: before the first iter())
and resumes after a line on stdin; with `gates`, a folder, after a file n is there; in the epochs of
`pause_epochs`. With `until`, a file, it takes up epochs until that is there.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from stoker import DataLoader

# Numbers of samples or batches, and files: none, unless they are given.
_PLACES = ("raise_at", "kill_at", "hang_at", "pause_at")
DEFAULTS = dict.fromkeys((*_PLACES, "gates", "until")) | {
    "samples": 48,
    "batch_size": 4,
    "epochs": 2,
    "pause_epochs": [0],
    "num_workers": 0,
    "sample_seconds": 0.0,
    "heavy": [],
    "heavy_seconds": 0.0,
    "loaders": 1,
    "shape": [3, 40, 40],
    "rank": 0,
    "world": 1,
    "loader": {},
    **dict.fromkeys(("lock", "unreadable", "objects", "is_torchs"), False),
}


class Unreadable(random.Random):
    """Can be pickled, and not read back: it is made again without its argument."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)


class Images(torch.utils.data.Dataset):
    def __init__(self, given: dict, salt: int) -> None:
        # The same in all ranks: data hosts then hold it once.
        self.given = {key: value for key, value in given.items() if key != "rank"}
        self.salt = salt

    def __len__(self) -> int:
        return self.given["samples"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, object]]:
        given = self.given
        if given["sample_seconds"]:
            time.sleep(given["sample_seconds"])
        if index in given["heavy"]:
            time.sleep(given["heavy_seconds"])
        if index == given["raise_at"]:
            raise LookupError(f"sample {index} is broken")
        if index == given["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == given["hang_at"]:
            threading.Event().wait()
        image = torch.randint(0, 256, given["shape"], dtype=torch.uint8)
        facts = {"id": index, "python": random.random(), "numpy": np.random.rand(2)}
        return image, facts


SCALE = 2


def collate(items: list) -> dict[str, object]:
    images = torch.stack([image for image, _ in items])
    noise = torch.rand(len(items)) * SCALE
    return {
        "images": images,
        "noise": noise,
        "ids": torch.tensor([facts["id"] for _, facts in items]),
        "python": torch.tensor([facts["python"] for _, facts in items], dtype=torch.float64),
        "numpy": np.stack([facts["numpy"] for _, facts in items]),
    }


def collate_with_object(items: list) -> dict[str, object]:
    return collate(items) | {"object": {1, 2}}


def digest(batch: dict[str, object]) -> str:
    whole = hashlib.sha256()
    for key, value in batch.items():
        whole.update(key.encode())
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        whole.update(str(array.dtype).encode() + str(array.shape).encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def pause(given: dict, batch: int) -> None:
    say(pause=batch)
    if given["gates"] is None:
        sys.stdin.readline()
        return
    while not Path(given["gates"], str(batch)).exists():
        time.sleep(0.02)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    pauses = given["pause_at"] if isinstance(given["pause_at"], list) else [given["pause_at"]]
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    kind = torch.utils.data.DataLoader if given["is_torchs"] else DataLoader
    if given["is_torchs"]:
        # As stoker's sitecustomize does it where a training starts a Python.
        from stoker.feed.replace import install

        install(kind)
    first = collate_with_object if given["objects"] else collate
    loaders = []
    for number in range(given["loaders"]):
        dataset = Images(given, salt=number)
        if given["lock"]:
            # Nobody can send a lock that is held.
            dataset.lock = threading.Lock()
            dataset.lock.acquire()
        if given["unreadable"]:
            vars(dataset)["noise"] = Unreadable(3)
        sampler = None
        if given["world"] > 1:
            ranks = given["world"], given["rank"]
            sampler = torch.utils.data.DistributedSampler(dataset, *ranks)
        loaders.append(
            kind(
                dataset,
                batch_size=given["batch_size"],
                shuffle=sampler is None,
                sampler=sampler,
                num_workers=given["num_workers"],
                collate_fn=first if number == 0 else lambda items: collate(items),
                **given["loader"],
            )
        )
    if -1 in pauses:
        pause(given, -1)
    for epoch in range(given["epochs"]):
        iterators = [iter(loader) for loader in loaders]
        batch = 0
        while True:
            for number, iterator in enumerate(iterators):
                if batch in pauses and epoch in given["pause_epochs"] and number == 0:
                    pause(given, batch)
                facts = {"loader": number, "epoch": epoch, "batch": batch}
                try:
                    value = next(iterator)
                except StopIteration:
                    iterators[number] = None
                    continue
                except Exception as err:
                    kinds = [kind.__name__ for kind in type(err).__mro__]
                    say(**facts, error=kinds[0], kinds=kinds, text=str(err))
                    if given["raise_at"] is None:
                        raise
                    continue
                say(**facts, hash=digest(value), ids=value["ids"].tolist())
            iterators = [iterator for iterator in iterators if iterator is not None]
            batch += 1
            if not iterators:
                break
        del iterators
        if given["until"] is not None and Path(given["until"]).exists():
            break
    say(state=digest({"state": torch.get_rng_state()}))


if __name__ == "__main__":
    main()
