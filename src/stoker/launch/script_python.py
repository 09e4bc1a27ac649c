"""The Python that runs the training script: whether stoker can feed it, before it starts.

The command may start a Python that is not stoker's: of another environment, or another version.
A short program of a few imports, run by that Python in the command's environment, tells. Commands
that are no Python, such as shell scripts, are not looked into: `startup.sitecustomize` tells of the
Pythons that they start.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.errors import UsageError
from stoker.feed import why_unfed
from stoker.feed.rank_reports import Loading
from stoker.feed.why_unfed import WhyUnfed
from stoker.feed.wire.protocol import PROTOCOL_VERSION
from stoker.launch.strategies.start import STARTUP_DIR
from stoker.launch.supervise import resolve_program
from stoker.platforms.base import JobSpec

# A Python that takes longer to import stoker is on a slow disk: the training is started.
PROBE_SECONDS = 60.0
_PYTHON = re.compile(r"^(python|pypy)[\d.]*$")
# Options of Python with a value; after the last two comes the program.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_PROGRAM = ("-c", "-m")
_HEAD_BYTES = 512
# Printed last, as `sitecustomize` of the user may print, too.
_MARK = "stoker-python: "
_PROBE = """
import json, os, sys
sys.path[:] = [path for path in sys.path if path]
said = {"python": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3], "problem": ""}
said["has_startup"] = any(path and os.path.samefile(path, FOLDER)
                          for path in sys.path if os.path.isdir(path))
try:
    from stoker.feed.wire import protocol
    import cloudpickle, zmq
    said["protocol"] = protocol.PROTOCOL_VERSION
except Exception as err:
    said["problem"] = "%s: %s" % (type(err).__name__, err)
print("\\n" + MARK + json.dumps(said))
"""


class ScriptPython(msgspec.Struct, frozen=True, kw_only=True):
    """A Python that will run the training script.

    Attributes:
        python: The interpreter.
        version: Its version.
        problem: What its import of stoker raised; empty: nothing.
        protocol: The version of its stoker's messages.
        has_startup: Whether it has stoker's startup folder on its path.
        options: Its options before the program.
    """

    python: str
    version: str
    problem: str = ""
    protocol: int | None = None
    has_startup: bool = True
    options: tuple[str, ...] = ()

    def why_unfed(self, *, hosts: str = "") -> WhyUnfed | None:
        """Returns why stoker cannot feed a script that it runs; None: nothing is known against it.

        A Python that ignores PYTHONPATH is not refused: the script may import stoker itself.

        Args:
            hosts: Python version of the data hosts; empty: not known.
        """
        if self.problem:
            return why_unfed.no_stoker(
                self.python, version=self.version, problem=self.problem, own=sys.executable
            )
        if self.protocol != PROTOCOL_VERSION:
            return why_unfed.other_stoker(
                self.python, theirs=self.protocol or 0, own=PROTOCOL_VERSION
            )
        # Functions are sent as byte code, which differs between minor versions.
        if hosts and self.version.split(".")[:2] != hosts.split(".")[:2]:
            return why_unfed.other_python(
                self.version, own=hosts, who="the data hosts run", python=self.python
            )
        return None

    def loading(self) -> Loading:
        """Returns what the launcher knows of it, for the end of a run whose script says nothing."""
        return Loading(python=self.python, version=self.version, options=self.options)


def refuse_unfed_script(job: JobSpec, environ: Mapping[str, str]) -> None:
    """Raises UsageError if stoker cannot feed a job's script on this machine, before it starts.

    Blocks while a Python that is not stoker's imports stoker, PROBE_SECONDS at most.
    """
    is_fed = job.settings.engine.name == "feed" and job.settings.profile is None
    if not is_fed or not any(group.role == "data" for group in job.groups):
        return
    all_variables = {**environ, **job.environment}
    command = resolve_program(job.command, all_variables)
    python = script_python(command, environ=all_variables) if command else None
    why = python.why_unfed(hosts=platform.python_version()) if python else None
    if why is not None:
        raise UsageError(why.what, where=f"command {shlex.join(job.command)}", fix=why.fix)


def script_python(
    command: Sequence[str], *, environ: Mapping[str, str], folder: Path | None = None
) -> ScriptPython | None:
    """Returns the Python that a command starts, if it is not stoker's own, and it answers.

    Blocks while it imports stoker, PROBE_SECONDS at most.

    Args:
        command: As it is started: the program's path, and arguments.
        environ: Its environment.
        folder: The folder in which it will run.
    """
    python = interpreter_of(command)
    # Nearly always: this very Python.
    if not python or python == (sys.executable,):
        return None
    return ask_python(python, environ=environ, folder=folder)


def interpreter_of(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the Python that a command starts, with its options; empty: it starts none itself.

    Args:
        command: The program's path, and arguments.
    """
    program = command[0]
    if _PYTHON.match(Path(program).name):
        return (program, *_options(command[1:]))
    try:
        with open(program, "rb") as file:
            head = file.read(_HEAD_BYTES).partition(b"\n")[0]
    except OSError:
        return ()
    # Of programs that pip installs: torchrun, accelerate.
    # A script's first line names its interpreter.
    words = os.fsdecode(head[2:]).split() if head.startswith(b"#!") else []
    if not words or not _PYTHON.match(Path(words[0]).name):
        return ()
    return (words[0], *_options(words[1:]))


def ask_python(
    python: Sequence[str], *, environ: Mapping[str, str], folder: Path | None = None
) -> ScriptPython | None:
    """Returns what a Python says of its stoker; None: it does not answer.

    Blocks while it imports stoker: 0.2 s, PROBE_SECONDS at most.

    Args:
        python: The interpreter, and its options.
        environ: The environment of the command.
        folder: The folder in which the command will run.
    """
    # Without a launcher's variables, for which `sitecustomize` would take it for a rank.
    quiet = {name: text for name, text in environ.items() if not name.startswith("STOKER_")}
    places = (str(STARTUP_DIR), environ.get("PYTHONPATH", ""))
    quiet["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    probe = f"FOLDER, MARK = {str(STARTUP_DIR)!r}, {_MARK!r}\n{_PROBE}"
    try:
        done = subprocess.run(
            [*python, "-c", probe],
            env=quiet,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        # The command's own start will tell.
        return None
    # The last one, as what the user's code prints may look alike.
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    try:
        answer = json.loads(answers[-1].removeprefix(_MARK))
        return msgspec.convert({**answer, "options": tuple(python[1:])}, ScriptPython)
    except (IndexError, ValueError):
        return None


def _options(words: Sequence[str]) -> tuple[str, ...]:
    options: list[str] = []
    is_value = False
    for word in words:
        is_option = word.startswith("-") and word not in ("-", "--", *_PROGRAM)
        if not is_value and not is_option:
            break
        options.append(word)
        is_value = not is_value and word in _WITH_VALUE
    return tuple(options)
