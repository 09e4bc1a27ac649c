"""Each batch of each epoch comes once, in order, whatever becomes of hosts and connections."""

import itertools
import random

import pytest

from stoker.errors import FeedLostError
from stoker.feed.trainer.session import EpochRequest, IndexSource
from support.feed_world import BATCH_SAMPLES, SPECS, World, numbered


def epoch_of(world, one, epoch, draw):
    """Iterates over an epoch, or leaves it; checks what comes."""
    count = draw.choice([1, 3, 12, 30])
    spec = draw.choice([SPECS[0], SPECS[0], *SPECS])
    seeding = draw.choice(["stretch", "stretch", "sample"])
    local = one.local
    if local is None or not local.makes(spec, seeding):
        local = world.local(spec, seeding) if draw.random() < 0.4 else None
    source = IndexSource(numbered(epoch, count))
    request = EpochRequest(
        epoch=epoch,
        spec=spec,
        seeding=seeding,
        local=local,
        source=source,
        is_eager=draw.random() < 0.5,
    )
    epoch_id = one.begin(request)
    for number in range(draw.choice([count, count, draw.randrange(count + 1)])):
        first = 10_000 * epoch + BATCH_SAMPLES * number
        try:
            outcome = one.next(epoch_id, timeout_seconds=0)
        except FeedLostError:
            # In place of its batch, of which workers died.
            assert world.lost[epoch_id, number]
            yield
            continue
        one.unreturned = None
        assert outcome.value["x"].tolist() == [*range(first, first + BATCH_SAMPLES)]
        yield
    if one.schedule.head == count:
        with pytest.raises(StopIteration):
            one.next(epoch_id, timeout_seconds=0)
    one.cancel(epoch_id)


def run(seed, patch):
    world = World(seed, patch)
    draw = random.Random(seed)
    serial = itertools.count()
    try:
        running = {one.name: iter(()) for one in world.sessions}
        left = {one.name: draw.choice([1, 3]) for one in world.sessions}
        while running:
            one = draw.choice([one for one in world.sessions if one.name in running])
            if next(running[one.name], "over") != "over":
                continue
            if not left[one.name]:
                del running[one.name]
                continue
            left[one.name] -= 1
            running[one.name] = epoch_of(world, one, next(serial), draw)
        world.settle()
    finally:
        world.close()


SEEDS = 40


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(SEEDS, 20 * SEEDS, SEEDS))],
)
def test_batches_come_once_and_in_order_whatever_becomes_of_hosts(first, monkeypatch):
    for seed in range(first, first + SEEDS):
        with monkeypatch.context() as patch:
            try:
                run(seed, patch)
            except BaseException as err:
                err.add_note(f"seed {seed}")
                raise
