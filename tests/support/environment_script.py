"""Changes its environment, and prints what a dataset finds of it and where. Argument: ignored."""

import json
import os
import sys

import torch

from stoker import DataLoader

NAMES = ("SET_BY_SCRIPT", "CHANGED_BY_SCRIPT", "DELETED_BY_SCRIPT", "MY_TOKEN", "LOCAL_RANK")


class Looking(torch.utils.data.Dataset[list[object]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[object]:
        return [index, os.getppid(), sys.argv[1:], {name: os.environ.get(name) for name in NAMES}]


def main() -> None:
    os.environ["SET_BY_SCRIPT"] = "ä"
    os.environ["CHANGED_BY_SCRIPT"] = "after"
    os.environ.pop("DELETED_BY_SCRIPT", None)
    os.environ["MY_TOKEN"] = "hidden"
    os.environ["LOCAL_RANK"] = os.environ.get("RANK", "0")
    loader = DataLoader(Looking(), batch_size=None, num_workers=json.loads(sys.argv[1])["local"])
    for index, parent, arguments, found in loader:
        where = "here" if parent in (os.getpid(), os.getppid()) else "there"
        print(json.dumps({"index": index, "at": where, "argv": arguments, **found}), flush=True)


if __name__ == "__main__":
    main()
