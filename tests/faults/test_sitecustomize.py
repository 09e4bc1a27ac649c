"""The sitecustomize of launched processes chains on, keeps failures, and breaks nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.launch.strategies.start import STARTUP_DIR

pytestmark = pytest.mark.fault


def python(code, tmp_path, *, is_rank=True, path="", **environ):
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{STARTUP_DIR}:{path}" if path else str(STARTUP_DIR),
        "STOKER_OUTPUT": str(tmp_path),
        "STOKER_HOST": "algo-1",
        "STOKER_LAUNCHER_PID": str(os.getpid()) if is_rank else "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=variables | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def failure(tmp_path, rank=0):
    found: dict[str, object] = json.loads((tmp_path / f"failure-rank{rank}.json").read_text())
    return found


def test_an_uncaught_error_is_kept_and_still_shown(tmp_path):
    ended = python("def f(): raise KeyError('ä')\nf()", tmp_path)
    assert ended.returncode == 1
    assert "KeyError" in ended.stderr
    kept = failure(tmp_path)
    assert (kept["rank"], kept["host"], kept["type"]) == (0, "algo-1", "KeyError")
    assert "in f" in str(kept["traceback"])
    assert [path.name for path in tmp_path.iterdir()] == ["failure-rank0.json"]


def test_the_rank_is_that_of_torchrun(tmp_path):
    python("raise ValueError('x')", tmp_path, RANK="3")
    assert failure(tmp_path, 3)["rank"] == 3


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise KeyboardInterrupt"])
def test_an_exit_and_ctrl_c_are_no_failures_of_a_rank(tmp_path, code):
    python(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_no_rank_is_left_alone(tmp_path):
    code = "import sys; print(sys.excepthook is sys.__excepthook__); raise ValueError('x')"
    ended = python(code, tmp_path, is_rank=False)
    assert ended.stdout == "True\n"
    assert list(tmp_path.iterdir()) == []


def test_the_next_sitecustomize_runs_too(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys; sys.theirs_ran = __name__\n")
    ended = python("import sys; print(sys.theirs_ran)", tmp_path, path=str(theirs))
    assert (ended.stdout, ended.stderr) == ("sitecustomize\n", "")


def test_a_broken_next_sitecustomize_is_one_line_and_breaks_nothing(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("1 / 0\n")
    ended = python("print('ran')", tmp_path, path=str(theirs))
    assert ended.stdout == "ran\n"
    assert ended.stderr == "stoker: sitecustomize: ZeroDivisionError: division by zero\n"


def test_a_failure_that_cannot_be_kept_is_one_more_line(tmp_path):
    ended = python("raise ValueError('x')", tmp_path, STOKER_OUTPUT="/proc/nowhere")
    assert ended.returncode == 1
    assert ended.stderr.count("stoker: sitecustomize:") == 1
    assert "ValueError: x" in ended.stderr


def test_nothing_heavy_is_imported_at_start(tmp_path):
    code = "import sys; print(sorted({n.split('.')[0] for n in sys.modules}))"
    ours = set(json.loads(python(code, tmp_path).stdout.replace("'", '"')))
    assert not ours & {"stoker", "torch", "json", "traceback", "msgspec", "zmq", "numpy"}


REPLACED = (
    "import {how}\n"
    "from torch.utils.data import DataLoader\n"
    "import sys\n"
    "print('replaced', 'stoker.feed.replace' in sys.modules)\n"
    "print('finder left', any('torch' in getattr(f, '_missing', ()) for f in sys.meta_path))\n"
)


@pytest.mark.parametrize(
    "how",
    [
        "torch",
        pytest.param("torch.utils.data", marks=pytest.mark.soak),
        pytest.param("torch.nn.functional", marks=pytest.mark.soak),
    ],
)
def test_the_replacement_is_installed_however_torch_is_imported(tmp_path, how):
    ended = python(REPLACED.format(how=how), tmp_path, STOKER_REPLACE_DATALOADER="1")
    assert ended.stdout == "replaced True\nfinder left False\n", ended.stderr
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("value", "second"),
    # As a parameter of a pipeline spells it: a step that asks for all loaders.
    [("auto", "torch.utils.data.dataloader"), ("true", "stoker.feed.iterators")],
)
def test_auto_replaces_the_loader_unless_stokers_is_imported(tmp_path, value, second):
    code = (
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader([1, 2])\n"
        "kinds = lambda: print(type(iter(loader)).__module__)\n"
        "kinds(); from stoker import DataLoader; kinds()\n"
    )
    source = str(Path(stoker.__file__).parents[1])
    ended = python(code, tmp_path, path=source, STOKER_REPLACE_DATALOADER=value)
    assert ended.stdout == f"stoker.feed.iterators\n{second}\n", ended.stderr


def test_without_being_asked_for_nothing_is_replaced(tmp_path):
    ended = python(REPLACED.format(how="torch"), tmp_path)
    assert ended.stdout == "replaced False\nfinder left False\n"


def test_an_error_of_the_replacement_is_one_line_and_torch_still_works(tmp_path):
    ended = python(
        "import torch, torch.utils.data; print(torch.ones(1).item())",
        tmp_path,
        STOKER_PROFILE="not JSON",
    )
    assert ended.stdout == "1.0\n"
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("stoker: sitecustomize: ")
