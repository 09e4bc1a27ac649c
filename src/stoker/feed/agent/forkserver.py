"""The fork server of an agent: `python -m stoker.feed.agent.forkserver FD`.

A clean process that has imported torch once (1.25 CPU-seconds, 223 MB) and has no other threads,
zmq sockets or locks, so that its children are safe. It forks a *template*, which imports the
modules that specs name, once for all of them, and forks a dataset process for each spec, in advance
where there is time. If one of these dies, so do all after it: agent → fork server → template →
dataset processes → workers (PR_SET_PDEATHSIG, and the end of their channels). The modules are
imported while the spec arrives: they are named in its first piece. Each data worker is forked in
`_fork`.

Nothing is forked that has threads: a child would not have them, and would wait for their locks. A
dataset that starts threads as it is unpickled is unpickled by each worker, which the template's
next child forks. Where the import of a module starts threads, or the script's start method is not
fork, workers import and unpickle for themselves: forked of a child of the fork server, which has
imported nothing of the user's, or (spawn) in a fresh interpreter. The template is not used then.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, TypedDict

import msgspec

from stoker.feed.agent.dataset_process import (
    DatasetEnded,
    Exited,
    Fork,
    Kill,
    Loaded,
    StartDataset,
    to_dataset_process,
    to_fork_server,
)
from stoker.feed.wire.dataset import (
    DatasetPlace,
    DatasetSpec,
    pack_error,
    read_place,
    read_spec,
    reopened_spec,
)
from stoker.feed.wire.host_errors import words_of_error
from stoker.feed.wire.imported_code import INSTALLED, imported_code, installed_version
from stoker.feed.workers import stacks
from stoker.feed.workers.pipe import Pipe, Received, Up, channel_pair, pack
from stoker.host.spawn import end_with_parent
from stoker.host.threads import num_lasting_threads, num_threads

# To wait for killed children.
END_SECONDS = 2.0
# From an order to the fork of the next dataset process (10 ms): after the first batches of the last
# one's workers, and before the script's next loader (a third of a second).
SPARE_SECONDS = 0.15

# Modules that no dataset has named.
_known: set[str] = set()
# Answers of a template to an order: a dataset process has it; a new template gets it; each worker
# is to begin alone; likewise, and a new template gets the next order: this one's modules have
# started threads, whose number follows.
_TAKEN = b"taken"
_REFUSED = b"refused"
_ALONE = b"alone"
_SPOILT = b"spoilt "
# Before that: the module that it imports next. First of all: its descriptor of its stacks.
_IMPORTS = b"imports "
_STACKS = b"stacks "


def main() -> None:
    """Forks a dataset process for every order, until the agent is gone."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    poll = select.poll()
    poll.register(sock, 0)
    if poll.poll(0):
        # The agent died before `end_with_parent`: no signal comes.
        return
    channel = Pipe(sock, blocking=False)
    # Of it, and of all that are forked: where native code crashes, the host's log has the stack.
    faulthandler.enable()
    # Only now: it imports torch, and the agent may die during that.
    import_ahead()
    _known.update(sys.modules)
    children = _Children()
    template = _ForkedAhead(children, channel, _serve_as_template)
    waiting: deque[Received] = deque()
    while not channel.is_closed:
        template.work_on(waiting)
        select.select([channel.fileno(), children.fileno(), *template.filenos()], [], [])
        ended = children.take_ended()
        # First: the last module that it named may have ended it.
        template.take_reply(waiting)
        if template.pid in ended:
            template.tell_end(ended[template.pid])
            template.close()
        for order in channel.receive():
            if _is_preload(order):
                template.preload(order, waiting)
            else:
                waiting.append(order)
    children.stop()


def _is_preload(order: Received) -> bool:
    _, descriptors = order
    return len(descriptors) == 1


def _serve_as_template(sock: socket.socket) -> None:
    _Template(Pipe(sock, blocking=False)).run()


class _Template:
    """A process that has imported a script's modules, and forks its dataset processes."""

    def __init__(self, orders: Pipe) -> None:
        self._orders = orders
        self._children = _Children()
        self._modules = _Modules()
        # Where an import hangs, the agent reads these. Its children register their own.
        self._stacks_file = stacks.write_on_signal()
        orders.send(_STACKS + str(self._stacks_file).encode())
        # Of dataset processes that have threads, and so cannot fork.
        ours, self._returns = channel_pair()
        self._returned = Pipe(ours, blocking=False)
        serve_next = functools.partial(_serve_next_dataset, returns=self._returns)
        # The first one at once: its first batch waits for this.
        self._spare = _ForkedAhead(self._children, orders, serve_next)

    def run(self) -> None:
        # Replaced by a new template, its dataset processes still serve, and would die with it.
        while self._children.pids or not self._orders.is_closed:
            self._wait()
            if self._spare.pid in self._children.take_ended():
                self._spare.close()
            # After the ended ones are known: what they have returned is there.
            self._serve_returned()
            self._serve_orders()
            if self._orders.is_closed:
                self._spare.close()

    def _wait(self) -> None:
        """Waits for something to do; forks a dataset process ahead if nothing comes for long."""
        is_closed = self._orders.is_closed
        has_spare = self._spare.is_there or self._modules.are_spoilt
        seconds = None if has_spare or is_closed else SPARE_SECONDS
        inputs = [self._children.fileno(), self._returned.fileno()]
        if not is_closed:
            inputs.append(self._orders.fileno())
        ready, _, _ = select.select(inputs, [], [], seconds)
        if not ready:
            self._spare.fork()

    def _serve_returned(self) -> None:
        waiting = deque(self._returned.receive())
        while waiting:
            data, (memory, channel) = waiting.popleft()
            # A template that is spoilt cannot fork workers either.
            is_fresh = self._modules.num_threads > 0
            run = functools.partial(
                _serve_alone, data, memory, channel, is_loaded=True, is_fresh=is_fresh
            )
            pid = _fork(self._children, self._orders, waiting, self._spare.not_in(run))
            self._children.tell_end_of(pid, channel)
            _close(memory, channel)

    def _serve_orders(self) -> None:
        if self._orders.is_closed:
            return
        waiting = deque(self._orders.receive())
        # A process that an order spoils closes the pipe: the fork server gives the rest to another.
        while waiting and not self._orders.is_closed:
            order = waiting.popleft()
            if _is_preload(order):
                _preload(order, self._orders, self._modules, self._spare, waiting=waiting)
            else:
                self._serve(order)

    def _serve(self, order: Received) -> None:
        data, (memory, channel) = order
        _tell_once(channel, Up(os.getpid(), self._stacks_file, is_ready=False))
        reply = _answer(self._modules.prepare(memory, self._orders), self._modules, self._spare)
        if reply == _TAKEN:
            run = functools.partial(_serve_dataset, data, memory, channel, returns=self._returns)
            self._spare.start(order, otherwise=run)
        self._orders.send(reply)
        _close(memory, channel)
        if reply.startswith(_SPOILT):
            self._orders.close()


def _preload(
    order: Received,
    orders: Pipe,
    modules: "_Modules",
    spare: "_ForkedAhead",
    *,
    waiting: Iterable[Received],
) -> None:
    """Imports the modules of a spec that arrives; the order for it finds the same again."""
    _, (memory,) = order
    readiness = modules.prepare(memory, orders)
    os.close(memory)
    # It imports nothing any more.
    orders.send(_IMPORTS)
    if modules.are_news:
        spare.close()
    if modules.are_news and readiness == "ready":
        # At once: the order comes in milliseconds.
        spare.fork(waiting)


def _answer(found: str, modules: "_Modules", spare: "_ForkedAhead") -> bytes:
    """Returns what a template answers to an order for whose modules it `found` this."""
    if found != "ready" or modules.are_news:
        # It was forked before these modules were imported.
        spare.close()
    if found == "started":
        return _SPOILT + str(modules.num_threads).encode()
    return {"ready": _TAKEN, "stale": _REFUSED, "alone": _ALONE}[found]


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _serve_next_dataset(sock: socket.socket, *, returns: socket.socket) -> None:
    with contextlib.closing(Pipe(sock, blocking=True)) as orders:
        given = list(orders.receive())
    for data, (memory, theirs) in given:
        _serve_dataset(data, memory, theirs, returns=returns)


class _Modules:
    def __init__(self) -> None:
        self.are_news = False
        # They have started threads, or an accelerator: nothing may be forked any more.
        self.are_spoilt = False
        self.num_threads = 0
        self._files: dict[str, tuple[int, int]] = {}
        self._changes: tuple[tuple[str, str | None], ...] | None = None

    def prepare(self, memory: int, orders: Pipe) -> Literal["ready", "stale", "started", "alone"]:
        """Imports the modules of the spec in `memory`, before it is unpickled.

        Sends the name of each to `orders` before: it may end this process.

        Returns "stale" if a file of an imported module, or the script's environment, has changed;
        "started" if a module has started threads, of Python or not (`num_threads`), or uses an
        accelerator, which a forked process would not have; "alone", and imports nothing, if the
        script's start method is not fork.
        """
        self.are_news = False
        if self.are_spoilt:
            return "started"
        if any(_version_of(file) != version for file, version in self._files.items()):
            return "stale"
        try:
            with reopened_spec(memory) as file:
                place = read_place(file)
        except Exception:
            # The dataset process meets the same error, and reports it; or more is to arrive.
            return "ready"
        if place.start_method != "fork":
            return "alone"
        changes = place.environment.changes
        if self._changes not in (None, changes):
            # Modules may have read the environment when they were imported.
            return "stale"
        self._changes = changes
        # First: modules may be in the script's folder, where they hide what is imported here, and
        # may read the environment when they are imported.
        place.enter()
        missing = [name for name in place.modules if name not in sys.modules]
        if not missing:
            return "ready"
        before = num_threads()
        self._import(missing, orders)
        is_on_accelerator = sys.modules["torch"].cuda.is_initialized()
        self.num_threads = num_lasting_threads(before)
        self.are_spoilt = self.num_threads > 0 or is_on_accelerator
        if self.are_spoilt:
            return "started"
        gc.collect()
        gc.freeze()
        return "ready"

    def _import(self, missing: Iterable[str], orders: Pipe) -> None:
        self.are_news = True
        for name in missing:
            orders.send(_IMPORTS + name.encode())
            # Unpickling raises the error again.
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        news = sys.modules.keys() - _known
        for name in news:
            path = getattr(sys.modules.get(name), "__file__", None)
            # What is not installed may be edited in a run.
            if path and not INSTALLED.search(path):
                self._files[path] = _version_of(path)
        imported_code().note(news)
        _known.update(news)


def _version_of(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def import_ahead() -> None:
    """Imports what nearly every dataset's module imports, before a batch is waited for."""
    # Imports make little garbage: collections took 0.1 of 1.3 CPU-seconds.
    gc.disable()
    for name in ("stoker.feed.workers.worker", "stoker.feed.loader"):
        importlib.import_module(name)
    pillow = (f"PIL.Image{part}" for part in ("", "Enhance", "Filter", "Ops"))
    for name in ("numpy.random", *pillow):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Each dataset process compares these: looked up there, they would cost it 10 ms and 0.5 MB.
    for package in ("torch", "numpy", "PIL"):
        installed_version(package)
    # A collection would copy the pages of these objects, in each worker.
    gc.freeze()
    gc.enable()


class _Children:
    """Forked processes; readable when one may have ended."""

    def __init__(self) -> None:
        self._readable, self._writable = socket.socketpair()
        self._readable.setblocking(False)
        self._writable.setblocking(False)
        self.pids: set[int] = set()
        # Copies of the channels of dataset processes, to tell how these ended.
        self._channels: dict[int, socket.socket] = {}
        # With SIG_DFL Python would not write to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._writable.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._readable.fileno()

    def tell_end_of(self, pid: int, channel: int) -> None:
        """Has the agent hear on that channel, which is copied, if that child crashes."""
        with contextlib.suppress(OSError):
            self._channels[pid] = socket.socket(fileno=os.dup(channel))

    def take_ended(self) -> dict[int, int]:
        with contextlib.suppress(BlockingIOError):
            self._readable.recv(4096)
        ended: dict[int, int] = {}
        for pid in list(self.pids):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # Reaped by the dataset's code: its status is unknown.
                done = pid
                status = 0
            if done:
                self.pids.discard(pid)
                ended[pid] = os.waitstatus_to_exitcode(status)
                if pid in self._channels:
                    _tell_end(self._channels.pop(pid), DatasetEnded(ended[pid]))
        return ended

    def stop(self) -> None:
        """Kills those that still run and waits for their end, 2 s at most."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self.pids and time.monotonic() < deadline:
            select.select([self], [], [], END_SECONDS / 20)
            self.take_ended()

    def wait(self) -> None:
        while self.pids:
            select.select([self], [], [])
            self.take_ended()

    def close(self) -> None:
        """Undoes `__init__` in a new child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._readable.close()
        self._writable.close()
        # Else this child would hide the end of another.
        for channel in self._channels.values():
            channel.close()


class _ForkedAhead:
    """A process forked in advance, so that the next order need not wait for a fork."""

    def __init__(
        self, children: _Children, channel: Pipe, run: Callable[[socket.socket], None]
    ) -> None:
        self._children = children
        self._channel = channel
        self._run = run
        self._orders: Pipe | None = None
        # The unanswered order, and the module that is imported for it.
        self._given: Received | None = None
        self._imports = ""
        self._stacks_file = -1
        self.pid = -1
        self.fork()

    @property
    def is_there(self) -> bool:
        return self._orders is not None

    def filenos(self) -> list[int]:
        return [self._orders.fileno()] if self._orders is not None else []

    def fork(self, waiting: Iterable[Received] = ()) -> None:
        ours, theirs = channel_pair()

        def run() -> None:
            ours.close()
            self._run(theirs)

        self.pid = _fork(self._children, self._channel, waiting, run)
        theirs.close()
        self._orders = Pipe(ours, blocking=False)
        self._stacks_file = -1

    def give(self, order: Received) -> bool:
        """Returns False if it does not run, or does not take the order."""
        if self._orders is None:
            return False
        self._orders.send(*order)
        return not (self._orders.wants_write or self._orders.is_closed)

    def preload(self, order: Received, waiting: Iterable[Received]) -> None:
        """Gives it an order without an answer, unless it has another one."""
        _, descriptors = order
        if self._given is None:
            self._give_surely(order, (order, *waiting))
        _close(*descriptors)

    def start(self, order: Received, *, otherwise: Callable[[], None]) -> None:
        """Gives it an order for a dataset, or forks another child that does as `otherwise`."""
        pid = self.pid
        if not self.give(order):
            pid = _fork(self._children, self._channel, (), otherwise)
        _, (_, channel) = order
        self._children.tell_end_of(pid, channel)
        self.close()

    def work_on(self, waiting: deque[Received]) -> None:
        while waiting and self._given is None:
            if self._stacks_file >= 0:
                # An import for a spec that arrives may hang: then it takes no order.
                _, (_, channel) = waiting[0]
                _tell_once(channel, Up(self.pid, self._stacks_file, is_ready=False))
            self._give_surely(waiting[0], waiting)
            self._given = waiting.popleft()

    def _give_surely(self, order: Received, waiting: Iterable[Received]) -> None:
        """Gives an order to it, or to another process that is forked for it."""
        if not self.give(order):
            self.close()
            self.fork(waiting)
            self.give(order)

    def take_reply(self, waiting: Iterable[Received]) -> None:
        if self._orders is None:
            return
        for reply, _ in self._orders.receive():
            if reply.startswith(_IMPORTS):
                self._imports = reply.removeprefix(_IMPORTS).decode()
                continue
            if reply.startswith(_STACKS):
                self._stacks_file = int(reply.removeprefix(_STACKS))
                continue
            if reply == _REFUSED and self._given is not None:
                self._give_to_next(self._given)
                return
            is_spoilt = reply.startswith(_SPOILT)
            if reply != _TAKEN and self._given is not None:
                num_started = int(reply.removeprefix(_SPOILT)) if is_spoilt else 0
                self._serve_without(self._given, waiting, num_started=num_started)
            self._done()
            if is_spoilt:
                self.close()
                return

    def _give_to_next(self, refused: Received) -> None:
        """Ends the template that refused an order, and gives it to another one."""
        # `close` would close its descriptors.
        self._given = None
        self.close()
        self.fork((refused,))
        self._given = refused
        self.give(refused)

    def _serve_without(
        self, order: Received, waiting: Iterable[Received], *, num_started: int
    ) -> None:
        """Serves a dataset by a child of this process, which has imported nothing of the user's.

        Args:
            num_started: Threads that the imports have started, for which no template serves it.
        """
        data, (memory, theirs) = order
        run = functools.partial(_serve_alone, data, memory, theirs, num_started=num_started)
        pid = _fork(self._children, self._channel, waiting, self.not_in(run))
        self._children.tell_end_of(pid, theirs)

    def tell_end(self, status: int) -> None:
        """Tells the agent how this process ended, which had not answered its order."""
        if self._given is None:
            return
        _, (_, theirs) = self._given
        doing = f"it imported {self._imports}" if self._imports else ""
        _tell_end(socket.socket(fileno=os.dup(theirs)), DatasetEnded(status, doing))

    def _done(self) -> None:
        _, descriptors = self._given or (b"", ())
        self._given = None
        self._imports = ""
        for descriptor in descriptors:
            os.close(descriptor)

    def not_in(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns `run` for another child, which must not hold this one's channel open."""

        def run_without() -> None:
            if self._orders is not None:
                self._orders.close()
            run()

        return run_without

    def close(self) -> None:
        self._done()
        if self._orders is not None:
            self._orders.close()
        self._orders = None
        self.pid = -1


def _tell_once(channel: int, message: Up) -> None:
    """Sends a message on another process's channel, which stays open."""
    with contextlib.closing(Pipe(socket.socket(fileno=os.dup(channel)), blocking=False)) as copy:
        copy.send(pack(message))


def _tell_end(sock: socket.socket, ended: DatasetEnded) -> None:
    """Sends how a dataset process ended, unless that was as it should, and closes the channel."""
    sock.setblocking(False)
    with contextlib.closing(Pipe(sock, blocking=False)) as channel:
        if ended.status:
            channel.send(pack(ended))


def _fork(
    children: _Children, channel: Pipe, waiting: Iterable[Received], run: Callable[[], None]
) -> int:
    """Forks a child, which closes what it inherits: it would hide the death of workers to come."""
    # Else the child would print the buffers' content again.
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        children.pids.add(pid)
        return pid
    status = 1
    try:
        end_with_parent(signal.SIGKILL, parent=parent)
        children.close()
        channel.close()
        for _, descriptors in waiting:
            for descriptor in descriptors:
                os.close(descriptor)
        run()
        status = 0
    except SystemExit as end:
        # The dataset may call sys.exit(3): so does the worker.
        traceback.print_exc()
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Without exit handlers and finalizers, which are the parent's.
        os._exit(status & 0xFF)


def _serve_dataset(data: bytes, memory: int, theirs: int, *, returns: socket.socket) -> None:
    """Runs a dataset process: unpickles the spec, forks workers until the channel is closed.

    Where unpickling has started threads, it returns the order to the template, and ends.
    """
    channel = Pipe(socket.socket(fileno=theirs), blocking=False)
    order = to_fork_server.decode(data)
    channel.send(pack(Up(os.getpid(), stacks.write_on_signal(), is_ready=False)))
    before = num_threads()
    unpacked = _unpack(order, memory, channel)
    if unpacked is None:
        return
    spec, loaded = unpacked
    num_more = num_lasting_threads(before)
    if num_more:
        copied = (
            f"{_threads(num_more)} after it was unpickled, and a forked worker has none of them"
        )
        _tell(channel, msgspec.structs.replace(loaded, copied=copied))
        Pipe(returns, blocking=True).send(data, (memory, channel.fileno()))
        return
    os.close(memory)
    # A collection in a worker would copy the dataset's pages.
    gc.freeze()
    channel.send(pack(loaded))

    # Only now: they import torch.
    from stoker.feed.module_generators import module_generators
    from stoker.feed.workers.worker import worker_main

    def start(sock: socket.socket, about: _WorkerFacts) -> None:
        worker_main(sock, spec, **about)

    # Once for all workers.
    module_generators().version()
    _serve_workers(order, channel, start)


def _serve_alone(
    data: bytes,
    memory: int,
    theirs: int,
    *,
    is_loaded: bool = False,
    is_fresh: bool = False,
    num_started: int = 0,
) -> None:
    """Starts workers that each unpickle the spec, until the channel is closed.

    Args:
        is_loaded: A dataset process has reported that it can be loaded.
        is_fresh: Each worker is to be a fresh interpreter, whatever the script's start method.
        num_started: Threads that the import of its modules starts.
    """
    channel = Pipe(socket.socket(fileno=theirs), blocking=False)
    order = to_fork_server.decode(data)
    with reopened_spec(memory) as file:
        place = read_place(file)
    if not is_loaded:
        copied = ""
        if num_started:
            copied = f"{_threads(num_started)} once its modules are imported: each worker imports"
        other_code = _other_code(place)
        if other_code and order.refuses_other_code:
            _tell(channel, Loaded(summary=other_code, is_of_host=True))
            return
        channel.send(pack(Loaded(warning=other_code, copied=copied)))

    from stoker.feed.workers.worker import worker_main

    def start(sock: socket.socket, about: _WorkerFacts) -> None:
        if place.start_method != "spawn" and not is_fresh:
            worker_main(sock, reopened_spec(memory), **about)
            return
        for descriptor in (sock.fileno(), memory):
            os.set_inheritable(descriptor, True)
        ends = str(sock.fileno()), str(memory)
        module = "stoker.feed.workers.spawned"
        # -P: a module in the working directory must not replace one of ours.
        os.execv(sys.executable, (sys.executable, "-P", "-m", module, *ends, json.dumps(about)))

    _serve_workers(order, channel, start)


class _WorkerFacts(TypedDict):
    """Arguments of `worker_main`."""

    worker_id: int
    num_workers: int
    base_seed: int
    seeding: str
    host: str
    is_remote: bool


def _serve_workers(
    order: StartDataset, channel: Pipe, start: Callable[[socket.socket, _WorkerFacts], None]
) -> None:
    """Forks a child for every worker that is ordered, which does what `start` does."""
    children = _Children()
    tokens: dict[int, int] = {}
    while not channel.is_closed:
        writable = [channel.fileno()] if channel.wants_write else []
        select.select([channel.fileno(), children.fileno()], writable, [])
        channel.flush()
        # A child closes the descriptors of orders that still wait, for other workers.
        waiting = deque(channel.receive())
        while waiting:
            packed, descriptors = waiting.popleft()
            match to_dataset_process.decode(packed):
                case Fork() as fork:
                    sock = socket.socket(fileno=descriptors[0])
                    about = _WorkerFacts(
                        worker_id=fork.worker_id,
                        num_workers=fork.num_workers,
                        base_seed=fork.base_seed,
                        seeding=fork.seeding,
                        host=order.host,
                        is_remote=True,
                    )
                    run = functools.partial(start, sock, about)
                    tokens[_fork(children, channel, waiting, run)] = fork.token
                    sock.close()
                case Kill(token):
                    for pid, held in tokens.items():
                        # A reaped pid may be another process's by now.
                        if held == token and pid in children.pids:
                            os.kill(pid, signal.SIGKILL)
        for pid, status in children.take_ended().items():
            channel.send(pack(Exited(tokens.pop(pid), status)))
    if channel.failure:
        print(f"stoker: the dataset process ends: {channel.failure}", file=sys.stderr)
    children.stop()


def _unpack(order: StartDataset, memory: int, channel: Pipe) -> tuple[DatasetSpec, Loaded] | None:
    try:
        with reopened_spec(memory) as file:
            place = read_place(file)
            # Before unpickling, which may fail with other code.
            place.enter()
            other_code = imported_code().differences(place.code)
            if other_code and order.refuses_other_code:
                _tell(channel, Loaded(summary=other_code, is_of_host=True))
                return None
            spec = read_spec(file, host=order.host, entered=place)
            return spec, Loaded(warning=other_code)
    # Whatever ends a process as well: the script hears of it.
    except BaseException as err:
        packed = pack_error(err, host=order.host, where="the dataset process")
        _tell(channel, Loaded(packed, words_of_error(err)))
        return None


def _other_code(place: DatasetPlace) -> str:
    """Looks at the files of modules in a child: to find some, their packages are imported."""
    if not (place.code.files or place.code.versions):
        return ""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException), open(writable, "w") as file:
            place.enter()
            file.write(imported_code().differences(place.code))
        os._exit(0)
    os.close(writable)
    with open(readable) as file:
        words = file.read()
    os.waitpid(pid, 0)
    return words


def _threads(count: int) -> str:
    return "a thread runs" if count == 1 else f"{count} threads run"


def _tell(channel: Pipe, loaded: Loaded) -> None:
    channel.send(pack(loaded))
    while channel.wants_write:
        select.select([], [channel], [])
        channel.flush()


if __name__ == "__main__":
    main()
