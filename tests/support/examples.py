"""The example workloads, with names in place of their placeholders."""

import json
import os
import shutil
import sys
from pathlib import Path

import yaml

from support.processes import ran

ROOT = Path(__file__).parents[2]
# Placeholder to the name in its place.
NAMES = {
    "ACCOUNT": "123456789012",
    "REGION": "eu-central-1",
    "BUCKET": "bucket",
    "REGISTRY": "registry.example",
}


def filled(name: str) -> str:
    text = (ROOT / "configs" / name).read_text()
    for placeholder, own in NAMES.items():
        text = text.replace(placeholder, own)
    return text


def document(name: str) -> str:
    return json.dumps(yaml.safe_load(filled(name)))


def project(folder: Path) -> Path:
    shutil.copytree(ROOT / "configs", folder / "configs")
    for file in (folder / "configs").glob("*.yaml"):
        file.write_text(filled(file.name))
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


_OFFLINE = """
import os, socket, sys
def refuse(*arguments, **named):
    raise AssertionError("a socket was used")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
sys.path.insert(0, sys.argv[1])
before = dict(os.environ)
{}
assert dict(os.environ) == before, "the environment was changed"
"""


def printed_elsewhere(code: str, folder: Path, *options: str, timeout: float) -> str:
    """Returns what Python prints in a folder of pipelines only, with another hash seed and home.

    It uses no network, and leaves its environment as it was.
    """
    shutil.copytree(ROOT / "pipelines", folder / "pipelines")
    kept = {key: os.environ[key] for key in ("PATH",) if key in os.environ}
    words = [sys.executable, *options, "-c", _OFFLINE.format(code), str(ROOT / "tests")]
    environ = {**kept, "PYTHONHASHSEED": "77", "HOME": str(folder), "TZ": "UTC-2"}
    done = ran(words, cwd=folder, env=environ, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
