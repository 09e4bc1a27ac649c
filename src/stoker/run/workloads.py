"""Workloads that a command line names: a file, or a bare command; and a file for a command."""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stoker.catalog import with_pools
from stoker.errors import UsageError
from stoker.host.machine import usable_vcpus
from stoker.host.processes import why_not_found
from stoker.parameters import overrides_of
from stoker.records import Json, Workload
from stoker.workload_file import read_workload, workload_from, workload_yaml

_HEAD = """\
# All keys: stoker schema workload. What the model must reach is a gate on what the script reports
# by stoker.log_metrics(accuracy=0.97), or prints: then the gate has a pattern.
# gate:
# - {metric: accuracy, min: 0.95}
# - {metric: accuracy, min: 0.95, regex: 'accuracy (\\S+)'}
"""


def read_with_params(
    file: str, *, overrides: Sequence[str], params: Sequence[str] = ()
) -> Workload:
    """Reads a workload file, and applies a run's parameters, then `overrides`.

    Args:
        file: The workload file, or its text as JSON.
        overrides: KEY=VALUE texts; they win.
        params: NAME=VALUE texts.
    """
    if params:
        known = read_workload(file, overrides=overrides)
        overrides = [*overrides_of(params, workload=known), *overrides]
    return with_pools(read_workload(file, overrides=overrides))


def is_file_of_workload(words: Sequence[str]) -> bool:
    """Whether the words of a command line name a workload, or are its JSON document."""
    return len(words) == 1 and words[0].endswith((".yaml", ".yml", ".json", "}"))


def resolve(words: Sequence[str], *, overrides: Sequence[str]) -> Workload:
    """Returns the workload of a file, or one made of a bare command.

    On the local platform the program and the script must exist here; elsewhere they are in the
    image or package.
    """
    if not words:
        raise UsageError(
            "no workload and no command", fix="name a workload file, or a command after --"
        )
    if is_file_of_workload(words):
        workload = read_with_params(words[0], overrides=overrides)
        if workload.platform_info.is_this_machine:
            _check_command(workload.command, where=f"{words[0][:80]}, key command")
        return workload
    _check_command(words, where="command line")
    if words[0].endswith((".yaml", ".yml")):
        raise UsageError("a workload cannot be used with a command", fix="leave one of them out")
    keys = {override.partition("=")[0].strip() for override in overrides}
    # Today's cluster of a bare command whose number of ranks is set.
    is_here = not keys & {"platform", "cluster.dnn.instance_type"}
    if is_here and any(key.startswith("cluster.dnn.") for key in keys):
        here = f"cluster.dnn.instance_type=local.c{usable_vcpus()}"
        overrides = [here, *overrides]
    return _workload_of(words, overrides=overrides)


def _workload_of(command: Sequence[str], *, overrides: Sequence[str] = ()) -> Workload:
    """Returns a workload for a bare command, named after its script."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    # Hosts and services allow only these characters.
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower())[:40].strip("-") or "command"
    return workload_from({"name": name, "command": [*command]}, overrides=overrides)


def _check_command(command: Sequence[str], *, where: str) -> None:
    """Raises UsageError unless the command's program, and the script of `python SCRIPT`, exist."""
    program, script, *_ = [*command, ""]
    # `python` is the Python that runs stoker, whether or not it is on the path.
    is_python = program in ("python", "python3")
    if not is_python and shutil.which(program) is None:
        what, fix = why_not_found(program)
        raise UsageError(what, where=where, fix=fix)
    if is_python and script.endswith(".py") and not Path(script).is_file():
        raise UsageError(
            f"no such script: {script}",
            where=f"{where}, folder {Path.cwd()}",
            fix="run stoker in the project's folder, or correct the path",
        )


def workload_text(command: Sequence[str]) -> tuple[str, str]:
    """Returns name and YAML text of the workload of a command."""
    kept, hyperparameters = parted_command(command)
    name = _workload_of(command).name
    body = (
        f"name: {name}\ncommand: {json.dumps(kept, ensure_ascii=False)}\n"
        "# Where it trains today: local.cN is N cores of this machine.\n"
        f"cluster:\n  dnn: {{instance_type: local.c{usable_vcpus()}, count: 1}}\n"
    )
    if hyperparameters:
        body += workload_yaml({"hyperparameters": hyperparameters})
    return name, body + _HEAD


def parted_command(words: Sequence[str]) -> tuple[list[str], dict[str, Json]]:
    """Returns the command without its last options, and these as hyperparameters.

    What stands before the last `--name value` or `--name=value`, or is no such option, stays in the
    command; of an option that is given twice the last one is a hyperparameter.
    """
    kept = [*words]
    found: dict[str, Json] = {}
    while len(kept) > 2:
        number = 1 if kept[-1].startswith("--") else 2
        option = kept[-2:] if number == 2 else kept[-1].split("=", 1)
        name = option[0][2:]
        if len(option) < 2 or not re.fullmatch("--[^=]{2,}", option[0]) or name in found:
            break
        found = {name: _typed(option[1]), **found}
        del kept[-number:]
    return kept, found


def _typed(word: str) -> Json:
    """Returns a value that the script gets as the same number or text."""
    with suppress(ValueError):
        number: Json = json.loads(word)
        if isinstance(number, int | float) and str(number) == word:
            return number
    return word
