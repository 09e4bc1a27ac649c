"""Further replayed steps on a device: simulated, on a virtual clock."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from stoker.profile.batches import Cache
from stoker.profile.rank_results import quartiles
from stoker.profile.script_phases import VARIANTS, Replay, VariantPhases, pin_seconds
from stoker.profile.steps import ReplaySteps, StepClock
from support.device_double import DeviceDouble

WORK, COPY, COPY_PINNED = 0.0104, 0.0281, 0.0031
BUDGET = 2.0


class CopyingToDevice(TorchDispatchMode):
    """Lets copies from the host to `meta` take time on a double of a device."""

    def __init__(self, device: DeviceDouble) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_device = str(kwargs.get("device", "")) == "meta"
        if func is torch.ops.aten._to_copy.default and to_device and args[0].device.type == "cpu":
            if kwargs.get("non_blocking"):
                self.device.launch(COPY_PINNED)
            else:
                self.device.copy(COPY)
        return func(*args, **kwargs)


class Training:
    """A script on a double of a device, and its variants."""

    def __init__(self, *, budget_seconds: float = BUDGET, device: DeviceDouble | None = None):
        self.device = device or DeviceDouble()
        self.clock = StepClock(find=lambda: device or self.device, now=self.device.now)
        self.cache = Cache()
        for number in range(4):
            self.cache.add((torch.full((8, 3), float(number)), torch.arange(8)))
        self.elapsed = 0.0
        self.variants = VariantPhases(
            self.cache,
            clock=self.clock,
            loader=DataLoader(torch.zeros(4)),
            inner=lambda: None,
            iterate=DataLoader.__iter__,
            budget_seconds=budget_seconds,
            elapsed_seconds=lambda: self.elapsed,
            is_stopped=lambda: False,
        )

    def train(self, replay: Replay, *, steps: int, begin: int = 0) -> Replay:
        with CopyingToDevice(self.device):
            for number in range(begin, begin + steps):
                images, _ = replay.batch(number)
                images.to("meta")
                self.device.launch_step(WORK, host_seconds=WORK / 2)
                # In place, as scripts may: the next replay must not see it.
                images.zero_()
                replay.asked()
        return replay

    def cached(self) -> Replay:
        replay = self.train(Replay(self.cache, ReplaySteps(clock=self.clock)), steps=40)
        replay.steps.settle()
        return replay

    def run(self, *, step_seconds: float) -> list[str]:
        """Goes through the variants as `phases.ProfileSession` does; returns their names."""
        cached = self.cached().steps.result(cached_batches=4).step_seconds
        names = []
        while name := self.variants.following(cached, step_seconds=step_seconds):
            names.append(name)
            self.variants.begin(name)
            self.train(self.variants.running, steps=40)
        self.variants.end()
        self.variants.end()
        return names


def test_the_wait_for_transfers_is_what_a_batch_on_the_device_saves():
    training = Training()
    assert training.run(step_seconds=0.0389) == ["on-device", "pinned"]
    found = training.variants.result()
    assert found.on_device.median == pytest.approx(WORK, rel=0.02)
    assert found.pinned.median == pytest.approx(WORK + COPY_PINNED, rel=0.02)
    assert found.copied_bytes == 8 * 3 * 4
    assert found.is_waiting
    assert not found.is_pinned
    assert found.pin_seconds >= 0
    assert found.beside_workers is None
    assert not training.variants.notes
    # The script's own again.
    assert "to" not in vars(torch.Tensor)


def test_pinning_is_not_tried_where_copies_cost_little():
    training = Training()
    assert training.run(step_seconds=10.0) == ["on-device"]
    assert training.variants.result().pinned is None


def test_a_step_of_the_host_has_no_variants():
    training = Training()
    training.clock = StepClock(find=lambda: None)
    training.variants._clock = training.clock
    assert training.run(step_seconds=0.1) == []
    assert training.variants.result() is None
    assert not training.variants.notes


def test_a_short_budget_is_said_and_leaves_the_rest_to_the_loader():
    training = Training()
    training.elapsed = 0.8 * BUDGET
    assert training.run(step_seconds=0.0389) == []
    assert training.variants.notes == [
        "not measured: the wait for transfers and what loading adds to a step (the budget is too "
        "short)"
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no copy", "the script copies no tensor of its batches to a device"),
        ("no memory", "the device has no memory for a batch more"),
        ("few", "too few steps"),
    ],
)
def test_a_variant_that_tells_nothing_is_said_and_is_no_figure(how, words, monkeypatch):
    training = Training()
    training.variants.begin("on-device")
    running = training.variants.running
    if how == "no copy":
        for number in range(20):
            running.batch(number)
            training.device.launch_step(WORK, host_seconds=WORK / 2)
            running.asked()
    elif how == "no memory":
        training.variants._source.copies.has_failed = True
        training.train(running, steps=20)
    else:
        training.train(running, steps=4)
    training.variants.end()
    assert training.variants.result() is None
    assert training.variants.notes == [f"not measured: the wait for transfers ({words})"]


def test_variants_come_in_their_order_and_one_that_was_left_out_is_not_made_up_for():
    variants = Training().variants
    assert tuple(variants.left) == VARIANTS
    variants.begin("pinned")
    assert tuple(variants.left) == ("beside-workers",)
    variants.begin("on-device")
    variants.end()


def test_a_variant_ends_after_its_share_of_the_budget_however_few_steps_it_had(monkeypatch):
    training = Training(budget_seconds=100.0)
    now = 0.0
    monkeypatch.setattr("stoker.profile.script_phases.time.monotonic", lambda: now)
    training.variants.begin("on-device")
    assert not training.variants.is_enough()
    training.train(training.variants.running, steps=150)
    now = 1.0
    assert training.variants.is_enough()
    training.variants.begin("pinned")
    now = 5.5
    assert not training.variants.is_enough()
    now = 6.5
    assert training.variants.is_enough()
    training.variants.end()


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_pinning_takes_time_for_all_of_a_batch_in_any_layout():
    with threads(1):
        batch = [torch.rand(64, 3, 64, 64).to(memory_format=torch.channels_last), torch.arange(3)]
        assert pin_seconds(batch) > 0
    assert quartiles([pin_seconds({"a": torch.zeros(0)})]).mean >= 0
