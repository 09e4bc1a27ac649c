"""A script as users have them, whose datasets read files with objects of its own classes.

No line of stoker's is in it. Arguments: one JSON object with `folder`, `num_workers`, `ranks`.
"""

import argparse
import colorsys
import dataclasses
import enum
import functools
import importlib.util
import inspect
import json
import os
import pickle
import re
import shelve
import sys
import threading
import traceback
import typing
from pathlib import Path

import numpy
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, IterableDataset

SCALE = 3
OPTIONS = argparse.Namespace(shift=4)
TABLE = {"a": [1, 2], ("b", 1): {3}}
MEAN = torch.tensor([0.5, 1.5])
LOCK = threading.Lock()
PASSWORD_OF_STORE = "not for others"
RANK = os.getpid()
LARGE = bytes(3 << 20)
Label = typing.NewType("Label", int)
Item = typing.TypeVar("Item")


def scaled(number):
    return SCALE * number + OPTIONS.shift


def shifted(number, by=1):
    return scaled(number) + by


class Entry:
    def __init__(self, number):
        self.number = number

    def value(self):
        return scaled(self.number) + len(TABLE)


class Outer:
    class Inner(Entry):
        def value(self):
            return 100 + super().value()


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    @property
    def tone(self):
        return round(colorsys.rgb_to_hsv(self.value, 0.5, 0.2)[0], 3)


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Point:
    x: int
    label: "Label"
    parts: "list[Color]" = dataclasses.field(default_factory=lambda: [Color.RED])


class Pair(typing.NamedTuple):
    first: object
    second: "Point"


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


class Box(typing.Generic[Item]):
    def __init__(self, item: "Item"):
        self.item = item


class Table(dict):
    def total(self):
        return sum(self.values())


class Meta(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.is_made_by_meta = True
        return made


class Made(metaclass=Meta):
    pass


def rebuilt(number):
    return Rebuilt(number + 1)


class Rebuilt:
    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return (rebuilt, (self.number,))


class OddError(Exception):
    pass


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)

    def forward(self, value):
        return self.layer(value - MEAN)


@functools.singledispatch
def kind_of(value):
    return "unknown"


@kind_of.register
def _(value: Entry):
    return "entry"


@kind_of.register(Color)
def _(value):
    return "color"


def told(value):
    """Returns what is compared of an object: no address, and nothing of its module's name."""
    match value:
        case Outer.Inner() | Entry():
            return [type(value).__qualname__, value.value()]
        case Color() | Flags():
            return [str(value), getattr(value, "tone", 0)]
        case Pair():
            return ["pair", told(value.first), told(value.second)]
        case Point():
            return ["point", value.x, value.label, [each.tone for each in value.parts]]
        case Slotted():
            return ["slotted", value.number]
        case Box():
            return ["box", value.item]
        case Table():
            return ["table", value.total()]
        case Made():
            return ["made", value.is_made_by_meta]
        case Rebuilt():
            return ["rebuilt", value.number]
        case functools.partial():
            return ["partial", value(1)]
    return str(value)


def objects():
    point = Point(1, Label(2), [Color.BLUE])
    return {
        "class": Entry(1),
        "nested class": Outer.Inner(2),
        "enum": Color.BLUE,
        "flag": Flags.A | Flags.B,
        "dataclass": point,
        "named tuple": Pair(Entry(3), point),
        "slots": Slotted(4),
        "generic": Box("item"),
        "subclass of dict": Table(a=1, b=2),
        "metaclass": Made(),
        "reduced by a function": Rebuilt(1),
        "partial of a function": functools.partial(shifted, by=5),
    }


class Files(Dataset):
    """Holds no class of the script: what is in the files names them."""

    def __init__(self, folder):
        self.files = sorted(str(path) for path in Path(folder).glob("*.bin"))

    def __len__(self):
        return len(self.files)


class Pickled(Files):
    def __getitem__(self, index):
        name = Path(self.files[index]).stem
        with open(self.files[index], "rb") as file:
            return name, told(pickle.load(file))


class TorchSaved(Files):
    def __getitem__(self, index):
        name = self.files[index].replace(".bin", ".pt")
        return Path(name).stem, told(torch.load(name, weights_only=False))


class Model(Files):
    def __getitem__(self, index):
        model = torch.load(f"{self.files[0]}.net", weights_only=False)
        return float(model(torch.tensor([float(index), 1.0])).detach())


class WeightsOnly(Files):
    def __getitem__(self, index):
        with torch.serialization.safe_globals([Entry]):
            found = torch.load(f"{self.files[0]}.entry", weights_only=True)
        return type(found) is Entry, found.value()


class Joblib(Files):
    def __getitem__(self, index):
        import joblib

        name = self.files[index].replace(".bin", ".joblib")
        return told(joblib.load(name))


class Dill(Files):
    def __getitem__(self, index):
        import dill

        return told(dill.loads(Path(self.files[index].replace(".bin", ".dill")).read_bytes()))


class Shelf(Files):
    def __getitem__(self, index):
        with shelve.open(f"{Path(self.files[0]).parent}/shelf", "r") as shelf:
            return told(shelf["entry"])


class ArrayOfObjects(Files):
    def __getitem__(self, index):
        return told(numpy.load(f"{self.files[0]}.npy", allow_pickle=True)[0])


class Hints(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        kind = [Point, Pair][index]
        return sorted(name for name in typing.get_type_hints(kind)), self.of_name()

    def of_name(self):
        return sorted(typing.get_type_hints(sys.modules["__main__"].Point))


class Sources(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return inspect.getsource(Outer), inspect.getsource(shifted)


class Dispatched(Files):
    def __getitem__(self, index):
        with open(self.files[index], "rb") as file:
            return kind_of(pickle.load(file))


class Names(Dataset):
    """Asks the module itself, as libraries do."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        import __main__

        names = ["SCALE", "TABLE", "OPTIONS", "MEAN", "Label", "Item", "colorsys", "Path"]
        found = [str(getattr(__main__, name)) for name in names]
        found = [re.sub(r"__(mp_)?main__", "", each) for each in found]
        return found, Path(__main__.__file__).name, sys.modules["__mp_main__"] is __main__


class Raising(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise OddError(index)


class Rows(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        for file in self.files:
            with open(file, "rb") as opened:
                yield told(pickle.load(opened))


class Objects(Dataset):
    """Batches with the objects themselves."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return Pair(Color.RED, Point(index, Label(index))), Flags.B, Entry(index)


class Identity(Files):
    """The class that the dataset names is the one in the file."""

    def __getitem__(self, index):
        with open(self.files[index], "rb") as file:
            found = pickle.load(file)
        return isinstance(found, (Entry, Color, Point, Pair, Flags)), type(found).__name__


NEEDS = {"Joblib": "joblib", "Dill": "dill"}
DATASETS = (
    *(Pickled, TorchSaved, Model, WeightsOnly, Joblib, Dill, Shelf, ArrayOfObjects, Dispatched),
    *(Hints, Sources, Names, Raising, Objects, Identity, Rows),
)


def write(folder):
    for name, value in objects().items():
        Path(folder, f"{name}.bin").write_bytes(pickle.dumps(value))
        torch.save(value, Path(folder, f"{name}.pt"))
        for module in ("joblib", "dill"):
            if importlib.util.find_spec(module):
                with Path(folder, f"{name}.{module}").open("wb") as file:
                    importlib.import_module(module).dump(value, file)
    first = min(str(path) for path in Path(folder).glob("*.bin"))
    torch.manual_seed(3)
    torch.save(Net(), f"{first}.net")
    torch.save(Entry(7), f"{first}.entry")
    numpy.save(f"{first}.npy", numpy.array([Entry(5)], dtype=object))
    with shelve.open(f"{folder}/shelf") as shelf:
        shelf["entry"] = Entry(6)


def checked(batch):
    """Batches of Objects have the script's own classes."""
    for pair, flag, entry in batch:
        assert type(pair) is Pair, type(pair)
        assert pair.first is Color.RED
        assert type(pair.second) is Point
        assert flag is Flags.B
        assert type(entry) is Entry
    return [told(each) for row in batch for each in row]


def say(facts):
    # At once: another rank writes to the same pipe.
    os.write(1, f"{json.dumps(facts)}\n".encode())


def loop(given, rank=0):
    for kind in DATASETS:
        name = kind.__name__
        if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
            continue
        dataset = kind(given["folder"]) if issubclass(kind, Files) else None
        if kind is Rows:
            dataset = Rows(Files(given["folder"]).files)
        loader = DataLoader(
            dataset or kind(), batch_size=2, num_workers=given["num_workers"], collate_fn=list
        )
        facts = {"dataset": name, "rank": rank}
        try:
            for batch in loader:
                found = checked(batch) if kind is Objects else batch
                say({**facts, "batch": found})
        except OddError as err:
            say({**facts, "caught": type(err).__name__})
        except Exception as err:
            traceback.print_exception(err)
            say({**facts, "error": type(err).__name__})


def rank_main(rank, given):
    os.environ["RANK"] = str(rank)
    loop(given, rank)


def main():
    given = json.loads(sys.argv[1])
    write(given["folder"])
    if given["ranks"]:
        torch.multiprocessing.spawn(rank_main, (given,), nprocs=given["ranks"])
    else:
        loop(given)


if __name__ == "__main__":
    main()
