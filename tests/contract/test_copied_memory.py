"""What a forked process copies of its parent's memory, as the kernel counts it."""

import json
import mmap
import os

from stoker.host.memory_usage import process_memory
from stoker.profile.memory.watch import _Point, _point, copied_between

PAGE = mmap.PAGESIZE


def point_here() -> _Point:
    memory = process_memory(os.getpid())
    assert memory is not None
    return _point(1, memory)


def own_copies(pages: int) -> list[int]:
    """Returns what a forked process sees as copied: as it writes shared pages, and inherited ones.

    Args:
        pages: Of each kind.
    """
    inherited = bytearray(b"1") * (pages * PAGE)
    file = mmap.mmap(-1, pages * PAGE)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = point_here()
            # Without an object of that size, which may lie on inherited pages.
            for page in range(pages):
                file[page * PAGE] = 1
            written = point_here()
            inherited[::PAGE] = b"2" * pages
            growths = [copied_between(before, written), copied_between(written, point_here())]
            os.write(sender, json.dumps(growths).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, encoding="utf-8") as said:
        growths = json.load(said)
    os.waitpid(pid, 0)
    return growths


def test_pages_of_shared_memory_that_a_worker_writes_are_no_copies():
    written, copied = own_copies(2000)
    assert copied >= 0.9 * 2000 * PAGE
    # The process itself copies some pages meanwhile.
    assert written < 0.2 * 2000 * PAGE
