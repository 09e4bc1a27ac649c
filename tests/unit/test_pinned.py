"""Batches lie in pinned memory where the process uses an accelerator, and memory can be pinned."""

from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from stoker import DataLoader
from stoker.feed.bookkeeping import making_of
from stoker.feed.replace import note_makings
from stoker.feed.trainer import pinned
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.trainer.pinned import PinnedMemory, current_device, device_in_use, set_device

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("accelerator", [None, SimpleNamespace(current_device_idx=min)])
def test_older_torch_pins_for_the_current_device_of_cuda(accelerator, monkeypatch):
    if accelerator is None:
        monkeypatch.delattr(torch, "accelerator", raising=False)
    else:
        monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    set_device(current_device())
    assert chosen == [3]


@pytest.fixture
def built_for(monkeypatch):
    """Makes torch one that was built for a kind of accelerator."""

    def build(kind, **module):
        pinned._kind_of_accelerator.cache_clear()
        device = None if kind is None else SimpleNamespace(type=kind)
        accelerator = SimpleNamespace(
            current_accelerator=lambda: device, current_device_index=lambda: 2
        )
        monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
        if kind:
            monkeypatch.setattr(torch, kind, SimpleNamespace(**module), raising=False)

    yield build
    pinned._kind_of_accelerator.cache_clear()


@pytest.mark.parametrize(
    ("kind", "module", "device"),
    [
        (None, {}, None),
        ("newer", {"is_initialized": lambda: False}, None),
        ("newer", {"is_initialized": lambda: True}, 2),
        ("mps", {}, None),
    ],
)
def test_an_accelerator_counts_once_the_process_uses_it(built_for, kind, module, device):
    built_for(kind, **module)
    assert device_in_use() == device


def test_nothing_is_initialised_to_find_out():
    device_in_use()
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


class Driver:
    """A double of torch's allocator, with so many bytes that can be pinned."""

    def __init__(self, monkeypatch, *, free_bytes: int, cached_bytes: int = 0) -> None:
        self.free_bytes = free_bytes
        self.cached_bytes = cached_bytes
        self.used_bytes = 0
        self.num_tries = self.num_emptied = 0
        self.devices: list[int] = []
        monkeypatch.setattr(pinned, "_pinned", self._pinned)
        monkeypatch.setattr(pinned, "set_device", self.devices.append)
        monkeypatch.setattr(pinned, "empty_host_cache", self._empty)
        monkeypatch.setattr(pinned, "pinned_bytes", lambda: self.cached_bytes + self.used_bytes)

    def _pinned(self, nbytes: int) -> object:
        self.num_tries += 1
        if nbytes > self.free_bytes:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")
        self.free_bytes -= nbytes
        return torch.empty(nbytes, dtype=torch.uint8).numpy()

    def _empty(self) -> None:
        self.num_emptied += 1
        self.free_bytes += self.cached_bytes
        self.cached_bytes = 0


def test_where_no_memory_can_be_pinned_batches_are_pageable_and_that_is_said_once(monkeypatch):
    driver, reasons = Driver(monkeypatch, free_bytes=100), []
    memory = PinnedMemory(warn=reasons.append)
    buffers = BatchBuffers(pinned=memory)
    are_pinned = [isinstance(buffers.room(70, 0).base, torch.Tensor) for _ in range(4)]
    assert are_pinned == [True, False, False, False]
    assert reasons == ["70 bytes: CUDA error: out of memory"]
    # Once more after what was free of other sizes was given back; then never again.
    assert (driver.num_tries, driver.num_emptied, memory.has_failed) == (3, 1, True)


def test_memory_of_other_sizes_that_is_free_makes_room(monkeypatch):
    driver = Driver(monkeypatch, free_bytes=10, cached_bytes=80)
    memory = PinnedMemory()
    assert memory.take(70, 0).nbytes == 70
    assert (driver.num_emptied, memory.has_failed) == (1, False)


def test_free_memory_above_the_limit_is_given_back_and_looked_at_once_a_second(monkeypatch):
    driver = Driver(monkeypatch, free_bytes=1000, cached_bytes=100)
    now = [10.0]
    monkeypatch.setattr(pinned.time, "monotonic", lambda: now[0])
    memory = PinnedMemory(max_bytes=100)
    emptied = []
    for cached, seconds in ((100, 0.0), (300, 0.5), (300, 0.6), (200, 0.2), (200, 1.0)):
        driver.cached_bytes = cached
        now[0] += seconds
        memory.take(1, 0)
        emptied.append(driver.num_emptied)
    assert emptied == [0, 0, 1, 1, 2]


def test_memory_that_is_in_use_is_not_given_back_each_second(monkeypatch):
    driver = Driver(monkeypatch, free_bytes=1000)
    now = [10.0]
    monkeypatch.setattr(pinned.time, "monotonic", lambda: now[0])
    memory = PinnedMemory(max_bytes=100)
    emptied = []
    # The third and fourth: not twice what was in use when it was given back last.
    for used, cached in (
        (90, 0),
        (150, 20),
        (150, 140),
        (150, 150),
        (150, 160),
        (10, 200),
        (10, 90),
    ):
        driver.used_bytes, driver.cached_bytes = used, cached
        now[0] += 1.0
        memory.take(1, 0)
        emptied.append(driver.num_emptied)
    assert emptied == [0, 1, 1, 1, 2, 2, 2]


# What torch calls all pinned bytes: 2.7, and from 2.9 on (2.11 counts more in use than there is).
STATS = {
    "2.7": {"reserved_bytes": {"current": 300}, "allocated_bytes": {"current": 100}},
    "2.11": {"allocated_bytes": {"current": 300}, "active_bytes": {"current": 1096}},
    "not initialised": {},
}


@pytest.mark.parametrize("version", STATS)
def test_all_pinned_bytes_are_read_by_the_name_of_each_torch(version, built_for, monkeypatch):
    built_for("cuda", host_memory_stats_as_nested_dict=lambda: STATS[version])
    assert pinned.pinned_bytes() == (300 if STATS[version] else 0)


@pytest.mark.parametrize("kind", [None, "cuda", "newer"])
def test_a_torch_that_does_not_say_what_is_pinned_pins_without_a_limit(kind, built_for):
    built_for(kind)
    assert pinned.pinned_bytes() == 0


def test_each_thread_chooses_its_device_once(monkeypatch):
    driver = Driver(monkeypatch, free_bytes=1000)
    memory = PinnedMemory()

    def take() -> None:
        for _ in range(3):
            memory.take(1, 5)

    for thread in [Thread(target=take) for _ in range(2)]:
        thread.start()
        thread.join()
    assert driver.devices == [5, 5]


@NEEDS_CUDA
def test_memory_is_pinned_and_given_back(monkeypatch):
    device = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    pinned.empty_host_cache()
    before = pinned.pinned_bytes()
    memory = PinnedMemory(max_bytes=before + (4 << 20))
    assert device_in_use() == torch.cuda.current_device()
    for _ in range(8):
        array = memory.take(1 << 20, 0)
        assert array.base.is_pinned()
        device.copy_(array.base, non_blocking=True)
        # Others, while this one is copied from.
        arrays = [memory.take(1 << 20, 0) for _ in range(8)]
        del array, arrays
    torch.cuda.synchronize()
    if not hasattr(torch.cuda, "host_memory_stats_as_nested_dict"):
        return
    assert pinned.pinned_bytes() >= before + (8 << 20)
    monkeypatch.setattr(memory, "_look_at", 0.0)
    last = memory.take(1 << 20, 0)
    assert last.base.is_pinned()
    assert pinned.pinned_bytes() <= before + (2 << 20)


MADE = {
    "by the script, by name": ("/work/train.py", "cls(data, pin_memory=False)", True),
    "by the script, by position": ("/work/train.py", "cls(data, *LIKE_TORCH)", True),
    "by the script, without it": ("/work/train.py", "cls(data, batch_size=2)", False),
    "again by a package": ("/x/site-packages/m/a.py", "cls(data, pin_memory=False)", False),
}


@pytest.mark.parametrize("is_torchs", [False, True])
@pytest.mark.parametrize("case", MADE)
def test_what_a_script_gives_is_its_choice_and_what_a_package_copies_is_not(case, is_torchs):
    class Torchs(torch.utils.data.DataLoader):
        pass

    note_makings(Torchs)
    file, code, is_chosen = MADE[case]
    like_torch = (1, False, None, None, 0, None, False)
    names = {"cls": Torchs if is_torchs else DataLoader, "data": [1], "LIKE_TORCH": like_torch}
    loader = eval(compile(code, file, "eval"), names)
    assert making_of(loader).chooses_pinning == is_chosen
