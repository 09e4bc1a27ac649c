"""A data host imports what the script imports, under names that others have, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STARTUP = Path(stoker.__file__).parent / "startup"

# The standard module with a mark, so that whoever wants the standard one can use it, too.
MARKED = """
import os
_path = os.path.join(os.path.dirname(os.__file__), {name!r} + ".py")
exec(compile(open(_path).read(), _path, "exec"))
MARK = {mark!r}
"""
# Names that torch imports, and others.
STANDARD = ["queue", "platform", "wave", "profile", "hmac", "secrets"]
# With nothing of what the standard one has; stoker imports some of them.
BARE = ["statistics", "fractions", "shlex", "resource", "decimal", "chunk", "cmd"]
# Installed here, with modules of the same name.
PACKAGES = ["joblib", "mlflow", "pandas", "httpx2", "utils"]
SCRIPT = f"""
import importlib, json, os, sys
given = json.loads(sys.argv[1])
sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "vendor"))
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "extra"))
import torch
from torch.utils.data import DataLoader, Dataset
import {", ".join(STANDARD + BARE + [f"{name}.parts" for name in PACKAGES])}
import vendored, extra_only, attr, attrs, on_path

NAMES = {STANDARD + BARE + PACKAGES}

def mark(name):
    return getattr(importlib.import_module(name), "MARK", "other")

class Marks(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        import lazily, lazily.inner, tabnanny
        held = [statistics.MARK, secrets.MARK, joblib.parts.MARK, attr.__name__, vendored.MARK]
        found = [*map(mark, NAMES), *held, extra_only.MARK, mark("attr"), on_path.MARK]
        return found + [lazily.inner.MARK, tabnanny.MARK, os.getcwd()]

for epoch in range(2):
    for batch in DataLoader(Marks(), num_workers=1, collate_fn=list):
        print(json.dumps({{"epoch": epoch, "marks": batch}}), flush=True)
print(json.dumps({{"mean": mark("statistics"), "token": mark("secrets")}}))
"""


def write(folder):
    def put(name, text="", mark=""):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or f"MARK = {mark or 'own'!r}\n")

    for name in STANDARD:
        put(f"{name}.py", MARKED.format(name=name, mark="own"))
    for name in [*BARE, "tabnanny"]:
        put(f"{name}.py")
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


@pytest.mark.parametrize("launched_in", ["another folder", "its folder"])
def test_data_hosts_import_what_the_script_imports(script, launched_in, monkeypatch):
    if launched_in == "its folder":
        monkeypatch.chdir(Path(script).parent)
    more = f"{Path(script).parent}/more"
    expected = run_script({}, script=script, env={"PYTHONPATH": more}).finish()
    with Cluster(agents=2, workers=1) as cluster:
        cluster.wait_for_agents()
        fed = {
            "STOKER_LAUNCHER_PID": str(os.getpid()),
            "PYTHONPATH": f"{STARTUP}:{more}",
            "STOKER_REPLACE_DATALOADER": "auto",
        }
        found = cluster.train(script=script, env=fed, workers=0).finish()
    assert expected[0]["marks"][0].count("own") == len(STANDARD + BARE + PACKAGES) + 5
    assert found == expected


def test_a_script_that_imports_stoker_keeps_its_own_modules(tmp_path):
    for name in BARE:
        (tmp_path / f"{name}.py").write_text("MARK = 'own'\n")
    names = ", ".join(BARE)
    (tmp_path / "train.py").write_text(
        f"from stoker import DataLoader\nimport {names}\n"
        f"print([int(each) for each in DataLoader(range(3), batch_size=1)])\n"
        f"print([each.MARK for each in [{names}]])\n"
    )
    words = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == ["[0, 1, 2]", str(["own"] * len(BARE))], done.stderr
