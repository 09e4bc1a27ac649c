"""`stoker VERB`, forked of a process that has imported it: a start takes 0.8 CPU-seconds.

As a script: a line of JSON in, {"argv", "cwd", "env", "out", "err"}, and one out, the exit code.
One command after the other; each has the variables, folder and output that it is given. What one
has imported of stoker is imported for the next.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn


@functools.cache
def _server() -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.kill)
    return server


def ran(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None
) -> "subprocess.CompletedProcess[str]":
    """Runs `stoker WORDS` to its end."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        given = {"argv": ["stoker", *words], "cwd": str(cwd), "out": out.name, "err": err.name}
        print(json.dumps({**given, "env": dict(env or os.environ)}), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _become(verbs: Callable[[], None], given: dict, imported: int) -> NoReturn:
    os.setsid()
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    for number, path in enumerate((os.devnull, given["out"], given["err"])):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.argv[:] = given["argv"]
    code = 0
    try:
        verbs()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        with open(imported, "w") as file:
            file.write("\n".join(each for each in sys.modules if each.startswith("stoker.")))
        os._exit(code)


def _forked(verbs: Callable[[], None], given: dict) -> int:
    theirs, ours = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(theirs)
        _become(verbs, given, ours)
    os.close(ours)
    with open(theirs) as file:
        # An empty text if it was killed; what it started does not have the pipe.
        names = file.read().split()
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    (script,) = entry_points(group="console_scripts", name="stoker")
    verbs = script.load()
    for line in sys.stdin:
        print(_forked(verbs, json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
