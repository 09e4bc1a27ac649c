"""`make` fetches a torch that the machine can use, and says before how large it is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# In place of .venv's Python: keeps what pip is asked for. The index of CPU builds may be away.
PYTHON = """#!/bin/sh
echo "$*" >>"$ASKED"
case "$*" in *download.pytorch.org*) exit "$AWAY";; esac
"""

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


def installed(folder, *, nvidia, away):
    """Returns what make said, and what of torch pip was asked for."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements/run.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    asked = folder / "asked"
    environ = os.environ | {"ASKED": str(asked), "AWAY": str(int(away))}
    made = subprocess.run(
        ["make", f"NVIDIA={nvidia}", ".venv/.installed-run"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    return made.stdout, [line for line in asked.read_text().splitlines() if "torch==" in line]


@pytest.mark.parametrize("away", [False, True])
def test_without_a_driver_the_build_for_cpus_comes_first(tmp_path, away):
    said, asked = installed(tmp_path, nvidia="", away=away)
    assert CPU_INDEX in asked[0]
    assert said.index("for CPUs, as there is no NVIDIA driver (0.2 GB to fetch") >= 0
    # The usual index only where that one cannot be reached.
    assert [CPU_INDEX in words for words in asked[1:]] == [False] * away
    assert ("from the usual index" in said) is away
    assert ("5 GB on disk" in said) is away


def test_with_a_driver_the_usual_index_is_asked_alone(tmp_path):
    said, asked = installed(tmp_path, nvidia="/proc/driver/nvidia/version", away=False)
    assert [CPU_INDEX in words for words in asked] == [False]
    assert "5 GB on disk" in said
