"""Makes few of the example's digits: to validate on all costs more than a short training."""

import gzip
from pathlib import Path

BUNDLED = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "data"


def few_digits(folder: Path) -> Path:
    """Writes MNIST's four files to a new folder: 1,024 digits to train on, 256 to validate."""
    folder.mkdir()
    for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
        content = gzip.decompress((BUNDLED / f"t10k-{kind}-ubyte.gz").read_bytes())
        for name, first, count in (("train", 0, 1024), ("t10k", 1024, 256)):
            head = content[:4] + count.to_bytes(4, "big") + content[8:header]
            part = content[header + first * size : header + (first + count) * size]
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + part, 1))
    return folder
