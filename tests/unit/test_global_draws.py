"""A sampler that draws from the process's generators is asked exactly as far as torch asks it."""

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.utils.data as data

import stoker
from stoker.feed.bookkeeping import LoaderBooks
from stoker.feed.sampler import SamplerOrder, yielded
from stoker.feed.seeding import Numbered
from stoker.feed.trainer.buffers import BatchOutcome
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.trainer.session import EpochRequest, FeedSession, IndexSource
from stoker.feed.wire.codec import unpack_value
from stoker.feed.wire.dataset import DatasetSpec, pack_spec

LENGTH = 90
SPEC = pack_spec(DatasetSpec(dataset=[1], collate_fn=repr), max_bytes=1 << 20)

Draw = Callable[[], float]
DRAWS: dict[str, Draw] = {
    "random": random.random,
    "numpy": lambda: float(np.random.random()),
    "torch": lambda: float(torch.rand(())),
}


class Drawn(data.Sampler[int]):
    """Draws each index as it is asked for it, or all of them at once."""

    def __init__(self, draw: Draw, *, is_at_once: bool) -> None:
        self._draw = draw
        self._is_at_once = is_at_once

    def __iter__(self) -> Iterator[int]:
        places = (int(self._draw() * LENGTH) for _ in range(LENGTH))
        yield from [*places] if self._is_at_once else places

    def __len__(self) -> int:
        return LENGTH


def loader_of(draw: Draw, *, workers: int, factor: int, is_at_once: bool, generator: bool):
    return stoker.DataLoader(
        data.TensorDataset(torch.arange(LENGTH)),
        3,
        sampler=Drawn(draw, is_at_once=is_at_once),
        num_workers=workers,
        prefetch_factor=factor,
        generator=torch.Generator() if generator else None,
    )


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def by_torch(loader: data.DataLoader[object], draw: Draw, *, taken: list[int]) -> list[object]:
    """Returns what loop and sampler draw where the sampler is asked as torch's loader asks it."""
    seed()
    seen: list[object] = []
    for count in taken:
        indices = iter(loader._index_sampler)
        num_ahead = loader.num_workers * (loader.prefetch_factor or 2)
        ahead = [next(indices) for _ in range(num_ahead)]
        for _ in range(count):
            following = next(indices, None)
            if following is not None:
                ahead.append(following)
            seen += [ahead.pop(0), draw()]
    return seen


class Fed:
    """A loader's epochs from a session whose hosts have `credits`, in this process."""

    def __init__(self, loader: data.DataLoader[object], *, credits: int) -> None:
        self._loader = loader
        self._books = LoaderBooks(0)
        schedule = BatchScheduler(max_bytes=1 << 20)
        self._session = FeedSession(
            "s", lock=threading.RLock(), wake=lambda: None, schedule=schedule
        )
        if credits:
            schedule.grant("host", credits)
        self.num_asked: list[int] = []

    def epoch(self, draw: Draw, *, count: int) -> list[object]:
        order = SamplerOrder(self._loader, self._books, is_inline=False, is_fed=True)
        given: list[object] = []
        indices = (Numbered((1,), index) for index in order)
        draws = order.global_draws
        assert draws is not None
        source = IndexSource(indices, num_ahead=draws.num_ahead, is_in_step=draws.are_in_step)
        request = EpochRequest(epoch=0, spec=SPEC, seeding="batch", source=source, is_eager=True)
        epoch_id = self._session.begin(request)
        schedule = self._session.schedule
        schedule.grant("host", 6)
        for number in range(count):
            while not schedule.is_there(schedule.head):
                asked = schedule.assign(0.0)
                for _, batch_number in asked:
                    index = unpack_value(
                        self._session._asked[batch_number].index, allow_pickle=True
                    )
                    assert schedule.arrived("host", batch_number, frame_bytes=1, now=0.0)
                    self._session.deliver(batch_number, BatchOutcome(index))
                assert asked
            given.append(self._session.next(epoch_id, timeout_seconds=1).value)
            self._session.unreturned = None
            yielded(order.position, number + 1)
            self.num_asked.append(order.position.num_drawn - number - 1)
            given.append(draw())
        self._session.cancel(epoch_id)
        order.position.cancel()
        return given


@pytest.mark.parametrize("credits", [0, 20])
@pytest.mark.parametrize(("workers", "factor"), [(1, 1), (2, 7)])
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_a_sampler_that_draws_as_it_goes_is_asked_as_by_torch(
    name, generator, workers, factor, credits
):
    loader = loader_of(
        DRAWS[name], workers=workers, factor=factor, is_at_once=False, generator=generator
    )
    expected = by_torch(loader, DRAWS[name], taken=[3, 1, 25])
    fed = Fed(loader, credits=credits)
    seed()
    assert [one for count in (3, 1, 25) for one in fed.epoch(DRAWS[name], count=count)] == expected


@pytest.mark.parametrize("name", DRAWS)
def test_a_sampler_that_draws_its_order_at_once_is_asked_as_far_as_hosts_need(name):
    loader = loader_of(DRAWS[name], workers=2, factor=2, is_at_once=True, generator=False)
    fed = Fed(loader, credits=20)
    seed()
    found = fed.epoch(DRAWS[name], count=4)
    assert found == by_torch(loader, DRAWS[name], taken=[4])
    assert fed.num_asked[0] > 4
