"""A training command that runs scripts as its children, one or many at a time: `FOLDER`.

A script is a folder in FOLDER with `job.json`: {"argv": [...], "env": {...}, "is_cold": bool}.
Its working folder is `work` in there, its streams are `in` (a pipe with a name), `out` and `err`;
`code` is its exit code. It is forked of this process, which has torch, unless it is cold. `fed` is
there if a process that is none of the script's was seen in its working folder: a data host's, which
works where the script works. The command ends when FOLDER has `end`.
"""

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import numpy  # noqa: F401
import torch
import torch.utils.data

LOOK_SECONDS = 0.04
MAX_SECONDS = 400
PR_SET_PDEATHSIG = 1


def become_script(job: Path, given: dict) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(job / "work")
    for number, name in enumerate(("in", "out", "err")):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDWR
        os.dup2(os.open(job / name, flags), number)
    if given["is_cold"]:
        os.execve(sys.executable, [sys.executable, *given["argv"]], os.environ | given["env"])
    os.environ.update(given["env"])
    sys.argv[:] = given["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    code = 1
    try:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except Exception:
            # It may set the exit code.
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_of(pid: int, script: int) -> bool:
    """Whether the process is the script's, or has ended meanwhile."""
    while pid > 1:
        try:
            if pid == script or os.getsid(pid) == script:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return True
    return False


def look(running: dict[int, Path]) -> None:
    for name in os.listdir("/proc"):
        try:
            folder = os.readlink(f"/proc/{name}/cwd") if name.isdigit() else ""
        except OSError:
            continue
        for script, job in running.items():
            if f"{folder}/".startswith(f"{job}/work/") and not is_of(int(name), script):
                (job / "fed").touch()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    # Else each script has as many threads as the machine has cores.
    torch.set_num_threads(1)
    (folder / "pid").write_text(str(os.getpid()))
    running: dict[int, Path] = {}
    begun: dict[int, float] = {}
    seen: set[Path] = set()
    while running or not (folder / "end").exists():
        for file in sorted({*folder.glob("*/job.json")} - seen):
            seen.add(file)
            pid = os.fork()
            if not pid:
                become_script(file.parent, json.loads(file.read_text()))
            running[pid], begun[pid] = file.parent, time.monotonic()
        if unseen := {pid: job for pid, job in running.items() if not (job / "fed").exists()}:
            look(unseen)
        for pid, job in [*running.items()]:
            if time.monotonic() - begun[pid] > MAX_SECONDS:
                os.killpg(pid, signal.SIGKILL)
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                (job / "code.new").write_text(str(code))
                (job / "code.new").rename(job / "code")
                del running[pid]
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
