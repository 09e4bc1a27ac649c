"""Workloads (`settings` reads them), groups and run folders that a command line names."""

import contextlib
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.catalog import local_instance, with_pools
from stoker.errors import UsageError
from stoker.host.machine import usable_vcpus
from stoker.host.processes import why_not_found
from stoker.logs import printable
from stoker.parameters import overrides_of, parameter_named, parameters_of, parse
from stoker.records import (
    Cluster,
    Group,
    Json,
    Profile,
    Role,
    TodaysGroup,
    Training,
    Workload,
    close_match,
    nearest,
    read_json,
    to_document,
)
from stoker.records.platforms import NAME_END
from stoker.records.workload import refuse_foreign
from stoker.workload_file import read_workload, workload_from

RUNS = Path("runs")
_ROLES: tuple[Role, ...] = ("dnn", "data")


def read_with_params(
    file: str, *, overrides: Sequence[str], params: Sequence[str] = ()
) -> Workload:
    """Reads a workload file, and applies a run's parameters, then `overrides`."""
    if params:
        known = read_workload(file, overrides=overrides)
        overrides = [*overrides_of(params, workload=known), *overrides]
    return with_pools(read_workload(file, overrides=overrides))


def with_params(workload: Workload, params: Sequence[str], *, target: str) -> Workload:
    """Applies a run's parameters to the workload; those that only its pipeline has are left out."""
    from stoker.cli.compile import has_parameter

    known = {name for p in parameters_of(workload) for name in (p.name, p.camel_name)}
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
        raise UsageError(
            f"{words[0]} is a script, not a workload or a program",
            where="command line",
            # `run` takes workloads only.
            fix=typed("--", "python", *words)
            if verb
            else f"stoker init --script {shlex.quote(words[0])}     makes a workload of it",
        )
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
    is_python = Path(program).name.startswith("python")
    script = command[1] if is_python and len(command) > 1 else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise UsageError(
            f"no such script: {script}",
            where=f"{where}, folder {Path.cwd()}",
            fix="run stoker in the project's folder, or correct the path",
        )


def region_of(workload: Workload) -> str | None:
    return workload.sagemaker.region if workload.sagemaker else None


def todays_cluster(workload: Workload, *, all_cores: bool = False) -> Cluster:
    """Returns today's cluster; raises UsageError in a cloud if the workload names none.

    By default it is one core of this machine; or, as for a bare command without stoker,
    `all_cores` that it may use.
    """
    if workload.cluster:
        return workload.cluster
    if workload.platform_info.is_this_machine:
        cores = usable_vcpus() if all_cores else 1
        return Cluster(dnn=TodaysGroup(instance_type=f"local.c{cores}", count=1))
    raise UsageError(
        "the workload does not name the cluster on which it trains today",
        where=f"workload {workload.name}, key cluster",
        fix="add cluster: {dnn: {instance_type: ..., count: ...}}",
    )


def reused_profile(workload: Workload, params: Sequence[str]) -> Profile | None:
    """Returns the profile of the parameter reuse_profile, a text or a file, if it is set."""
    given = parse(params, workload=workload).get("reuse_profile", "") if params else ""
    if not given:
        return None
    profile = read_json(given, Profile)
    refuse_foreign(
        "profile",
        keys=profile.workload_keys,
        digest=profile.workload_sha256,
        workload=workload,
        where="--param reuse_profile",
        fix="leave it out, or name a profile of this one",
    )
    return profile


def _made(name: str, *, may_exist: bool) -> Path:
    """Makes runs/NAME, in a temporary folder where this folder cannot be written.

    A pipeline's step may run as another user than the image's.
    """
    runs = RUNS
    if not os.access(RUNS if RUNS.exists() else Path(), os.W_OK):
        runs = Path(tempfile.gettempdir()) / RUNS
    try:
        (runs / name).mkdir(parents=True, exist_ok=may_exist)
    except OSError as err:
        if isinstance(err, FileExistsError) and not may_exist:
            raise
        raise UsageError(
            f"cannot make a run folder: {err}", where=str(runs), fix="check its permissions"
        ) from None
    return runs / name


def named_run_dir(name: str) -> Path:
    """Makes runs/NAME, or uses the one of an earlier attempt."""
    from stoker.platforms.base import check_run_name

    check_run_name(name, most=63)
    return _made(name, may_exist=True)


def run_base(workload: Workload, *, kind: str = "") -> str:
    """Returns how the names of a workload's runs begin, for `new_run_dir`.

    Args:
        workload: Its name comes first; on SageMaker no other workload's runs begin alike.
        kind: What follows, such as profile; empty: nothing.
    """
    if workload.platform == "sagemaker":
        # `new_run_dir` adds a dash.
        return f"{workload.name}{NAME_END}{kind}" if kind else f"{workload.name}{NAME_END[1:]}"
    return f"{workload.name}-{kind}" if kind else workload.name


def new_run_dir(name: str) -> Path:
    """Makes the new folder runs/NAME-DATE-TIME."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # `mkdir` is atomic: two runs that begin in the same second get two folders.
    for suffix in ["", *(f"-{n}" for n in range(2, 100))]:
        with contextlib.suppress(FileExistsError):
            return _made(f"{name}-{stamp}{suffix}", may_exist=False)
    raise UsageError("too many runs were started within one second", where=str(RUNS.absolute()))


def latest_run_dir(workload: Workload, *, needs: Sequence[str]) -> Path:
    """Returns the newest run of the same workload that has the files in `needs`.

    If there is none, the UsageError says what differs from the newest run of that name.
    """
    begin = f"{workload.name}-"
    # Runs of this name first, as a workload may have been renamed; then the newest.
    found = sorted(
        RUNS.glob("*/workload.json"),
        key=lambda file: (not file.parent.name.startswith(begin), -file.stat().st_mtime),
    )
    foreign: UsageError | None = None
    for file in found:
        if not all((file.parent / name).is_file() for name in needs):
            continue
        try:
            ran = read_json(file, Workload)
            refuse_foreign(
                "profile",
                keys=ran.profile_keys(),
                digest=ran.digest(),
                workload=workload,
                where=str(file.parent),
                fix="leave --from out: what was changed needs a new profile",
            )
        except UsageError as err:
            foreign = foreign or err
        else:
            return file.parent
    raise foreign or UsageError(
        f"no earlier run of this workload has {', '.join(needs)}",
        where=f"folder {RUNS.resolve()}, workload {workload.name}",
        fix="leave --from out",
    )


def _example(default_type: str | None) -> str:
    # With types of the platform in use.
    if default_type is None or local_instance(default_type):
        return "for example --group dnn=local.c1:1 --group data=local.c1:1:1"
    return "for example --group dnn=1 --group data=ml.c7i.8xlarge:2:32"


def parse_groups(texts: Sequence[str], *, default_type: str | None) -> tuple[Group, ...]:
    """Returns the groups of a cluster, dnn first, each from `ROLE=[TYPE:]HOSTS[:WORKERS]`."""
    groups = [_parse(text, default_type=default_type) for text in texts]
    roles = [group.role for group in groups]
    for role in _ROLES:
        if roles.count(role) > 1:
            raise UsageError(f"--group {role}=... is given twice", fix="name each role once")
    if "dnn" not in roles:
        raise UsageError(
            "--group dnn=... is missing: it is the group that trains", fix=_example(default_type)
        )
    return tuple(sorted(groups, key=lambda group: group.role != "dnn"))


def groups_of(workload: Workload, texts: Sequence[str]) -> tuple[Group, ...]:
    """Returns the groups named on the command line, else today's dnn group."""
    today = todays_cluster(workload).dnn
    if not texts:
        return (Group.of_today(today),)
    dnn, *data = parse_groups(texts, default_type=today.instance_type)
    # Another type has other accelerators, and by default a process for each. On this machine any
    # number of cores is the same type.
    types = (dnn.instance_type, today.instance_type)
    if len(set(types)) == 1 or all(local_instance(name) for name in types):
        dnn = msgspec.structs.replace(dnn, processes_per_host=today.processes_per_host)
    return (dnn, *data)


def _parse(text: str, *, default_type: str | None) -> Group:
    example = _example(default_type)
    name, equals, rest = text.partition("=")
    role = next((known for known in _ROLES if known == name), None)
    if not equals or role is None:
        hint = nearest(name, _ROLES) if equals else example
        raise UsageError(f"--group {text} is not ROLE=[TYPE:]HOSTS[:WORKERS]", fix=hint)
    parts = rest.split(":")
    instance_type = default_type if _is_number(parts[0]) else parts.pop(0)
    if not instance_type:
        raise UsageError(f"--group {text} names no instance type", fix=example)
    if not 1 <= len(parts) <= 2 or not all(_is_number(part) for part in parts):
        raise UsageError(f"--group {text}: expected [TYPE:]HOSTS[:WORKERS] after =", fix=example)
    hosts, workers = int(parts[0]), int(parts[1]) if len(parts) == 2 else None
    if hosts < 1:
        raise UsageError(
            f"--group {text}: a group has at least one host", fix="leave the group out"
        )
    if role == "data" and workers == 0:
        raise UsageError(
            f"--group {text}: data hosts need workers", fix="leave :WORKERS out, or give at least 1"
        )
    return Group(
        name=role, role=role, instance_type=instance_type, count=hosts, workers_per_host=workers
    )


def _is_number(text: str) -> bool:
    # int() also takes digits of other scripts, signs and underscores.
    return text.isascii() and text.isdigit()
