"""Reads loaders whose datasets hold open files, locks and loggers, as `__init__` made them.

Argument: one JSON object, see `DEFAULTS`. Prints one JSON line per batch: what it holds, and what
the aliases of its first tensor hold after that is changed. Before batch `pause_at` it says
{"pause": n} and waits for a line.
"""

import gzip
import json
import logging
import sys
import tempfile
import threading
import time
import weakref
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from stoker import DataLoader

DEFAULTS = {
    "kind": "file",
    "num_workers": 2,
    "epochs": 2,
    "pause_at": None,
    "context": None,
    "persistent": False,
    "is_torchs": False,
}
SAMPLES = 64
# Longer than a buffer of Python's: two workers at one position would read each other's.
RECORD = 4096


class Records(Dataset[torch.Tensor]):
    """Reads its samples from what it opened when it was made."""

    def __init__(self, held: object, read: object) -> None:
        self.held = held
        self.read = read

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.read(self.held, index)[:64]), dtype=torch.float32)


def content(index: int) -> bytes:
    return bytes((index * 7 + number) % 251 for number in range(RECORD))


def at(file, index: int) -> bytes:
    file.seek(RECORD * index)
    # Another that shares the position would move it meanwhile.
    time.sleep(0.002)
    return file.read(RECORD)


def text_at(file, index: int) -> bytes:
    file.seek(0)
    line = [file.readline() for _ in range(index + 1)][-1]
    return line.encode() * 64


def held_and_read(kind: str, folder: Path):
    whole = b"".join(map(content, range(SAMPLES)))
    plain = folder / "records"
    plain.write_bytes(whole)
    match kind:
        case "file":
            return open(plain, "rb"), at
        case "unbuffered":
            return open(plain, "rb", buffering=0), at
        case "text":
            lines = folder / "lines.txt"
            lines.write_text("".join(f"line {number} of many\n" for number in range(SAMPLES)))
            return open(lines, encoding="utf-8"), text_at
        case "gzip":
            with gzip.open(folder / "records.gz", "wb", compresslevel=1) as file:
                file.write(whole)
            return gzip.open(folder / "records.gz"), at
        case "zip":
            with zipfile.ZipFile(folder / "records.zip", "w") as archive:
                for index in range(SAMPLES):
                    archive.writestr(f"{index}", content(index))
            return zipfile.ZipFile(folder / "records.zip"), lambda a, index: a.read(f"{index}")
        case "memmap":
            mapped = np.memmap(plain, dtype=np.uint8, mode="r").reshape(SAMPLES, RECORD)
            return mapped, lambda rows, index: rows[index].tobytes()
        case "lambda":
            lock, log = threading.Lock(), logging.Logger("of a lambda")

            def locked(_, index: int) -> bytes:
                with lock:
                    log.debug("sample %s", index)
                    return content(index)

            return None, lambda held, index: locked(held, index)
        case "weak":
            data = [content(index) for index in range(SAMPLES)]
            owner = Owner(data)
            return (owner, weakref.ref(owner)), lambda held, index: held[1]().data[index]
    raise ValueError(kind)


class Owner:
    """Owns the data that a weak reference leads to."""

    def __init__(self, data: list[bytes]) -> None:
        self.data = data


def collate(rows: list[torch.Tensor]) -> dict[str, object]:
    """A batch of one memory: whole, again, parts, and rows that repeat."""
    whole = torch.stack(rows)
    parts = [whole[1:3], whole.t(), whole[:, 5], whole[0].expand(3, -1)]
    return {"whole": whole, "again": whole, "parts": parts}


def facts_of(batch: dict[str, object]) -> dict[str, object]:
    whole, parts = batch["whole"], batch["parts"]
    before = whole.sum().item()
    whole += 1
    return {
        "sum": before,
        "is_one": whole is batch["again"],
        "parts": [part.sum().item() for part in parts],
        "strides": [list(part.stride()) for part in parts],
    }


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    torch.manual_seed(7)
    kind = torch.utils.data.DataLoader if given["is_torchs"] else DataLoader
    options = {"multiprocessing_context": given["context"]} if given["context"] else {}
    with tempfile.TemporaryDirectory() as folder:
        loader = kind(
            Records(*held_and_read(given["kind"], Path(folder))),
            batch_size=4,
            shuffle=True,
            collate_fn=collate,
            num_workers=given["num_workers"],
            persistent_workers=given["persistent"],
            **options,
        )
        for epoch in range(given["epochs"]):
            for number, batch in enumerate(loader):
                if epoch == 0 and number == given["pause_at"]:
                    print(json.dumps({"pause": number}), flush=True)
                    sys.stdin.readline()
                facts = {"epoch": epoch, "batch": number, **facts_of(batch)}
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
