"""A notebook trains over loaders whose parts are defined in its cells; a kernel runs it.

Prints one JSON line for each line that the cells print.
"""

import json
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

OTHER = """
import enum
import json

import torch
from torch.utils.data import DataLoader, Dataset

class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2

class Sides(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return Side.LEFT if index % 2 else Side.RIGHT

batches = list(DataLoader(Sides(), 4, num_workers=1, collate_fn=list))
is_ours = all(side in Side for batch in batches for side in batch)
print(json.dumps({"run": [[side.name for side in batch] for batch in batches], "ours": is_ours}))
"""
DEFINED = """
import dataclasses, enum, json, typing
import torch
from torch.utils.data import DataLoader, Dataset

SCALE = 10

class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"

class Batch(typing.NamedTuple):
    values: torch.Tensor
    kinds: list

@dataclasses.dataclass
class Entry:
    value: float
    kind: Kind

class BadSample(ValueError):
    pass

class Entries(Dataset):
    def __init__(self, size=12, bad=None):
        self.size, self.bad = size, bad
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        if index == self.bad:
            raise BadSample(f"sample {index} cannot be read")
        return Entry(float(index * SCALE), Kind.CAT if index % 2 else Kind.DOG)

def collate(entries):
    values = torch.tensor([entry.value for entry in entries])
    return Batch(values, [entry.kind for entry in entries])

def epoch(loader):
    found = []
    for batch in loader:
        assert type(batch) is Batch and all(kind in Kind for kind in batch.kinds)
        found.append([batch.values.tolist(), [kind.value for kind in batch.kinds]])
    print(json.dumps({"epoch": found}))
"""
TRAINED = """
loader = DataLoader(Entries(), 4, num_workers=1, collate_fn=collate)
epoch(loader)
"""
# Cells that are run again with other text, as people do.
REDEFINED = """
SCALE = 100

class Entries(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return Entry(float(index * SCALE) + 0.5, Kind.DOG)

class Kind(enum.Enum):
    CAT = "cat"
    DOG = "other dog"
"""
FAILED = """
class Entries(Entries):
    def __getitem__(self, index):
        if index == 5:
            raise BadSample(f"sample {index} cannot be read")
        return super().__getitem__(index)

try:
    epoch(DataLoader(Entries(), 4, num_workers=1, collate_fn=collate))
except BadSample as err:
    print(json.dumps({"failed": type(err).__name__, "is_ours": type(err) is BadSample}))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "other.py").write_text(OTHER)
        cells = [DEFINED, TRAINED, TRAINED, REDEFINED, TRAINED, FAILED, "%run other.py"]
        notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
        resources = {"metadata": {"path": name}}
        client = nbclient.NotebookClient(notebook, timeout=120, resources=resources)
        client.execute()
    for cell in notebook.cells:
        streams = {"stdout": "", "stderr": ""}
        for output in cell.outputs:
            if output.output_type == "stream":
                streams[output.name] += output.text
        print(streams["stderr"], file=sys.stderr)
        for line in streams["stdout"].splitlines():
            print(json.dumps(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
