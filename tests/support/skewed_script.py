"""Reads a dataset whose module is beside it or in a folder. Argument: one JSON object.

Prints one JSON line per epoch, with the samples and the versions of the code that made them. Before
each epoch in `pauses` it prints {"pause": epoch} and goes on after a line on stdin.
"""

import importlib
import json
import sys

import stoker
from stoker.feed.wire.imported_code import installed_version

given = json.loads(sys.argv[1])
sys.path.insert(0, given["folder"])
skewed = importlib.import_module("skewed")
# A data host has its files in a folder of its own, although all are on one machine here. What is
# installed in that folder is looked up before.
installed_version("skewed_library")
sys.path[:] = [path for path in sys.path if not path.startswith(given["folder"])]
loader = stoker.DataLoader(skewed.Numbers(), batch_size=4, num_workers=given.get("num_workers", 1))
for epoch in range(given["epochs"]):
    if epoch in given.get("pauses", []):
        print(json.dumps({"pause": epoch}), flush=True)
        sys.stdin.readline()
    samples = [pair for batch in loader for pair in zip(*map(list, batch), strict=True)]
    ids, versions = [int(i) for i, _ in samples], sorted({int(v) for _, v in samples})
    print(json.dumps({"ids": ids, "versions": versions}), flush=True)
