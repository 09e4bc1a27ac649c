"""Which device a script trains on: told from torch's own modules, here doubles of them."""

import sys
from types import SimpleNamespace

import pytest

from stoker.feed.device_events import ExposedWait, FoundDevice, find_device, own_gpu_uuids
from support.device_double import DeviceDouble


def never() -> None:
    raise AssertionError("ranks that are forked later could not use CUDA any more")


def torch_with(
    *,
    kind: str | None = None,
    held: tuple[int, ...] = (),
    current: int = 0,
    is_initialized: bool = True,
) -> SimpleNamespace:
    """Makes a torch whose accelerator of a kind holds so many bytes on each device."""
    module = SimpleNamespace(
        is_initialized=lambda: is_initialized,
        is_available=never,
        current_device=lambda: current,
        device_count=lambda: len(held),
        memory_allocated=lambda index: held[index],
    )
    none = SimpleNamespace(is_initialized=lambda: False, is_available=never)
    accelerator = SimpleNamespace(
        current_accelerator=lambda: SimpleNamespace(type=kind) if kind else None,
        is_available=lambda: True,
    )
    return SimpleNamespace(
        cuda=module if kind == "cuda" else none,
        accelerator=accelerator,
        get_device_module=lambda _kind: module,
    )


@pytest.mark.parametrize(
    ("torch", "name"),
    [
        (torch_with(), None),
        (torch_with(kind="cuda", held=(0, 0), is_initialized=False), None),
        (torch_with(kind="cuda", held=(0, 0)), None),
        (torch_with(kind="cuda", held=(10, 90)), "cuda:0"),
        (torch_with(kind="cuda", held=(10, 90), current=1), "cuda:1"),
        # A rank that names its device and never sets it.
        (torch_with(kind="cuda", held=(0, 5, 70, 0)), "cuda:2"),
        (torch_with(kind="xpu", held=(5,)), "xpu:0"),
        (torch_with(kind="xpu", held=(5,), is_initialized=False), None),
    ],
    ids=["cpu", "not used", "no memory", "current", "set", "named", "xpu", "xpu not used"],
)
def test_the_device_is_the_one_on_which_the_process_holds_memory(monkeypatch, torch, name):
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = find_device()
    assert (device and device.name) == name


@pytest.mark.parametrize(
    ("torch", "uuids"),
    [
        (torch_with(kind="cuda", held=(0, 5, 7)), ("1a", "2b")),
        (torch_with(kind="cuda", held=(0, 0, 0)), ()),
        (torch_with(kind="cuda", held=(1,), is_initialized=False), ()),
        (torch_with(kind="xpu", held=(5,)), ()),
    ],
    ids=["two of three", "none", "not used", "xpu"],
)
def test_gpus_that_hold_memory_of_the_process_are_known_by_their_uuids(monkeypatch, torch, uuids):
    spelled = ("GPU-0c", "1a", "MIG-2b")
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=spelled[index])
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert own_gpu_uuids() == uuids
    torch.cuda.get_device_properties = lambda index: SimpleNamespace()
    assert own_gpu_uuids() == ()


def test_apples_device_has_no_number_and_needs_no_start(monkeypatch):
    torch = torch_with(kind="mps")
    module = SimpleNamespace(current_allocated_memory=lambda: 7, device_count=lambda: 1)
    torch.get_device_module = lambda _kind: module
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert find_device().name == "mps:0"


def test_an_older_torch_knows_cuda_only(monkeypatch):
    torch = torch_with(kind="cuda", held=(1,))
    del torch.accelerator
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert find_device().name == "cuda:0"
    torch.cuda.is_initialized = lambda: False
    assert find_device() is None


def test_without_torch_there_is_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert find_device() is None


def test_a_device_is_looked_for_ever_more_rarely():
    looks = []
    found = FoundDevice(lambda: looks.append(1))
    for _ in range(1000):
        found.look()
    assert len(looks) == 10


def test_a_device_that_waits_to_answer_is_not_asked_in_runs():
    device = DeviceDouble(name="mps:0")
    exposed = ExposedWait(FoundDevice(lambda: device))
    device.launch(1.0)
    exposed.asked()
    exposed.got(wait_seconds=0.5)
    assert exposed.seconds(0.5) == 0.5
    assert device.questions == 0
