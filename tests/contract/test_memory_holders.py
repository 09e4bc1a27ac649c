"""Memory that is not the run's: files in folders that are memory, and other programs."""

import os
import subprocess
import sys

import psutil
import pytest

from stoker.host.memory_holders import HeldMemory, files_in_memory, other_programs
from stoker.host.memory_usage import written_bytes

MB = 1_000_000
# Ends when its standard input does; with "detached" nobody here is its parent.
HOLDS = """
import ctypes, os, sys
if "detached" in sys.argv and os.fork():
    os._exit(0)
PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, sys.argv[2].encode(), 0, 0, 0)
held = bytearray(b"1") * int(sys.argv[1])
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program():
    """Starts a program that holds so many bytes, and returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(num_bytes: int, name: str, *how: str) -> int:
        words = [sys.executable, "-c", HOLDS, str(num_bytes), name, *how]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    yield start
    for process in started:
        process.communicate()


def test_another_program_is_named_and_what_this_process_has_started_is_none(program, monkeypatch):
    started = [program(80 * MB, "worker"), program(60 * MB, "notebook", "detached")]
    # As on a machine where nothing else runs.
    processes = [psutil.Process(pid) for pid in (*started, os.getpid())]
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(processes))
    held = other_programs()
    assert held.holder == "notebook"
    assert held.num_bytes == written_bytes(started[1]) >= 60 * MB


@pytest.fixture
def folder_in_memory(tmp_path):
    """A folder below /dev/shm, with the kernel's list of file systems, where only that one is."""
    folder = f"/dev/shm/stoker-test-{os.getpid()}"
    try:
        os.mkdir(folder)
    except OSError as err:
        pytest.skip(f"no folder in memory: {err}")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {folder} tmpfs rw,size=8000k 0 0\n")
    yield folder, mounts
    for name in os.listdir(folder):
        os.remove(f"{folder}/{name}")
    os.rmdir(folder)


def test_files_in_memory_are_counted_and_batches_on_their_way_are_not(folder_in_memory):
    folder, mounts = folder_in_memory
    for name in ("train.bin", "torch_123_456", "sem.mp-1"):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(bytes(20 * MB))
    held = files_in_memory(least_bytes=MB, mounts=mounts)
    assert held.holder == folder
    assert held.num_bytes == pytest.approx(20 * MB, rel=0.01)


def test_a_folder_with_little_is_not_looked_at(folder_in_memory):
    _, mounts = folder_in_memory
    assert files_in_memory(least_bytes=1 << 50, mounts=mounts) == HeldMemory()


def test_without_a_list_of_file_systems_nothing_is_known(tmp_path):
    assert files_in_memory(least_bytes=0, mounts=tmp_path / "none") == HeldMemory()
