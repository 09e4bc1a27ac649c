"""A data host imports what the script imports, under names that others have, too."""

import os
from pathlib import Path

import pytest

import stoker
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(300)]

STARTUP = Path(stoker.__file__).parent / "startup"

# Installed here, with modules of the same name.
PACKAGES = ["joblib", "mlflow", "pandas", "httpx2", "utils"]
SCRIPT = f"""
import importlib, json, os, sys
given = json.loads(sys.argv[1])
sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "vendor"))
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "extra"))
import torch
from torch.utils.data import DataLoader, Dataset
import {", ".join(f"{name}.parts" for name in PACKAGES)}
import vendored, extra_only, attr, attrs, on_path

NAMES = {PACKAGES}

def mark(name):
    return getattr(importlib.import_module(name), "MARK", "other")

class Marks(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        import lazily, lazily.inner
        held = [joblib.parts.MARK, attr.__name__, vendored.MARK]
        found = [*map(mark, NAMES), *held, extra_only.MARK, mark("attr"), on_path.MARK]
        return found + [lazily.inner.MARK, os.getcwd()]

for epoch in range(2):
    for batch in DataLoader(Marks(), num_workers=1, collate_fn=list):
        print(json.dumps({{"epoch": epoch, "marks": batch}}), flush=True)
"""


def write(folder):
    def put(name, text="", mark="own"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or f"MARK = {mark!r}\n")

    for name in [*PACKAGES, "lazily"]:
        put(f"{name}/__init__.py")
        put(f"{name}/parts.py")
    put("lazily/inner.py")
    put("vendor/vendored.py", mark="vendored")
    put("extra/extra_only.py", mark="extra")
    # Behind what is installed: it hides nothing.
    put("extra/attr.py", mark="hidden")
    put("more/on_path.py", mark="PYTHONPATH")
    put("train.py", SCRIPT)
    return str(folder / "train.py")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return write(tmp_path_factory.mktemp("project"))


def test_data_hosts_import_what_the_script_imports(script):
    more = f"{Path(script).parent}/more"
    expected = run_script({}, script=script, env={"PYTHONPATH": more}).finish()
    with Cluster(agents=2, workers=1) as cluster:
        cluster.wait_for_agents()
        fed = {
            "STOKER_LAUNCHER_PID": str(os.getpid()),
            "PYTHONPATH": f"{STARTUP}:{more}",
            "RUN_REPLACE_DATALOADER": "true",
        }
        found = cluster.train(script=script, env=fed, workers=0).finish()
    assert expected[0]["marks"][0].count("own") == len(PACKAGES) + 2
    assert found == expected
