"""Reads a torch loader with more workers than this process has cores; warnings are errors.

Argument: {"own": stoker's loader}.
"""

import json
import os
import sys
import warnings

import torch.utils.data

import stoker
from stoker.feed.replace import install


class WarnsAlways(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            warnings.warn("of the dataset", UserWarning, stacklevel=1)
        except UserWarning:
            return [index, "error"]
        return [index, "shown"]


def main():
    warnings.simplefilter("error")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    own = json.loads(sys.argv[1])["own"]
    if not own:
        install(torch.utils.data.DataLoader)
    kind = stoker.DataLoader if own else torch.utils.data.DataLoader
    for index, found in kind(WarnsAlways(), batch_size=None, num_workers=4):
        print(json.dumps({"index": index, "found": found}), flush=True)


if __name__ == "__main__":
    main()
