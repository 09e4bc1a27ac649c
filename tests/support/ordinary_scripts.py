"""Small scripts as people publish them, each a text, to be run with and without a data group."""

# `show` prints what a script got, type by type; the rest of each script is its author's.
HEAD = """\
import os
from torch.utils.data import DataLoader

if os.environ.get("ORDINARY_IS_FED"):
    # As stoker's sitecustomize does it where a training starts a Python.
    from stoker.feed.replace import install

    install(DataLoader)
import collections, dataclasses, functools, itertools, json, math
import operator, random, sys, time, typing
import numpy as np
import torch
from torch import nn
from torch.utils.data import *


def plain(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, np.ndarray):
        return ["numpy", str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, *map(plain, value)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, plain(vars(value))]
    return repr(value)


def show(*values):
    print(json.dumps({"said": plain(values)}), flush=True)


class Numbers(Dataset):
    def __init__(self, count=24):
        self.data = torch.arange(count, dtype=torch.float32)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


torch.manual_seed(0)
"""

SCRIPTS: dict[str, str] = {}

SCRIPTS["regression loop"] = """\
class Line(Dataset):
    def __init__(self):
        self.x = torch.linspace(-1, 1, 32).unsqueeze(1)
        self.y = 3 * self.x + 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Line(), batch_size=8, shuffle=True, num_workers=2)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(epoch, loss.item())
"""

SCRIPTS["images and a csv file"] = """\
import csv, tempfile
from PIL import Image

folder = tempfile.mkdtemp()
with open(f"{folder}/labels.csv", "w", newline="") as file:
    writer = csv.writer(file)
    for i in range(12):
        Image.new("RGB", (4, 4), (i * 10, i, 255 - i)).save(f"{folder}/{i}.png")
        writer.writerow([f"{i}.png", i % 3])


class Pictures(Dataset):
    def __init__(self, annotations, img_dir, transform=None, target_transform=None):
        self.labels = list(csv.reader(open(annotations)))
        self.img_dir, self.transform, self.target_transform = (
            img_dir,
            transform,
            target_transform,
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        name, label = self.labels[idx]
        image = Image.open(os.path.join(self.img_dir, name))
        image = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.transform:
            image = self.transform(image)
        if self.target_transform:
            label = self.target_transform(label)
        return image, label


one_hot = lambda y: torch.zeros(3).scatter_(0, torch.tensor(int(y)), 1)
loader = DataLoader(
    Pictures(f"{folder}/labels.csv", folder, lambda x: x / 255, one_hot), 4, num_workers=2
)
for images, labels in loader:
    show(images, labels)
"""

SCRIPTS["landmarks as dictionaries"] = """\
class Rescale:
    def __init__(self, output_size):
        self.output_size = output_size

    def __call__(self, sample):
        return {**sample, "landmarks": sample["landmarks"] * self.output_size}


class ToTensor:
    def __call__(self, sample):
        return {k: torch.from_numpy(v) for k, v in sample.items()}


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, sample):
        for t in self.transforms:
            sample = t(sample)
        return sample


class Faces(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 9

    def __getitem__(self, i):
        if torch.is_tensor(i):
            i = i.tolist()
        return self.transform(
            {"image": np.full((2, 2), i), "landmarks": np.arange(4.0).reshape(2, 2) + i}
        )


for i, sample in enumerate(
    DataLoader(Faces(Compose([Rescale(10), ToTensor()])), 4, num_workers=4)
):
    show(i, sample)
    if i == 3:
        break
"""

SCRIPTS["embedding bag collation"] = """\
vocab = collections.Counter("the cat sat on the mat a dog ran".split())
stoi = {w: i for i, w in enumerate(sorted(vocab))}
texts = [
    (i % 2, " ".join(random.Random(i).choices(list(stoi), k=1 + i % 5))) for i in range(20)
]
text_pipeline = lambda x: [stoi[w] for w in x.split()]
device = torch.device("cpu")


def collate_batch(batch):
    labels, tokens, offsets = [], [], [0]
    for label, text in batch:
        labels.append(label)
        ids = torch.tensor(text_pipeline(text), dtype=torch.int64)
        tokens.append(ids)
        offsets.append(ids.size(0))
    return (
        torch.tensor(labels).to(device),
        torch.tensor(offsets[:-1]).cumsum(dim=0).to(device),
        torch.cat(tokens).to(device),
    )


loader = DataLoader(
    texts, batch_size=6, shuffle=True, collate_fn=collate_batch, num_workers=1
)
for batch in loader:
    show(batch)
"""

SCRIPTS["padded and packed sequences"] = """\
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence

seqs = [torch.arange(1 + i % 5) for i in range(12)]


def collate(batch):
    batch.sort(key=len, reverse=True)
    return {"padded": pad_sequence(batch, batch_first=True), "packed": pack_sequence(batch)}


for batch in DataLoader(seqs, 4, collate_fn=collate, num_workers=2):
    assert type(batch["packed"]) is PackedSequence
    show(batch["padded"], batch["packed"].data, batch["packed"].batch_sizes)
"""

SCRIPTS["tokenizer class with cached_property"] = """\
class Tokenizer:
    def __init__(self, words):
        self.words = words

    @functools.cached_property
    def table(self):
        return {w: i for i, w in enumerate(self.words)}

    def __call__(self, text, max_length=4):
        ids = [self.table.get(w, -1) for w in text.split()][:max_length]
        mask = [1] * len(ids) + [0] * (max_length - len(ids))
        return {"input_ids": ids + [0] * (max_length - len(ids)), "attention_mask": mask}


tokenizer = Tokenizer("a b c d e f".split())
tokenizer("a b")


class Texts(Dataset):
    def __init__(self, texts, tokenizer):
        self.texts, self.tokenizer = texts, tokenizer

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return {k: torch.tensor(v) for k, v in self.tokenizer(self.texts[i]).items()}


texts = ["a b", "c d e f a", "zz", "f"] * 4
for batch in DataLoader(Texts(texts, tokenizer), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["wave files"] = """\
import tempfile, wave

folder = tempfile.mkdtemp()
for i in range(8):
    with wave.open(f"{folder}/{i}.wav", "wb") as w:
        w.setnchannels(1)
        w.setsampwidth(2)
        w.setframerate(8000)
        w.writeframes((np.sin(np.arange(40 + i) * i) * 1000).astype("<i2").tobytes())


class Audio(Dataset):
    def __init__(self, folder):
        self.files = sorted(os.scandir(folder), key=lambda e: e.name)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with wave.open(self.files[i].path) as w:
            return torch.frombuffer(
                bytearray(w.readframes(w.getnframes())), dtype=torch.int16
            ), w.getframerate()


def collate(batch):
    return [x for x, _ in batch], {r for _, r in batch}


for x, rates in DataLoader(Audio(folder), 4, num_workers=2, collate_fn=collate):
    show(x, rates)
"""

SCRIPTS["tar members"] = """\
import io, tarfile, tempfile

path = tempfile.mktemp(".tar")
with tarfile.open(path, "w") as tar:
    for i in range(16):
        data = json.dumps({"id": i}).encode()
        info = tarfile.TarInfo(f"{i:03}.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


class Members(Dataset):
    def __init__(self, path):
        self.tar = tarfile.open(path)
        self.members = [m for m in self.tar.getmembers() if m.isfile()]

    def __len__(self):
        return len(self.members)

    def __getitem__(self, i):
        return json.load(self.tar.extractfile(self.members[i]))["id"]


for batch in DataLoader(Members(path), 4, shuffle=True, num_workers=1):
    show(batch)
"""

SCRIPTS["streamed shards with buffer shuffle"] = """\
class Shards(IterableDataset):
    def __init__(self, shards, buffer=5):
        self.shards, self.buffer = shards, buffer

    def lines(self):
        info = get_worker_info()
        shards = self.shards if info is None else self.shards[info.id :: info.num_workers]
        for shard in shards:
            yield from shard

    def __iter__(self):
        rng, held = random.Random(3), []
        for line in self.lines():
            held.append(line)
            if len(held) >= self.buffer:
                yield held.pop(rng.randrange(len(held)))
        yield from held


shards = [range(10 * n, 10 * n + 7) for n in range(4)]
for epoch in range(2):
    for batch in DataLoader(Shards(shards), 4, num_workers=2):
        show(epoch, batch)
"""

SCRIPTS["compose of generators"] = """\
class Pipeline(IterableDataset):
    def __init__(self, source, *stages):
        self.source, self.stages = source, stages

    def __iter__(self):
        data = iter(self.source)
        for stage in self.stages:
            data = stage(data)
        return data


def mapped(f):
    def stage(data):
        for x in data:
            yield f(x)

    return stage


def batched(n):
    def stage(data):
        while chunk := list(itertools.islice(data, n)):
            yield torch.tensor(chunk)

    return stage


for batch in DataLoader(
    Pipeline(range(30), mapped(lambda x: x * x), batched(7)), batch_size=None, num_workers=1
):
    show(batch)
"""

SCRIPTS["lru cache in a method"] = """\
class Cached(Dataset):
    def __len__(self):
        return 16

    @functools.lru_cache(maxsize=4)
    def load(self, i):
        return np.arange(i, i + 3)

    def __getitem__(self, i):
        return self.load(i // 2)


for epoch in range(2):
    for batch in DataLoader(Cached(), 4, num_workers=2):
        show(batch)
"""

SCRIPTS["wrapper with __getattr__"] = """\
class Wrapped(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i] * self.scale


base = Numbers()
base.scale = 3
for batch in DataLoader(Wrapped(base), 6, num_workers=1):
    show(batch)
"""

SCRIPTS["wrappers that look attributes up"] = """\
class ByTable(Dataset):
    def __init__(self):
        self.table = {"scale": 2, "n": 8}

    def __getattr__(self, name):
        try:
            return self.table[name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i * self.scale


class BySlots:
    __slots__ = ("inner", "more")

    def __init__(self, inner):
        self.inner, self.more = inner, 5

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i] + self.more + self.scale


class ByAttribute(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __getattribute__(self, name):
        if name in ("inner", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return (
            {"scale": 7}[name] if name == "scale" else object.__getattribute__(self, name)
        )

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i] * self.scale


class Frozen(collections.UserDict):
    def __getattr__(self, name):
        return self.data[name]


class Nested(Dataset):
    def __init__(self):
        self.cfg = Frozen(a=1, b=Frozen(c=2))

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i + self.cfg.a + self.cfg.b.c


for dataset in (ByTable(), BySlots(ByTable()), ByAttribute(BySlots(ByTable())), Nested()):
    for batch in DataLoader(dataset, 4, num_workers=1):
        show(batch)
"""

SCRIPTS["wrapper with __getattr__ over __dict__"] = """\
class Config(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as e:
            raise AttributeError(name) from e

    def __setattr__(self, name, value):
        self[name] = value


class Data(Dataset):
    def __init__(self, cfg):
        self.cfg = cfg

    def __len__(self):
        return self.cfg.size

    def __getitem__(self, i):
        return i * self.cfg.model.scale


cfg = Config(size=12, model=Config(scale=2))
for epoch in range(2):
    cfg.model.scale = 2 + epoch
    for batch in DataLoader(Data(cfg), 4, num_workers=1):
        show(batch)
"""

SCRIPTS["properties with setters"] = """\
class Props(Dataset):
    def __init__(self):
        self._size, self._mean = 10, None

    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = int(value)

    @property
    def mean(self):
        if self._mean is None:
            self._mean = sum(range(self.size)) / self.size
        return self._mean

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return i - self.mean


dataset = Props()
dataset.size = 12.0
loader = DataLoader(dataset, 4, num_workers=1)
show(len(loader), dataset.mean)
for batch in loader:
    show(batch)
dataset.size = 8
dataset._mean = None
show(len(loader))
for batch in loader:
    show(batch)
"""

SCRIPTS["slots"] = """\
class Slotted(Dataset):
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 3, [1, 2]

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.a * i + self.b[i % 2]


for batch in DataLoader(Slotted(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["partials everywhere"] = """\
def load(i, scale, offset=0):
    return torch.tensor(i * scale + offset)


class Lazy(Dataset):
    def __init__(self, f, n):
        self.f, self.n = f, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.f(i)


def collate(batch, *, reverse):
    return torch.stack(batch[::-1] if reverse else batch)


for batch in DataLoader(
    Lazy(functools.partial(load, scale=5, offset=1), 12),
    4,
    num_workers=1,
    collate_fn=functools.partial(collate, reverse=True),
):
    show(batch)
"""

SCRIPTS["partialmethod and singledispatchmethod"] = """\
class Data(Dataset):
    def __len__(self):
        return 8

    @functools.singledispatchmethod
    def convert(self, x):
        return -1

    @convert.register
    def _(self, x: int):
        return x * 2

    @convert.register
    def _(self, x: str):
        return len(x)

    def scaled(self, i, by):
        return i * by

    triple = functools.partialmethod(scaled, by=3)

    def __getitem__(self, i):
        return self.convert(i), self.convert(str(i) * i), self.triple(i)


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["namedtuple samples"] = """\
Sample = collections.namedtuple("Sample", "x y")


class Typed(typing.NamedTuple):
    inner: Sample
    name: str = "n"


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return Typed(Sample(i, torch.tensor([i])), name=str(i))


for batch in DataLoader(Data(), 4, num_workers=1):
    assert type(batch) is Typed and type(batch.inner) is Sample
    show(batch)
"""

SCRIPTS["frozen dataclass batch with pin_memory"] = """\
@dataclasses.dataclass(frozen=True, slots=False)
class Batch:
    x: torch.Tensor
    names: list

    def pin_memory(self):
        return dataclasses.replace(self, names=[n.upper() for n in self.names])

    def to(self, device):
        return Batch(self.x.to(device), self.names)


def collate(items):
    return Batch(torch.tensor(items), [f"n{i}" for i in items])


for batch in DataLoader(range(12), 4, num_workers=1, collate_fn=collate):
    assert type(batch) is Batch
    show(batch.to("cpu"))
"""

SCRIPTS["slotted dataclass"] = """\
@dataclasses.dataclass(slots=True)
class Batch:
    x: torch.Tensor
    tags: dict = dataclasses.field(default_factory=dict)


def collate(items):
    return Batch(torch.tensor(items), {"n": len(items)})


for batch in DataLoader(range(12), 4, num_workers=1, collate_fn=collate):
    assert type(batch) is Batch
    show(batch.x, batch.tags)
"""

SCRIPTS["attrs classes"] = """\
import attrs


@attrs.define
class Example:
    idx: int
    text: str = attrs.field(converter=str)


@attrs.frozen
class Batch:
    ids: torch.Tensor
    examples: list


def collate(items):
    return Batch(torch.tensor([e.idx for e in items]), items)


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return Example(i, i * 2)


for batch in DataLoader(Data(), 4, num_workers=1, collate_fn=collate):
    assert type(batch) is Batch and type(batch.examples[0]) is Example
    show(batch.ids, [attrs.asdict(e) for e in batch.examples])
"""

SCRIPTS["pydantic models"] = """\
import pydantic


class Item(pydantic.BaseModel):
    idx: int
    tags: list[str] = []


class Data(Dataset):
    def __init__(self):
        self.items = [Item(idx=i, tags=["a"] * (i % 3)) for i in range(8)]

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.items[i]


for batch in DataLoader(Data(), 4, num_workers=1, collate_fn=list):
    assert type(batch[0]) is Item
    show([item.model_dump() for item in batch])
"""

SCRIPTS["enums and flags in batches"] = """\
import enum


class Split(enum.StrEnum):
    TRAIN = enum.auto()
    TEST = enum.auto()


class Bits(enum.Flag):
    A = 1
    B = 2


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return (Split.TRAIN if i % 2 else Split.TEST), Bits(i % 4)


for batch in DataLoader(Data(), 4, num_workers=1, collate_fn=list):
    assert all(s in Split for s, _ in batch)
    show([(s.name, s is Split.TRAIN, b.value, b is Bits.A) for s, b in batch])
"""

SCRIPTS["tensor subclass"] = """\
class Tagged(torch.Tensor):
    @staticmethod
    def __new__(cls, data, tag=""):
        made = torch.as_tensor(data).as_subclass(cls)
        made.tag = tag
        return made


def collate(items):
    return Tagged(torch.stack(items), tag=f"{len(items)} items")


for batch in DataLoader(Numbers(12), 4, num_workers=1, collate_fn=collate):
    assert type(batch) is Tagged
    show(torch.Tensor(batch), batch.tag)
"""

SCRIPTS["parameters and gradients in batches"] = """\
class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((2,), float(i), requires_grad=False)


def collate(items):
    return torch.stack(items).requires_grad_(True)


for batch in DataLoader(Data(), 4, num_workers=1, collate_fn=collate):
    (batch * 2).sum().backward()
    show(batch.requires_grad, batch.is_leaf, batch.grad)
"""

SCRIPTS["concatenated, chained, subsets"] = """\
class Stream(IterableDataset):
    def __init__(self, a, b):
        self.a, self.b = a, b

    def __iter__(self):
        return iter(range(self.a, self.b))


both = ConcatDataset([Numbers(7), Numbers(5)]) + Numbers(3)
for batch in DataLoader(both, 4, num_workers=2):
    show(batch)
train, valid, test = random_split(
    Numbers(20), [0.5, 0.25, 0.25], generator=torch.Generator().manual_seed(42)
)
for part in (train, valid, Subset(test, [2, 0])):
    for batch in DataLoader(part, 4, num_workers=1, shuffle=part is train):
        show(len(part), batch)
for batch in DataLoader(ChainDataset([Stream(0, 5), Stream(10, 16)]), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["stacked datasets and tensor datasets"] = """\
stack = StackDataset(
    image=Numbers(9), label=TensorDataset(torch.arange(9), torch.arange(9) * 2)
)
for batch in DataLoader(stack, 4, num_workers=1):
    show(batch)
"""

SCRIPTS["weighted sampling"] = """\
weights = torch.tensor([0.1, 0.9] * 12)
sampler = WeightedRandomSampler(weights, 20, replacement=True)
for epoch in range(2):
    for batch in DataLoader(Numbers(), 5, sampler=sampler, num_workers=1):
        show(batch)
    weights.mul_(torch.linspace(0, 1, 24))
"""

SCRIPTS["bucketing batch sampler"] = """\
class Buckets(Sampler):
    def __init__(self, lengths, size):
        self.lengths, self.size, self.epoch = lengths, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return math.ceil(len(self.lengths) / self.size)

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.Random(self.epoch).shuffle(batches)
        yield from batches


sampler = Buckets([i * 7 % 11 for i in range(24)], 5)
loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        show(epoch, batch)
"""

SCRIPTS["pairs from a tuple sampler"] = """\
class Pairs(Sampler):
    def __iter__(self):
        return iter([(i, (i * 5 + 1) % 12) for i in range(12)])

    def __len__(self):
        return 12


class Siamese(Dataset):
    def __getitem__(self, pair):
        return torch.tensor(pair), float(pair[0] % 2 == pair[1] % 2)


for batch in DataLoader(Siamese(), 4, sampler=Pairs(), num_workers=1):
    show(batch)
"""

SCRIPTS["keys of a dictionary-style dataset"] = """\
class Keyed(Dataset):
    def __init__(self):
        self.items = {f"id{i}": i * 1.5 for i in range(12)}

    def __len__(self):
        return len(self.items)

    def __getitem__(self, key):
        return key, self.items[key]


dataset = Keyed()
for batch in DataLoader(dataset, 4, sampler=list(dataset.items), num_workers=1):
    show(batch)
"""

SCRIPTS["distributed sampler without a group"] = """\
sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=7)
loader = DataLoader(Numbers(), 4, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        show(batch)
"""

SCRIPTS["infinite sampler and next"] = """\
class Infinite(Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randperm(self.n, generator=g).tolist()


it = iter(DataLoader(Numbers(), 4, sampler=Infinite(24), num_workers=2))
for step in range(13):
    show(step, next(it))
"""

SCRIPTS["curriculum by callback"] = """\
class Graded(Dataset):
    difficulty = 0

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i + 100 * self.difficulty


class Curriculum:
    def __init__(self, dataset):
        self.dataset = dataset

    def on_epoch_end(self, epoch):
        self.dataset.difficulty = epoch + 1


dataset = Graded()
callbacks = [Curriculum(dataset)]
for workers in (0, 1):
    loader = DataLoader(dataset, 4, num_workers=workers)
    for epoch in range(3):
        for batch in loader:
            show(batch)
        for c in callbacks:
            c.on_epoch_end(epoch)
"""

SCRIPTS["curriculum in mid-epoch without workers"] = """\
class Graded(Dataset):
    def __init__(self):
        self.max_len = 1

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return min(i, self.max_len)


dataset = Graded()
for step, batch in enumerate(DataLoader(dataset, 4)):
    show(batch)
    if step >= 4:
        dataset.max_len += 5
"""

SCRIPTS["curriculum in a module of settings"] = """\
import types

args = types.SimpleNamespace(level=0, aug=types.SimpleNamespace(p=0.0))


class Data(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return i + 100 * args.level + args.aug.p


for step, batch in enumerate(DataLoader(Data(), 4)):
    show(batch)
    if step == 5:
        args.level = 1
    if step == 7:
        args.aug.p = 0.5
"""

SCRIPTS["mixup in collate"] = """\
class MixUp:
    def __init__(self, alpha):
        self.alpha = alpha

    def __call__(self, batch):
        x = default_collate(batch)
        return self.alpha * x + (1 - self.alpha) * x.flip(0)


from torch.utils.data import default_collate

mix = MixUp(0.25)
loader = DataLoader(Numbers(), 6, collate_fn=mix, num_workers=1)
for epoch in range(2):
    for batch in loader:
        show(batch)
    mix.alpha = 0.5
"""

SCRIPTS["shared epoch value"] = """\
import multiprocessing as mp


class Data(Dataset):
    def __init__(self):
        self.epoch = mp.Value("i", 0)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i + 100 * self.epoch.value


dataset = Data()
loader = DataLoader(dataset, 4, num_workers=1, persistent_workers=True)
for epoch in range(3):
    with dataset.epoch.get_lock():
        dataset.epoch.value = epoch
    for batch in loader:
        show(batch)
"""

SCRIPTS["shared array and event"] = """\
ctx = torch.multiprocessing.get_context("fork")


class Data(Dataset):
    def __init__(self):
        self.scale, self.stop = ctx.Array("d", [1.0] * 4), ctx.Event()

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return -1.0 if self.stop.is_set() else i * self.scale[i % 4]


dataset = Data()
loader = DataLoader(dataset, 4, num_workers=1, persistent_workers=True)
for epoch in range(3):
    for batch in loader:
        show(batch)
    dataset.scale[1] = epoch + 5.0
    if epoch == 1:
        dataset.stop.set()
"""

SCRIPTS["replay buffer"] = """\
class Replay(Dataset):
    def __init__(self, capacity):
        self.memory = collections.deque(maxlen=capacity)

    def push(self, *t):
        self.memory.append(t)

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, i):
        return self.memory[i]


memory = Replay(16)
for i in range(8):
    memory.push(i, i * 0.5)
for episode in range(4):
    for state, reward in DataLoader(memory, 4):
        show(state, reward)
        memory.push(int(state.sum()), float(reward.mean()))
        if len(memory) > 14:
            break
"""

SCRIPTS["pseudo labels written into the dataset"] = """\
dataset = TensorDataset(torch.arange(24.0), torch.zeros(24))
for epoch in range(2):
    for step, (x, y) in enumerate(DataLoader(dataset, 4)):
        show(x, y)
        dataset.tensors[1][4 * (step + 1) :] += 1
"""

SCRIPTS["logging in the dataset"] = """\
import logging

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s %(message)s")
log = logging.getLogger("data")


class Handler(logging.Handler):
    def emit(self, record):
        pass


log.addHandler(Handler())


class Data(Dataset):
    def __init__(self):
        self.log = log

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.log.info("item %d", i)
        return i, self.log.getEffectiveLevel(), self.log.isEnabledFor(10)


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["warnings as errors that the dataset catches"] = """\
import warnings

warnings.simplefilter("error", RuntimeWarning)


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        try:
            return float(np.float64(1.0) / np.float64(i))
        except (RuntimeWarning, FloatingPointError):
            return -1.0


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["default dtype"] = """\
torch.set_default_dtype(torch.float64)


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([i * 0.1]), i * 0.1


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["default device"] = """\
torch.set_default_device("cpu")
loader = DataLoader(
    Numbers(), 6, shuffle=True, num_workers=1, generator=torch.Generator("cpu")
)
for batch in loader:
    show(batch, batch.device.type)
"""

SCRIPTS["meta device in a context"] = """\
with torch.device("meta"):
    model = nn.Linear(2, 2)
for batch in DataLoader(Numbers(), 6, num_workers=1):
    show(batch, model.weight.is_meta)
"""

SCRIPTS["locale and decimals"] = """\
import decimal, locale

locale.setlocale(locale.LC_ALL, "C.UTF-8")
decimal.getcontext().prec = 5


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return (
            str(decimal.Decimal(i + 1) / 7),
            locale.format_string("%.2f", i),
            locale.getlocale(),
        )


for batch in DataLoader(Data(), 4, num_workers=1, collate_fn=list):
    show(batch)
"""

SCRIPTS["a local decimal context"] = """\
import decimal


class Data(Dataset):
    def __init__(self):
        self.ctx = decimal.Context(prec=3, rounding=decimal.ROUND_UP)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return str(self.ctx.divide(decimal.Decimal(i), 7))


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["worker_init_fn that splits a stream"] = """\
class Range(IterableDataset):
    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        return iter(range(self.start, self.end))


def worker_init_fn(worker_id):
    info = torch.utils.data.get_worker_info()
    dataset = info.dataset
    per = int(math.ceil((dataset.end - dataset.start) / info.num_workers))
    begin = dataset.start
    dataset.start = begin + worker_id * per
    dataset.end = min(dataset.start + per, dataset.end)


import torch.utils.data

for workers in (2, 3):
    for batch in DataLoader(
        Range(3, 17), num_workers=workers, worker_init_fn=worker_init_fn
    ):
        show(batch)
"""

SCRIPTS["worker_init_fn that opens files"] = """\
import tempfile

path = tempfile.mktemp()
open(path, "w").write("".join(f"{i:04}\\n" for i in range(20)))


class Rows(Dataset):
    file = None

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.file.seek(5 * i)
        return int(self.file.readline())


def init(_):
    get_worker_info().dataset.file = open(path)


for batch in DataLoader(Rows(), 5, num_workers=2, worker_init_fn=init):
    show(batch)
"""

SCRIPTS["seeds of get_worker_info"] = """\
class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        info = get_worker_info()
        return i, info.id, info.num_workers, len(info.dataset)


for batch in DataLoader(Data(), 4, num_workers=2):
    show(batch)
for batch in DataLoader(Numbers(8), 4):
    show(batch, get_worker_info() is None)
"""

SCRIPTS["seeds set by worker_init_fn"] = """\
def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


g = torch.Generator()
g.manual_seed(0)
loader = DataLoader(
    Numbers(), 6, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=g
)
for epoch in range(2):
    for batch in loader:
        show(batch)
show(
    torch.rand(2),
    np.random.RandomState(1).rand(),
    random.Random(1).random(),
    g.get_state().sum(),
)
"""

SCRIPTS["draws of the loop between batches"] = """\
np.random.seed(1)
random.seed(1)
for workers in (0, 2):
    for batch in DataLoader(Numbers(), 6, shuffle=True, num_workers=workers):
        show(batch, torch.rand(1), np.random.normal(), random.gauss(0, 1))
"""

SCRIPTS["exceptions that the script catches"] = """\
class Broken(Exception):
    def __init__(self, index, why):
        self.index, self.why = index, why
        super().__init__(index, why)


class Data(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 5:
            raise self.kind
        return i


for kind in (
    ValueError("bad"),
    KeyError("k"),
    OSError(2, "no file", "p"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "r"),
    NotImplementedError(),
    ZeroDivisionError("z"),
    IndexError("i"),
    FileNotFoundError(2, "m"),
):
    for workers in (0, 1):
        try:
            for batch in DataLoader(Data(kind), 4, num_workers=workers):
                show(batch)
        except Exception as e:
            show(workers, type(e).__name__, (str(e).splitlines() or ["-"])[-1])
"""

SCRIPTS["an exception with two arguments"] = """\
class Broken(Exception):
    def __init__(self, index, why):
        self.index = index
        super().__init__(f"{index}: {why}")


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 5:
            raise Broken(i, "no luck")
        return i


try:
    for batch in DataLoader(Data(), 4, num_workers=1):
        show(batch)
except Exception as e:
    # PyTorch's workers make a RuntimeError of it, which has its class in the text.
    show(type(e).__name__ in ("Broken", "RuntimeError"))
    show(str(e).splitlines()[-1].removeprefix("Broken: "))
"""

SCRIPTS["bad samples skipped by collate"] = """\
from torch.utils.data import default_collate


class Data(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        try:
            if i % 5 == 0:
                raise OSError("corrupt")
            return torch.tensor(i)
        except OSError:
            return None


def collate(batch):
    batch = [b for b in batch if b is not None]
    return default_collate(batch) if batch else None


for batch in DataLoader(Data(), 4, num_workers=2, collate_fn=collate):
    show(batch)
"""

SCRIPTS["the loop goes on after a caught error"] = """\
class Data(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        if i == 9:
            raise RuntimeError("sample 9")
        return i


it = iter(DataLoader(Data(), 4, num_workers=1))
for _ in range(8):
    try:
        show(next(it))
    except StopIteration:
        show("end")
        break
    except RuntimeError as e:
        show("caught", str(e).splitlines()[-1])
"""

SCRIPTS["keyboard interrupt in the loop"] = """\
import _thread

loader = DataLoader(Numbers(), 4, num_workers=1)
try:
    for i, batch in enumerate(loader):
        show(batch)
        if i == 2:
            raise KeyboardInterrupt
except KeyboardInterrupt:
    show("saved")
for batch in loader:
    show(batch)
"""

SCRIPTS["early breaks"] = """\
loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=2)
for epoch in range(4):
    for i, batch in enumerate(loader):
        show(batch)
        if i == epoch:
            break
"""

SCRIPTS["early breaks with persistent workers"] = """\
loader = DataLoader(
    Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3
)
for epoch in range(4):
    for i, batch in enumerate(loader):
        show(batch)
        if i == epoch:
            break
"""

SCRIPTS["zip of two loaders"] = """\
labelled = DataLoader(Numbers(8), 2, shuffle=True, num_workers=1)
unlabelled = DataLoader(Numbers(24), 4, shuffle=True, num_workers=1)
for a, b in zip(labelled, unlabelled):
    show(a, b)
for a, b in zip(itertools.cycle(labelled), unlabelled):
    show(a, b)
"""

SCRIPTS["two iterators of one loader"] = """\
loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=1)
for a, b in zip(loader, loader):
    show(a, b)
first, second = iter(loader), iter(loader)
show(next(first), next(second), next(second), next(first))
"""

SCRIPTS["cycle by restart"] = """\
def forever(loader):
    while True:
        yield from loader


source = forever(DataLoader(Numbers(12), 4, shuffle=True, num_workers=1, drop_last=True))
for _ in range(8):
    show(next(source))
"""

SCRIPTS["a length that changes"] = """\
class Growing(Dataset):
    def __init__(self):
        self.items = list(range(8))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


dataset = Growing()
loader = DataLoader(dataset, 4, shuffle=True, num_workers=1)
for epoch in range(3):
    show(len(loader))
    for batch in loader:
        show(batch)
    dataset.items += range(100 * epoch, 100 * epoch + 4)
"""

SCRIPTS["drop_last, prefetch and odd sizes"] = """\
for options in (
    {"drop_last": True},
    {"prefetch_factor": None},
    {"prefetch_factor": 1, "num_workers": 1},
    {"num_workers": 1, "timeout": 30},
):
    for batch in DataLoader(Numbers(11), 4, **options):
        show(batch)
unordered = DataLoader(Numbers(11), 4, num_workers=1, in_order=False)
show(sorted(batch.tolist() for batch in unordered))
"""

SCRIPTS["streams without a length"] = """\
class Stream(IterableDataset):
    def __iter__(self):
        for i in range(10):
            yield {"i": i, "text": f"t{i}"}


loader = DataLoader(Stream(), batch_size=4, num_workers=1)
try:
    show(len(loader))
except TypeError as e:
    show(type(e).__name__)
for batch in loader:
    show(batch)
for batch in DataLoader(Stream(), batch_size=4, drop_last=True):
    show(batch)
"""

SCRIPTS["streams with a length"] = """\
class Stream(IterableDataset):
    def __len__(self):
        return 10

    def __iter__(self):
        return iter(torch.arange(10))


loader = DataLoader(Stream(), batch_size=4, num_workers=1)
show(len(loader))
for batch in loader:
    show(batch)
"""

SCRIPTS["batch_size None"] = """\
class Whole(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return np.full((2, i + 1), i), {"i": i}, "text"


for batch in DataLoader(Whole(), batch_size=None, num_workers=1, shuffle=True):
    show(batch)
sampler = BatchSampler(SequentialSampler(range(10)), 4, False)


class ByList(Dataset):
    def __getitem__(self, ids):
        return torch.tensor(ids) * 2


for batch in DataLoader(ByList(), batch_size=None, sampler=sampler, num_workers=1):
    show(batch)
"""

SCRIPTS["__getitems__"] = """\
class Many(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i

    def __getitems__(self, ids):
        return [i * 10 for i in ids]


for batch in DataLoader(Many(), 5, num_workers=1):
    show(batch)
for batch in DataLoader(Subset(Many(), range(3, 9)), 2, num_workers=1):
    show(batch)
"""

SCRIPTS["a list, a range, a dict and an array as dataset"] = """\
for dataset in (
    [1, 2, 3, 4, 5],
    range(5),
    {i: str(i) for i in range(5)},
    np.arange(10).reshape(5, 2),
    torch.arange(5),
    "abcde",
    (1.5, 2.5),
    [{"a": 1}, {"a": 2}],
    [b"x", b"yy"],
):
    for batch in DataLoader(dataset, 2, num_workers=1):
        show(batch)
"""

SCRIPTS["pandas rows"] = """\
import pandas as pd


class Frame(Dataset):
    def __init__(self, df):
        self.df = df.reset_index(drop=True)

    def __len__(self):
        return len(self.df)

    def __getitem__(self, i):
        row = self.df.iloc[i]
        return torch.tensor(row[["a", "b"]].to_numpy(dtype="float32")), row.c


df = pd.DataFrame({"a": range(12), "b": np.arange(12) * 0.5, "c": list("abcdefghijkl")})
for batch in DataLoader(Frame(df[df.a > 2]), 4, num_workers=1):
    show(batch)
for batch in DataLoader(df.index, 4, num_workers=1, collate_fn=lambda i: df.loc[i]):
    show(batch.to_dict(), list(batch.index))
"""

SCRIPTS["sliding windows over one tensor"] = """\
class Windows(Dataset):
    def __init__(self, series, size):
        self.series, self.size = series, size

    def __len__(self):
        return len(self.series) - self.size

    def __getitem__(self, i):
        return self.series[i : i + self.size], self.series[i + self.size]


for batch in DataLoader(Windows(torch.sin(torch.arange(20.0)), 5), 4, num_workers=1):
    show(batch)
for batch in DataLoader(Windows(torch.arange(20.0), 5), 4, num_workers=1, collate_fn=list):
    show(batch)
"""

SCRIPTS["numpy memmap tokens"] = """\
import tempfile

path = tempfile.mktemp()
np.arange(100, dtype=np.uint16).tofile(path)


class Tokens(Dataset):
    def __init__(self, path, block):
        self.data, self.block = np.memmap(path, dtype=np.uint16, mode="r"), block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        at = i * self.block
        x = torch.from_numpy(self.data[at : at + self.block].astype(np.int64))
        return x, torch.from_numpy(self.data[at + 1 : at + 1 + self.block].astype(np.int64))


for batch in DataLoader(Tokens(path, 8), 3, shuffle=True, num_workers=1):
    show(batch)
"""

SCRIPTS["json lines by offset"] = """\
import mmap, tempfile

path = tempfile.mktemp()
with open(path, "w") as f:
    for i in range(12):
        f.write(json.dumps({"i": i, "t": "x" * i}) + "\\n")


class Lines(Dataset):
    def __init__(self, path):
        self.file = open(path, "rb")
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.offsets = [0]
        while (at := self.map.find(b"\\n", self.offsets[-1])) >= 0:
            self.offsets.append(at + 1)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        return json.loads(self.map[self.offsets[i] : self.offsets[i + 1]])


for batch in DataLoader(Lines(path), 4, num_workers=2, collate_fn=list):
    show(batch)
"""

SCRIPTS["sqlite opened lazily"] = """\
import sqlite3, tempfile, threading

path = tempfile.mktemp()
with sqlite3.connect(path) as db:
    db.execute("create table t (i integer, s text)")
    db.executemany("insert into t values (?, ?)", [(i, f"s{i}") for i in range(12)])


class Rows(Dataset):
    def __init__(self, path):
        self.path, self.local = path, threading.local()

    @property
    def db(self):
        if not hasattr(self.local, "db"):
            self.local.db = sqlite3.connect(self.path)
        return self.local.db

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.db.execute("select * from t where i = ?", (i,)).fetchone()


for batch in DataLoader(Rows(path), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["registry of datasets by decorator"] = """\
REGISTRY = {}


def register(name):
    def add(cls):
        REGISTRY[name] = cls
        return cls

    return add


class Meta(type):
    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.tag = cls.__name__.lower()
        return made


@register("squares")
class Squares(Dataset, metaclass=Meta):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i * i, self.tag, sorted(REGISTRY)


@register("cubes")
class Cubes(Squares):
    def __getitem__(self, i):
        return (i, *super().__getitem__(i))


for name in REGISTRY:
    for batch in DataLoader(REGISTRY[name](), 4, num_workers=1, collate_fn=list):
        show(batch)
"""

SCRIPTS["abstract and generic bases"] = """\
import abc

T = typing.TypeVar("T")


class Base(Dataset[T], abc.ABC, typing.Generic[T]):
    @abc.abstractmethod
    def load(self, i: int) -> T: ...
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.load(i)


class Ints(Base[int]):
    def load(self, i):
        return i * 3


for batch in DataLoader(Ints(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["classes made in functions"] = """\
def make(n):
    offset = 100

    class Local(Dataset):
        def __len__(self):
            return n

        def __getitem__(self, i):
            return i + offset

        def helper(self):
            return __class__.__name__

    return Local()


def main():
    seen = []

    def collate(batch):
        seen.append(len(batch))
        return torch.tensor(batch), len(seen) > 0

    for batch in DataLoader(make(10), 4, num_workers=1, collate_fn=collate):
        show(batch)
    show(len(seen))


main()
"""

SCRIPTS["subclassed loader"] = """\
class FastLoader(DataLoader):
    def __init__(self, *args, repeats=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.repeats = repeats

    def __iter__(self):
        for _ in range(self.repeats):
            yield from super().__iter__()

    def __len__(self):
        return self.repeats * super().__len__()


loader = FastLoader(Numbers(10), 4, num_workers=1, shuffle=True)
show(len(loader))
for batch in loader:
    show(batch)
"""

SCRIPTS["repeat sampler of YOLO"] = """\
class _Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


loader = InfiniteDataLoader(Numbers(12), batch_size=4, shuffle=True, num_workers=2)
for epoch in range(3):
    for batch in loader:
        show(epoch, batch)
"""

SCRIPTS["prefetcher of timm"] = """\
class Prefetcher:
    def __init__(self, loader, mean):
        self.loader, self.mean = loader, torch.tensor(mean)

    def __iter__(self):
        first, held = True, None
        for batch in self.loader:
            batch = batch.float().sub_(self.mean)
            if not first:
                yield held
            else:
                first = False
            held = batch
        yield held

    def __len__(self):
        return len(self.loader)

    @property
    def sampler(self):
        return self.loader.sampler


def fast_collate(batch):
    return torch.from_numpy(np.stack(batch))


class Bytes(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return np.full((2, 2), i, dtype=np.uint8)


for batch in Prefetcher(
    DataLoader(Bytes(), 4, num_workers=1, collate_fn=fast_collate), 2.0
):
    show(batch)
"""

SCRIPTS["threaded prefetch"] = """\
import queue, threading


class Background(threading.Thread):
    def __init__(self, source):
        super().__init__(daemon=True)
        self.q = queue.Queue(2)
        self.source = source
        self.start()

    def run(self):
        for item in self.source:
            self.q.put(item)
        self.q.put(None)

    def __iter__(self):
        return iter(self.q.get, None)


for batch in Background(DataLoader(Numbers(), 4, num_workers=1)):
    show(batch)
"""

SCRIPTS["loader within a generator that is closed"] = """\
def batches():
    try:
        for batch in DataLoader(Numbers(), 4, num_workers=1):
            yield batch
    finally:
        show("closed")


g = batches()
show(next(g))
show(next(g))
g.close()
for batch in batches():
    show(batch)
"""

SCRIPTS["enumerate, tqdm, islice, len"] = """\
from tqdm import tqdm

loader = DataLoader(Numbers(), 4, num_workers=1)
for i, batch in enumerate(tqdm(loader, file=sys.stderr), 1):
    show(i, batch)
for batch in itertools.islice(loader, 2):
    show(batch)
show(
    len(list(loader)),
    max(len(b) for b in loader),
    sum(1 for _ in loader),
    next(iter(loader)),
)
show(torch.cat(list(loader)), [*loader][-1])
"""

SCRIPTS["evaluation between training batches"] = """\
train = DataLoader(Numbers(), 4, shuffle=True, num_workers=1)
valid = DataLoader(Numbers(8), 4, num_workers=1)
for step, batch in enumerate(train):
    show(batch)
    if step % 2 == 0:
        with torch.no_grad():
            show([b.sum() for b in valid])
"""

SCRIPTS["loaders of folds"] = """\
from sklearn.model_selection import KFold

data = Numbers(12)
for fold, (tr, va) in enumerate(KFold(3, shuffle=True, random_state=0).split(range(12))):
    train = DataLoader(data, 4, sampler=SubsetRandomSampler(tr), num_workers=1)
    for batch in train:
        show(fold, batch)
    for batch in DataLoader(Subset(data, va), 4, num_workers=1):
        show(fold, batch)
"""

SCRIPTS["mixed containers"] = """\
class Odd(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {
            "set": {i, i + 1},
            "frozen": frozenset([i]),
            "od": collections.OrderedDict(a=i, b=[i]),
            "dd": collections.defaultdict(int, x=i),
            "bytes": bytes([i]),
            "none": None,
            "c": complex(i, 1),
            "slice": slice(i),
            "range": range(i),
            "big": 10**30 + i,
            "nan": float("nan"),
            "dt": np.datetime64("2026-01-01") + i,
        }


def collate(b):
    return b


for batch in DataLoader(Odd(), 3, num_workers=1, collate_fn=collate):
    show(batch, [type(v).__name__ for v in batch[0].values()], batch[0]["dd"]["missing"])
"""

SCRIPTS["dates, paths, uuids, fractions"] = """\
import datetime, fractions, pathlib, uuid


class Odd(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return (
            datetime.date(2026, 1, 1 + i),
            datetime.timedelta(i),
            pathlib.Path("/x") / str(i),
            uuid.UUID(int=i),
            fractions.Fraction(i, 7),
            datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        )


for batch in DataLoader(Odd(), 3, num_workers=1, collate_fn=tuple):
    show(batch)
"""

SCRIPTS["structured arrays and strings"] = """\
rows = np.array(
    [(i, i * 0.5, f"n{i}") for i in range(8)], dtype=[("a", "i4"), ("b", "f8"), ("c", "U4")]
)
for batch in DataLoader(rows, 4, num_workers=1, collate_fn=np.stack):
    show(batch["a"], batch["b"], batch["c"], str(batch.dtype))
words = np.array(["a", "bb"] * 4, dtype=object)
for batch in DataLoader(words, 4, num_workers=1):
    show(batch)
masked = np.ma.masked_array(np.arange(8), mask=[0, 1] * 4)
for batch in DataLoader(range(8), 4, num_workers=1, collate_fn=lambda i: masked[i]):
    show(batch.filled(-1), type(batch).__name__)
"""

SCRIPTS["shared tensor in a batch twice"] = """\
class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((3,), i)


def collate(items):
    x = torch.stack(items)
    return {"x": x, "y": x, "view": x[:, 1:], "t": x.t()}


for batch in DataLoader(Data(), 4, num_workers=1, collate_fn=collate):
    batch["x"][0] = 99
    show(batch, batch["x"] is batch["y"], batch["t"].is_contiguous())
"""

SCRIPTS["strided, channels last, sparse"] = """\
def collate(items):
    x = torch.stack(items).view(2, 1, 2, 1).expand(2, 3, 2, 2)
    return (
        x.contiguous(memory_format=torch.channels_last),
        x,
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
    )


for a, b, c, d in DataLoader(Numbers(12), 4, num_workers=1, collate_fn=collate):
    show(a, a.stride(), b, b.shape, c.to_dense(), c.layout, d.to_dense())
"""

SCRIPTS["empty batches and scalars"] = """\
def collate(items):
    return torch.zeros(0, 3), [], {}, torch.tensor(len(items)), (), ""


for batch in DataLoader(Numbers(8), 4, num_workers=1, collate_fn=collate):
    show(batch)
for batch in DataLoader(Numbers(0), 4, num_workers=1):
    show("never")
for batch in DataLoader(Subset(Numbers(), []), 4):
    show("never")
"""

SCRIPTS["profiling and autocast around the loop"] = """\
with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
    for batch in DataLoader(Numbers(12), 4, num_workers=1):
        show(batch @ batch, torch.is_inference_mode_enabled())
with torch.no_grad():
    for batch in DataLoader(Numbers(12), 4):
        show((batch * 2).requires_grad)
"""

SCRIPTS["deepcopy and pickle of a loader"] = """\
import copy, pickle

loader = DataLoader(Numbers(12), 4, num_workers=1)
for batch in loader:
    show(batch)
for other in (
    copy.deepcopy(loader),
    copy.copy(loader),
    pickle.loads(pickle.dumps(DataLoader(range(8), 4, num_workers=1))),
):
    for batch in other:
        show(batch)
"""

SCRIPTS["attributes changed on the loader"] = """\
loader = DataLoader(Numbers(12), 4, num_workers=1)
for batch in loader:
    show(batch)
loader.collate_fn = lambda items: len(items)
for batch in loader:
    show(batch)
loader.num_workers = 0
for batch in loader:
    show(batch)
try:
    loader.batch_size = 3
except ValueError as e:
    show(str(e))
show(
    loader.dataset is not None,
    loader.drop_last,
    type(loader.sampler).__name__,
    loader.pin_memory,
)
"""

SCRIPTS["environment, arguments and folder"] = """\
import pathlib, tempfile

os.chdir(tempfile.mkdtemp())
pathlib.Path("data.txt").write_text("42")
os.environ["MY_DATA_ROOT"] = "here"


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return (
            i,
            pathlib.Path("data.txt").read_text(),
            os.environ["MY_DATA_ROOT"],
            len(sys.argv),
            __name__ in ("__main__", "__mp_main__"),
        )


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["print from the dataset goes nowhere else"] = """\
class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        print("item", i, file=sys.stderr)
        return i


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["asyncio in a sample"] = """\
import asyncio


class Remote(Dataset):
    def __len__(self):
        return 12

    async def fetch(self, i):
        await asyncio.sleep(0.001)
        return i * 2

    def __getitem__(self, i):
        return asyncio.run(self.fetch(i))

    def __getitems__(self, ids):
        async def all_():
            return await asyncio.gather(*map(self.fetch, ids))

        return asyncio.run(all_())


for batch in DataLoader(Remote(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["thread pool in a sample"] = """\
import concurrent.futures


class Pooled(Dataset):
    def __init__(self):
        self.pool = None

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i

    def __getitems__(self, ids):
        if self.pool is None:
            self.pool = concurrent.futures.ThreadPoolExecutor(3)
        return list(self.pool.map(lambda i: i * 3, ids))


for epoch in range(2):
    for batch in DataLoader(Pooled(), 4, num_workers=1):
        show(batch)
"""

SCRIPTS["subprocess in a sample"] = """\
import subprocess


class Shell(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return int(
            subprocess.run(["printf", str(i)], capture_output=True, check=True).stdout
        )


for batch in DataLoader(Shell(), 3, num_workers=1):
    show(batch)
"""

SCRIPTS["context managers and weak caches"] = """\
import contextlib, weakref


class Cache:
    pass


class Data(Dataset):
    def __init__(self):
        self.caches, self.strong = weakref.WeakValueDictionary(), []

    def __len__(self):
        return 8

    @contextlib.contextmanager
    def opened(self, i):
        yield i * 2

    def __getitem__(self, i):
        with self.opened(i) as value:
            cache = self.caches.get("c") or Cache()
            self.caches["c"] = cache
            return value


for batch in DataLoader(Data(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["a generator of the dataset without workers"] = """\
def numbers():
    yield from range(40)


class Data(Dataset):
    def __init__(self):
        self.source = numbers()

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i, next(self.source)


for batch in DataLoader(Data(), 4):
    show(batch)
"""

SCRIPTS["class with __call__ as worker_init_fn"] = """\
class Init:
    def __init__(self, base):
        self.base = base

    def __call__(self, worker_id):
        get_worker_info().dataset.offset = self.base


class Data(Dataset):
    offset = 0

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i + self.offset


for batch in DataLoader(Data(), 4, num_workers=2, worker_init_fn=Init(1000)):
    show(batch)
"""

SCRIPTS["bound method as collate_fn"] = """\
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, 2)
        self.calls = 0

    def collate(self, items):
        return torch.tensor(items), self.table.weight.shape[0]

    def loader(self):
        return DataLoader(range(24), 6, collate_fn=self.collate, num_workers=1)


module = Module()
for batch in module.loader():
    show(batch)
"""

SCRIPTS["an index of numpy and of tensors"] = """\
class Show(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return type(i).__name__, int(i)


for sampler in (np.arange(6), torch.arange(6), [np.int64(3), 4], iter([]), range(5, 0, -1)):
    for batch in DataLoader(Show(), 3, sampler=sampler, num_workers=1):
        show(batch)
"""

SCRIPTS["a batch that is changed in place"] = """\
loader = DataLoader(Numbers(16), 4, num_workers=1)
kept = []
for epoch in range(2):
    for batch in loader:
        batch.mul_(2).add_(1)
        batch.resize_(2)
        kept.append(batch)
show(kept)
"""

SCRIPTS["numpy batches that are written to"] = """\
def collate(items):
    return np.stack([item.numpy() for item in items])


kept = []
for batch in DataLoader(Numbers(16), 4, num_workers=1, collate_fn=collate):
    batch += 1
    kept.append(batch)
    show(batch.flags.writeable)
show(kept)
"""

SCRIPTS["a count that each sample moves"] = """\
class Data(Dataset):
    def __init__(self):
        self.ids = itertools.count(5)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i, next(self.ids)


for batch in DataLoader(Data(), 4):
    show(batch)
"""

SCRIPTS["iterators that each sample moves"] = """\
class Data(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i, next(self.source)


for source in (itertools.cycle("abc"), iter(range(99)), map(str, range(99)), reversed(range(99))):
    for batch in DataLoader(Data(source), 4):
        show(batch)
"""

SCRIPTS["an iterator that the loop draws from, too"] = """\
todo = iter(list(range(100)))


class Data(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return i, operator.length_hint(todo)


for step, batch in enumerate(DataLoader(Data(), 4)):
    show(batch)
    if step > 4:
        show(next(todo))
"""

SCRIPTS["worker_init_fn without workers"] = """\
def init(worker_id):
    get_worker_info().dataset.data += 1000


for options in ({}, {"num_workers": 0, "prefetch_factor": None}):
    for batch in DataLoader(Numbers(40), 4, worker_init_fn=init, **options):
        show(batch)
"""

SCRIPTS["a counter shared by collate functions"] = """\
import multiprocessing

seen = multiprocessing.Value("i", 0)


def collate(items):
    with seen.get_lock():
        seen.value += len(items)
    return torch.stack(items)


for epoch in range(2):
    loader = DataLoader(Numbers(), 8, collate_fn=collate, num_workers=1)
    show(sum(batch.sum().item() for batch in loader), seen.value)
"""

SCRIPTS["a sampler that reads a manager's dict"] = """\
import multiprocessing


class Wanted(Sampler):
    def __init__(self, shared):
        self.shared = shared

    def __iter__(self):
        return iter(range(self.shared["start"], 24, self.shared["step"]))

    def __len__(self):
        return len(range(self.shared["start"], 24, self.shared["step"]))


with multiprocessing.Manager() as manager:
    shared = manager.dict(start=0, step=3)
    loader = DataLoader(Numbers(), 3, sampler=Wanted(shared), num_workers=2)
    for epoch in range(3):
        show(list(loader))
        shared["start"] += 1
        shared["step"] -= 1
"""

SCRIPTS["a curriculum that the loop moves"] = """\
class Curriculum(Sampler):
    def __init__(self):
        self.level = 1

    def __iter__(self):
        order = torch.randperm(8 * self.level).tolist()
        return iter(order)

    def __len__(self):
        return 8 * self.level


curriculum = Curriculum()
loader = DataLoader(Numbers(), 4, sampler=curriculum, num_workers=2)
for epoch in range(3):
    show(len(loader), [batch for batch in loader])
    curriculum.level = min(3, curriculum.level + 1)
"""

SCRIPTS["a curriculum in the middle of an epoch"] = """\
class Hard(Numbers):
    noise = 0.0

    def __getitem__(self, index):
        return self.data[index] + self.noise


dataset = Hard()
for batch in DataLoader(dataset, 2):
    show(batch)
    dataset.noise += 0.5
"""

SCRIPTS["a dataset that caches in a dict"] = """\
class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = torch.full((3,), float(index)) ** 2
        return self.cache[index]


dataset = Cached()
for workers in (0, 2):
    loader = DataLoader(dataset, 4, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(2):
        show(list(loader))
"""

SCRIPTS["weights of a sampler that the loop writes"] = """\
weights = torch.ones(24, dtype=torch.double)
sampler = WeightedRandomSampler(weights, 12, replacement=True)
loader = DataLoader(Numbers(), 4, sampler=sampler, num_workers=2)
for epoch in range(3):
    batches = list(loader)
    show(batches)
    for value in torch.cat(batches).long().tolist():
        sampler.weights[value] *= 0.25
"""

SCRIPTS["sqlite in a list"] = """\
import sqlite3, tempfile

path = tempfile.mkdtemp() + "/rows.db"
with sqlite3.connect(path) as db:
    db.execute("create table rows (id integer, name text)")
    db.executemany("insert into rows values (?, ?)", [(i, f"row {i}") for i in range(12)])


class Rows(Dataset):
    def __init__(self, path):
        self.path, self.open = path, []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if not self.open:
            self.open.append(sqlite3.connect(self.path))
        return self.open[0].execute("select * from rows where id = ?", (index,)).fetchone()


for batch in DataLoader(Rows(path), 4, num_workers=2):
    show(batch)
"""

SCRIPTS["a zip archive in a dataclass in a dict"] = """\
import tempfile, zipfile

path = tempfile.mkdtemp() + "/a.zip"
with zipfile.ZipFile(path, "w") as archive:
    for i in range(8):
        archive.writestr(f"{i}.txt", f"text {i}")


@dataclasses.dataclass
class Source:
    archive: zipfile.ZipFile
    names: list


class Zipped(Dataset):
    def __init__(self):
        archive = zipfile.ZipFile(path)
        self.sources = {"train": Source(archive, sorted(archive.namelist()))}

    def __len__(self):
        return len(self.sources["train"].names)

    def __getitem__(self, index):
        source = self.sources["train"]
        return source.archive.read(source.names[index])


for batch in DataLoader(Zipped(), 3, num_workers=1, collate_fn=list):
    show(batch)
"""

SCRIPTS["memory maps in a tuple"] = """\
import mmap, tempfile

folder = tempfile.mkdtemp()
for part in range(2):
    np.arange(part * 12, part * 12 + 12, dtype=np.int16).tofile(f"{folder}/{part}.bin")


class Mapped(Dataset):
    def __init__(self):
        self.parts = tuple(
            np.memmap(f"{folder}/{part}.bin", dtype=np.int16, mode="r") for part in range(2)
        )
        self.file = open(f"{folder}/1.bin", "rb")
        self.raw = [mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)]

    def __len__(self):
        return 24

    def __getitem__(self, index):
        part, at = divmod(index, 12)
        return int(self.parts[part][at]), self.raw[0][2 * at]


for batch in DataLoader(Mapped(), 6, num_workers=2):
    show(batch)
"""

SCRIPTS["text files with an encoding and their own newlines"] = """\
import tempfile

folder = tempfile.mkdtemp()
with open(f"{folder}/latin.txt", "w", encoding="latin-1", newline="\\r\\n") as file:
    file.writelines(f"zeile {i} \\u00e4\\u00f6\\n" for i in range(8))


class Lines(Dataset):
    def __init__(self):
        self.kept = open(f"{folder}/latin.txt", encoding="latin-1", newline="")
        self.plain = open(f"{folder}/latin.txt", encoding="latin-1")
        self.plain.readline()
        self.strict = open(f"{folder}/latin.txt", encoding="ascii", errors="replace")

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.kept.seek(0)
        lines = self.kept.readlines()
        self.strict.seek(0)
        return lines[index], self.strict.readline(), self.plain.name[-9:]


for batch in DataLoader(Lines(), 3, num_workers=1, collate_fn=list):
    show(batch)
"""

SCRIPTS["compressed files of three kinds"] = """\
import bz2, gzip, lzma, tempfile

folder = tempfile.mkdtemp()
OPENERS = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
for ending, opener in OPENERS.items():
    with opener(f"{folder}/a.{ending}", "wt") as file:
        file.writelines(f"{ending} {i}\\n" for i in range(8))


class Compressed(Dataset):
    def __init__(self):
        self.files = {e: opener(f"{folder}/a.{e}", "rb") for e, opener in OPENERS.items()}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        found = []
        for file in self.files.values():
            file.seek(0)
            found.append(file.readlines()[index])
        return found


for batch in DataLoader(Compressed(), 4, num_workers=1, collate_fn=list):
    show(batch)
"""

SCRIPTS["members of a tar archive"] = """\
import io, tarfile, tempfile

path = tempfile.mkdtemp() + "/a.tar"
with tarfile.open(path, "w") as archive:
    for i in range(9):
        data = f"sample {i}".encode()
        info = tarfile.TarInfo(f"{i:03}.txt")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))


class Tarred(Dataset):
    def __init__(self):
        self.archive = tarfile.open(path)
        self.members = self.archive.getmembers()

    def __len__(self):
        return len(self.members)

    def __getitem__(self, index):
        return self.archive.extractfile(self.members[index]).read()


for batch in DataLoader(Tarred(), 4, num_workers=1, collate_fn=list):
    show(batch)
"""

SCRIPTS["seeds of one sample in three libraries"] = """\
class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        own = {
            "python": random.Random(index),
            "numpy": np.random.default_rng([7, index]),
            "torch": torch.Generator().manual_seed(index),
        }
        return (
            own["python"].random(),
            own["numpy"].normal(size=2),
            torch.rand(2, generator=own["torch"]),
        )


for batch in DataLoader(Noisy(), 4, shuffle=True, num_workers=2):
    show(batch)
"""

SCRIPTS["weak references and a logger with handlers"] = """\
import io, logging, weakref

stream = io.StringIO()
logger = logging.getLogger("my.data")
logger.setLevel(logging.INFO)
logger.addHandler(logging.StreamHandler(stream))
logger.propagate = False


class Table:
    def __init__(self):
        self.rows = [i * i for i in range(12)]


class Referring(Dataset):
    def __init__(self):
        self.table = Table()
        self.weak = weakref.ref(self.table)
        self.by_name = weakref.WeakValueDictionary(squares=self.table)
        self.log = logger

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.log.info("reads %d", index)
        return self.weak().rows[index], self.by_name["squares"] is self.table


for batch in DataLoader(Referring(), 4, num_workers=1):
    show(batch)
"""

SCRIPTS["partials, caches and methods"] = """\
@functools.lru_cache(maxsize=None)
def squares(count):
    return [i * i for i in range(count)]


def scaled(value, *, by, plus=0):
    return value * by + plus


class Pipeline(Dataset):
    def __init__(self):
        self.steps = [
            functools.partial(scaled, by=2),
            functools.partial(scaled, by=1, plus=self.size),
        ]
        self.again = self.steps[0]
        self.pick = operator.itemgetter(1)
        self.own = functools.partialmethod(Pipeline.add, 3).__get__(self)

    @functools.cached_property
    def table(self):
        return squares(12)

    @property
    def size(self):
        return 100

    def add(self, n, value):
        return n + value

    def __len__(self):
        return 12

    def __getitem__(self, index):
        value = self.table[index]
        for step in self.steps:
            value = step(value)
        return self.own(value), self.pick([0, value]), self.again is self.steps[0]


squares(3)
for batch in DataLoader(Pipeline(), 4, num_workers=2):
    show(batch)
show(squares.cache_info().currsize)
"""

SCRIPTS["views and aliases in nested batches"] = """\
Pair = collections.namedtuple("Pair", "whole head")


@dataclasses.dataclass
class Views:
    whole: torch.Tensor
    parts: dict


def collate(items):
    whole = torch.stack(items)
    return [
        Pair(whole, whole[:2]),
        Views(whole, {"rows": whole[1:], "turned": whole.t(), "again": whole}),
        {"same": [whole, whole]},
    ]


items = [torch.arange(3.0) + i for i in range(8)]
for pair, views, same in DataLoader(items, 4, collate_fn=collate, num_workers=2):
    pair.whole[0, 0] = -1
    show(pair.head, views.parts["turned"], views.parts["again"], same["same"][1])
    show(same["same"][0] is same["same"][1], views.parts["turned"].stride())
"""

SCRIPTS["sparse, complex and meta tensors"] = """\
def collate(items):
    dense = torch.stack(items)
    return {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "meta": torch.empty(2, 3, device="meta"),
        "complex": torch.view_as_complex(dense.repeat(1, 2).reshape(len(items), -1, 2)),
    }


items = [torch.eye(4)[i % 4] * i for i in range(8)]
for batch in DataLoader(items, 4, collate_fn=collate, num_workers=2):
    show(batch["coo"].coalesce().indices(), batch["coo"].coalesce().values())
    show(batch["csr"].crow_indices(), batch["csr"].values(), batch["csr"].layout)
    show(batch["meta"].shape, batch["meta"].device, torch.view_as_real(batch["complex"]))
"""

SCRIPTS["nested tensors"] = """\
import warnings

warnings.simplefilter("ignore")


def collate(items):
    return torch.nested.nested_tensor(items)


items = [torch.arange(float(1 + i % 3)) for i in range(9)]
for batch in DataLoader(items, 3, collate_fn=collate, num_workers=2):
    show(batch.is_nested, [each for each in batch.unbind()])
"""

SCRIPTS["packed sequences in both orders"] = """\
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence


def collate(items):
    return {
        "packed": pack_sequence(items, enforce_sorted=False),
        "tuple": (pack_sequence(sorted(items, key=len, reverse=True)), len(items)),
    }


items = [torch.arange(float(1 + i % 4)) for i in range(8)]
for batch in DataLoader(items, 4, collate_fn=collate, num_workers=2):
    packed = batch["packed"]
    show(*pad_packed_sequence(packed), packed.sorted_indices, packed.unsorted_indices)
    show(batch["tuple"][0].batch_sizes, batch["tuple"][0].sorted_indices, batch["tuple"][1])
"""

SCRIPTS["a subclass of Tensor with attributes"] = """\
class Boxes(torch.Tensor):
    @staticmethod
    def __new__(cls, data, *args, **kwargs):
        return torch.Tensor._make_subclass(cls, torch.as_tensor(data, dtype=torch.float32))


class Boxed(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        boxes = Boxes([[0, 0, index, index]])
        boxes.size_of_image = (index, 2 * index)
        return boxes


def collate(items):
    return items


for batch in DataLoader(Boxed(), 3, collate_fn=collate, num_workers=2):
    show([type(each).__name__ for each in batch])
    show([each.as_subclass(torch.Tensor) for each in batch])
    show([each.size_of_image for each in batch])
"""

SCRIPTS["parameters and buffers in a batch"] = """\
def collate(items):
    stacked = torch.stack(items)
    return {
        "parameter": nn.Parameter(stacked),
        "frozen": nn.Parameter(stacked, requires_grad=False),
        "state": nn.Linear(2, 1, bias=False).state_dict(),
    }


items = [torch.full((2,), float(i)) for i in range(8)]
for batch in DataLoader(items, 4, collate_fn=collate, num_workers=1):
    show(type(batch["parameter"]).__name__, batch["parameter"].detach())
    show(batch["frozen"].requires_grad, list(batch["state"]), batch["frozen"].detach())
"""

SCRIPTS["structured, masked and object arrays"] = """\
KIND = np.dtype([("id", np.int32), ("box", np.float32, (2,))])


def collate(items):
    records = np.zeros(len(items), KIND)
    records["id"] = items
    return {
        "records": records,
        "masked": np.ma.masked_greater(np.array(items), 4),
        "objects": np.array([{"id": i} for i in items], dtype=object),
        "dates": np.array([np.datetime64("2026-01-01") + i for i in items]),
        "texts": np.array([f"row {i}" for i in items]),
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }


for batch in DataLoader(range(8), 4, collate_fn=collate, num_workers=2):
    show(batch["records"].dtype.names, batch["records"]["id"], batch["masked"].filled(-1))
    show(batch["objects"], batch["dates"].astype(str), batch["texts"])
    show(batch["turned"].flags.f_contiguous, batch["turned"])
"""

SCRIPTS["a queue of replay that the loop fills"] = """\
class Replay(IterableDataset):
    def __init__(self):
        self.buffer = collections.deque(maxlen=16)

    def __iter__(self):
        for number in itertools.count():
            yield torch.tensor(self.buffer[number % len(self.buffer)])


replay = Replay()
replay.buffer.extend(float(i) for i in range(4))
batches = iter(DataLoader(replay, 2))
for step in range(6):
    batch = next(batches)
    show(batch)
    replay.buffer.append(batch.sum().item() + 100 * step)
"""

SCRIPTS["an iterator over a generator's rows with islice"] = """\
class Rows(IterableDataset):
    def __init__(self, *, start, stop):
        self.start, self.stop = start, stop

    def rows(self):
        for i in range(self.start, self.stop):
            yield {"id": i, "row": torch.full((2,), float(i))}

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(self.rows(), first, None, step)


for workers in (0, 2):
    for batch in DataLoader(Rows(start=3, stop=17), 3, num_workers=workers):
        show(batch)
"""

SCRIPTS["a context variable and an environment variable"] = """\
import contextvars

level = contextvars.ContextVar("level", default=1)
os.environ["MY_OFFSET"] = "10"


class Offset(Numbers):
    def __getitem__(self, index):
        return self.data[index] + int(os.environ["MY_OFFSET"])


for epoch in range(3):
    show(list(DataLoader(Offset(12), 4, num_workers=epoch % 2)))
    os.environ["MY_OFFSET"] = str(20 + epoch)
"""

SCRIPTS["a pandas-like frame of columns with slots"] = """\
class Column:
    __slots__ = ("name", "values", "__weakref__")

    def __init__(self, name, values):
        self.name, self.values = name, values


class Frame(Dataset):
    __slots__ = ("columns", "order")

    def __init__(self):
        self.columns = [Column("a", list(range(8))), Column("b", [i / 2 for i in range(8)])]
        self.order = range(8)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return {each.name: each.values[index] for each in self.columns}


for batch in DataLoader(Frame(), 4, num_workers=2):
    show(batch)
"""

SCRIPTS["no worker info without workers"] = """\
from torch.utils.data import dataloader


class Seen(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        inner = list(DataLoader(Numbers(2), 2))
        return i, get_worker_info() is None, torch.utils.data.get_worker_info(), len(inner)


class SeenAtOnce(Seen):
    def __getitems__(self, indices):
        return [(i, get_worker_info()) for i in indices]


def collate(samples):
    return [get_worker_info() is None, dataloader._utils.worker.get_worker_info(), *samples]


def never(worker_id):
    raise ValueError("workers alone call it")


for dataset in (Seen(), SeenAtOnce(), Subset(Seen(), range(0, 48, 2))):
    for epoch in range(2):
        for batch in DataLoader(dataset, 4, collate_fn=collate, worker_init_fn=never):
            show(batch)
for sample in DataLoader(Seen(), batch_size=None, collate_fn=collate):
    show(sample)
"""

SCRIPTS["a stream without workers"] = """\
class Stream(IterableDataset):
    def __init__(self):
        self.seen = get_worker_info()

    def __iter__(self):
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers + 100)
        for i in range(begin, 30, step):
            yield i, info is None, get_worker_info() is None, self.seen


def never(worker_id):
    raise ValueError("workers alone call it")


def with_info(samples):
    return [get_worker_info(), samples]


for epoch in range(2):
    for batch in DataLoader(Stream(), 4, collate_fn=with_info, worker_init_fn=never):
        show(batch)
for batch in DataLoader(ChainDataset([Stream(), Stream()]), 8, collate_fn=list):
    show(batch)
"""

SCRIPTS["data pipes without workers"] = """\
import warnings

warnings.simplefilter("ignore")
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper, ShardingFilter


def seen(i):
    return i, get_worker_info() is None


pipe = Mapper(ShardingFilter(IterableWrapper(range(20))), seen)
for batch in DataLoader(pipe, 4, collate_fn=list):
    show(batch)
"""
