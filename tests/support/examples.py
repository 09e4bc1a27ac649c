"""The example workloads, with names in place of their placeholders."""

import json
import shutil
from pathlib import Path

import yaml

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
