"""A training script whose batches wait for a slow step, or of which a sample takes much memory.

Arguments: batches, megabytes of a batch, seconds of a step, and a file that the one sample which
takes more than there is makes before it does, with its process's number (none: no sample does).
Prints a digest of all bytes.
"""

import os
import sys
import time
import zlib
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES = 4
GREEDY = 21
GREEDY_BYTES = 3 << 30


class Samples(Dataset[torch.Tensor]):
    def __init__(self, batches: int, num_bytes: int, greedy: Path | None) -> None:
        self.length = SAMPLES * batches
        self.width = num_bytes // SAMPLES // 4
        self.greedy = greedy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == GREEDY and self.greedy is not None:
            self._take_all(self.greedy)
        # Loading is fast, but no single second fills a host.
        time.sleep(0.02)
        return torch.full((self.width,), float(index))

    def _take_all(self, file: Path) -> None:
        """Takes more memory than there is, in one process; others wait until that one is killed.

        On a slow machine its batch is overdue before that, and the run would be at its end.
        """
        try:
            with file.open("x") as opened:
                opened.write(str(os.getpid()))
        except FileExistsError:
            while not (first := file.read_text()) or Path("/proc", first).exists():
                time.sleep(0.02)
            return
        held = bytearray(GREEDY_BYTES)
        held[::4096] = b"1" * len(range(0, GREEDY_BYTES, 4096))


def main() -> None:
    batches, megabytes, seconds, *rest = sys.argv[1:]
    greedy = Path(rest[0]) if rest else None
    dataset = Samples(int(batches), int(megabytes) << 20, greedy)
    weight = torch.zeros(1, requires_grad=True)
    seen = digest = 0
    for batch in DataLoader(dataset, SAMPLES, num_workers=2):
        time.sleep(float(seconds))
        (weight * batch.mean()).sum().backward()
        seen += len(batch)
        digest = zlib.crc32(batch.numpy().tobytes(), digest)
    print(f"seen {seen} digest {digest}")


if __name__ == "__main__":
    main()
