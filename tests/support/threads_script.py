"""Reads a dataset that starts threads. Argument: one JSON object, see `DEFAULTS`.

Prints one JSON line a batch: its samples, and how its worker was made (pid, pid of its parent, its
command line, whether it unpickled the dataset, and imported its module, itself).
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.feed.replace import install

# What starts threads, and when ("import", "unpickling" or "never"); how workers begin: as an option
# of the loader, or as the default of the process (`sets`).
DEFAULTS = {
    "threads": "python",
    "when": "unpickling",
    "start": None,
    "sets": None,
    "num_workers": 2,
    "is_stream": False,
    "pause_at": None,
    "breaks": False,
    "folder": "",
    "loader": {},
    "samples": 24,
}

MODULE = """
import concurrent.futures, ctypes, multiprocessing.pool, os, threading

IMPORTED_BY = os.getpid()
WAITS = threading.Event()

def start(kind):
    if kind == "python":
        threading.Thread(target=WAITS.wait, daemon=True).start()
        return None
    if kind == "executor":
        pool = concurrent.futures.ThreadPoolExecutor(3)
        assert list(pool.map(abs, range(9))) == list(range(9))
        return pool
    if kind == "pool":
        return multiprocessing.pool.ThreadPool(2)
    if kind == "native":
        libc = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        pause = ctypes.cast(libc.pause, ctypes.c_void_p)
        assert libc.pthread_create(ctypes.byref(thread), None, pause, None) == 0
        return None
    if kind == "openmp":
        import torch
        before = torch.get_num_threads()
        torch.set_num_threads(4)
        (torch.ones(2000, 2000) + 1).sum()
        torch.ones(500, 500) @ torch.ones(500, 500)
        torch.set_num_threads(before)
        return None
    if kind == "locked":
        # A thread that holds a lock which samples need, as a pool's does in the middle of a task.
        lock, is_held = threading.Lock(), threading.Event()
        def hold():
            with lock:
                is_held.set()
                threading.Event().wait(0.05)
            WAITS.wait()
        threading.Thread(target=hold, daemon=True).start()
        is_held.wait()
        return lock
    if kind == "joined":
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(abs, range(9)))
        return None
    raise ValueError(kind)

HELD = start(<kind>) if <when> == "import" and os.getpid() != <pid> else None
"""


class Starts:
    def __init__(self, given: dict) -> None:
        self.given = given
        self.held = None
        self.unpickled_by = None

    def __getstate__(self) -> dict:
        return {"given": self.given}

    def __setstate__(self, state: dict) -> None:
        self.given = state["given"]
        self.unpickled_by = os.getpid()
        self.held = None
        if self.given["breaks"]:
            raise OSError("no such table")
        if self.given["when"] == "unpickling":
            self.held = module.start(self.given["threads"])

    def facts(self, index: int) -> dict:
        if hasattr(self.held, "submit"):
            # Hangs where the pool's threads are missing.
            assert self.held.submit(abs, -index).result() == index
        if hasattr(self.held, "acquire"):
            with self.held:
                pass
        return {
            "index": index,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "command": " ".join(sys.orig_argv),
            "unpickles": self.unpickled_by == os.getpid(),
            "imports": os.getpid() == module.IMPORTED_BY,
        }


class Items(Starts, Dataset):
    def __len__(self) -> int:
        return self.given["samples"]

    def __getitem__(self, index: int) -> dict:
        return self.facts(index)


class Stream(Starts, IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return map(self.facts, range(info.id, self.given["samples"], info.num_workers))


def as_they_are(samples: list) -> list:
    return samples


def main() -> None:
    global module
    given = DEFAULTS | json.loads(sys.argv[1])
    name = f"threads_module_{os.getpid()}"
    facts = {"pid": os.getpid(), "kind": given["threads"], "when": given["when"]}
    text = MODULE
    for key, value in facts.items():
        text = text.replace(f"<{key}>", repr(value))
    Path(given["folder"], f"{name}.py").write_text(text)
    sys.path.insert(0, given["folder"])
    module = __import__(name)
    install(DataLoader)
    if given["sets"]:
        torch.multiprocessing.set_start_method(given["sets"], force=True)
    options = {"multiprocessing_context": given["start"]} if given["start"] else {}
    loader = DataLoader(
        (Stream if given["is_stream"] else Items)(given),
        batch_size=2,
        num_workers=given["num_workers"],
        collate_fn=as_they_are,
        **options,
        **given["loader"],
    )
    for epoch in range(2 if given["loader"].get("persistent_workers") else 1):
        for number, batch in enumerate(loader):
            print(json.dumps({"epoch": epoch, "batch": batch}), flush=True)
            if number == given["pause_at"] and epoch == 0:
                print(json.dumps({"pause": number}), flush=True)
                sys.stdin.readline()


if __name__ == "__main__":
    main()
