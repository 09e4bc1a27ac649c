"""The fork server imports what specs name once for all of them, with real processes."""

import contextlib
import importlib
import os
import select
import socket
import sys
import time

import psutil
import pytest
from torch.utils.data import default_collate

from stoker.feed.agent.dataset_process import DatasetProcess, Fork, ForkServer
from stoker.feed.wire.dataset import DatasetSpec, pack_spec
from stoker.feed.workers.stacks import stacks_of, words_of
from support.processes import until

pytestmark = pytest.mark.fault

DEADLINE_SECONDS = 150.0

MODULE = """
import os, threading
with open({marker!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
VALUE = {value}

class Items:
    def __init__(self, salt):
        self.salt = salt

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open({held!r}, "a") as file:
            file.write(f"{{self.salt}} {{VALUE}} {{threading.active_count()}}\\n")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index
"""


class Host:
    def __init__(self, folder, name, fork_server):
        self.folder = folder
        self.name = name
        self.fork_server = fork_server
        self.held: list[DatasetProcess] = []

    def write(self, *, value=1, more=""):
        given = {"marker": str(self.folder / "imported"), "held": str(self.folder / "held")}
        (self.folder / f"{self.name}.py").write_text(MODULE.format(value=value, **given) + more)
        return importlib.import_module(self.name)

    def hold(self, module, salt, *, first_bytes=0, meanwhile=lambda: None):
        spec = DatasetSpec(dataset=module.Items(salt), collate_fn=default_collate)
        data = pack_spec(spec, max_bytes=1 << 30).data
        memory = os.memfd_create("spec")
        if first_bytes:
            os.write(memory, data[:first_bytes])
            self.fork_server.preload(memory)
            meanwhile()
        os.write(memory, data[first_bytes:])
        dataset_process = self.fork_server.start_dataset(salt, memory)
        os.close(memory)
        self.held.append(dataset_process)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while dataset_process.loaded is None and not dataset_process.channel.is_closed:
            assert time.monotonic() < deadline, "the spec is held"
            select.select([dataset_process.channel.fileno()], [], [], 1.0)
            dataset_process.handle()
        return dataset_process

    def imported(self):
        lines = (self.folder / "imported").read_text().split()
        return [int(line) for line in lines if int(line) != os.getpid()]

    def told(self):
        return [line.split() for line in (self.folder / "held").read_text().splitlines()]


@pytest.fixture(scope="module")
def fork_server():
    own = ForkServer(host="data-1")
    yield own
    own.close()


@pytest.fixture
def host(tmp_path, request, fork_server):
    name = f"user_{os.getpid()}_{abs(hash(request.node.name))}"
    sys.path.insert(0, str(tmp_path))
    made = Host(tmp_path, name, fork_server)
    yield made
    for dataset_process in made.held:
        dataset_process.close()
    sys.path.remove(str(tmp_path))
    sys.modules.pop(name, None)


def test_what_several_datasets_name_is_imported_once_and_again_when_it_was_edited(host):
    module = host.write(value=1)
    for salt in ("train", "valid"):
        assert host.hold(module, salt).loaded is not None
    assert len(host.imported()) == 1
    host.write(value=22)
    host.hold(module, "test")
    told = [told[:2] for told in host.told()]
    assert told == [["train", "1"], ["valid", "1"], ["test", "22"]]
    assert len(host.imported()) == 2


def test_threads_that_a_module_starts_are_there_where_the_dataset_is(host):
    waiting = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    module = host.write(more=waiting)
    (host.folder / "held").touch()
    for salt in ("train", "valid"):
        dataset_process = host.hold(module, salt)
        assert dataset_process.loaded.copied.startswith("a thread runs once its modules are")
        # In each worker.
        for number in (1, 2):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                dataset_process.fork(theirs, Fork(number, 2, 7, "batch"))
                until(lambda number=number: len(host.told()) >= number, "a worker has the dataset")
        assert [told[::2] for told in host.told()] == [[salt, "2"]] * 2
        (host.folder / "held").write_text("")


def test_the_modules_of_a_spec_are_imported_once_its_beginning_is_there(host):
    module = host.write()
    dataset_process = host.hold(
        module,
        "train",
        first_bytes=-100,
        meanwhile=lambda: until(lambda: len(host.imported()) == 1, "its module is imported"),
    )
    assert not dataset_process.loaded.error
    assert [told[0] for told in host.told()] == ["train"]
    assert len(host.imported()) == 1


@pytest.mark.parametrize("num_bytes", [1, 9000, 25_000])
def test_a_beginning_that_names_no_modules_yet_is_passed_over(host, num_bytes):
    module = host.write()
    assert not host.hold(module, "train", first_bytes=num_bytes).loaded.error


ENDS = {
    "as it is imported": ("import os; os._exit(3)\n", 3),
    "by a signal": ("import os; os.kill(os.getpid(), 9)\n", -9),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_module_that_ends_the_process_before_its_spec_is_there_is_named(host, kind):
    module = host.write()
    text, status = ENDS[kind]
    (host.folder / f"{host.name}.py").write_text(text)
    dataset_process = host.hold(module, "bad", first_bytes=-1)
    dataset_process.handle()
    ended = dataset_process.ended
    assert (ended.status, ended.doing) == (status, f"it imported {host.name}")


def test_threads_of_modules_that_are_imported_before_their_spec_is_there_are_known(host):
    waiting = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    module = host.write(more=waiting)
    for _ in range(2):
        dataset_process = host.hold(module, "train", first_bytes=-1)
        assert dataset_process.loaded.copied.startswith("a thread runs once its modules are")


def test_a_dataset_that_hangs_as_it_is_unpickled_shows_where(host):
    hangs = "def hang(items, state):\n    threading.Event().wait()\nItems.__setstate__ = hang\n"
    module = host.write(more=hangs)
    memory = os.memfd_create("spec")
    spec = DatasetSpec(dataset=module.Items("train"), collate_fn=default_collate)
    os.write(memory, pack_spec(spec, max_bytes=1 << 30).data)
    dataset_process = host.fork_server.start_dataset("train", memory)
    os.close(memory)
    host.held.append(dataset_process)

    def words() -> str:
        dataset_process.handle()
        up = dataset_process.up
        return "" if up is None else words_of(stacks_of(up.pid, up.stacks))

    until(lambda: words().startswith(f"in hang ({host.name}.py:"), "it hangs")


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_module_whose_import_hangs_shows_where(host, is_ahead):
    module = host.write()
    marks = f"open({str(host.folder / 'imported')!r}, 'a').write('0\\n')"
    hangs = f"import os, threading; {marks}\n"
    hangs += f"if os.getpid() != {os.getpid()}: threading.Event().wait()\n"
    (host.folder / f"{host.name}.py").write_text(hangs)
    memory = os.memfd_create("spec")
    spec = DatasetSpec(dataset=module.Items("train"), collate_fn=default_collate)
    os.write(memory, pack_spec(spec, max_bytes=1 << 30).data)
    # Its own: what comes after that import would wait for it.
    with contextlib.closing(ForkServer(host="data-2")) as fork_server:
        if is_ahead:
            fork_server.preload(memory)
            until(lambda: host.imported(), "it is imported")
        dataset_process = fork_server.start_dataset("train", memory)
        os.close(memory)

        def words() -> str:
            dataset_process.handle()
            up = dataset_process.up
            return "" if up is None else words_of(stacks_of(up.pid, up.stacks))

        until(lambda: f"({host.name}.py:2)" in words(), "it hangs")
        dataset_process.close()


def test_a_module_that_cannot_be_imported_is_an_error_of_the_dataset(host):
    module = host.write()
    (host.folder / f"{host.name}.py").write_text("import no_such_module\n")
    for salt in ("train", "valid"):
        dataset_process = host.hold(module, salt)
        assert "no_such_module" in dataset_process.loaded.summary


def test_a_module_that_ends_the_process_ends_only_that_dataset(host):
    module = host.write()
    good = sys.modules[host.name]
    (host.folder / f"{host.name}.py").write_text("import os; os._exit(3)\n")
    dataset_process = host.hold(module, "bad")
    assert dataset_process.loaded is None
    dataset_process.handle()
    assert (dataset_process.ended.status, dataset_process.ended.doing) == (
        3,
        f"it imported {host.name}",
    )
    assert host.fork_server.is_alive
    host.write()
    sys.modules[host.name] = good
    dataset_process = host.hold(module, "good")
    assert not dataset_process.loaded.error


def is_fork_server(process):
    try:
        return "stoker.feed.agent.forkserver" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_a_template_that_is_gone_is_made_again(host):
    module = host.write()
    host.hold(module, "before")
    fork_server = next(child for child in psutil.Process().children() if is_fork_server(child))
    (template,) = fork_server.children()
    template.kill()
    psutil.wait_procs([template], DEADLINE_SECONDS)
    dataset_process = host.hold(module, "after")
    assert dataset_process.loaded is not None
