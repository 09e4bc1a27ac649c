"""Small scripts as people publish them, each a text, to be run with and without a data group."""

# `show` prints what a script got, type by type; the rest of each script is its author's.
HEAD = """\
import collections, dataclasses, functools, itertools, json, math
import operator, os, random, sys, time, typing
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

SCRIPTS["distributed sampler without a group"] = """\
sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=7)
loader = DataLoader(Numbers(), 4, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        show(batch)
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

SCRIPTS["default device"] = """\
torch.set_default_device("cpu")
loader = DataLoader(
    Numbers(), 6, shuffle=True, num_workers=1, generator=torch.Generator("cpu")
)
for batch in loader:
    show(batch, batch.device.type)
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
            # Where a file was missing is added to what an OSError says.
            said = "" if isinstance(e, OSError) else str(e)
            show(workers, type(e).__name__, (said.splitlines() or ["-"])[-1])
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

SCRIPTS["two iterators of one loader"] = """\
loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=1)
for a, b in zip(loader, loader):
    show(a, b)
first, second = iter(loader), iter(loader)
show(next(first), next(second), next(second), next(first))
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

SCRIPTS["profiling and autocast around the loop"] = """\
with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
    for batch in DataLoader(Numbers(12), 4, num_workers=1):
        show(batch @ batch, torch.is_inference_mode_enabled())
with torch.no_grad():
    for batch in DataLoader(Numbers(12), 4):
        show((batch * 2).requires_grad)
"""

SCRIPTS["environment, arguments and folder"] = """\
import pathlib

os.mkdir("data")
os.chdir("data")
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

# Scripts of more than one file or process: their files by name.

STARTING: dict[str, dict[str, str]] = {}
# Of those that are not `python train.py`.
ARGUMENTS: dict[str, list[str]] = {}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]

_RANKS = """\
import torch.distributed as dist


def train(rank, world):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    dataset = Numbers()
    sampler = DistributedSampler(dataset, world, rank, seed=3)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler, num_workers=2)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            seen.append(x.tolist())
            model(x.unsqueeze(1) / 24).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    everybodys = [None] * world
    dist.all_gather_object(everybodys, seen)
    if rank == 0:
        show(everybodys, *model.parameters())
    dist.destroy_process_group()
"""

ARGUMENTS["torchrun with two ranks"] = TORCHRUN
STARTING["torchrun with two ranks"] = {
    "train": HEAD
    + _RANKS
    + """
if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
"""
}

STARTING["mp.spawn with two ranks"] = {
    "train": HEAD
    + _RANKS
    + """
def main(rank, world, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    train(rank, world)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(2, os.path.abspath("group")), nprocs=2)
"""
}

_METHOD = """
SCALE = 3
OFFSETS = {"a": 1}


class Scaled(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return self.transform(i) * SCALE + OFFSETS["a"], str(i)


def square(i):
    return torch.tensor(i) ** 2


def main():
    OFFSETS["a"] = 5
    loader = DataLoader(
        Scaled(square), 4, shuffle=True, num_workers=2, multiprocessing_context="METHOD"
    )
    for epoch in range(2):
        for batch in loader:
            # In a process that was started anew the global has its first value.
            show(epoch, batch[1], len(batch[0]))


if __name__ == "__main__":
    main()
"""

for _method in ("spawn", "forkserver"):
    STARTING[f"workers by {_method}"] = {"train": HEAD + _METHOD.replace("METHOD", _method)}

ARGUMENTS["dist.get_rank() in __getitem__"] = TORCHRUN
STARTING["dist.get_rank() in __getitem__"] = {
    "train": HEAD
    + """
import torch.distributed as dist


class Shard(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return dist.get_world_size() * i + dist.get_rank()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    seen = [batch.tolist() for batch in DataLoader(Shard(), 3, num_workers=1)]
    everybodys = [None, None]
    dist.all_gather_object(everybodys, seen)
    if dist.get_rank() == 0:
        show(everybodys)
    dist.destroy_process_group()
"""
}

# So far all start processes; those that follow need no Python of their own.
COLD = {*STARTING}

STARTING["a download in main()"] = {
    "train": HEAD
    + """
from pathlib import Path


def download(folder):
    folder.mkdir(exist_ok=True)
    for i in range(12):
        np.save(folder / f"{i}.npy", np.arange(i, i + 4, dtype=np.float32))


class Files(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return np.load(self.folder / f"{i}.npy")


def main():
    folder = Path("data")
    download(folder)
    for batch in DataLoader(Files(folder), 5, shuffle=True, num_workers=2):
        show(batch)


if __name__ == "__main__":
    main()
"""
}

STARTING["a module of settings that main() changes"] = {
    "settings": "SIZE = 1\nNAMES = {}\n",
    "datasets": """\
import torch

import settings


class Sized(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.full((settings.SIZE,), float(i)), settings.NAMES[i % 2]
""",
    "train": HEAD
    + """
import settings
from datasets import Sized


def main():
    settings.SIZE = 3
    settings.NAMES.update({0: "even", 1: "odd"})
    for batch in DataLoader(Sized(), 4, num_workers=2):
        show(batch)


if __name__ == "__main__":
    main()
""",
}

STARTING["a file of records that each worker opens at first use"] = {
    "train": HEAD
    + """
import struct


class Records(Dataset):
    def __init__(self, path, count):
        self.path, self.count, self.file = path, count, None

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if self.file is None:
            self.file = open(self.path, "rb")
        self.file.seek(8 * i)
        return struct.unpack("<d", self.file.read(8))[0]


def main():
    with open("records.bin", "wb") as file:
        for i in range(30):
            file.write(struct.pack("<d", i / 7))
    loader = DataLoader(
        Records("records.bin", 30), 7, num_workers=2, persistent_workers=True, shuffle=True
    )
    for epoch in range(3):
        show(epoch, list(loader))


if __name__ == "__main__":
    main()
"""
}

STARTING["generators at the top, a split and a seeded worker"] = {
    "train": HEAD
    + """
GENERATOR = torch.Generator().manual_seed(17)
ORDER = np.random.default_rng(5)


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    whole = TensorDataset(torch.arange(40.0), torch.from_numpy(ORDER.permutation(40)))
    parts = random_split(whole, [0.75, 0.25], generator=GENERATOR)
    for epoch in range(2):
        for part, shuffle in zip(parts, (True, False)):
            loader = DataLoader(
                part,
                batch_size=8,
                shuffle=shuffle,
                num_workers=2,
                worker_init_fn=seed_worker,
                generator=GENERATOR,
                drop_last=shuffle,
            )
            for x, y in loader:
                show(epoch, shuffle, x, y)
    show(GENERATOR.initial_seed(), ORDER.integers(99))


if __name__ == "__main__":
    main()
"""
}

STARTING["tokens in blocks of a memory map, by arguments"] = {
    "train": HEAD
    + """
import argparse


class Blocks(Dataset):
    def __init__(self, path, block_size):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.block_size = block_size

    def __len__(self):
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, i):
        start = i * self.block_size
        block = torch.from_numpy(self.data[start : start + self.block_size + 1].astype(np.int64))
        return block[:-1], block[1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    (np.arange(99) * 37 % 211).astype(np.uint16).tofile("tokens.bin")
    model = nn.Embedding(211, 2)
    loader = DataLoader(
        Blocks("tokens.bin", args.block_size),
        batch_size=5,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=False,
    )
    for x, y in loader:
        show(x, y, model(x).sum())


if __name__ == "__main__":
    main()
"""
}
ARGUMENTS["tokens in blocks of a memory map, by arguments"] = ["train.py", "--block-size", "6"]
