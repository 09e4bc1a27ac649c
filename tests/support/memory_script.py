"""A training script whose memory is in the state that its arguments put it in.

Arguments: name=value pairs. case: what the dataset holds or leaks, one of CASES; samples: of an
epoch; workers; batch; prefetch; persistent (yes); group: a control group to join first; epochs;
ballast_mb: what each worker holds; file: what is read, once at the start with read_first (yes);
keeps: what the loop keeps of each step, with "+" between: losses, total, attribute, joined, scores
or numbers, or of its first steps alone: warm-up; collate (keeps); waits_for: a file, for which the
loop waits once, when all workers hold what they hold (a file beside it, "waits", says so);
copied_to: a file, to which 700 MB are written at the start.
"""

import collections
import ctypes
import functools
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

DEFAULTS = "samples=40000 workers=2 batch=50 prefetch=2 model_ms=3 width=64 epochs=100 ballast_mb=0"
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
LEAKED_BYTES = 20_000
KEPT_FIRST = 200
WARM_UP_STEPS = 15
COPIED_BYTES = 700_000_000
# Early: a profile counts later steps. Each of four workers has given a batch by then.
WAITING_STEP = 5


def name_of(number: int) -> str:
    return f"/data/pictures/of/class-{number % 1000:04d}/picture-{number:09d}.jpeg"


class Samples(Dataset[torch.Tensor]):
    def __init__(self, asked: dict[str, str]) -> None:
        self.width = int(asked["width"])
        self.length = int(asked["samples"])
        self.ballast_bytes = 1_000_000 * int(asked["ballast_mb"])
        self.ballast: bytearray | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.ballast is None:
            # Not as a copy of other bytes: for a moment a worker would hold three times as much.
            self.ballast = bytearray(b"\1") * self.ballast_bytes
        return torch.full((self.width,), float(index % 255))


class ListOfPaths(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.paths = [name_of(number) for number in range(self.length)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(len(self.paths[index])))


class ListOfDicts(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.rows: list[dict[str, Any]] = [
            {"path": name_of(number), "label": number, "box": [number / 2, number / 3]}
            for number in range(self.length)
        ]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(self.rows[index]["label"]))


class Annotation:
    def __init__(self, number: int) -> None:
        self.path = name_of(number)
        self.label = number


class ColumnsOfPaths(Samples):
    """Keeps a list for each column in one dictionary, with paths of pathlib."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.columns = {"path": [Path(name_of(number)) for number in range(self.length)]}

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(len(self.columns["path"][index].name)))


class Catalog:
    """What a library for annotations keeps of its file."""

    def __init__(self, length: int) -> None:
        self.texts = [(name_of(number), f"a picture of {number}") for number in range(length)]


class CatalogOfTexts(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.annotations = Catalog(self.length)

    def __getitem__(self, index: int) -> torch.Tensor:
        name, text = self.annotations.texts[index]
        return torch.full((self.width,), float(len(name) + len(text)))


class DictOfObjects(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.annotations = {name_of(number): Annotation(number) for number in range(self.length)}

    def __getitem__(self, index: int) -> torch.Tensor:
        annotation = self.annotations[name_of(index)]
        return torch.full((self.width,), float(annotation.label))


class ObjectColumn(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        import pandas

        super().__init__(asked)
        names = [name_of(number) for number in range(self.length)]
        self.table = pandas.DataFrame({"path": pandas.Series(names, dtype=object)})

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(len(self.table["path"].iat[index])))


class CachedGetitem(Samples):
    @functools.cache  # noqa: B019  # This is what goes wrong.
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(index))


class OwnCache(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = torch.full((self.width,), float(index))
        return self.cache[index]


class GrowingList(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.seen: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(torch.full((self.width,), float(index)))
        return self.seen[-1]


class BoundedCache(Samples):
    """Keeps the first samples that it has made, as of a validation, and no more."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.first: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        made = torch.full((self.width,), float(index))
        if len(self.first) < KEPT_FIRST:
            self.first[index] = made.clone()
        return made


KEPT_BY_ALL: dict[int, torch.Tensor] = {}


class GlobalCache(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return KEPT_BY_ALL.setdefault(index, torch.full((self.width,), float(index)))


class Episode:
    """A recording that is read at its first use, and then kept."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.frames: torch.Tensor | None = None

    def read(self, width: int) -> torch.Tensor:
        if self.frames is None:
            self.frames = torch.full((width,), float(self.number))
        return self.frames


class LazyEpisodes(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.episodes = [Episode(number) for number in range(self.length)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.episodes[index].read(self.width).clone()


class KeepingCollate:
    """Keeps each batch that it has made, as of a debugging session."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.batches.append(torch.stack(samples))
        return self.batches[-1].clone()


class ReadsBallast(Samples):
    """Reads what it holds at random places, as an index in memory is read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        super().__getitem__(index)
        assert self.ballast is not None
        places = np.random.default_rng(index).integers(0, self.ballast_bytes, 64)
        return torch.full((self.width,), float(sum(self.ballast[place] for place in places)))


class LeakInC(Samples):
    is_trimmed = False

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.is_trimmed:
            # What the trainer has freed and a worker inherits would hold all that it leaks in a
            # look on a busy machine, and count as copied.
            LIBC.malloc_trim(0)
            self.is_trimmed = True
        LIBC.memset(LIBC.malloc(LEAKED_BYTES), 1, LEAKED_BYTES)
        return super().__getitem__(index)


class ReadsFiles(Samples):
    """Reads a file that is larger than its group's memory, from random places."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.file = asked["file"]
        if asked.get("read_first") == "yes":
            with open(self.file, "rb") as file:
                while file.read(1 << 20):
                    pass
        self.values = np.memmap(self.file, dtype=np.uint8, mode="r").reshape(self.length, -1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(self.values[index].sum()))


class OneArray(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.paths = np.array([name_of(number) for number in range(self.length)], dtype="S")

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(len(self.paths[index])))


class OneTensor(Samples):
    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.values = torch.arange(self.length * self.width).reshape(self.length, self.width)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index].float()


class MemoryMap(ReadsFiles):
    """Reads a small file, which stays in the page cache."""


CASES = {
    "list of paths": ListOfPaths,
    "list of dicts": ListOfDicts,
    "dict of objects": DictOfObjects,
    "columns of paths": ColumnsOfPaths,
    "catalog of texts": CatalogOfTexts,
    "object column": ObjectColumn,
    "lru_cache": CachedGetitem,
    "own cache": OwnCache,
    "growing list": GrowingList,
    "global cache": GlobalCache,
    "lazy episodes": LazyEpisodes,
    "reads ballast": ReadsBallast,
    "leak in C": LeakInC,
    "more than the page cache": ReadsFiles,
    "bounded cache": BoundedCache,
    "plain": Samples,
    "one array": OneArray,
    "one tensor": OneTensor,
    "memory map": MemoryMap,
}


class CopiesAndCaches(ListOfPaths):
    """Reads its paths one by one, and keeps each sample."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class KeepsNothing(OneTensor):
    """Has an array, a tensor and a mapped file, and keeps its first samples."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.mapped = MemoryMap(asked)
        self.names = OneArray(asked)
        self.first = BoundedCache(asked)

    def __getitem__(self, index: int) -> torch.Tensor:
        others = (self.mapped, self.names, self.first)
        return super().__getitem__(index) + sum(part[index] for part in others)


class ManyCaches(OwnCache):
    """Keeps each sample in a cache of each kind."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        self.others = (CachedGetitem(asked), GlobalCache(asked), GrowingList(asked))

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + sum(part[index] for part in self.others)


class ManyCopies(Samples):
    """Reads an object of each kind of collection."""

    def __init__(self, asked: dict[str, str]) -> None:
        super().__init__(asked)
        kinds: list[type[Samples]] = [ListOfPaths, DictOfObjects]
        if importlib.util.find_spec("pandas"):
            kinds.append(ObjectColumn)
        self.parts = [kind(asked) for kind in kinds]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.parts[0][index] + sum(part[index] for part in self.parts[1:])


CASES["many caches"] = ManyCaches
CASES["many copies"] = ManyCopies
CASES["copies and caches"] = CopiesAndCaches
CASES["keeps nothing"] = KeepsNothing


def asked_by(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in [*DEFAULTS.split(), *words])


def loader_of(asked: dict[str, str]) -> DataLoader[torch.Tensor]:
    """Returns the script's loader, in the control group and beside the files that it asks for."""
    if "group" in asked:
        Path(asked["group"], "cgroup.procs").write_text(str(os.getpid()))
    if "copied_to" in asked:
        with open(asked["copied_to"], "wb") as file:
            for _ in range(COPIED_BYTES // 1_000_000):
                file.write(bytes(1_000_000))
    torch.set_num_threads(1)
    workers = int(asked["workers"])
    return DataLoader(
        CASES[asked["case"]](asked),
        int(asked["batch"]),
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0 and asked.get("persistent") == "yes",
        prefetch_factor=int(asked["prefetch"]) if workers else None,
        collate_fn=KeepingCollate() if asked.get("collate") == "keeps" else None,
    )


def main() -> None:
    asked = asked_by(sys.argv[1:])
    train(loader_of(asked), asked)


def wait_for(file: Path) -> None:
    file.with_name("waits").touch()
    while not file.exists():
        time.sleep(0.02)


class History:
    """What a trainer class keeps, as of a validation."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[torch.Tensor]] = collections.defaultdict(list)


def train(loader: Iterable[torch.Tensor], asked: dict[str, str]) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    keeps, history = set(asked.get("keeps", "").split("+")), History()
    losses: list[torch.Tensor | float] = []
    scores: list[float] = []
    total, joined = torch.zeros(()), torch.zeros(0)
    steps = itertools.count(1)
    for _ in range(int(asked["epochs"])):
        for batch in loader:
            if next(steps) == WAITING_STEP and "waits_for" in asked:
                wait_for(Path(asked["waits_for"]))
            time.sleep(float(asked["model_ms"]) / 1000)
            optimizer.zero_grad()
            outputs = (weight * batch).exp()
            loss = outputs.mean()
            if keeps <= {"", "numbers", "scores", "warm-up"}:
                loss.backward()
                optimizer.step()
            if "losses" in keeps:
                losses.append(loss)
            if "total" in keeps:
                total = total + loss
            if "attribute" in keeps:
                history.outputs["train"].append(outputs.detach())
            if "joined" in keeps:
                joined = torch.cat([joined, outputs.detach().reshape(-1)[:10_000]])
            if "scores" in keeps:
                scores.extend(outputs.detach().reshape(-1)[:20_000].tolist())
            if "warm-up" in keeps and len(history.outputs["first"]) < WARM_UP_STEPS:
                history.outputs["first"].append(torch.ones(1_000_000))
            if keeps & {"numbers", "warm-up"}:
                losses.append(loss.item())


if __name__ == "__main__":
    main()
