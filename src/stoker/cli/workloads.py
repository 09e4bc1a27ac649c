"""Workloads that a command line names: a file, or a bare command."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.catalog import with_pools
from stoker.errors import UsageError
from stoker.host.machine import usable_vcpus
from stoker.host.processes import why_not_found
from stoker.logs import printable
from stoker.parameters import overrides_of, parameter_named, parameters_of
from stoker.records import (
    Json,
    Profile,
    Training,
    Workload,
    close_match,
    to_document,
)
from stoker.workload_file import read_workload, workload_from


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


def with_params(workload: Workload, params: Sequence[str], *, target: str) -> Workload:
    """Applies a run's parameters to the workload; those that only its pipeline has are left out.

    Args:
        workload: Whose pipeline runs.
        params: NAME=VALUE texts.
        target: sagemaker or kubeflow.

    Raises:
        UsageError: Neither the workload nor its pipeline has a parameter of such a name.
    """
    from stoker.cli.compile import has_parameter

    known = {parameter.name for parameter in parameters_of(workload)}
    own = []
    for text in params:
        name = text.partition("=")[0].strip()
        close = close_match(name, sorted(known))
        if parameter_named(name, workload=workload):
            own.append(text)
        elif close and not has_parameter(target, workload, name):
            raise UsageError(
                f"a run of {workload.name} has no parameter {name}", fix=f"did you mean {close}?"
            )
    document = to_document(workload)
    assert isinstance(document, Mapping)
    return workload_from(document, overrides=overrides_of(own, workload=workload))


def resolve(
    words: Sequence[str], *, overrides: Sequence[str], params: Sequence[str] = (), verb: str = ""
) -> Workload:
    """Returns the workload of a file, or one made of a bare command.

    On the local platform the program and the script must exist here; elsewhere they are in the
    image or package. `verb` is for the corrected command line in errors.
    """

    def typed(*words: str) -> str:
        return shlex.join(["stoker", verb, *words])

    if not words:
        raise UsageError(
            "no workload and no command", fix="name a workload file, or a command after --"
        )
    is_document = words[0].lstrip().startswith("{")
    if len(words) == 1 and (is_document or words[0].endswith((".yaml", ".yml", ".json"))):
        workload = read_with_params(words[0], overrides=overrides, params=params)
        if workload.platform_info.is_this_machine:
            # Elsewhere the program is in the image.
            check_command(workload.command, where=f"{words[0]}, key command")
        return workload
    if words[0].endswith((".yaml", ".yml")):
        raise UsageError(
            "a workload cannot be used with a command",
            where=f"command line: {shlex.join(words)}",
            fix=f"leave one out: {typed(words[0])} or {typed('--', *words[1:])}",
        )
    if params:
        raise UsageError("--param needs a workload file", fix="use --set key.path=value")
    if words[0].endswith(".py") and not os.path.dirname(words[0]) and Path(words[0]).is_file():
        # `run` takes workloads only.
        fix = f"stoker init --script {shlex.quote(words[0])}     makes a workload of it"
        if verb:
            fix = typed("--", "python", *words)
        what = f"{words[0]} is a script, not a workload or a program"
        raise UsageError(what, where="command line", fix=fix)
    check_command(words, where="command line")
    return workload_of(words, overrides=overrides, keys=_ranks_here(overrides))


def _ranks_here(overrides: Sequence[str]) -> dict[str, Json]:
    # Today's cluster of a bare command whose number of ranks is set.
    keys = [override.partition("=")[0].strip() for override in overrides]
    is_set = any(key.startswith("cluster.dnn.") for key in keys)
    is_elsewhere = any(each.startswith("platform=") for each in overrides)
    if not is_set or is_elsewhere or "cluster.dnn.instance_type" in keys:
        return {}
    return {"cluster": {"dnn": {"instance_type": f"local.c{usable_vcpus()}"}}}


def workload_of(
    command: Sequence[str], *, overrides: Sequence[str], keys: Mapping[str, Json] | None = None
) -> Workload:
    """Returns a workload for a bare command, named after its script, with other `keys`."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    # Hosts and services allow only these characters.
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower())[:40].strip("-") or "command"
    return workload_from({"name": name, "command": [*command], **(keys or {})}, overrides=overrides)


def workload_of_records(
    training: Training, profile: Profile, *, overrides: Sequence[str]
) -> Workload:
    """Returns the workload of a command that was trained without a workload file."""
    known = training.workload_keys or profile.workload_keys or {}
    command = shlex.split(known.get("command", "")) or ["train"]
    keys: dict[str, Json] = {name: known[name] for name in ("strategy", "engine") if name in known}
    keys["platform"] = training.job.platform
    return workload_of(command, overrides=overrides, keys=keys)


def check_command(command: Sequence[str], *, where: str) -> None:
    """Raises UsageError unless the command's program, and the script of `python SCRIPT`, exist."""
    try:
        # Records are UTF-8: another name of a folder would fail later, in the middle of a run.
        str(Path.cwd()).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the name of this folder is not UTF-8: {printable(str(Path.cwd()))}",
            where=where,
            fix="rename it: records and other hosts use its name",
        ) from None
    program = command[0]
    # `python` is the Python that runs stoker, whether or not it is on the path.
    if shutil.which(program) is None and program not in ("python", "python3"):
        what, fix = why_not_found(program)
        raise UsageError(what, where=where, fix=fix)
    if not Path(program).name.startswith("python"):
        return
    script = next(iter(command[1:]), "")
    if script.endswith(".py") and not Path(script).is_file():
        raise UsageError(
            f"no such script: {script}",
            where=f"{where}, folder {Path.cwd()}",
            fix="run stoker in the project's folder, or correct the path",
        )
