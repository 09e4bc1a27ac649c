"""The sitecustomize of launched processes chains on, keeps failures, and breaks nothing."""

import json
import os
import sys
from pathlib import Path

import pytest

import stoker
from stoker.launch.job_environment import STARTUP_DIR
from support.processes import ran

pytestmark = pytest.mark.fault


def python(code, tmp_path, *, is_rank=True, path="", **environ):
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{STARTUP_DIR}:{path}" if path else str(STARTUP_DIR),
        "STOKER_OUTPUT": str(tmp_path),
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "STOKER_LAUNCHER_PID": str(os.getpid()) if is_rank else "1",
    }
    return ran([sys.executable, "-c", code], env=variables | environ, timeout=150)


# The second one as Lightning starts its children.
@pytest.mark.parametrize("environ", [{"RANK": "3", "LOCAL_RANK": "1"}, {"LOCAL_RANK": "3"}])
def test_an_uncaught_error_is_kept_and_still_shown(tmp_path, environ):
    ended = python("def f(): raise KeyError('ä')\nf()", tmp_path, **environ)
    assert ended.returncode == 1
    assert "KeyError" in ended.stderr
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())["message"]
    assert (kept["extraInfo"]["rank"], kept["message"]) == (3, "KeyError: 'ä'")
    assert "in f" in kept["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise KeyboardInterrupt"])
def test_an_exit_and_ctrl_c_are_no_failures_of_a_rank(tmp_path, code):
    python(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_no_rank_is_left_alone(tmp_path):
    code = "import sys; print(sys.excepthook is sys.__excepthook__); raise ValueError('x')"
    ended = python(code, tmp_path, is_rank=False)
    assert ended.stdout == "True\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("import sys; sys.theirs_ran = __name__\n", ("sitecustomize\n", "")),
        ("1 / 0\n", ("no\n", "stoker: sitecustomize: ZeroDivisionError: division by zero\n")),
    ],
    ids=["runs too", "is broken: one line"],
)
def test_the_next_sitecustomize_runs_too_and_breaks_nothing(tmp_path, theirs, said):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text(theirs)
    code = "import sys; print(getattr(sys, 'theirs_ran', 'no'))"
    ended = python(code, tmp_path, path=str(tmp_path / "theirs"))
    assert (ended.stdout, ended.stderr) == said


def test_a_failure_that_cannot_be_kept_is_one_more_line(tmp_path):
    ended = python(
        "raise ValueError('x')", tmp_path, TORCHELASTIC_ERROR_FILE="/proc/nowhere/error.json"
    )
    assert ended.returncode == 1
    assert ended.stderr.count("stoker: sitecustomize:") == 1
    assert "ValueError: x" in ended.stderr


def test_nothing_heavy_is_imported_at_start(tmp_path):
    code = "import sys; print(sorted({n.split('.')[0] for n in sys.modules}))"
    ours = set(json.loads(python(code, tmp_path).stdout.replace("'", '"')))
    assert not ours & {"stoker", "torch", "json", "traceback", "msgspec", "zmq", "numpy"}


LOOK = (
    "import sys\n"
    "print('replaced', 'stoker.feed.replace' in sys.modules)\n"
    "print('finder left', any('torch' in getattr(f, '_missing', ()) for f in sys.meta_path))\n"
)


def test_no_replacement_is_installed_where_none_is_asked_for(tmp_path):
    ended = python(f"import torch\nfrom torch.utils.data import DataLoader\n{LOOK}", tmp_path)
    assert (ended.stdout, ended.stderr) == ("replaced False\nfinder left False\n", "")


def test_torchs_loader_is_replaced_where_that_is_asked_for(tmp_path):
    code = (
        f"from torch.utils.data import DataLoader\n{LOOK}"
        "print(type(iter(DataLoader([1, 2]))).__module__)\n"
    )
    source = str(Path(stoker.__file__).parents[1])
    ended = python(code, tmp_path, path=source, RUN_REPLACE_DATALOADER="true")
    installed = "replaced True\nfinder left False\n"
    assert ended.stdout == f"{installed}stoker.feed.iterators\n", ended.stderr
    assert "stoker: sitecustomize" not in ended.stderr


def test_an_error_of_the_replacement_is_one_line_and_torch_still_works(tmp_path):
    code = "import torch, torch.utils.data; print(torch.ones(1).item())"
    ended = python(code, tmp_path, STOKER_RUN='{"profile": "no section"}')
    assert ended.stdout == "1.0\n"
    # The probes of torch's loader and of stoker.timed say the same.
    (line,) = set(ended.stderr.splitlines())
    assert line.startswith("stoker: sitecustomize: ")
