"""Trains over loaders without workers, while the loop changes what their batches are made from.

Argument: one JSON object, see `DEFAULTS`. Prints one JSON line an epoch: case, epoch, its batches,
and at the end a line with the state of torch's random numbers.
"""

import collections
import functools
import hashlib
import heapq
import json
import os
import queue
import random
import sys
import tempfile
import threading
import time

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

import stoker
from stoker.feed.replace import install

DEFAULTS = {"cases": [], "loader": "torch", "epochs": 2, "sleep": 0.0, "pause_at": None}
DEFAULTS |= {"start": "fork"}
TRAINER = os.getpid()
SAMPLES = 64
BATCH = 4
LEVEL = 0


class Plain(Dataset):
    """What the others are made of; `draws` shows how a batch was seeded."""

    def __init__(self, samples=SAMPLES):
        self.data = torch.arange(samples, dtype=torch.float64)
        self.level = 0
        self.transform = None

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        value = self.data[index] + 1000 * self.level
        return value if self.transform is None else self.transform(value)


class Drawing(Plain):
    def __getitem__(self, index):
        return self.data[index] + torch.rand((), dtype=torch.float64)


class Replay(Dataset):
    def __init__(self, kind):
        self.items = kind([float(index) for index in range(8)])

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.items[index % len(self.items)] + len(self.items)


class Ring(Dataset):
    """Prioritized replay in arrays of NumPy, without a counter that the loop moves."""

    def __init__(self, size):
        self.values = np.zeros(size)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.values[index]


class Caching(Plain):
    def __init__(self):
        super().__init__()
        self.cache = {}
        self.opened = None

    def __getitem__(self, index):
        if self.opened is None:
            self.opened = object()
        if index not in self.cache:
            self.cache[index] = self.data[index] * 2
        return self.cache[index]


class Makers(Plain):
    """Shows whether the trainer itself makes a sample."""

    def __init__(self):
        super().__init__()
        self.trainer = TRAINER

    def __getitem__(self, index):
        return float(os.getpid() == self.trainer)


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        return self.data[index] + 1000.0 * self.count


class OfLevel(Plain):
    def __getitem__(self, index):
        return self.data[index] + 1000.0 * LEVEL


class Mined(Sampler):
    """Hard examples first: the loop writes losses, each index follows from those of the moment."""

    def __init__(self, losses):
        self.losses = losses

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(np.argmax(np.asarray(self.losses)))


class Todo(Sampler):
    """Waits for the loop, which says what comes next."""

    def __init__(self, todo):
        self.todo = todo

    def __iter__(self):
        while True:
            while not self.todo:
                time.sleep(0.001)
            index = self.todo.popleft()
            if index < 0:
                return
            yield index


class Queued(Sampler):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(self.source.get, -1)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)).tolist()


class Randoms(Sampler):
    """Draws each index when it is asked for it, from one of the process's generators."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(self.draw() * SAMPLES)


class Shown(Sampler):
    """A sampler of the script that changes nothing."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(range(SAMPLES - 1, -1, -1))


class Heap(Sampler):
    """The most urgent sample comes next; the loop says which one is urgent."""

    def __init__(self):
        self.urgent = [(index, index) for index in range(SAMPLES)]

    def __iter__(self):
        for _ in range(SAMPLES):
            yield heapq.heappop(self.urgent)[1]


class Scaling(torch.nn.Module):
    """A transform whose strength is annealed."""

    def __init__(self):
        super().__init__()
        self.strength = 0.0

    def forward(self, value):
        return value + 1000 * self.strength


class OfTarget(Plain):
    """Labels by a target network, which follows the trained one by its `data`."""

    def __init__(self):
        super().__init__()
        self.target = torch.nn.Linear(1, 1).double().requires_grad_(False)
        self.target.weight.data.fill_(1.0)

    def __getitem__(self, index):
        return self.target(self.data[index].view(1)).item()


@functools.lru_cache
def looked_up(index):
    # By its name only at run time.
    return index + 1000.0 * globals()["LEVEL"]


class OfLookUp(Plain):
    def __getitem__(self, index):
        return looked_up(index)


class OfFile(Plain):
    """Reads a file at each sample, as of hard examples that the loop writes down."""

    def __init__(self):
        super().__init__()
        handle, self.path = tempfile.mkstemp()
        os.close(handle)

    def __getitem__(self, index):
        with open(self.path) as file:
            return self.data[index] + 1000 * len(file.read())


class OfEnvironment(Plain):
    def __getitem__(self, index):
        return self.data[index] + 1000 * float(os.environ.get("CHANGING_LEVEL", "0"))


class OfRegistry(Plain):
    table = {}  # noqa: RUF012 - of the class on purpose

    def __getitem__(self, index):
        return self.data[index] + 1000 * len(self.table)


class Mapped(Ring):
    def __init__(self):
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(bytes(8 * SAMPLES))
        self.values = np.memmap(file.name, dtype=np.float64, mode="r+")


class BufferStream(IterableDataset):
    """As Lightning's examples of reinforcement learning have it."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __iter__(self):
        for index in range(SAMPLES):
            yield float(index + 1000 * len(self.buffer))


class WaitingStream(IterableDataset):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(self.source.get, -1.0)


def collate_by_level(samples):
    return torch.tensor([float(sample) for sample in samples]) + 100000 * LEVEL


def nothing(step, batch):
    pass


def draw_once(draw, step, batch):
    draw()


def grown(items, every=1):
    def change(step, batch):
        if step % every == every - 1:
            items.append(float(step))

    return change


def set_level(dataset, at=None):
    def change(step, batch):
        if at is None or step == at:
            dataset.level = step

    return change


def set_global(step, batch):
    global LEVEL
    LEVEL = step


def set_class(kind):
    def change(step, batch):
        kind.scale = step

    return change


class ByClass(Plain):
    scale = 0

    def __getitem__(self, index):
        return self.data[index] + 1000.0 * self.scale


def write_ring(dataset, at=0):
    def change(step, batch):
        if step >= at:
            dataset.values[:] = step

    return change


def urge(urgent, step):
    heapq.heappush(urgent, (-step - 1, step))


def anneal(transform, step):
    transform.strength = step


def clear_cache(step, batch):
    set_global(step, batch)
    looked_up.cache_clear()


def append(path):
    with open(path, "a") as file:
        file.write("x")


def register(step):
    OfRegistry.table[len(OfRegistry.table)] = step


def set_environment(step):
    os.environ["CHANGING_LEVEL"] = str(step)


def mine(losses):
    def change(step, batch):
        losses[int(batch[0]) % SAMPLES] -= 1.0 + step

    return change


def feed_todo(todo, put):
    def change(step, batch):
        for index in range(BATCH):
            put((step * BATCH + index) % SAMPLES if step < 11 else -1)

    return change


def waiting(kind):
    source = queue.Queue() if kind is Queued or kind is WaitingStream else collections.deque()
    put = source.put if isinstance(source, queue.Queue) else source.append
    for index in range(BATCH):
        put(index)
    return source, feed_todo(source, put)


def generated(todo):
    while True:
        while not todo:
            time.sleep(0.001)
        index = todo.popleft()
        if index < 0:
            return
        yield index


def after_event(event):
    while True:
        if not event.wait(150):
            raise RuntimeError("the loop did not go on")
        event.clear()
        yield 3


def cases():
    """Returns for each case the loader's arguments, what the loop does, and between epochs."""
    made = {}

    def case(name, dataset, change=nothing, *, between=None, limit=None, **options):
        made[name] = (dataset, change, between, limit, options)

    case("frozen", Drawing(), shuffle=True)
    case("cache", Caching(), shuffle=True)
    case("shown", Drawing(), sampler=Shown())
    case("endless", Drawing(), sampler=Endless(), limit=200)
    case("makers", Makers())
    counted = DistributedSampler(Makers(), num_replicas=1, rank=0, shuffle=False)
    case("makers, counted", Makers(), sampler=counted)
    plain = Drawing()
    case("epoch set", plain, between=lambda epoch: setattr(plain, "level", epoch))
    learner = Replay(list)
    case("appended between", learner, between=lambda epoch: learner.items.append(epoch))
    for kind in (list, collections.deque):
        replay = Replay(kind)
        case(f"replay {kind.__name__}", replay, grown(replay.items))
    slow = Replay(list)
    case("replay each fifth", slow, grown(slow.items, every=5))
    full = Replay(functools.partial(collections.deque, maxlen=8))
    case("replay full", full, grown(full.items))
    for name, at in (("curriculum", None), ("switched late", 9)):
        dataset = Plain()
        case(name, dataset, set_level(dataset, at), shuffle=True)
    switched = Plain()
    case(
        "transform",
        switched,
        lambda step, batch: step == 5 and setattr(switched, "transform", torch.neg),
    )
    case("global", OfLevel(), set_global)
    case("class attribute", ByClass(), set_class(ByClass))
    case("collate", Plain(), set_global, collate_fn=collate_by_level)
    tensor = Plain()
    case("tensor in place", tensor, lambda step, batch: tensor.data.add_(1))
    for name, size in (("ring", SAMPLES), ("large ring", 1 << 20)):
        ring = Ring(size)
        case(name, ring, write_ring(ring))
    late = Ring(SAMPLES)
    case("late ring", late, write_ring(late, at=6))
    counting = Counting()
    case("counting", counting)
    heap = Heap()
    case("heap", Plain(), lambda step, batch: urge(heap.urgent, step), sampler=heap, limit=12)
    annealed = Plain()
    annealed.transform = torch.nn.Sequential(torch.nn.Identity(), Scaling())
    case("annealed", annealed, lambda step, batch: anneal(annealed.transform[1], step))
    labelled = OfTarget()
    case("target network", labelled, lambda step, batch: labelled.target.weight.data.mul_(1.5))
    case("cleared cache", OfLookUp(), clear_cache)
    noted = OfFile()
    case("rewritten file", noted, lambda step, batch: append(noted.path))
    case("environment", OfEnvironment(), lambda step, batch: set_environment(step))
    case("registry", OfRegistry(), lambda step, batch: register(step))
    mapped = Mapped()
    case("memory map", mapped, write_ring(mapped))
    for name, losses in (("mined", np.ones(SAMPLES)), ("mined tensor", torch.ones(SAMPLES))):
        case(name, Plain(), mine(losses), sampler=Mined(losses))
    weights = torch.ones(SAMPLES)
    case(
        "weights",
        Plain(),
        lambda step, batch: weights.mul_(0.5),
        sampler=WeightedRandomSampler(weights, SAMPLES),
    )
    for name, kind in (("todo", Todo), ("queue", Queued)):
        source, change = waiting(kind)
        case(name, Plain(), change, sampler=kind(source), limit=48)
    source, change = waiting(Todo)
    case("generator", Plain(), change, sampler=generated(source), limit=48)
    event = threading.Event()
    event.set()
    case(
        "event",
        Plain(),
        lambda step, batch: event.set(),
        sampler=after_event(event),
        batch_size=1,
        limit=12,
    )
    by_torch = functools.partial(torch.rand, ())
    for name, draw, drawn in (
        ("drawn", random.random, by_torch),
        ("drawn in turns", random.random, random.random),
        ("drawn in turns by numpy", np.random.rand, np.random.rand),
        ("drawn in turns by torch", by_torch, by_torch),
    ):
        change = functools.partial(draw_once, drawn)
        case(name, Drawing(), change, sampler=Randoms(draw))
    buffer = [0]
    case("stream buffer", BufferStream(buffer), grown(buffer))
    later = [0]
    case("stream later", BufferStream(later), grown(later, every=6))
    case("stream frozen", BufferStream([0]))
    source, change = waiting(WaitingStream)
    case("stream queue", WaitingStream(source), change, limit=12)
    return made


def in_turns(kind, *, is_changing):
    """Reads two loaders over one dataset with a cache in lock-step, and a sample by hand."""
    dataset = Caching()
    loaders = kind(dataset, batch_size=BATCH), kind(dataset, batch_size=BATCH, shuffle=True)
    for epoch in range(2):
        found = []
        for step, (one, other) in enumerate(zip(*loaders, strict=True)):
            found.append((one + other).tolist())
            if is_changing and step > 3:
                dataset.data = dataset.data + 1
                dataset.cache.clear()
        print(json.dumps({"case": "in turns", "epoch": epoch, "batches": found}), flush=True)


def main():
    given = DEFAULTS | json.loads(sys.argv[1])
    kind = stoker.DataLoader if given["loader"] == "stoker" else torch.utils.data.DataLoader
    if given["loader"] == "torch":
        install(kind)
    torch.multiprocessing.set_start_method(given["start"])
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    known = cases()
    for name in given["cases"] or known:
        if name.startswith("in turns"):
            in_turns(kind, is_changing="changing" in name)
            continue
        dataset, change, between, limit, options = known[name]
        # Each loader by a line of its own, else short ones are made here for that.
        code = compile("kind(dataset, **options)", f"{name}.py", "eval")
        names = {"kind": kind, "dataset": dataset, "options": {"batch_size": BATCH} | options}
        loader = eval(code, names)
        for epoch in range(given["epochs"] if limit is None else 1):
            if between is not None:
                between(epoch)
            found = []
            for step, batch in enumerate(loader):
                if step == given["pause_at"] and epoch == 0:
                    print(json.dumps({"pause": step}), flush=True)
                    sys.stdin.readline()
                found.append([float(value) for value in batch])
                time.sleep(given["sleep"])
                change(step, batch)
                if limit is not None and step + 1 == limit:
                    break
            digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]
            facts = {"case": name, "epoch": epoch, "num": len(found), "first": found[:8]}
            print(json.dumps(facts | {"digest": digest}), flush=True)
    if not given["cases"]:
        print(json.dumps({"state": torch.get_rng_state().sum().item()}), flush=True)


if __name__ == "__main__":
    main()
