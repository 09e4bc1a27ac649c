"""The fork server of an agent: `python -m stoker.feed.agent.forkserver FD`.

A clean process that has imported torch once (1.25 CPU-seconds, 223 MB) and has no other threads,
zmq sockets or locks, so that its children are safe. It forks a *template*, which imports the
modules that specs name, once for all of them, and forks a dataset process for each spec, in advance
where there is time. If one of these dies, so do all after it: agent → fork server → template →
dataset processes → workers (PR_SET_PDEATHSIG, and the end of their channels).
"""

import contextlib
import functools
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from stoker.feed.agent.dataset_process import (
    Exited,
    Fork,
    Kill,
    Loaded,
    StartDataset,
    to_dataset_process,
    to_fork_server,
)
from stoker.feed.wire.dataset import DatasetSpec, pack_error, read_place, read_spec
from stoker.feed.wire.imported_code import INSTALLED, imported_code, installed_version
from stoker.feed.workers.pipe import Pipe, Received, channel_pair, pack
from stoker.host.spawn import end_with_parent

# To wait for killed children.
END_SECONDS = 2.0
# From an order to the fork of the next dataset process (10 ms): after the first batches of the last
# one's workers, and before the script's next loader (a third of a second).
SPARE_SECONDS = 0.15

# Modules that no dataset has named.
_known: set[str] = set()
# Answers of a template to an order: a dataset process has it; likewise, and a new template gets the
# next order; a new template gets this one.
_TAKEN, _LAST, _REFUSED = b"taken", b"last", b"refused"


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
    # Only now: it imports torch, and the agent may die meanwhile.
    import_ahead()
    _known.update(sys.modules)
    children = _Children()
    template = _ForkedAhead(children, channel, _serve_as_template)
    waiting: deque[Received] = deque()
    while not channel.is_closed:
        template.work_on(waiting)
        select.select([channel.fileno(), children.fileno(), *template.filenos()], [], [])
        if template.pid in children.take_ended():
            template.close()
        template.take_reply()
        waiting.extend(channel.receive())
    children.stop()


def _serve_as_template(sock: socket.socket) -> None:
    orders = Pipe(sock, blocking=False)
    children = _Children()
    modules = _Modules()
    # The first one at once: its first batch waits for this.
    spare = _ForkedAhead(children, orders, _serve_next_dataset)
    while not orders.is_closed:
        seconds = None if spare.is_there else SPARE_SECONDS
        ready, _, _ = select.select([orders.fileno(), children.fileno()], [], [], seconds)
        if not ready:
            spare.fork()
        if spare.pid in children.take_ended():
            spare.close()
        for data, (memory, theirs) in orders.receive():
            found = modules.prepare(memory)
            if found != "ready" or modules.are_news:
                # It was forked before these modules were imported.
                spare.close()
            if found == "started" and modules.is_first:
                # A fork would lose what was started: this process becomes the dataset process.
                orders.send(_LAST)
                orders.close()
                _serve_dataset(data, memory, theirs)
                return
            if found != "ready":
                orders.send(_REFUSED)
            else:
                modules.is_first = False
                if not spare.give((data, (memory, theirs))):
                    run = functools.partial(_serve_dataset, data, memory, theirs)
                    _fork(children, orders, (), run)
                spare.close()
                orders.send(_TAKEN)
            os.close(theirs)
            os.close(memory)
    # Replaced by a new template; its dataset processes still serve, and would die with this one.
    children.wait()


def _serve_next_dataset(sock: socket.socket) -> None:
    with contextlib.closing(Pipe(sock, blocking=True)) as orders:
        given = orders.receive()
    for data, (memory, theirs) in given:
        _serve_dataset(data, memory, theirs)


class _Modules:
    def __init__(self) -> None:
        self.is_first = True
        self.are_news = False
        self._files: dict[str, tuple[int, int]] = {}
        self._changes: tuple[tuple[str, str | None], ...] | None = None

    def prepare(self, memory: int) -> Literal["ready", "stale", "started"]:
        """Imports the modules of the spec in `memory`, before it is unpickled.

        Returns "stale" if a file of an imported module, or the script's environment, has changed;
        "started" if a module has started Python threads, or uses an accelerator, which a forked
        process would not have. (Native thread pools start with their first work.)
        """
        self.are_news = False
        if any(_version_of(file) != version for file, version in self._files.items()):
            return "stale"
        try:
            os.lseek(memory, 0, os.SEEK_SET)
            with open(memory, "rb", closefd=False) as file:
                place = read_place(file)
        except Exception:
            # The dataset process meets the same error, and reports it.
            return "ready"
        changes = place.environment.changes
        if self._changes not in (None, changes):
            # Modules may have read the environment when they were imported.
            return "stale"
        self._changes = changes
        missing = [name for name in place.modules if name not in sys.modules]
        if not missing:
            return "ready"
        self.are_news = True
        num_threads = len(sys._current_frames())
        # Modules may be in the script's folder, and may read the environment when imported.
        place.enter()
        for name in missing:
            # Unpickling raises the error again.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        news = sys.modules.keys() - _known
        for name in news:
            path = getattr(sys.modules.get(name), "__file__", None)
            # What is not installed may be edited in a run.
            if path and not INSTALLED.search(path):
                self._files[path] = _version_of(path)
        imported_code().note(news)
        _known.update(news)
        is_on_accelerator = sys.modules["torch"].cuda.is_initialized()
        if len(sys._current_frames()) > num_threads or is_on_accelerator:
            return "started"
        gc.collect()
        gc.freeze()
        return "ready"


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
        # With SIG_DFL Python would not write to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._writable.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._readable.fileno()

    def take_ended(self) -> dict[int, int]:
        with contextlib.suppress(BlockingIOError):
            self._readable.recv(4096)
        ended: dict[int, int] = {}
        for pid in list(self.pids):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # Reaped by the dataset's code: its status is unknown.
                done, status = pid, 0
            if done:
                self.pids.discard(pid)
                ended[pid] = os.waitstatus_to_exitcode(status)
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


class _ForkedAhead:
    """A process forked in advance, so that the next order need not wait for a fork."""

    def __init__(
        self, children: _Children, channel: Pipe, run: Callable[[socket.socket], None]
    ) -> None:
        self._children = children
        self._channel = channel
        self._run = run
        self._orders: Pipe | None = None
        # The unanswered order.
        self._given: Received | None = None
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

    def give(self, order: Received) -> bool:
        """Returns False if it does not run, or does not take the order."""
        if self._orders is None:
            return False
        self._orders.send(*order)
        return not (self._orders.wants_write or self._orders.is_closed)

    def work_on(self, waiting: deque[Received]) -> None:
        while waiting and self._given is None:
            if not (self.is_there and self.give(waiting[0])):
                self.close()
                self.fork(waiting)
                self.give(waiting[0])
            self._given = waiting.popleft()

    def take_reply(self) -> None:
        for reply, _ in self._orders.receive() if self._orders is not None else ():
            if reply == _REFUSED and self._given is not None:
                # For the next template. `close` would close its descriptors.
                refused, self._given = self._given, None
                self.close()
                self.fork((refused,))
                self._given = refused
                self.give(refused)
                return
            self._done()
            if reply == _LAST:
                self.close()
                return

    def _done(self) -> None:
        _, descriptors = self._given or (b"", ())
        self._given = None
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        self._done()
        if self._orders is not None:
            self._orders.close()
        self._orders, self.pid = None, -1


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


def _serve_dataset(data: bytes, memory: int, theirs: int) -> None:
    """Runs a dataset process: unpickles the spec, forks workers until the channel is closed."""
    # Only now: it imports torch.
    from stoker.feed.workers.worker import worker_main

    channel = Pipe(socket.socket(fileno=theirs), blocking=False)
    order = to_fork_server.decode(data)
    spec = _unpack(order, memory, channel)
    children = _Children()
    tokens: dict[int, int] = {}
    while spec is not None and not channel.is_closed:
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
                    run = functools.partial(
                        worker_main,
                        sock,
                        spec,
                        worker_id=fork.worker_id,
                        num_workers=fork.num_workers,
                        base_seed=fork.base_seed,
                        seeding=fork.seeding,
                        host=order.host,
                    )
                    tokens[_fork(children, channel, waiting, run)] = fork.token
                    sock.close()
                case Kill(token):
                    for pid, known in tokens.items():
                        # A reaped pid may be another process's by now.
                        if known == token and pid in children.pids:
                            os.kill(pid, signal.SIGKILL)
        for pid, status in children.take_ended().items():
            channel.send(pack(Exited(tokens.pop(pid), status)))
    if channel.failure:
        print(f"stoker: the dataset process ends: {channel.failure}", file=sys.stderr)
    children.stop()


def _unpack(order: StartDataset, memory: int, channel: Pipe) -> DatasetSpec | None:
    try:
        # The agent wrote it through the same descriptor.
        os.lseek(memory, 0, os.SEEK_SET)
        with open(memory, "rb", closefd=False) as file:
            place = read_place(file)
            # Before unpickling, which may fail with other code.
            place.enter()
            other_code = imported_code().differences(place.code)
            if other_code and order.refuses_other_code:
                _refuse(channel, Loaded(summary=other_code, is_of_host=True))
                return None
            file.seek(0)
            spec = read_spec(file)
    except Exception as err:
        packed = pack_error(err, host=order.host, where="the dataset process")
        _refuse(channel, Loaded(packed, f"{type(err).__name__}: {err}"))
        return None
    finally:
        os.close(memory)
    # A collection in a worker would copy the dataset's pages.
    gc.freeze()
    channel.send(pack(Loaded(warning=other_code)))
    return spec


def _refuse(channel: Pipe, loaded: Loaded) -> None:
    channel.send(pack(loaded))
    while channel.wants_write:
        select.select([], [channel], [])
        channel.flush()


if __name__ == "__main__":
    main()
