"""Hosts with limits below their need: one error that names the limit, from the first moment."""

import shutil
import sys
from pathlib import Path

import pytest

from support.processes import ran

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

_GROUPS = ("--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("--nofile=10:10", "at most 10 files may be open"),
        # As 47, of which the hosts need one more; each takes 30 s.
        pytest.param("--nofile=24:24", "at most 24 files may be open", marks=pytest.mark.soak),
        ("--nofile=47:47", "at most 47 files may be open"),
        ("--as=300000000:300000000", "the address space of a process is limited to 286 MiB"),
    ],
)
def test_a_limit_that_is_too_low_is_one_clear_error(tmp_path: Path, limit: str, words: str) -> None:
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        pytest.skip("no prlimit here")
    (tmp_path / "train.py").write_text("print('trained')\n")
    stoker = [sys.executable, "-m", "stoker.cli", "train", "--yes", *_GROUPS]
    done = ran([prlimit, limit, *stoker, "--", sys.executable, "train.py"], cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert words in said
    assert "Traceback" not in said
    assert "bug in stoker" not in said
    assert "Assertion" not in said
