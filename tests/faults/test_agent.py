"""A client drives a real agent, with its real fork server and workers, over real sockets."""

import contextlib
import importlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq
from torch.utils.data import default_collate, default_convert, get_worker_info

from stoker.errors import ShippingError, UsageError
from stoker.feed.agent.agent import Agent
from stoker.feed.seeding import seed_batch
from stoker.feed.wire import codec, crypto, protocol
from stoker.feed.wire.dataset import (
    DatasetSpec,
    pack_spec,
    unpack_error,
)
from stoker.feed.wire.protocol import PIECE_BYTES
from stoker.feed.wire.sealing import Unsealer
from stoker.feed.wire.stream import BatchReader, BufferPool, tune
from stoker.logs import Log
from stoker.records import FeedSettings
from support.cluster import wait_until
from support.local_job import WITHOUT_TORCH
from support.warm_python import WarmProcess

pytestmark = pytest.mark.fault
TOKEN = "ab" * 32
KEYS = crypto.Keys.from_token(bytes.fromhex(TOKEN))
DEADLINE_SECONDS = 150.0
# Of each agent that runs, its port for batches.
BATCH_PORTS: dict[int, int] = {}


class Images:
    def __init__(self, folder="", *, size=64):
        self.folder = folder
        self.size = size

    def __getitem__(self, index):
        if index == 500:
            raise FileNotFoundError("no image 500")
        if index >= 1000 and self.folder:
            self._special(index)
        image = torch.full((3, self.size, self.size), index % 256, dtype=torch.uint8)
        return image, index, random.random()

    def _special(self, index):
        first = Path(self.folder) / f"{index}"
        if index == 1001 or not first.exists():
            first.write_text(str(os.getpid()))
            while index != 1001 and not (Path(self.folder) / "go").exists():
                time.sleep(0.01)
            if index == 1001:
                os.kill(os.getpid(), signal.SIGKILL)


def spec_of(dataset, **kwargs):
    collate = default_collate if kwargs.get("auto_collation", True) else default_convert
    spec = DatasetSpec(dataset=dataset, collate_fn=collate, **kwargs)
    return pack_spec(spec, max_bytes=1 << 30)


def make_of(session, number, *, index=b"", epoch_id=0, seed=(), **more):
    return protocol.Make(
        session=session,
        batch_number=number,
        index=index,
        epoch_id=epoch_id,
        seed_words=seed,
        **more,
    )


class Client:
    def __init__(self, port, spec, **kwargs):
        self.port = port
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        crypto.secure_client(self.socket, KEYS)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.batches = self.reader = None
        self.spec = spec
        self.name = f"s{random.SystemRandom().randrange(1 << 30)}"
        self.answers = protocol.Unpacker(protocol.FromAgent)
        about = {"rank": 0, "spec": spec.digest, "spec_bytes": len(spec.data), **kwargs}
        version = protocol.PROTOCOL_VERSION
        self.opening = protocol.Open(protocol=version, session=self.name, **about)

    def send(self, message, *frames):
        self.socket.send_multipart([protocol.pack(message), *frames])

    def receive(self):
        assert self.socket.poll(round(DEADLINE_SECONDS * 1000)), "the agent says nothing"
        frames = self.socket.recv_multipart()
        return self.answers(frames[0]), frames[1] if len(frames) > 1 else b""

    def expect(self, kind):
        while True:
            message, frame = self.receive()
            if isinstance(message, kind):
                return message, frame
            assert isinstance(message, protocol.Credits | protocol.Need), message

    def ticket(self):
        self.send(protocol.Attach(host="data-1"))
        ticket, _ = self.expect(protocol.Ticket)
        return ticket

    def attach(self):
        ticket = self.ticket()
        if self.batches is not None:
            self.batches.close()
        self.batches = socket.create_connection(("127.0.0.1", BATCH_PORTS[self.port]), 10)
        self.batches.sendall(ticket.ticket)
        tune(self.batches)
        self.read_from(self.batches, ticket, max_head_bytes=1 << 20)

    def send_opening(self):
        self.send(self.opening)
        self.expect(protocol.Need)

    def ship(self, piece, *, offset=0):
        self.send(protocol.Ship(spec=self.spec.digest, offset=offset), piece)

    def read_from(self, connection, ticket, *, max_head_bytes):
        limits = {"max_head_bytes": max_head_bytes, "receive_timeout_seconds": DEADLINE_SECONDS}
        self.reader = BatchReader(connection, Unsealer(ticket.key), BufferPool(), **limits)
        assert self.reader.head(is_awaited=True) == (b"", 0)

    def open(self):
        if self.reader is None:
            self.attach()
        self.send(self.opening)
        message, frame = self.receive()
        if isinstance(message, protocol.Need):
            self.send(protocol.Ship(spec=self.spec.digest), self.spec.data)
            message, frame = self.receive()
        if isinstance(message, protocol.Failed):
            raise unpack_error(frame)
        assert isinstance(message, protocol.Ready)
        self.ready = message
        return self

    def ask(self, number, index, *, epoch_id=0, seed=None, **more):
        if self.reader is None:
            self.attach()
        index = codec.pack_value(index, allow_pickle=True)
        seed = seed or (7, 0, epoch_id, number)
        self.send(make_of(self.name, number, index=index, epoch_id=epoch_id, seed=seed, **more))

    def knock(self):
        self.send(make_of("nobody", 0))
        return self.expect(protocol.Declined)

    def made(self):
        packed, nbytes = self.reader.head(is_awaited=True)
        memory = bytearray(nbytes)
        self.reader.read(memoryview(memory))
        return protocol.Unpacker(protocol.Made)(packed), np.frombuffer(memory, dtype=np.uint8)

    def batch(self):
        message, payload = self.made()
        return message.batch_number, codec.decode(message.tree, payload, allow_pickle=True)

    def makes(self, *, size=64):
        self.ask(0, [1])
        number, batch = self.batch()
        return number == 0 and same(batch, expected(0, [1], size=size))

    def close(self):
        if self.batches is not None:
            self.batches.close()
        with contextlib.suppress(zmq.Again):
            self.socket.send(protocol.pack(protocol.Close(session=self.name)), zmq.NOBLOCK)
        self.context.destroy(linger=200)


def make_agent(*, port=None):
    about = {"feed": FeedSettings(), "log": Log(run="test", host="data-1"), "run_id": "test"}
    return Agent(keys=KEYS, workers=2, host="data-1", bind="127.0.0.1", port=port, **about)


@pytest.fixture(scope="module")
def agent(others):
    before, agent = set(psutil.Process().children()), make_agent()
    agent.open()
    BATCH_PORTS[agent.port] = agent.batch_port
    # Another agent's may fork meanwhile.
    (fork_server,) = set(psutil.Process().children()) - before
    thread = threading.Thread(target=agent.run)
    thread.start()
    yield agent
    family = [fork_server, *fork_server.children(recursive=True)]
    agent.stop()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    agent.close()
    wait_until(lambda: not any(map(is_running, family)), "its processes have ended")


@contextlib.contextmanager
def client_of(port, spec, **kwargs):
    client = Client(port, spec, **kwargs)
    try:
        yield client
    finally:
        client.close()


def batch_threads():
    found = set()
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(task) == os.SCHED_BATCH:
                found.add(task)
    return found


@pytest.fixture(scope="module")
def others():
    return batch_threads()


@pytest.fixture
def connect(agent):
    with contextlib.ExitStack() as stack:
        yield lambda spec, **kwargs: stack.enter_context(client_of(agent.port, spec, **kwargs))


@pytest.fixture
def client(connect):
    return connect(spec_of(Images())).open()


@pytest.fixture
def watched(connect, tmp_path):
    return connect(spec_of(Images(str(tmp_path)))).open()


def expected(number, indices, *, size=64):
    seed_batch((7, 0, 0, number))
    return default_collate([Images(size=size)[index] for index in indices])


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_dataset_comes_in_pieces_of_one_trainer(connect):
    spec = spec_of(Images(size=33))
    middle = len(spec.data) // 2
    first, second = connect(spec), connect(spec)
    first.send_opening()
    first.ship(spec.data[:middle])
    # Nobody asked the second one; what it sends is not mixed in.
    second.send(second.opening)
    second.ship(bytes(len(spec.data)))
    second.ship(spec.data[middle:], offset=middle)
    second.knock()
    first.ship(spec.data[middle:], offset=middle)
    for client in (first, second):
        client.expect(protocol.Ready)
    assert second.makes(size=33)


MALFORMED = {
    "type": ["", "Shipped", 7, None],
    "spec": ["", "s" * 201, 5, None, ["x"]],
    "offset": [-1, 1 << 49, 1.5, "0", True, None],
    "more": [1],
}


def test_pieces_with_a_malformed_field_are_refused_and_the_agent_goes_on(connect, capfd):
    spec = spec_of(Images(size=41))
    client, middle = connect(spec), len(spec.data) // 2
    client.send_opening()
    client.ship(spec.data[:middle])
    right = {"type": "Ship", "spec": spec.digest, "offset": middle}
    wrong = [right | {field: value} for field, values in MALFORMED.items() for value in values]
    wrong += [{name: right[name] for name in right if name != left} for left in ("type", "spec")]
    heads = [msgspec.msgpack.encode(fields) for fields in wrong] + [b"", b"\xc1" * 9]
    for head in heads:
        # Of another trainer, so that it is said, and of the one whose piece would complete it.
        other = connect(spec)
        for sender in (other, client):
            sender.socket.send_multipart([head, spec.data[middle:]])
        other.knock()
        client.knock()
    client.socket.send_multipart([msgspec.msgpack.encode(right), spec.data[middle:], b"more"])
    client.send(protocol.Ship(spec="x" * 32, offset=middle), spec.data[middle:])
    client.knock()
    assert capfd.readouterr().err.count("malformed_peer") == len(heads) + 1
    client.ship(spec.data[middle:], offset=middle)
    client.expect(protocol.Ready)
    assert client.makes(size=41)


def test_another_dataset_than_the_one_named_is_not_used_and_the_right_one_asked_for_again(connect):
    spec, other = spec_of(Images(size=39)).data, spec_of(Images(size=40)).data
    assert len(other) == len(spec)
    client = connect(spec_of(Images(size=39)))
    client.send_opening()
    client.ship(other)
    assert isinstance(client.receive()[0], protocol.Need)
    client.ship(spec)
    client.expect(protocol.Ready)
    assert client.makes(size=39)


@pytest.mark.parametrize("times", [1, 2])
def test_a_trainer_that_reconnects_is_asked_for_the_dataset_again(agent, times):
    spec = spec_of(Images(size=51 + times))
    with client_of(agent.port, spec) as lost:
        lost.send_opening()
        lost.ship(spec.data[: len(spec.data) // 2])
        # So that the piece has arrived.
        lost.knock()
        # It goes without a word of its session.
        lost.name = "nobody"
    for _ in range(times - 1):
        with client_of(agent.port, spec) as again:
            again.name, again.opening = lost.opening.session, lost.opening
            # Gone before a piece has arrived.
            again.send_opening()
            again.name = "nobody"
    with client_of(agent.port, spec) as again:
        again.name, again.opening = lost.opening.session, lost.opening
        assert again.open().makes(size=51 + times)


def test_a_dataset_that_a_trainer_left_before_it_shipped_is_asked_for_again(connect):
    spec, other = spec_of(Images(size=37)), spec_of(Images(size=38))
    mover, stayer = connect(spec), connect(spec)
    mover.send_opening()
    stayer.send(stayer.opening)
    # It has another dataset by the time it is asked, and ships nothing.
    mover.send(msgspec.structs.replace(mover.opening, spec=other.digest))
    need, _ = mover.expect(protocol.Need)
    assert need == protocol.Need(spec=other.digest)
    stayer.expect(protocol.Need)
    stayer.send(protocol.Close(session=stayer.name))
    # Nobody has the first one any more, until it comes back.
    assert mover.open().makes(size=37)


def test_it_interrupts_no_worker_of_its_own(client, others):
    client.ask(0, [1])
    client.batch()
    # Its loop and libzmq's two I/O threads, which send: all of them, and nobody else.
    assert len(batch_threads() - others) >= 3
    assert os.getpid() not in batch_threads()
    for process in filter(is_running, psutil.Process().children(recursive=True)):
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER


def test_workers_start_with_the_dataset_where_the_base_seed_is_known(connect, tmp_path):
    def begin(worker_id):
        info = get_worker_info()
        (tmp_path / f"{worker_id} {info.seed}").touch()

    seeds = {"base_seed": 100, "first_worker": 3, "worker_step": 2}
    client = connect(spec_of(Images(), worker_init_fn=begin), **seeds).open()
    # Nothing was asked for yet.
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both workers have begun")
    assert {path.name for path in tmp_path.iterdir()} == {"3 103", "5 105"}
    assert client.makes()


class Costly:
    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return importlib.import_module, (f"no_such_module{self.number}",)


def test_a_dataset_that_fails_costs_no_workers(connect, capfd):
    # What ends first, the workers' channels or the dataset process's, is another each time.
    for number in range(8):
        with pytest.raises(ShippingError, match="no_such_module"):
            connect(spec_of(Costly(number)), base_seed=1).open()
    # By the time that the next one is served, whoever died has been noticed.
    assert connect(spec_of(Images())).open().makes()
    assert "data_worker_died" not in capfd.readouterr().err


def test_a_dataset_process_that_was_forked_in_advance_may_die(agent):
    class Whose:
        def __getitem__(self, index):
            return os.getppid()

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with client_of(agent.port, spec_of(Whose(), auto_collation=False)) as client:
        client.open()
        client.ask(0, 1)
        dataset_process = psutil.Process(int(client.batch()[1]))
    template, known = dataset_process.parent(), before | {dataset_process.pid}

    def spares():
        return [child for child in template.children() if child.pid not in known]

    wait_until(lambda: len(spares()) == 1, "a dataset process is forked ahead")
    (spare,) = spares()
    spare.kill()
    wait_until(lambda: spare not in template.children(), "its end is seen")
    with client_of(agent.port, spec_of(Images(size=31))) as client:
        assert client.open().makes(size=31)


def test_what_is_made_before_the_connection_for_batches_is_there_waits_for_it(client, agent):
    ticket = client.ticket()
    # The connection before has ended with its ticket.
    assert client.batches.recv(1) == b""
    client.ask(0, [1])
    client.ask(1, [500])
    client.expect(protocol.Raised)
    with socket.create_connection(("127.0.0.1", agent.batch_port), 10) as connection:
        connection.sendall(ticket.ticket)
        client.read_from(connection, ticket, max_head_bytes=0)
        assert same(client.batch()[1], expected(0, [1]))


def hangs_up(connection):
    connection.settimeout(DEADLINE_SECONDS)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_an_earlier_ticket_is_void_and_each_is_good_once(client, agent):
    tickets = [client.ticket() for _ in range(2)]
    assert tickets[0].ticket != tickets[1].ticket
    assert tickets[0].key != tickets[1].key
    earlier, first, second = (
        socket.create_connection(("127.0.0.1", agent.batch_port), 10) for _ in range(3)
    )
    with earlier, first, second:
        earlier.sendall(tickets[0].ticket)
        assert hangs_up(earlier)
        first.sendall(tickets[1].ticket)
        assert len(first.recv(1)) == 1
        second.sendall(tickets[1].ticket)
        assert hangs_up(second)


def test_who_speaks_after_its_ticket_is_cut_and_may_reconnect(client):
    client.batches.sendall(b"one word more")
    assert hangs_up(client.batches)
    client.attach()
    assert client.makes()


def test_a_request_that_is_too_long_for_a_frame_goes_in_pieces(connect):
    client = connect(spec_of(Images(size=1))).open()
    indices = [200_000 + number for number in range(100_000)]
    packed = codec.pack_value(indices, allow_pickle=True)
    assert len(packed) > crypto.MAX_CONTROL_BYTES
    whole = protocol.pack(make_of(client.name, 0, index=packed, seed=(7, 0, 0, 0)))
    pieces = [whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES)]
    for piece in pieces:
        client.send(protocol.Piece(is_last=piece is pieces[-1]), piece)
    number, batch = client.batch()
    assert number == 0
    assert batch[1].tolist() == indices


def test_a_batch_that_kills_its_workers_is_dropped_and_the_rest_comes(watched):
    watched.ask(0, [1001])
    dropped, _ = watched.expect(protocol.Declined)
    assert "SIGKILL" in dropped.reason
    assert watched.makes()


def test_forgotten_batches_are_not_made(watched, tmp_path):
    # Two workers, each with one batch ahead; the fifth waits in the agent's queue.
    for number, index in enumerate([1002, 1003, 1004, 1005, 1006]):
        watched.ask(number, [index])
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both workers are busy")
    watched.send(protocol.Cancel(session=watched.name, before_epoch_id=1))
    # Refused, as the agent has read the Cancel: before a worker may go on.
    watched.ask(9, [1007])
    watched.expect(protocol.Declined)
    watched.ask(0, [5], epoch_id=1)
    # The first message to come is of epoch 1, when a worker is free again.
    (tmp_path / "go").touch()
    message, _ = watched.made()
    assert message.epoch_id == 1
    assert not (tmp_path / "1006").exists()


def test_a_batch_of_an_epoch_that_is_over_is_answered(client):
    client.send(protocol.Cancel(session=client.name, before_epoch_id=3))
    client.ask(7, [1], epoch_id=2)
    dropped, _ = client.expect(protocol.Declined)
    assert (dropped.epoch_id, dropped.batch_number, dropped.is_lost) == (2, 7, False)
    assert "over" in dropped.reason
    # What the trainer says last counts: a session that is opened again is as a new one.
    client.open()
    client.ask(7, [1], epoch_id=2)
    assert client.batch()[0] == 7


def test_a_batch_of_a_shard_that_was_begun_again_is_answered(connect):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return itertools.count()

    client = connect(spec_of(Endless(), is_iterable=True)).open()

    def ask(generation, *, epoch_id):
        stream = protocol.Stream(shard=0, num_shards=1, generation=generation)
        client.ask(0, [None], epoch_id=epoch_id, seed=(7,), stream=stream)

    client.send(protocol.Cancel(session=client.name, before_epoch_id=1))
    ask(1, epoch_id=0)
    client.expect(protocol.Declined)
    ask(3, epoch_id=1)
    ask(2, epoch_id=1)
    dropped, _ = client.expect(protocol.Declined)
    assert dropped.generation == 2
    assert client.batch()[0] == 0


def test_garbage_as_index_is_an_error_of_that_batch_only(client):
    client.send(make_of(client.name, 1, index=b"\xff" * 40, seed=(1,)))
    client.expect(protocol.Raised)
    assert client.makes()


def test_a_request_of_an_unknown_session_is_dropped(client):
    assert "unknown session" in client.knock()[0].reason


def test_another_protocol_is_refused_in_words(connect):
    client = connect(spec_of(Images()))
    client.opening = msgspec.structs.replace(client.opening, protocol=999)
    with pytest.raises(Exception, match="protocol 999"):
        client.open()


def test_credits_are_shared_by_the_active_sessions(connect, tmp_path):
    first, second = (connect(spec_of(Images(str(tmp_path)))) for _ in range(2))
    most = first.open().ready.credits
    first.ask(0, [1002])
    wait_until((tmp_path / "1002").exists, "a worker begins the batch")
    assert second.open().ready.credits < most
    second.ask(0, [1])
    credits = most
    while credits >= most:
        # They may grow meanwhile: earlier tests had batches of very different costs.
        changed, _ = first.expect(protocol.Credits)
        credits = changed.credits
    (tmp_path / "go").touch()
    assert first.batch()[0] == 0


def test_memory_in_flight_is_given_back(agent, connect):
    client = connect(spec_of(Images(size=256))).open()
    for number in range(30):
        client.ask(number, [1, 2, 3, 4])
        client.batch()
    wait_until(lambda: agent._service.outbox.sent_bytes == 0, "zmq lets go of the batches")
    names = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert sum("memfd:stoker" in name for name in names) <= 12


def test_drain_finishes_what_is_begun_and_opens_no_session(tmp_path):
    spec = spec_of(Images(str(tmp_path)))
    agent = agent_process(tmp_path, workers=1, is_warm=True)
    with agent as (process, port), client_of(port, spec) as client:
        client.open()
        for number, index in enumerate([1002, 1, 2]):
            client.ask(number, [index])
        wait_until((tmp_path / "1002").exists, "the worker begins the batch")
        process.terminate()
        client.expect(protocol.Leaving)
        dropped, _ = client.expect(protocol.Declined)
        assert dropped.batch_number == 2
        with client_of(port, spec) as late:
            late.send(late.opening)
            assert late.receive()[0] == protocol.Leaving()
        (tmp_path / "go").touch()
        assert [client.batch()[0], client.batch()[0]] == [0, 1]


def test_a_trainer_that_looks_for_another_host_is_told_so(connect):
    spec = spec_of(Images())
    client, other = connect(spec, host="data-1").open(), connect(spec)
    other.send(msgspec.structs.replace(client.opening, host="data-2"))
    assert other.receive()[0] == protocol.WrongHost(host="data-1")
    assert client.makes()


def test_a_taken_port_is_named():
    # Children and not descendants: the module's other agent may fork its next host meanwhile.
    before = {child.pid for child in psutil.Process().children()}
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(UsageError, match=f"port {port} cannot be bound"):
            make_agent(port=port).open()
    assert {child.pid for child in psutil.Process().children()} <= before


AGENT = """
import signal, sys
sys.path.insert(1, sys.argv[2])
from stoker.feed.agent.agent import Agent
from stoker.feed.wire.crypto import Keys
from stoker.logs import Log
from stoker.records import FeedSettings
from support.agent_host import forking
agent = Agent(keys=Keys.from_token(bytes.fromhex(sys.argv[1])), workers=int(sys.argv[3]),
    feed=FeedSettings(), log=Log(run="r", host="data-1"), host="data-1", run_id="r",
    bind="127.0.0.1", port=None)
signal.signal(signal.SIGTERM, lambda *_: agent.drain())
with forking():
    agent.open()
print("ports", agent.port, agent.batch_port, flush=True)
agent.run()
"""


@contextlib.contextmanager
def agent_process(folder, *, workers=2, is_warm=False, env=None):
    script, log = folder / "agent.py", folder / "agent.log"
    script.write_text(AGENT)
    argv = [str(script), TOKEN, str(Path(__file__).parents[1]), str(workers)]
    with log.open("wb") as stream:
        if is_warm:
            process = WarmProcess(argv, os.environ, log=stream)
        else:
            cold, variables = [sys.executable, *argv], os.environ | (env or {})
            process = subprocess.Popen(cold, stdout=stream, stderr=stream, env=variables)

    def ports():
        found = re.search(r"^ports (\d+) (\d+)\n", log.read_text(), re.MULTILINE)
        return [int(port) for port in found.groups()] if found else []

    try:
        wait_until(lambda: bool(ports()), "it listens")
        port, batch_port = ports()
        BATCH_PORTS[port] = batch_port
        yield process, port
    finally:
        process.kill()
        process.wait()


def is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# A cold one, as users have it, and a warm one.
@pytest.mark.parametrize(("number", "is_warm"), [(signal.SIGKILL, False), (signal.SIGTERM, True)])
def test_a_signal_to_the_agent_leaves_no_process(number, is_warm, tmp_path):
    with agent_process(tmp_path, is_warm=is_warm) as (process, port):
        with client_of(port, spec_of(Images(str(tmp_path)))) as client:
            client.open()
            assert client.makes()
            # One worker is busy, one idle.
            client.ask(1, [1002])
            wait_until(lambda: (tmp_path / "1002").exists(), "a worker begins the batch")
            family = psutil.Process(process.pid).children(recursive=True)
            # Fork server, dataset process and two workers; the template, where it is not the host
            # itself, and the next host, if it was forked already.
            assert len(family) in (4, 5, 6)
            if number == signal.SIGTERM:
                (tmp_path / "go").touch()
            process.send_signal(number)
            assert process.wait(DEADLINE_SECONDS) == (0 if number == signal.SIGTERM else -9)
            wait_until(lambda: not any(map(is_running, family)), "all processes end")


def test_an_agent_that_is_killed_at_its_start_leaves_no_process(tmp_path):
    # The fork server would import torch for ever.
    with agent_process(tmp_path, env=WITHOUT_TORCH) as (process, _):
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 1
        process.kill()
        process.wait(DEADLINE_SECONDS)
        wait_until(lambda: not any(map(is_running, family)), "the fork server ends")


def test_the_death_of_the_fork_server_ends_the_agent_with_words(tmp_path):
    with agent_process(tmp_path, is_warm=True) as (process, port):
        with client_of(port, spec_of(Images())) as client:
            client.open()
            (fork_server,) = psutil.Process(process.pid).children()
            family = psutil.Process(process.pid).children(recursive=True)
            fork_server.kill()
            assert process.wait(DEADLINE_SECONDS) == 1
            wait_until(lambda: not any(map(is_running, family)), "all processes end")
