"""Reads the files of configs/kubernetes that an administrator applies, as their comments say."""

import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "configs" / "kubernetes"


def objects(name: str, *, is_all: bool = False) -> list[dict[str, Any]]:
    """Returns the objects of a file; `is_all`: with those that stand there as comments."""
    text = (FOLDER / name).read_text()
    return [*yaml.safe_load_all(re.sub(r"(?m)^( *)# (- \{)", r"\1\2", text) if is_all else text)]


def rbac(*, namespace: str, account: str, api: str = "jobset") -> list[dict[str, Any]]:
    role, binding = objects("rbac.yaml", is_all=api == "trainer")
    if api == "trainer":
        role["rules"] = [r for r in role["rules"] if r["apiGroups"] != ["jobset.x-k8s.io"]]
    binding["subjects"] = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
    return [each | {"metadata": each["metadata"] | {"namespace": namespace}} for each in
            (role, binding)]  # fmt: skip
