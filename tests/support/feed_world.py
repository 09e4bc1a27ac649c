"""A trainer and data hosts of one process: without sockets and time, in any order of events.

Trainer and agents are the real ones (`IoThread`, `Service`, `Specs`, `LocalWorkers`); pools of
workers and connections are doubles that a seeded generator moves. It cuts connections, ends hosts,
loses and divides batches, and delivers late what was under way.
"""

import dataclasses
import io
import itertools
import os
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from stoker.environment import from_environment
from stoker.feed.agent import agent, dataset_process, dispatch
from stoker.feed.agent.batch_port import OutgoingBatch
from stoker.feed.seeding import Numbered
from stoker.feed.timeline import Timeline
from stoker.feed.trainer import answers, client, local_workers, session
from stoker.feed.trainer.links import AgentLink
from stoker.feed.trainer.scheduler import BatchScheduler
from stoker.feed.wire import protocol
from stoker.feed.wire.codec import decode, encode, unpack_value
from stoker.feed.wire.dataset import DatasetSpec, pack_spec
from stoker.feed.workers.crashes import RAISING
from stoker.feed.workers.jobs import FinishedPart, Result
from stoker.feed.workers.pipe import PartMade
from stoker.logs import Log
from stoker.records import FeedSettings

SPECS = [pack_spec(DatasetSpec(dataset=[n], collate_fn=str), max_bytes=1 << 20) for n in (1, 2)]
BATCH_SAMPLES = 8
MAX_STEPS = 4000

_filenos = itertools.count(1000)


def packed(samples):
    encoded = encode({"x": torch.tensor(samples)}, allow_pickle=False)
    payload = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(payload.data)
    return encoded.tree, payload


def samples_of(job) -> list[int]:
    samples = unpack_value(job.order.index, allow_pickle=False)
    assert isinstance(samples, list)
    return samples


class Pool:
    """In place of WorkerPool: batches are made, or lost, when the world says so."""

    world: Any = None

    def __init__(self, start, *, num_workers, host="", **_):
        self.num_workers = num_workers
        self.host = host
        self.fileno = next(_filenos)
        self.is_ready = self.is_closed = False
        self.jobs, self.lent, self.done = [], [], []
        self.shares, self.parts = {}, {}
        self.last_death, self.part_bytes, self.is_dead = "it died", 0, False
        self.world.pools.append(self)

    num_alive = property(lambda self: self.num_workers)
    num_ready = property(lambda self: self.num_workers * self.is_ready)
    busy_count = property(lambda self: min(self.num_workers, len(self.jobs)))
    idle_count = property(lambda self: self.num_ready - self.busy_count)
    room = property(lambda self: max(0, 2 * self.num_ready - len(self.jobs)))

    def sockets(self):
        return {self.fileno: False}

    def among(self, filenos):
        return [self.fileno] if self.fileno in filenos else []

    def assign(self, job):
        assert self.room > 0
        assert all(other.key != job.key for other in self.jobs)
        self.jobs.append(job)
        return []

    def lend(self, job):
        if self.is_ready:
            first, last = job.order.only
            step = job.order.part_samples
            self.lent += [(job, at, min(at + step, last)) for at in range(first, last, step)]

    def share_out(self, is_it, shares):
        for job in filter(is_it, self.jobs):
            self.shares[job.key] = shares

    def add_part(self, is_it, part):
        for job in filter(is_it, self.jobs):
            samples = samples_of(job)
            found = decode(part.tree, None, allow_pickle=False)
            assert found == samples[part.first :][: part.num_samples], "a part of another batch"
            self.parts.setdefault(job.key, {})[part.first] = found
        return []

    def make(self, draw):
        """Makes a part or a batch."""
        if self.lent and draw.random() < 0.6:
            job, first, last = self.lent.pop(0)
            samples = samples_of(job)[first:last]
            tree = encode(samples, allow_pickle=False).tree
            made = PartMade(
                len(samples), tree, 0, cpu_seconds=0.1, wall_seconds=0.1, send_seconds=0.0
            )
            job = dataclasses.replace(job, first=first)
            self.done.append(Result(job, 0, part=FinishedPart(made)))
        elif self.jobs:
            job = self.jobs.pop(draw.randrange(min(self.num_workers, len(self.jobs))))
            samples = samples_of(job)
            for first, part in self.parts.pop(job.key, {}).items():
                samples[first : first + len(part)] = part
            tree, payload = packed(samples)
            self.world.held += 1
            result = Result(job, 0, tree=tree, payload=payload, wall_seconds=0.1)
            result._release = self.world.release
            self.done.append(result)

    def lose(self, draw):
        if self.jobs:
            self._lose(self.jobs.pop(draw.randrange(len(self.jobs))))

    def _lose(self, job):
        self.world.lost[job.order.epoch_id, job.order.batch_number] += 1
        self.done.append(Result(job, 0, error=b"", summary="died", is_lost=True))

    def handle(self, fileno):
        results, self.done = self.done, []
        return results

    def cancel_jobs(self):
        for job in self.jobs:
            self._lose(job)
        self.jobs = []
        return self.handle(self.fileno)

    def drop_parts(self, is_over):
        self.lent = [lent for lent in self.lent if not is_over(lent[0])]
        return []

    def close(self):
        self.is_closed = True
        for result in self.done:
            result.release()
        self.jobs, self.lent, self.done = [], [], []

    def makers(self, is_it):
        return []

    def give_late_jobs_again(self):
        return []

    def starting_stacks(self):
        return ""

    def next_look_seconds(self):
        return None

    def flush(self):
        pass

    def spare_memory(self, share):
        pass

    def stop_shards(self, *, before_epoch_id):
        pass


class DatasetProcess:
    def __init__(self):
        number = next(_filenos)
        self.channel = SimpleNamespace(
            is_closed=False, fileno=lambda: number, wants_write=False, close=lambda: None
        )
        self.loaded = self.up = None

    def handle(self):
        self.loaded = self.loaded or dataset_process.Loaded()

    def death(self):
        return "the dataset process died", ""

    def close(self):
        self.channel.is_closed = True


class Wire:
    """A connection of a trainer to an agent: for messages both ways, and one for batches."""

    def __init__(self, link, host, identity):
        self.link, self.host, self.identity = link, host, identity
        self.up: deque[tuple[bytes, bytes]] = deque()
        self.down: deque[list[bytes]] = deque()
        self.batches: deque[OutgoingBatch] | None = None
        self.receiver: Any = None
        self.ticket = b""
        self.is_cut = False


class HostLink(AgentLink):
    world: Any = None
    wire = None

    def tick(self, now):
        if not (self.is_closed or self.is_open or now < self.dial_at):
            self.world.dial(self)

    def send(self, message, frame=None):
        if self.wire is not None:
            self.wire.up.append((protocol.pack(message), bytes(frame or b"")))

    def close(self, *, linger_seconds=0.0):
        super().close(linger_seconds=linger_seconds)
        wire, self.wire = self.wire, None
        self.is_open = False
        if wire is not None:
            self.world.cut(wire)


class Receiver:
    """In place of BatchReceiver."""

    world: Any = None

    def __init__(self, *, ticket, buffers, take, ended, **_):
        self.buffers, self.take, self.ended = buffers, take, ended
        self.ticket, self.reader = ticket, self
        self.has_been_up, self.num_taken, self.is_closed = True, 0, False
        self.failure = None

    def start(self):
        for wire in self.world.wires:
            if wire.ticket == self.ticket.ticket:
                wire.receiver = self

    def close(self):
        self.is_closed = True

    def words(self):
        return "reset"

    def deliver(self, batch):
        self.payload = batch.payload
        if self.world.wants(self):
            self.take(self, batch.packed, 0 if batch.payload is None else batch.payload.nbytes)
            self.num_taken += 1
        self.payload = batch.payload = None
        batch.done()

    def read(self, memory):
        memory[:] = self.payload.data


class Host:
    """A data host: the real service, over doubles of its workers and connections."""

    def __init__(self, world, name, *, workers):
        self.world, self.name, self.workers = world, name, workers
        self.place = len(world.hosts)
        self.start()

    def start(self):
        self.incarnation = str(next(_filenos))
        self.is_alive, self.is_draining = True, False
        self.wires = {}
        server: Any = SimpleNamespace(
            start_dataset=lambda spec, memory: DatasetProcess(),
            preload=lambda memory: None,
            close=lambda: None,
            is_alive=True,
        )
        self.specs = dataset_process.Specs(
            server,
            workers=self.workers,
            splits=True,
            rules=RAISING,
            host=self.name,
            wake=lambda: None,
        )
        self.service = agent.Service(
            self.specs,
            self,
            workers=self.workers,
            feed=self.world.feed,
            log=self.world.log,
            host=self.name,
        )
        vars(self.service.dispatch._guard)["is_due"] = lambda now: False
        self.ticked_at = self.world.now

    @property
    def has_work(self):
        sizes = self.service.dispatch.num_begun, self.service.outbox.sent_bytes
        requests = any(each.requests for each in self.service._sessions.values())
        return self.is_alive and (any(sizes) or requests)

    def words(self):
        sizes = self.service.dispatch.num_begun, self.service.outbox.sent_bytes
        return f"{sizes}, {self.service._sessions}"

    def member(self):
        return protocol.Member(
            host=self.name,
            place=self.place,
            group="data",
            address="10.0.0.1",
            port=1,
            batch_port=2,
            workers=self.workers,
            incarnation=self.incarnation,
        )

    def send(self, identity, frames):
        wire = self.wires.get(identity)
        if wire is not None:
            wire.down.append([bytes(frame) for frame in frames])
        return wire is not None

    def ticket_for(self, identity):
        ticket = protocol.Ticket(ticket=self.world.draw.randbytes(32), key=bytes(32))
        wire = self.wires.get(identity)
        if wire is not None:
            wire.ticket, wire.batches = ticket.ticket, deque()
        return ticket

    def send_batch(self, identity, batch):
        wire = self.wires.get(identity)
        if wire is None or wire.batches is None:
            return False
        wire.batches.append(batch)
        return True

    def wake(self):
        pass

    def take(self, wire):
        data, frame = wire.up.popleft()
        self.service.take(wire.identity, self.world.to_agent(data), memoryview(frame))

    def turn(self):
        if not self.is_alive:
            return
        self.service.work(list(self.specs.sockets()))
        if self.world.now - self.ticked_at >= 1.0:
            self.ticked_at = self.world.now
            self.service.tick(self.world.now)
        dispatch_ = self.service.dispatch
        if self.is_draining and not (dispatch_.num_begun or self.service.outbox.sent_bytes):
            self.world.end(self)


class Arrival:
    """In place of the session's condition: who waits moves the world."""

    def __init__(self, world):
        self.world, self.is_rung = world, False

    def notify_all(self):
        self.is_rung = True

    def wait(self):
        self.is_rung = False
        self.world.shared.lock.release()
        try:
            for _ in range(MAX_STEPS):
                self.world.step()
                if self.is_rung:
                    return
            raise AssertionError(f"stands still: {self.world.words()}")
        finally:
            self.world.shared.lock.acquire()


class World:
    def __init__(self, seed, patch):
        self.draw = draw = random.Random(seed)
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (agent, dataset_process, dispatch, answers, client, local_workers, session):
            patch.setattr(module, "time", clock)
        for double in (Pool, HostLink, Receiver):
            patch.setattr(double, "world", self, raising=False)
        patch.setattr(dataset_process, "WorkerPool", Pool)
        patch.setattr(local_workers, "WorkerPool", Pool)
        patch.setattr(client, "AgentLink", HostLink)
        patch.setattr(answers, "BatchReceiver", Receiver)
        patch.setattr(os, "register_at_fork", lambda **_: None)
        self.output = io.StringIO()
        self.log = Log(run="r", host="dnn", stream=self.output)
        self.feed = FeedSettings(
            max_bytes=draw.choice([100, 1 << 30]),
            split_batches=draw.choice([True, False]),
            start_deadline_seconds=1e9,
        )
        settings = dataclasses.replace(
            from_environment({}), feed=self.feed, comes_back=True, coordinator="127.0.0.1:1"
        )
        self.pools, self.wires, self.late = [], [], []
        self.lost, self.held = Counter[tuple[int, int]](), 0
        # Else a host is gone for good, and another one is left.
        self.come_back = draw.random() < 0.5
        self.num_faults = draw.choice([0, 5, 20, 60])
        self.to_agent = protocol.Unpacker(protocol.ToAgent)
        keys: Any = None
        self.shared = session.SharedState(timeline=Timeline(None), log=self.log)
        self.io = client.IoThread(self.shared, settings, keys)
        self.io._coordinator.is_closed = True
        # As of hosts: memory of the machine that tests run on.
        vars(self.io._guard)["is_due"] = lambda now: False
        self.hosts = []
        for name in ("d1", "d2", "d3")[: draw.choice([1, 2, 2, 3])]:
            self.hosts.append(Host(self, name, workers=draw.choice([1, 2, 4])))
        self.tell_roster()
        self.sessions = [self.session(f"s{n}") for n in range(draw.choice([1, 1, 2]))]

    def close(self):
        self.shared.close()
        self.io._context.destroy(linger=0)
        for host in self.hosts:
            if host.is_alive:
                host.specs.close()

    def session(self, name):
        made = session.FeedSession(
            name,
            lock=self.shared.lock,
            wake=self.shared.wake,
            schedule=BatchScheduler(max_bytes=self.draw.choice([1, 500, 1 << 40])),
        )
        vars(made)["_arrival"] = Arrival(self)
        self.shared.sessions[name] = made
        return made

    def local(self, spec, seeding):
        children: Any = SimpleNamespace(
            start=None,
            num_workers=self.draw.choice([1, 2]),
            is_iterable=False,
            host="dnn",
            seeding=seeding,
            packed=spec,
        )
        return local_workers.LocalWorkers(
            children,
            credits_each=2,
            splits=True,
            wake=lambda: None,
            on_death=lambda how: None,
        )

    def words(self):
        states = {
            one.name: (one.schedule.head, one.schedule.peers, one.failure) for one in self.sessions
        }
        return f"{states}\n{self.output.getvalue()[-3000:]}"

    def release(self):
        self.held -= 1

    def settle(self):
        """Has all work that is under way come to its end; what is counted comes to nothing."""
        self.num_faults = 0
        for _ in range(MAX_STEPS):
            if not any(host.has_work for host in self.hosts):
                break
            self.step()
        for host in self.hosts:
            assert not host.has_work, f"{host.name} counts what is over: {host.words()}"

    # Connections.

    def dial(self, link):
        host = next(host for host in self.hosts if host.name == link.member.host)
        if not host.is_alive or host.incarnation != link.member.incarnation:
            link.mark_lost(self.now)
            return
        wire = link.wire = Wire(link, host, self.draw.randbytes(5))
        host.wires[wire.identity] = wire
        self.wires.append(wire)
        link._address = "10.0.0.1"
        link.is_open = link.is_up = True
        link.attach()
        for one in self.sessions:
            one.has_news = True

    def wants(self, receiver):
        return not receiver.is_closed or self.draw.random() < 0.5

    def cut(self, wire):
        """Ends a connection for the agent; the trainer sees it later."""
        if wire.is_cut:
            return
        wire.is_cut = True
        # Some of what the trainer has sent still comes.
        for _ in range(self.draw.randrange(len(wire.up) + 1)):
            if wire.host.is_alive:
                wire.host.take(wire)
        wire.up.clear()
        wire.host.wires.pop(wire.identity, None)
        self.discard(wire)

    def discard(self, wire):
        """Drops what an agent has sent, but for what is in the trainer's hands."""
        batches, wire.batches = wire.batches, None
        for batch in batches or ():
            if wire.receiver is not None and self.draw.random() < 0.5:
                self.late.append((wire.receiver, batch))
                continue
            batch.payload = None
            batch.done()

    def end(self, host):
        for wire in list(host.wires.values()):
            self.cut(wire)
        host.is_alive = False
        for pool in self.pools:
            if pool.host == host.name:
                pool.close()
        host.specs.close()

    def tell_roster(self):
        alive = [host.member() for host in self.hosts if host.is_alive]
        gone = [host.member() for host in self.hosts if not host.is_alive]
        roster = protocol.Roster(agents=tuple(alive), lost=tuple(gone), expected=len(self.hosts))
        self.io._hosts.take_roster(roster, self.now)
        self.io._link_to(roster.agents)

    # What happens.

    def step(self):
        draw = self.draw
        draw.choices(
            [
                self.trainer_turns,
                self.host_turns,
                self.workers_work,
                self.messages_come,
                self.batches_come,
                self.time_passes,
                self.fault,
            ],
            weights=[6, 6, 6, 10, 6, 3, 1],
        )[0]()

    def trainer_turns(self):
        for wire in list(self.wires):
            if wire.is_cut and (wire.link.wire is not wire or self.draw.random() < 0.3):
                self.wires.remove(wire)
                if wire.link.wire is wire:
                    wire.link.mark_lost(self.now)
                    self.io._mark_lost(wire.link)
        self.shared.run_posted()
        for one in self.sessions:
            if one.local is not None:
                self.io._local_answers.take(one, 0)
        self.io._tick(self.now)

    def host_turns(self):
        self.draw.choice(self.hosts).turn()

    def workers_work(self):
        self.pools = [pool for pool in self.pools if not pool.is_closed]
        if self.pools:
            pool = self.draw.choice(self.pools)
            pool.make(self.draw) if pool.is_ready else setattr(pool, "is_ready", True)

    def messages_come(self):
        if not self.wires:
            return
        wire = self.draw.choice(self.wires)
        for _ in range(self.draw.choice([1, 1, 5])):
            if wire.up and self.draw.random() < 0.5:
                wire.host.take(wire)
            elif wire.down and wire.link.wire is wire:
                frames: list[Any] = [
                    SimpleNamespace(buffer=memoryview(frame)) for frame in wire.down.popleft()
                ]
                self.io._answers.take(wire.link, frames)

    def batches_come(self):
        if self.late and self.draw.random() < 0.2:
            receiver, batch = self.late.pop(0)
            receiver.deliver(batch)
            return
        wires = [wire for wire in self.wires if wire.batches and wire.receiver is not None]
        if wires:
            wire = self.draw.choice(wires)
            wire.receiver.deliver(wire.batches.popleft())

    def time_passes(self):
        self.now += self.draw.choice([0.001, 0.01, 0.1, 1.0, 3.0])

    def fault(self):
        gone = [host for host in self.hosts if not host.is_alive]
        if gone and self.come_back and self.draw.random() < 0.3:
            self.draw.choice(gone).start()
            self.tell_roster()
            return
        if not self.num_faults:
            return
        self.num_faults -= 1
        host = self.draw.choice(self.hosts)
        self.draw.choice(
            [
                self.cut_one,
                self.cut_batches,
                self.drain_or_end,
                self.lose_batch,
                self.lose_batch,
                self.roster_comes,
            ]
        )(host)

    def cut_one(self, host):
        for wire in list(host.wires.values()):
            self.cut(wire)

    def cut_batches(self, host):
        for wire in list(host.wires.values()):
            receiver = wire.receiver
            if receiver is None or receiver.is_closed:
                continue
            self.discard(wire)
            receiver.failure = OSError("reset")
            receiver.ended(receiver)

    def drain_or_end(self, host):
        others = [one for one in self.hosts if one is not host]
        is_last = not any(one.is_alive and not one.is_draining for one in others)
        if not host.is_alive or (is_last and not self.come_back):
            return
        if self.draw.random() < 0.5:
            host.is_draining = True
            host.service.drain()
        else:
            self.end(host)
        if self.draw.random() < 0.7:
            self.tell_roster()

    def roster_comes(self, host):
        self.tell_roster()

    def lose_batch(self, host):
        pools = [pool for pool in self.pools if pool.jobs]
        if pools:
            self.draw.choice(pools).lose(self.draw)


def numbered(epoch, count):
    for number in range(count):
        first = 10_000 * epoch + BATCH_SAMPLES * number
        yield Numbered((1, 0, epoch, number), [*range(first, first + BATCH_SAMPLES)])
