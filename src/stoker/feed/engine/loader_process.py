"""Processes that load datasets and fork workers: `python -m ...loader_process FD HOST NICENESS`.

One program with two orders. The first process has torch imported and nothing of the user's. `Load`
has it fork a child that receives one loader's dataset and unpickles it, once for all ranks, and
takes `Work`: it forks a worker for a connection, which shares the dataset's memory. Where the
script asks for spawn, each of these workers unpickles for itself.

Each process has one thread, so forks are safe; what unpickling starts is the script's affair, as
with torch's own fork. All end with their parent (PR_SET_PDEATHSIG, and the end of their channels).
"""

import faulthandler
import gc
import mmap
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field

from stoker.errors import ProtocolError
from stoker.feed.engine.batch_socket import Connection
from stoker.feed.engine.hosting import Failed, Load, Loaded, Work, receive, send, unpack_order
from stoker.feed.engine.loader_spec import LoaderSpec, read_spec
from stoker.feed.engine.raised import pack_error
from stoker.feed.engine.run_messages import Ended
from stoker.feed.engine.worker import Progress, serve
from stoker.feed.memory import killed_words
from stoker.host import machine
from stoker.host.processes import ended_words
from stoker.host.spawn import end_with_parent

# An order of a batch of 100,000 samples has 500 KB.
MAX_ORDER_BYTES = 64 << 20


@dataclass(slots=True)
class _Child:
    """A forked process; `kills` had the kernel killed for memory before it."""

    pid: int
    order: Load | Work
    progress: Progress
    kills: int | None


@dataclass(slots=True)
class LoaderProcess:
    """The loop of one process: it forks what its channel orders, and reports who has ended.

    Attributes:
        channel: To the agent.
        host: Name of this host.
        spec: What its workers make batches of; None: they read it for themselves.
        file: That has it.
        children: By descriptor of the process.
    """

    channel: socket.socket
    host: str
    spec: LoaderSpec | None = None
    file: int = -1
    children: dict[int, _Child] = field(default_factory=dict)
    selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        """Serves until the agent closes the channel, or is gone; children end with the process."""
        self.selector.register(self.channel.fileno(), selectors.EVENT_READ)
        # Forks then copy no page only because the collector has looked at it.
        gc.collect()
        gc.freeze()
        while self._turn():
            pass

    def _turn(self) -> bool:
        for key, _ in self.selector.select():
            if key.fd in self.children:
                self._report_end(key.fd)
                continue
            packed, descriptors = receive(self.channel)
            if not packed:
                return False
            self._fork(unpack_order(packed), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, order: Load | Work, descriptors: list[int]) -> None:
        parent = os.getpid()
        progress = Progress()
        kills = machine.num_memory_kills()
        pid = os.fork()
        if pid == 0:
            self._run_child(order, descriptors, progress, parent=parent)
        process = os.pidfd_open(pid)
        self.children[process] = _Child(pid, order, progress, kills)
        self.selector.register(process, selectors.EVENT_READ)

    def _run_child(
        self, order: Load | Work, descriptors: list[int], progress: Progress, *, parent: int
    ) -> None:
        """Runs a forked child to its end; never returns."""
        status = 1
        try:
            end_with_parent(signal.SIGKILL, parent=parent)
            self.selector.close()
            self.channel.close()
            if isinstance(order, Load):
                self._serve_dataset(order, *descriptors)
            else:
                end = Connection(
                    socket.socket(fileno=descriptors[0]),
                    order.key,
                    is_workers=True,
                    max_packed_bytes=MAX_ORDER_BYTES,
                )
                serve(end, lambda: self.spec or _load(self.file), host=self.host, progress=progress)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _report_end(self, descriptor: int) -> None:
        child = self.children.pop(descriptor)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child.pid, 0)
        order = child.order
        if isinstance(order, Load):
            # Its channel says so.
            return
        how = ""
        # Status 0: its trainer has closed the connection.
        if status:
            code = os.waitstatus_to_exitcode(status)
            why = killed_words(code, kills_before=child.kills)
            how = f"a worker ended with {ended_words(code)}{why}"
        making = child.progress.read()
        ended = Ended(session=order.session, worker=order.worker, how=how, making=making)
        send(self.channel, ended)

    def _serve_dataset(self, order: Load, channel: int, connection: int) -> None:
        """Receives and loads a dataset and forks its workers; in a child of the first process."""
        reports = socket.socket(fileno=channel)
        spec: LoaderSpec | None = None
        file = os.memfd_create("stoker-dataset", os.MFD_CLOEXEC)
        os.truncate(file, order.nbytes)
        pickled = memoryview(mmap.mmap(file, order.nbytes))
        end = Connection(socket.socket(fileno=connection), order.key, is_workers=True)
        try:
            end.head()
            end.read(pickled)
        except (OSError, ProtocolError):
            # The trainer opens another connection.
            send(reports, Failed(b""))
            return
        end.close()
        if not pickled[0]:
            try:
                spec = _load(file)
            except Exception as err:
                where = f"the loading of the dataset on host {self.host}"
                send(reports, Failed(pack_error(err, where=where)))
                return
            os.close(file)
        send(reports, Loaded())
        LoaderProcess(reports, self.host, spec, file).run()


def _load(file: int) -> LoaderSpec:
    # Its own position: others read the same memory.
    with open(f"/proc/self/fd/{file}", "rb") as opened:
        return read_spec(opened)


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    os.nice(int(sys.argv[3]))
    # Of all that are forked: where native code crashes, the host's log has the stack.
    faulthandler.enable()
    LoaderProcess(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]).run()
