"""What processes share in memory is named, in whatever part of a loader and by whatever library."""

import functools
import mmap
import multiprocessing
import sys
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch.utils.data import default_collate

from stoker.feed.wire.dataset import DatasetSpec, pack_spec, refusal_of, what_is_shared
from stoker.feed.wire.shared_memory import SharedMemoryError, SharedRanges


class Holder:
    def __init__(self, part):
        self.part = part

    def __getitem__(self, index):
        return index


def shared_tensor():
    return torch.zeros(3).share_memory_()


def shared_array():
    return np.frombuffer(multiprocessing.Array("d", 3).get_obj())


def segment(request):
    memory = shared_memory.SharedMemory(create=True, size=64)

    def unlink():
        memory.unlink()

    request.addfinalizer(unlink)
    return memory


def array_in_a_segment(request):
    memory = segment(request)
    array = np.ndarray(3, buffer=memory.buf)
    array.setflags(write=False)
    # Else its buffer is unmapped below the array.
    request.addfinalizer(lambda: memory.size)
    return array


def file_of(folder):
    path = folder / "numbers"
    np.arange(64, dtype=np.float32).tofile(path)
    return path


def manager(request):
    served = multiprocessing.Manager()
    request.addfinalizer(served.shutdown)
    return served


def module_of(tensor):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("epoch", tensor)
    return module


# By library: what makes the shared object, of a test's request and folder.
SHARED = {
    "torch: tensor": lambda request, folder: shared_tensor(),
    "torch: view": lambda request, folder: shared_tensor()[1:],
    "torch: parameter": lambda request, folder: torch.nn.Parameter(shared_tensor()),
    "torch: module": lambda request, folder: torch.nn.Linear(2, 2).share_memory(),
    "torch: buffer": lambda request, folder: module_of(shared_tensor()),
    "torch: storage": lambda request, folder: shared_tensor().untyped_storage(),
    "torch: sparse": lambda request, folder: torch.sparse_coo_tensor(
        [[0]], shared_tensor()[:1], check_invariants=True
    ),
    "torch: in NumPy": lambda request, folder: shared_tensor().numpy(),
    "torch: file": lambda request, folder: torch.from_file(
        str(file_of(folder)), shared=True, size=4
    ),
    "torch: queue": lambda request, folder: torch.multiprocessing.get_context().Queue(),
    "torch: strategy": lambda request, folder: by_file_system(),
    "multiprocessing: Value": lambda request, folder: multiprocessing.Value("i", 1),
    "multiprocessing: Value without a lock": lambda request, folder: multiprocessing.Value(
        "i", 1, lock=False
    ),
    "multiprocessing: RawValue": lambda request, folder: multiprocessing.RawValue("d", 1.0),
    "multiprocessing: Array": lambda request, folder: multiprocessing.Array("i", 4),
    "multiprocessing: RawArray": lambda request, folder: multiprocessing.RawArray("i", 4),
    "multiprocessing: Queue": lambda request, folder: multiprocessing.Queue(),
    "multiprocessing: SimpleQueue": lambda request, folder: multiprocessing.SimpleQueue(),
    "multiprocessing: JoinableQueue": lambda request, folder: multiprocessing.JoinableQueue(),
    "multiprocessing: Pipe": lambda request, folder: multiprocessing.Pipe()[0],
    "multiprocessing: Lock": lambda request, folder: multiprocessing.Lock(),
    "multiprocessing: RLock": lambda request, folder: multiprocessing.RLock(),
    "multiprocessing: Semaphore": lambda request, folder: multiprocessing.Semaphore(2),
    "multiprocessing: Event": lambda request, folder: multiprocessing.Event(),
    "multiprocessing: Condition": lambda request, folder: multiprocessing.Condition(),
    "multiprocessing: Barrier": lambda request, folder: multiprocessing.Barrier(2),
    "multiprocessing: spawned": lambda request, folder: multiprocessing.get_context("spawn").Value(
        "i", 1
    ),
    "multiprocessing: manager": lambda request, folder: manager(request),
    "multiprocessing: list of a manager": lambda request, folder: manager(request).list(),
    "multiprocessing: Namespace": lambda request, folder: manager(request).Namespace(),
    "multiprocessing: SharedMemory": lambda request, folder: segment(request),
    "NumPy: over an Array": lambda request, folder: shared_array(),
    "NumPy: reshaped view": lambda request, folder: shared_array().reshape(1, 3)[:, 1:],
    "NumPy: as ctypes": lambda request, folder: np.ctypeslib.as_array(
        multiprocessing.RawArray("i", 4)
    ),
    "NumPy: in torch": lambda request, folder: torch.from_numpy(shared_array()),
    "NumPy: memmap r+": lambda request, folder: np.memmap(file_of(folder), np.float32, "r+"),
    "NumPy: memmap w+": lambda request, folder: np.memmap(
        folder / "new", np.float32, "w+", shape=4
    ),
    "mmap": lambda request, folder: mmap.mmap(-1, 4096),
    "mmap: in NumPy": lambda request, folder: np.frombuffer(mmap.mmap(-1, 4096), dtype=np.uint8),
}


def by_file_system():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return torch.zeros(3).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_is_named(name, request, tmp_path):
    with pytest.raises(SharedMemoryError, match=r"^dataset\.part.*shared.*script changes") as error:
        packed(Holder(SHARED[name](request, tmp_path)))
    assert error.value.where.startswith("dataset.part")


def packed(dataset, *, collate_fn=default_collate, init=None, **kwargs):
    spec = DatasetSpec(dataset=dataset, collate_fn=collate_fn, worker_init_fn=init)
    return pack_spec(spec, max_bytes=1 << 30, **kwargs)


EPOCH = shared_tensor()


def reading_a_global(samples):
    return samples, EPOCH


def ways():
    part = shared_tensor()

    class OfClass:
        epoch = part

    def reading_a_variable(samples):
        return samples, part

    def by_default(samples, epoch=part):
        return samples, epoch

    def init(worker):
        part.add_(worker)

    inner = Holder({"epochs": [0, part]})
    return {
        "dataset.part.part['epochs'][1]": {"dataset": Holder(inner)},
        "dataset.epoch": {"dataset": OfClass()},
        "collate_fn variable part": {"dataset": [1], "collate_fn": reading_a_variable},
        "collate_fn": {"dataset": [1], "collate_fn": by_default},
        "collate_fn.func": {"dataset": [1], "collate_fn": functools.partial(by_default, epoch=1)},
        "worker_init_fn variable part": {"dataset": [1], "init": init},
        "dataset.part.__self__": {"dataset": Holder(inner.__getitem__)},
    }


@pytest.mark.parametrize("path", ways())
def test_what_is_shared_is_found_in_every_part(path):
    with pytest.raises(SharedMemoryError) as error:
        packed(**ways()[path])
    # Of a function's defaults and a bound method the whole is named.
    assert error.value.where.split(".__")[0].startswith(path.split(".func")[0].split(".__")[0])


def test_globals_of_a_users_module_are_found(tmp_path, monkeypatch):
    (tmp_path / "shared_epoch.py").write_text(
        "import multiprocessing\nE = multiprocessing.Value('i')\n"
    )
    (tmp_path / "users_dataset.py").write_text(
        "import shared_epoch\n"
        "def scaled(value):\n    return value * shared_epoch.E.value\n"
        "class Numbers:\n    def __getitem__(self, index):\n        return scaled(index)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_dataset

    with pytest.raises(SharedMemoryError) as error:
        packed(users_dataset.Numbers())
    assert error.value.where == "shared_epoch.E"
    for name in ("shared_epoch", "users_dataset"):
        monkeypatch.delitem(sys.modules, name)


def saved_tensor(folder):
    torch.save(torch.zeros(64), folder / "saved.pt")
    return folder / "saved.pt"


PRIVATE = {
    "tensor": lambda folder: torch.zeros(3),
    "copy of a shared tensor": lambda folder: shared_tensor().clone(),
    "copy of an array": lambda folder: shared_array().copy(),
    "module": lambda folder: torch.nn.Linear(2, 2),
    "empty": lambda folder: torch.empty(0),
    "meta": lambda folder: torch.empty(3, device="meta"),
    "memmap r": lambda folder: np.memmap(file_of(folder), np.float32, "r"),
    "memmap c": lambda folder: np.memmap(file_of(folder), np.float32, "c"),
    "private file": lambda folder: torch.from_file(str(file_of(folder)), shared=False, size=4),
    "mapped checkpoint": lambda folder: torch.load(saved_tensor(folder), mmap=True),
    "objects": lambda folder: np.array([{"a": 1}, None], dtype=object),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_memory_is_sent(name, tmp_path):
    assert packed(Holder(PRIVATE[name](tmp_path))).data


def test_shared_memory_that_is_only_read_can_be_copied():
    assert packed(Holder(shared_tensor()), copies_shared=True).data
    spec = DatasetSpec(dataset=Holder(shared_tensor()), collate_fn=default_collate)
    bounds = {"max_bytes": 1 << 20, "max_seconds": 9.0}
    assert not refusal_of(spec, **bounds).what
    assert what_is_shared(spec, **bounds).startswith("dataset.part is a tensor in shared memory")
    assert not what_is_shared(DatasetSpec(dataset=[1], collate_fn=default_collate), **bounds)


def test_ranges_are_those_of_shared_writable_maps():
    ranges = SharedRanges(
        "1000-2000 rw-p 00000000 00:00 0 \n"
        "2000-3000 rw-s 00000000 00:01 77                     /dev/zero (deleted)\n"
        "3000-4000 r--s 00000000 fe:00 88                     /data/written\n"
        "4000-5000 rw-s 00000000 fe:00 88                     /data/written\n"
        "5000-6000 r--s 00000000 fe:00 99                     /data/only read\n"
        "6000-7000 rw-s 00000000 00:05 12                     /dev/nvidiactl\n"
    )
    starts = (0x1000, 0x2000, 0x2FFF, 0x3000, 0x4000, 0x5000, 0x6000, 0x7000)
    assert [start in ranges for start in starts] == [False, True, True, True, True, *[False] * 3]
