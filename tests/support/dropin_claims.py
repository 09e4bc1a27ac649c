"""Observes what torch's DataLoader promises, which every loader has to keep: a script.

Argument: {"kind": "torch" or "stoker", "workers" or "local": num_workers, "pool": workers of all
hosts, "only": names, "states": folder}. Prints a JSON line a claim, which the caller compares.
"""

import copy
import dataclasses
import functools
import inspect
import io
import itertools
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.utils.data as data
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data._utils.collate import default_collate_fn_map

Claim = Callable[["Load"], object]
CLAIMS: dict[str, Claim] = {}
PINNED: set[str] = set()
VALUED: dict[str, Claim] = {}
SEEDED: dict[str, Claim] = {}
# Held by a dataset as a global of the script.
MODULE_WIDE = np.random.default_rng(5)
# Of a claim: torch's own loader waits for ever for a batch that its workers cannot pickle.
MAX_SECONDS = 150


def claim(function: Claim) -> Claim:
    """Marks what is observed with torch's loader and two workers: others must do the same."""
    CLAIMS[function.__name__] = function
    return function


def pinned(function: Claim) -> Claim:
    """Marks a claim that says itself how many workers its loaders have, whatever `workers` is."""
    PINNED.add(function.__name__)
    return claim(function)


def valued(function: Claim) -> Claim:
    """Marks what is observed with torch's loader without workers: it arrives as it was made."""
    VALUED[function.__name__] = function
    return function


def seeded(function: Claim) -> Claim:
    """Marks content that depends on torch's workers: stoker's is the same for any placement."""
    SEEDED[function.__name__] = function
    return function


@dataclasses.dataclass(frozen=True)
class Load:
    cls: type[data.DataLoader]
    workers: int
    pool: int
    states: Path | None

    def __call__(self, dataset: object, **options: object) -> data.DataLoader:
        return self.cls(dataset, **({"num_workers": self.workers} | options))


# What is observed


def shown(value: object) -> object:
    """Turns a value into JSON, with all its types."""
    kind = type(value).__name__
    if globals().get(kind, type(value)) is not type(value):
        kind += ", but another class than the script's"
    match value:
        case torch.Tensor():
            shape = "nested" if value.is_nested else list(value.shape)
            facts = [str(value.dtype), shape, str(value.layout), value.requires_grad]
            return [kind, *facts, str(_plain(value)), _order(value)]
        case np.ndarray() | np.generic():
            order = [value.flags.c_contiguous, value.flags.f_contiguous, value.flags.writeable]
            is_scalar = isinstance(value, np.generic)
            plain = str(value.item() if is_scalar else value.tolist())
            return [kind, value.dtype.str, list(value.shape), plain, *([] if is_scalar else order)]
        case Mapping():
            return [kind, [[shown(key), shown(item)] for key, item in value.items()]]
        case list() | tuple() | deque():
            return [kind, list(getattr(value, "_fields", [])), [shown(item) for item in value]]
    if dataclasses.is_dataclass(value):
        return [kind, {f.name: shown(getattr(value, f.name)) for f in dataclasses.fields(value)}]
    return [kind, repr(value) if type(value).__repr__ is not object.__repr__ else vars(value)]


def _plain(tensor: torch.Tensor) -> object:
    if tensor.is_meta:
        return str(tensor.device)
    if tensor.is_quantized:
        return tensor.int_repr().tolist(), tensor.q_scale(), tensor.q_zero_point()
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    if tensor.layout is not torch.strided:
        return tensor.to_dense().tolist()
    if tensor.dtype.itemsize == 1 and tensor.dtype not in (torch.bool, torch.int8):
        return tensor.detach().as_subclass(torch.Tensor).contiguous().view(torch.uint8).tolist()
    return tensor.detach().tolist()


def _order(tensor: torch.Tensor) -> object:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor.detach())
    if not is_dense or tensor.is_contiguous():
        # Gaps do not travel.
        return list(torch.empty(tensor.shape, device="meta").stride())
    return list(tensor.stride())


def raised(action: Callable[[], object], *words: str) -> object:
    try:
        action()
    except Exception as err:
        text = str(err)
        return [
            [kind.__name__ for kind in type(err).__mro__],
            [word in text for word in ("Traceback (most recent call last)", "Caught", *words)],
        ]
    return "nothing raised"


def words_of(action: Callable[[], object]) -> str:
    try:
        return f"{action()}"
    except Exception as err:
        return f"{type(err).__name__}: {err}"


def ids(loader: object) -> list[object]:
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in loader]


# Datasets


class Plain(data.Dataset):
    def __init__(self, length: int = 10, offset: int = 0) -> None:
        self.length = length
        self.offset = offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index + self.offset


class Each(data.Dataset):
    def __init__(self, function: Callable[[int], object], length: int = 6) -> None:
        self.function = function
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> object:
        return self.function(index)


def echo(index: object) -> tuple[str, object]:
    return type(index).__name__, index


class Bulk(Plain):
    def __getitems__(self, indices: list[int]) -> list[object]:
        return [(index, len(indices), type(indices).__name__) for index in indices]


def same(batch: object) -> object:
    return batch


# Samplers, lengths, order


@claim
def samplers_and_batch_samplers(load: Load) -> object:
    whole = data.BatchSampler(data.SequentialSampler(range(5)), 2, drop_last=True)
    samplers = [[5, 4, 3], range(7, 10), (n for n in [7, 1]), {4: 1}]
    batches = [[[1, 2], [9]], whole, [(3, 4), (5,)], ([n, n] for n in range(3))]
    return [
        [ids(load(Plain(), batch_size=2, sampler=sampler)) for sampler in samplers],
        [ids(load(Plain(), batch_sampler=batch_sampler)) for batch_sampler in batches],
        ids(load({"a": 1, "b": 2}, sampler=["b", "a"], batch_size=None)),
    ]


@claim
def batches_of_indices_that_are_no_lists(load: Load) -> object:
    batches = [torch.tensor([1, 2]), np.array([3, 4]), range(5, 7), {8}]
    return [shown(b) for b in load(Each(echo), batch_sampler=batches, collate_fn=same)]


@claim
def indices_of_any_kind(load: Load) -> object:
    indices = ["a", 2**62, -(2**70), np.int64(3), torch.tensor(4), (1, "b"), None, 2.5, {"k": [1]}]
    return [shown(b) for b in load(Each(echo), sampler=indices, batch_size=None)]


@claim
def samples_of_their_own_and_many_at_once(load: Load) -> object:
    bulk = data.BatchSampler(data.SequentialSampler(range(5)), 2, drop_last=False)
    loaders = [
        load(Plain(3), batch_size=None),
        load(Each(lambda i: np.float32(i), 3), batch_size=None),
        load(Each(echo), batch_size=None, sampler=bulk),
        load(Plain(3), batch_size=None, collate_fn=lambda b: {"b": b}),
        load(Bulk(5), batch_size=2, collate_fn=same),
        load(Bulk(3), batch_size=None),
    ]
    return [[shown(batch) for batch in loader] for loader in loaders]


@claim
def drop_last_and_lengths(load: Load) -> object:
    loaders = [load(Plain(), batch_size=4, drop_last=last) for last in (False, True)]
    whole = load(Plain(), batch_size=None)
    return [(len(x), len(iter(x)), ids(x)) for x in (*loaders, whole)]


class AtOnce(data.Sampler):
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(10, generator=self.generator).tolist()
        return iter([order[:4], order[4:8], order[8:]])


@pinned
def samplers_that_draw_when_asked_for_an_iterator(load: Load) -> object:
    found: list[object] = []
    for count in (0, 1, 2):
        for options in [{}, {"persistent_workers": True}] if count else [{}]:
            generator = torch.Generator().manual_seed(8)
            options |= {"num_workers": count, "generator": generator}
            loader = load(Plain(), batch_sampler=AtOnce(generator), **options)
            found.append([ids(loader) for _ in range(3)])
            found.append([next(iter(loader)).tolist(), *ids(loader)])
            found.append(torch.rand(1, generator=generator).item())
    return found


@claim
def ranks_that_shuffle_by_epoch(load: Load) -> object:
    found = []
    for rank in range(2):
        sampler = data.DistributedSampler(Plain(9), num_replicas=2, rank=rank, seed=3)
        loader = load(Plain(9), batch_size=2, sampler=sampler)
        for epoch in (0, 1, 1):
            sampler.set_epoch(epoch)
            found.append(ids(loader))
    return found


@claim
def shuffles(load: Load) -> object:
    torch.manual_seed(4)
    found = []
    for generator in (None, torch.Generator().manual_seed(8)):
        loader = load(Plain(), batch_size=3, shuffle=True, generator=generator)
        found.append([ids(loader) for _ in range(3)])
    weighted = data.WeightedRandomSampler([0.1, 0.5, 0.4], 8)
    repeating = data.RandomSampler(Plain(), replacement=True, num_samples=8)
    some = data.SubsetRandomSampler([2, 3, 5, 7])
    found += [ids(load(Plain(), sampler=s, batch_size=4)) for s in (weighted, repeating, some)]
    return [found, torch.rand(1).item()]


@claim
def datasets_of_torch(load: Load) -> object:
    x, y = torch.arange(6.0), torch.arange(6)
    torch.manual_seed(1)
    datasets = [
        data.TensorDataset(x, y),
        data.ConcatDataset([Plain(2), Plain(3, 50)]),
        data.Subset(Plain(), [3, 1]),
        data.StackDataset(x, y),
        data.StackDataset(x=x, y=y),
        *data.random_split(Plain(), [4, 6]),
        [1, 2, 3],
        np.arange(3.0),
        x,
        "abc",
    ]
    return [[shown(b) for b in load(dataset, batch_size=2)] for dataset in datasets]


@functools.cache
def cached_power(index: int) -> int:
    return index * cached_power(index - 1) if index else 1


@functools.singledispatch
def length_of(value: object) -> int:
    return -1


@length_of.register
def _(value: str) -> int:
    return len(value)


class Decorated(data.Dataset):
    def __init__(self) -> None:
        self.seen: WeakValueDictionary[int, object] = WeakValueDictionary({1: Plain})

    @functools.cached_property
    def table(self) -> dict[int, str]:
        return {index: "x" * index for index in range(5)}

    @functools.lru_cache(maxsize=3)  # noqa: B019
    def look_up(self, index: int) -> str:
        return self.table[index]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> object:
        text = self.look_up(index)
        known = [cached_power(index), length_of(text), length_of(index)]
        return [*known, cached_power.cache_parameters()["maxsize"]]


@claim
def datasets_with_caches_and_dispatch(load: Load) -> object:
    return [shown(b) for b in load(Decorated(), batch_size=2, collate_fn=same)]


# Collate functions and what a batch may be


class Point(NamedTuple):
    x: object
    y: object


Old = namedtuple("Old", "a b")


@dataclasses.dataclass
class Facts:
    tensor: torch.Tensor
    words: list[str]


class Own:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Own({self.tensor.tolist()}, pinned={self.tensor.is_pinned()})"

    def pin_memory(self) -> "Own":
        return Own(self.tensor.pin_memory())


@dataclasses.dataclass(slots=True)
class Slotted:
    value: object


class MyDict(dict): ...


class MyList(list): ...


class Tagged(torch.Tensor): ...


class Text(str): ...


Level = IntEnum("Level", {"LOW": 0})


def quietly(make: Callable[..., object], *args: object) -> object:
    """Makes a kind of tensor that torch announces as experimental, or as going."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


def many() -> torch.Tensor:
    return torch.arange(48).view(2, 3, 2, 4)


DTYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
)
VALUES: dict[str, Callable[[], object]] = {
    **{
        f"tensor of {name}": lambda name=name: torch.ones(2, 3).to(getattr(torch, name))
        for name in DTYPES.split()
    },
    "tensor transposed": lambda: many().permute(3, 0, 2, 1),
    "tensor channels last": lambda: many().contiguous(memory_format=torch.channels_last),
    "tensor with gaps": lambda: many()[:, ::2],
    "tensor expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "tensor conjugated": lambda: torch.tensor([1 + 2j]).conj(),
    "tensor negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "tensor with gradient": lambda: torch.ones(2, requires_grad=True),
    "tensor on meta": lambda: torch.empty(2, device="meta"),
    "tensor quantised": lambda: quietly(
        torch.quantize_per_tensor, torch.tensor([0.0, 1.0]), 0.5, 3, torch.quint8
    ),
    "tensor sparse": lambda: torch.tensor([[0, 2], [3, 0]]).to_sparse(),
    "tensor sparse by rows": lambda: quietly(torch.eye(2).to_sparse_csr),
    "tensor nested": lambda: quietly(torch.nested.nested_tensor, [torch.ones(2), torch.ones(3)]),
    "tensor subclass": lambda: torch.ones(2).as_subclass(Tagged),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "packed sequence": lambda: pack_sequence([torch.ones(3, 1), torch.ones(2, 1)]),
    "size": lambda: torch.ones(2, 3).shape,
    "dtype and device": lambda: [torch.float16, torch.device("cpu")],
    "array": lambda: np.arange(6, dtype=np.int16).reshape(2, 3),
    "array in the order of Fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "array big endian": lambda: np.arange(3, dtype=">f4"),
    "array of objects": lambda: np.array([None, "x", 2**80], dtype=object),
    "array of records": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "scalars of NumPy": lambda: [np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("ä")],
    "numbers": lambda: [0, -1, True, 2**63, 2**64, -(2**90), 1.5, float("inf"), 1 + 2j],
    "text": lambda: ["", "plain", "ä\u20ac", "\ud800", "x" * 5000, Text("t")],
    "bytes": lambda: [b"", b"\x00\xff", b"x" * 5000, bytearray(b"yz")],
    "nothing": lambda: None,
    "dict": lambda: {"b": torch.ones(1), 3: None, (1, 2): [b"x"], None: 1, 2.5: 2, True: 0},
    "ordered dict": lambda: OrderedDict([("z", torch.ones(1)), ("a", 1)]),
    "default dict": lambda: defaultdict(list, {"a": [torch.ones(1)]}),
    "other mappings": lambda: [MyDict(a=1), UserDict({"u": torch.ones(1)})],
    "counter and chain map": lambda: [Counter("aab"), ChainMap({"a": 1}, {"b": 2})],
    "sequences": lambda: ([1, (2,)], (), [], MyList([torch.ones(1)]), deque([1, 2]), range(3)),
    "sets": lambda: [{1}, frozenset([2]), set()],
    "named tuples": lambda: [Point(torch.ones(1), "y"), Old(1, [torch.zeros(1)])],
    "dataclass": lambda: Facts(torch.ones(2), ["a", "b"]),
    "objects": lambda: [Own(torch.ones(2)), Slotted(3), Level.LOW, slice(1, 2)],
    "objects of the library": lambda: [Decimal("1.5"), date(2026, 1, 2), PurePosixPath("a/b")],
    "functions and classes": lambda: [len, Point],
    "deep": lambda: functools.reduce(lambda a, _: [a], range(100), torch.ones(1)),
}


@valued
def values(load: Load) -> object:
    """Counts as one claim per value in comparisons."""
    # Some kinds of tensors are announced as experimental, or as going.
    warnings.simplefilter("ignore")
    dataset = Each(lambda name: VALUES[name]())
    iterator = iter(load(dataset, sampler=list(VALUES), batch_size=None, collate_fn=same))
    found: dict[str, object] = {}
    for name in VALUES:
        try:
            found[name] = shown(next(iterator))
        except Exception as err:
            found[name] = f"{type(err).__name__}: {str(err)[-600:]}"
    warn_by_errors()
    return found


@claim
def default_collate_keeps_types(load: Load) -> object:
    def sample(i: int) -> object:
        return {
            "point": Point(i, torch.tensor([i])),
            "old": Old(float(i), "text"),
            "mapping": MyDict(a=i, b=np.float32(i)),
            "ordered": OrderedDict(z=i),
            "list": [i, (i, b"bytes")],
            "array": np.full(2, i, dtype=np.int16),
            "bool": bool(i),
            "half": torch.tensor(i, dtype=torch.bfloat16),
            "big": np.array([i], dtype=np.float64),
            "my list": MyList([i, i]),
        }

    return [shown(b) for b in load(Each(sample), batch_size=4)]


@claim
def collate_functions(load: Load) -> object:
    scale = 3

    @dataclasses.dataclass
    class Scaled:
        by: int

        def __call__(self, items: list[int]) -> object:
            return Point(sum(items) * self.by, len(items))

        def method(self, items: list[int]) -> object:
            return [item * self.by for item in items]

    partial = functools.partial(lambda by, items: max(items) * by, 7)
    closure = lambda items: {"items": tuple(item * scale for item in items)}  # noqa: E731
    loaders = [
        load(Plain(5), batch_size=3, collate_fn=function)
        for function in (closure, Scaled(2), Scaled(5).method, partial, sum)
    ]
    return [[shown(b) for b in loader] for loader in loaders]


@claim
def collate_function_of_an_own_type(load: Load) -> object:
    def join(batch: list[Slotted], *, collate_fn_map: object = None) -> object:
        return Slotted([item.value for item in batch])

    default_collate_fn_map[Slotted] = join
    try:
        return [shown(b) for b in load(Each(Slotted), batch_size=4)]
    finally:
        del default_collate_fn_map[Slotted]


@claim
def default_dtype_of_the_script(load: Load) -> object:
    torch.set_default_dtype(torch.float64)
    try:
        return [shown(b) for b in load(Each(lambda i: torch.tensor([i / 3])), batch_size=4)]
    finally:
        torch.set_default_dtype(torch.float32)


@claim
def errors_of_default_collate(load: Load) -> object:
    def told(make: Callable[[int], object], *words: str) -> object:
        return raised(lambda: list(load(Each(make), batch_size=2)), *words)

    return [
        told(lambda i: torch.ones(i + 1), "stack expects each tensor to be equal size"),
        told(Slotted, "default_collate: batch must contain tensors", "Slotted"),
        told(lambda i: [0] * i, "each element in list of batch should be of equal size"),
    ]


@claim
def same_tensor_twice_and_batches_that_are_written_to(load: Load) -> object:
    def collate(items: list[int]) -> object:
        one = torch.tensor(items)
        return [one, {"again": one}, one.numpy().copy()]

    batches = list(load(Plain(4), batch_size=2, collate_fn=collate))
    for batch in batches:
        batch[0].mul_(10)
    return [shown(batch) for batch in batches]


@valued
def views_of_batches_that_are_kept(load: Load) -> object:
    loader = load(Each(lambda i: torch.full((50_000,), i), 60))
    views = [batch.numpy()[0, 5:9] for batch in loader]
    # Others land where those have lain whose last view is gone.
    for batch in loader:
        batch.fill_(-1)
    return [view.tolist() for view in views]


@claim
def batches_that_are_pinned(load: Load) -> object:
    if not torch.cuda.is_available():
        return "no accelerator"
    own, plain = Each(lambda i: Own(torch.ones(2))), Each(lambda i: {"x": torch.ones(2)})
    samples = load(own, pin_memory=True, batch_size=None, collate_fn=same)
    batches = load(plain, pin_memory=True, batch_size=2)
    return [[*map(repr, samples)], [[type(b).__name__, b["x"].is_pinned()] for b in batches]]


# Workers


@pinned
def worker_init_fn_runs_once_a_worker_with_its_number_and_seed(load: Load) -> object:
    def begin(number: int) -> None:
        info = data.get_worker_info()
        seeds = info.seed - info.id, torch.initial_seed() == info.seed
        begun = (os.getpid(), number, info.id, draws(None), *seeds)
        info.dataset.begun = [*getattr(info.dataset, "begun", []), begun]
        assert info.id < info.num_workers

    class Begun(Plain):
        def __getitem__(self, index: int) -> object:
            info = data.get_worker_info()
            told = info.id, info.num_workers, info.dataset is self, torch.get_num_threads()
            return self.begun, told, info.seed - info.id

    torch.manual_seed(6)
    loader = load(Begun(12), num_workers=2, worker_init_fn=begin, batch_size=None, collate_fn=same)
    batches, later = list(loader), list(loader)
    workers = {begun[0] for begun, _, _ in batches}
    return [
        all(len(begun) == 1 for begun, _, _ in batches + later),
        # Processes, numbers and draws: each another one.
        [len({worker[fact] for worker in workers}) == len(workers) for fact in (0, 1, 3)],
        all(number == of and is_seeded for _, number, of, _, _, is_seeded in workers),
        all(base == begun[0][4] for begun, _, base in batches),
        [told for _, told, _ in batches + later],
        # Base seeds of each epoch, and of both.
        [len({base for *_, base in epoch}) for epoch in (batches, later, batches + later)],
    ]


@claim
def options_of_workers(load: Load) -> object:
    count = max(load.workers, 1)
    options: list[dict[str, object]] = [
        {"prefetch_factor": 1},
        {"prefetch_factor": 7},
        {"timeout": 30},
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": torch.multiprocessing.get_context("fork")},
        {"persistent_workers": True},
    ]
    return [ids(load(Plain(), batch_size=4, num_workers=count, **option)) for option in options]


@claim
def any_order_holds_all_batches(load: Load) -> object:
    return sorted(ids(load(Plain(), batch_size=3, in_order=False)))


@pinned
def persistent_workers_stay(load: Load) -> object:
    class Counting(Plain):
        count = 0

        def __getitem__(self, index: int) -> tuple[int, int]:
            self.count += 1
            time.sleep(0.01)
            return self.count, os.getpid()

    loader = load(
        Counting(12), num_workers=2, persistent_workers=True, batch_size=None, collate_fn=same
    )
    made = defaultdict(list)
    for _ in range(3):
        for count, pid in loader:
            made[pid].append(count)
        # The dataset of workers that persist is the one that they began with.
        loader.dataset.count = 100
    return [
        len(made) <= max(2, load.pool),
        all(sorted(counts) == list(range(1, len(counts) + 1)) for counts in made.values()),
        iter(loader) is iter(loader),
    ]


@pinned
def persistent_workers_go_on_after_an_error(load: Load) -> object:
    loader = load(
        fail_at_two(lambda: ValueError("no")), num_workers=2, persistent_workers=True, batch_size=2
    )
    return [outcomes(iter(loader), 2), outcomes(iter(loader), 5)]


@claim
def epoch_goes_on_after_a_timeout(load: Load) -> object:
    def slow(index: int) -> int:
        time.sleep(2.0 if index == 1 else 0)
        return index

    iterator = iter(load(Each(slow, 4), num_workers=max(load.workers, 1), timeout=0.3))
    found: list[object] = []
    timeouts: list[object] = []
    while len(found) < 5 and len(timeouts) < 100:
        said = raised(lambda: found.append(next(iterator, None)), "timed out after 0.3 seconds")
        if said != "nothing raised":
            timeouts.append(said)
    return [[shown(batch) for batch in found], timeouts[0]]


# Epochs


@pinned
def epoch_that_is_shut_down(load: Load) -> object:
    """Uses a name of torch's own by which scripts get rid of the workers of an epoch."""
    loader = load(Plain(40), batch_size=2, num_workers=2, persistent_workers=True)
    next(iter(loader))
    loader._iterator._shutdown_workers()
    loader._iterator = None
    return ids(loader)


@claim
def passes_that_overlap(load: Load) -> object:
    one, two = load(Plain(4), batch_size=2), load(Plain(4, 100), batch_size=2)
    first, second = iter(one), iter(one)
    mixed = [next(first), next(second), next(second), next(first)]
    return [
        [b.tolist() for b in mixed],
        [next(first, "end"), next(second, "end"), next(first, "end")],
        [(a.tolist(), b.tolist()) for a in one for b in two],
        [(a.tolist(), b.tolist()) for a in one for b in one],
        [(a.tolist(), b.tolist()) for a, b in zip(one, two, strict=True)],
        [(a.tolist(), b.tolist()) for a, b in zip(one, one, strict=True)],
    ]


@claim
def loaders_in_generators_closures_and_threads(load: Load) -> object:
    def stream() -> Iterator[object]:
        for offset in (0, 100):
            yield from load(Plain(2, offset))

    kept = iter(load(Plain(3)))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(ids(load(Plain(3)))))
    thread.start()
    thread.join(150)
    return [ids(stream()), ids(kept), found, ids(map(same, load(Plain(3))))]


@claim
def loader_in_a_child_process(load: Load) -> object:
    def child(end: object) -> None:
        end.send(ids(load(Plain(4), batch_size=2)))

    before = ids(load(Plain(4), batch_size=2))
    context = torch.multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,))
    process.start()
    found = here.recv() if here.poll(20) else "nothing"
    process.join(150)
    return [before, found, process.exitcode, ids(load(Plain(4), batch_size=2))]


@claim
def datasets_that_change_between_passes(load: Load) -> object:
    items = [1, 2, 3]
    loader = load(items)
    changed = load(Plain(2))
    found: list[object] = [ids(loader), ids(changed)]
    items.append(4)
    changed.dataset.offset = 7
    return [*found, len(loader), ids(loader), ids(changed)]


@claim
def empty_passes(load: Load) -> object:
    return [ids(load(Plain(), sampler=[])), ids(load(Plain(), batch_sampler=[])), len(load([]))]


@claim
def own_random_state_of_the_trainer(load: Load) -> object:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for shuffle in (False, True):
        list(load(Each(draws), batch_size=2, shuffle=shuffle))
    return [draws(None), data.get_worker_info() is None]


# Errors


class Broken(Exception): ...


class Worded(Exception):
    message = "words"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail_at_two(make: Callable[[], Exception]) -> Each:
    def sample_that_fails(index: int) -> int:
        if index == 2:
            raise make()
        return index

    class EachOfOne(Each):
        """A class of its own: loaders of one class and line that end soon are made here."""

    return EachOfOne(sample_that_fails)


def outcomes(iterator: Iterator[object], count: int) -> list[object]:
    found: list[object] = []
    for _ in range(count):
        try:
            batch = next(iterator)
            found.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        except StopIteration:
            found.append("end")
        except Exception as err:
            found.append(type(err).__name__)
    return found


@claim
def errors_of_samples(load: Load) -> object:
    of_words = [LookupError, KeyError, Broken, Unpicklable]
    made = [
        *(lambda kind=kind: kind("the words") for kind in of_words),
        lambda: Worded(message="the words"),
        lambda: OSError(2, "the words"),
        lambda: AssertionError(),
    ]
    loaders = [load(fail_at_two(make), batch_size=2) for make in made]
    words = "sample_that_fails", "Original"
    return [raised(lambda loader=loader: list(loader), *words) for loader in loaders]


@claim
def errors_that_a_script_catches(load: Load) -> object:
    found = []
    for kind in (Broken, KeyError):
        try:
            list(load(fail_at_two(lambda kind=kind: kind("the words"))))
        except kind as err:
            is_text = isinstance(err.args[0], str)
            found.append(["\\n" in repr(err), str(err).count("\n") > 3, is_text])
    return found


@claim
def errors_of_other_functions(load: Load) -> object:
    def collate_that_fails(items: list[int]) -> object:
        if 2 in items:
            raise Broken("collate words")
        return items

    loader = load(Plain(6), batch_size=2, collate_fn=collate_that_fails)
    return [
        raised(lambda: list(loader), "collate words", "collate_that_fails"),
        outcomes(iter(loader), 4),
    ]


@claim
def errors_of_a_start(load: Load) -> object:
    def start_that_fails(number: int) -> None:
        raise Broken("start words")

    count = max(load.workers, 1)
    loader = load(Plain(6), worker_init_fn=start_that_fails, num_workers=count)
    return raised(lambda: next(iter(loader)), "start words", "start_that_fails")


@claim
def errors_that_come_of_others(load: Load) -> object:
    def sample_that_fails(index: int) -> int:
        try:
            return {}["the first"]
        except KeyError as err:
            raise Broken("the second") from err

    return raised(lambda: list(load(Each(sample_that_fails))), "the first", "the second", "direct")


def without_forks(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    """Leaves out what Python says from 3.12 on of a fork beside threads; it names the process."""
    return [w for w in caught if "use of fork() may lead" not in str(w.message)]


@pinned
def iterable_datasets_with_loaders_of_their_own(load: Load) -> object:
    class Words(data.IterableDataset):
        def __iter__(self) -> Iterator[object]:
            info = data.get_worker_info()
            inner = load(Plain(7), batch_size=2, num_workers=0)
            yield from ([info.id, info.num_workers, *batch.tolist()] for batch in inner)

    found: list[object] = []
    for option in ({"in_order": False}, {"timeout": 20, "prefetch_factor": 1}):
        loader = load(Words(), batch_size=None, num_workers=2, collate_fn=same, **option)
        epochs = [list(loader) for _ in range(2)]
        found.append([sorted(epoch) if "in_order" in option else epoch for epoch in epochs])
    return [found, raised(lambda: len(loader), "has no len()")]


@claim
def errors_of_a_sampler(load: Load) -> object:
    class Failing(data.Sampler):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise Broken("sampler words")

    return raised(lambda: list(load(Plain(6), sampler=Failing())), "sampler words")


@claim
def stop_iteration_of_a_sample_ends_a_for_loop(load: Load) -> object:
    loader = load(fail_at_two(lambda: StopIteration("no more")), batch_size=1)
    return [ids(loader), outcomes(iter(loader), 5)]


# The loader as an object


@claim
def attributes_that_may_be_set(load: Load) -> object:
    loader = load(Plain(5), batch_size=2, num_workers=max(load.workers, 1))
    found = [ids(loader)]
    loader.timeout, loader.prefetch_factor, loader.in_order = 20, 3, True
    loader.collate_fn = sum
    found.append(ids(loader))
    loader.worker_init_fn = lambda number: setattr(data.get_worker_info().dataset, "offset", 50)
    found.append(ids(loader))
    loader.num_workers = loader.timeout = 0
    loader.worker_init_fn = None
    found.append(ids(loader))
    names = "batch_size batch_sampler sampler drop_last dataset persistent_workers"
    found += [words_of(lambda name=name: setattr(loader, name, 3)) for name in names.split()]
    return [*found, ids(loader)]


@claim
def arguments_that_are_refused(load: Load) -> object:
    wrong: list[dict[str, object]] = [
        {"num_workers": -1},
        {"timeout": -1},
        {"num_workers": 0, "prefetch_factor": 2},
        {"num_workers": 0, "persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": -1},
        {"num_workers": 1, "multiprocessing_context": "nonsense"},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"sample": 1},
    ]
    return [words_of(lambda options=options: load(Plain(), **options)) for options in wrong]


@claim
def pin_memory_without_an_accelerator(load: Load) -> object:
    if torch.accelerator.is_available():
        return "there is one"
    loader = load(Plain(3), pin_memory=True, pin_memory_device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ids(loader)
    return [found, [(w.category.__name__, str(w.message)) for w in without_forks(caught)]]


@claim
def copies(load: Load) -> object:
    loader = load(Plain(4), batch_size=2)
    before = ids(loader)
    kinds = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    same_kind = [type(other) is type(loader) for other in kinds]
    pickled = raised(lambda: pickle.dumps(iter(loader)))
    return [before, [ids(other) for other in kinds], same_kind, pickled]


@claim
def library_that_subclasses(load: Load) -> object:
    class Shard(load.cls):
        def __init__(self, *args: object, skip: int = 0, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.skip = skip

        def __iter__(self) -> Iterator[object]:
            return itertools.islice(super().__iter__(), self.skip, None)

    shard = Shard(Plain(6), batch_size=2, num_workers=load.workers, skip=1)
    return [ids(shard), ids(shard), isinstance(shard, data.DataLoader), len(shard)]


@claim
def library_that_makes_the_loader_again(load: Load) -> object:
    """Works as Lightning does: from __init__ arguments and attributes of the same names."""
    loader = load(Plain(6), batch_size=2, shuffle=False, drop_last=True, worker_init_fn=None)
    names = [*inspect.signature(data.DataLoader.__init__).parameters][1:]
    kwargs = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    kwargs |= {"batch_size": 1, "shuffle": False, "drop_last": False, "sampler": None}
    kwargs |= {"batch_sampler": data.BatchSampler([5, 4, 3], 2, drop_last=False)}
    again = type(loader)(**kwargs)
    return [sorted(kwargs), ids(again), type(again) is type(loader)]


@claim
def library_that_never_ends_an_epoch(load: Load) -> object:
    """Works as Ultralytics and timm do: one iterator for all epochs, over a sampler without end."""

    class Repeating:
        def __iter__(self) -> Iterator[object]:
            while True:
                yield from data.BatchSampler(range(5), 2, drop_last=False)

    class Infinite(load.cls):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeating())
            self.iterator = super().__iter__()

        def __iter__(self) -> Iterator[object]:
            return itertools.islice(self.iterator, 3)

    loader = Infinite(Plain(5), batch_size=2, num_workers=load.workers)
    return [ids(loader) for _ in range(3)]


@claim
def loader_that_compares_by_value(load: Load) -> object:
    class Valued(load.cls):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Valued)

    one, two = (Valued(Plain(2, offset), num_workers=load.workers) for offset in (0, 100))
    return [ids(one), ids(two), ids(one)]


# Content that stoker makes the same wherever a batch is made


def draws(index: object) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def content(loader: data.DataLoader, epochs: int = 1) -> list[object]:
    torch.manual_seed(11)
    return [shown(batch) for _ in range(epochs) for batch in loader]


@seeded
def draws_of_samples_and_collate(load: Load) -> object:
    def collate(items: list[object]) -> object:
        return [items, draws(None)]

    return content(load(Each(draws, 24), batch_size=3, shuffle=True, collate_fn=collate), 2)


@seeded
def draws_of_samples_that_are_fetched_alone_or_many_at_once(load: Load) -> object:
    class Drawn(Plain):
        def __getitems__(self, indices: list[int]) -> list[object]:
            return [draws(index) for index in indices]

    bulk = data.BatchSampler(data.SequentialSampler(range(5)), 2, drop_last=False)
    return [
        content(load(Drawn(7), batch_size=3, collate_fn=same), 2),
        content(load(Each(draws), batch_size=None, collate_fn=same)),
        content(load(Each(draws), batch_size=None, collate_fn=same, sampler=bulk)),
    ]


class Holding(Plain):
    """Generators in every way that datasets and their transforms do."""

    of_class = np.random.RandomState(3)
    lazy: np.random.Generator | None = None

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.numpys = np.random.default_rng(3)
        self.pythons = [random.Random(3)]
        self.torchs = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> object:
        if self.lazy is None:
            info = data.get_worker_info()
            self.lazy = np.random.default_rng(3 if info is None else info.seed)
        return [
            float(MODULE_WIDE.random()),
            float(self.of_class.uniform()),
            float(self.lazy.random()),
            float(self.numpys.random()),
            self.pythons[0].random(),
            float(torch.rand((), generator=self.torchs)),
        ]


class Begun(Plain):
    def __getitem__(self, index: int) -> float:
        return self.begun.random() + float(np.random.rand())


def make_generators(number: int) -> None:
    np.random.seed(number)
    data.get_worker_info().dataset.begun = random.Random(number)


@seeded
def draws_of_generators_that_a_dataset_holds(load: Load) -> object:
    options = {"batch_size": 2, "shuffle": True, "collate_fn": same}
    begun = load(Begun(40), num_workers=2, worker_init_fn=make_generators, **options)
    found = content(load(Holding(40), **options), 2) + content(begun, 2)
    assert len({*map(str, found)}) == 80
    return found


@seeded
def draws_of_repeated_indices(load: Load) -> object:
    options = {"sampler": [3, 1, 3, 3, 1, 3], "collate_fn": same}
    batches = [torch.tensor([3, 1]), np.array([3, 3]), (1, 3), range(3, 4)]
    return [
        content(load(Each(draws), batch_size=2, **options)),
        content(load(Each(draws), batch_sampler=batches, collate_fn=same)),
    ]


@seeded
def draws_after_an_error(load: Load) -> object:
    def sample(index: int) -> object:
        if index == 3:
            raise ValueError("no")
        return draws(index)

    torch.manual_seed(2)
    iterator = iter(load(Each(sample, 9), batch_size=2, collate_fn=same))
    return outcomes(iterator, 6)


@seeded
def draws_of_subsets(load: Load) -> object:
    subset = data.Subset(data.Subset(Each(draws, 9), range(1, 9)), [5, 1, 1, 3])
    stack = data.StackDataset(Each(draws, 4), data.Subset(Each(draws, 9), range(4)))
    return [
        content(load(dataset, batch_size=3, collate_fn=same, shuffle=True))
        for dataset in (subset, stack)
    ]


@seeded
def draws_of_a_loader_in_a_dataset(load: Load) -> object:
    def whole(index: int) -> object:
        inner = load(Each(draws, 4), batch_size=2, shuffle=True, num_workers=0, collate_fn=same)
        return [*inner, draws(index), *inner]

    return content(load(Each(whole, 4), batch_size=2, collate_fn=same), 2)


SAMPLERS: dict[str, Callable[[], dict[str, object]]] = {
    "shuffled": lambda: {"shuffle": True},
    "weighted": lambda: {"sampler": data.WeightedRandomSampler([1, 2, 3] * 5, 14)},
    "by a generator": lambda: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(4),
        "batch_size": None,
    },
}


@seeded
def states_are_taken_up_wherever(load: Load) -> object:
    """A state of this mix of workers, and those that other mixes have left, give the same."""
    found = []
    for name, options in SAMPLERS.items():
        for stop in (0, 2, 99):
            torch.manual_seed(21)
            random.seed(21)
            np.random.seed(21)
            made = functools.partial(load, Each(draws, 15), batch_size=4, collate_fn=same)
            loader = made(**options())
            iterator = iter(loader)
            for _ in range(stop):
                next(iterator, None)
            buffer = io.BytesIO()
            torch.save(loader.state_dict(), buffer)
            states = [buffer.getvalue()]
            if load.states is not None:
                others = (file.read_bytes() for file in load.states.glob(f"{name}-{stop}@*"))
                # Some mixes leave the very same.
                states += {*others} - {*states}
                mine = load.states / f"{os.getpid()}"
                mine.write_bytes(states[0])
                mine.rename(load.states / f"{name}-{stop}@{os.getpid()}")
            results = []
            for state in states:
                again = made(**options())
                again.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
                results.append([shown(batch) for _ in range(2) for batch in again])
            found.append([results[0], all(result == results[0] for result in results)])
    return found


def warn_by_errors() -> None:
    warnings.simplefilter("error")
    # Of the machine, which has fewer CPUs than the loader has workers.
    warnings.filterwarnings("ignore", "This DataLoader will create")


def give_up(*_: object) -> None:
    raise TimeoutError(f"not within {MAX_SECONDS} s")


def main() -> None:
    warn_by_errors()
    given = json.loads(sys.argv[1])
    cls = data.DataLoader
    if given["kind"] != "torch":
        from stoker import DataLoader as cls
    states = Path(given["states"]) if "states" in given else None
    load = Load(cls, given.get("local", given.get("workers", 0)), given.get("pool", 0), states)
    signal.signal(signal.SIGALRM, give_up)
    # How long torch waits for each worker of an epoch that was given up: 5 s, which is seen often.
    data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    for name, function in (CLAIMS | VALUED | SEEDED).items():
        if name not in given.get("only", [name]):
            continue
        signal.alarm(MAX_SECONDS)
        try:
            found = function(load)
        except Exception as err:
            found = "".join(traceback.format_exception(err))[-3000:]
        signal.alarm(0)
        print(json.dumps({"claim": name, "found": found}, default=repr), flush=True)


if __name__ == "__main__":
    main()
