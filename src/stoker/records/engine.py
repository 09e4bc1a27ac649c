"""Engines, which make data on the data group: settings, presets, checks, and places in commands.

docs/engines.md lists the places. `{{host}}` is a literal `{host}`; other braces stay as they are.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from stoker.errors import UsageError
from stoker.records.base import Command, Name, NonNegativeInt, Place, PositiveFloat, Record, nearest

Strategy = Literal["torchrun", "smddp", "mpi", "none"]
StrategyName = Literal["auto", Strategy]
EngineName = Literal["feed", "command", "tf.data.service", "ray"]
# SageMaker's data-parallel library: no newer types, and PyTorch up to 2.4.1 (library 2.5.0 of
# October 2024, the last one).
SMDDP_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p3dn.24xlarge", "ml.p3.16xlarge")
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# Places without a port, and those that may have one: `{address}`, `{address:PORT}`.
PLAIN = (
    *("host", "index", "data_hosts", "dnn_hosts", "workers"),
    *("input", "output", "secret_file", "engines"),
)
WITH_PORT = ("address", "leader", "data_addresses", "dnn_addresses")
TF_CONFIG = "tf_config"
TF_TASKS = ("chief", "worker", "ps")
NAMES = (*PLAIN, *WITH_PORT, TF_CONFIG)
PORT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NAMED = r"([A-Za-z][A-Za-z0-9_-]*)(?::([A-Za-z][A-Za-z0-9_-]*))?"
# Doubled braces first: what stays of them is group 1; a place is in groups 4 and 5.
_PLACE = re.compile(rf"\{{(\{{{_NAMED}\}})\}}|\{{{_NAMED}\}}")
# The presets run example programs that come with stoker. -P: a file in the training's folder may
# have the name of a module that the server imports.
_TF_DATA = ("python", "-P", "{engines}/tf_server.py")
_RAY_NODE = (
    *("--gcs", "{leader:gcs}", "--address", "{address}", "--cpus", "{workers}"),
    *("--ports", "{node_manager},{object_manager},{client}", "--joined", "{joined}"),
)
# Ray does not encrypt by default, but it can ask for a token.
_RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{secret_file}"}
_MAX_PORT = 65535


class StrategySettings(Record, frozen=True, kw_only=True):
    """How the training's processes start on the hosts of the dnn group.

    Attributes:
        name: `auto`: torchrun if more than one process trains, else none; `torchrun`: a process per
            rank; `smddp`: the same with SageMaker's library; `mpi`: mpirun; `none`: a process per
            host.
        max_restarts: torchrun, smddp: how often all ranks restart after one failed.
        fallback: smddp: backend if SageMaker's is missing. None: the run is refused.
        mpi_arguments: mpi: more arguments of mpirun, such as `["-x", "NCCL_DEBUG=INFO"]`.
    """

    name: StrategyName = "auto"
    max_restarts: NonNegativeInt = 0
    fallback: Literal["nccl", "gloo"] | None = None
    mpi_arguments: tuple[str, ...] = ()

    def misfit(self) -> tuple[str, str] | None:
        """Returns a key that this strategy does not use, and the strategies that use it; else None.

        `auto` may become torchrun, so it accepts torchrun's keys.
        """
        if self.max_restarts and self.name not in ("auto", "torchrun", "smddp"):
            return "max_restarts", "torchrun and smddp"
        if self.fallback and self.name != "smddp":
            return "fallback", "smddp"
        if self.mpi_arguments and self.name != "mpi":
            return "mpi_arguments", "mpi"
        return None

    def refusal(self, *, instance_type: str, processes_per_host: int) -> tuple[str, str] | None:
        """Returns why a dnn group of these hosts cannot train so, and what to do; None: it can."""
        if self.name == "none" and processes_per_host > 1:
            return (
                f"strategy none starts one process per host, not {processes_per_host}",
                "use torchrun or mpi",
            )
        is_smddp = self.name == "smddp" and self.fallback is None
        if is_smddp and f"ml.{instance_type.removeprefix('ml.')}" not in SMDDP_TYPES:
            return (
                f"SageMaker's data-parallel library does not support {instance_type}, only "
                + ", ".join(SMDDP_TYPES),
                "use torchrun, or strategy: {name: smddp, fallback: nccl}",
            )
        return None


# omit_defaults here and below: the engine travels in a variable, of 512 characters on SageMaker.
class ReadyProbe(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Test whether an engine's server is ready.

    Attributes:
        port: Name of the engine's port that must accept connections.
        path: Path on that port that must answer an HTTP request with a code below 400.
        seconds: Timeout from the start of the command.
    """

    port: Name
    path: str | None = None
    seconds: PositiveFloat = 120.0


class EngineCommand(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A command that an engine runs on each host of a group, or on the leader.

    It runs in the foreground: if it ends before the training, it has failed.

    Attributes:
        command: Program and arguments, with places such as `{address}` or `{leader}`: see
            docs/engines.md.
        ready: When it counts as ready. None: at once.
        environment: More variables for it, with the same places.
        needs_workers: Whether it runs only on hosts with data workers.
        followers_only: Whether it does not run on the first dnn host.
    """

    command: Command
    ready: ReadyProbe | None = None
    environment: dict[Name, str] = {}
    needs_workers: bool = False
    followers_only: bool = False


class EngineSettings(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The program that makes data on the data group. Without a data group it does not run.

    Attributes:
        name: `feed`: stoker's own; `command`: the commands below; `tf.data.service`, `ray`:
            presets.
        leader: Command on the first dnn host only: a dispatcher, a head.
        dnn: Command on every dnn host.
        data: Command on every data host.
        ports: TCP ports by name, equal on every host. The local platform replaces them by free
            ones.
        environment: More variables for the training command, with the places of the commands.
        stop_seconds: Seconds after the end of the training until the commands are killed.
        needs_all: Whether losing a data host fails the run, unless lost hosts restart (Kubernetes).
            None: yes for tf.data.service and ray, whose training runs would hang.
    """

    name: EngineName = "feed"
    leader: EngineCommand | None = None
    dnn: EngineCommand | None = None
    data: EngineCommand | None = None
    ports: dict[Name, Port] = {}
    environment: dict[Name, str] = {}
    stop_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0
    needs_all: bool | None = None


class EngineHost(Record, frozen=True, kw_only=True):
    """How other hosts reach one host's servers of an engine.

    Attributes:
        address: Name or address.
        ports: In place of the engine's own.
    """

    address: Name
    ports: dict[Name, Port] = {}


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """A place to fill in, in a text: `{name}`, or `{name:port}`."""

    name: str
    port: str = ""

    def __str__(self) -> str:
        return "{" + self.name + (f":{self.port}" if self.port else "") + "}"


def places_in(text: str) -> Iterator[EnginePlace]:
    """Yields the places in a text, known or not."""
    for place in _PLACE.finditer(text):
        if not place[1]:
            yield EnginePlace(place[4], place[5] or "")


def fill(text: str, value_of: Callable[[EnginePlace], str]) -> str:
    return _PLACE.sub(
        lambda found: found[1] or value_of(EnginePlace(found[4], found[5] or "")), text
    )


def _mistake(
    place: EnginePlace, ports: Mapping[str, int]
) -> tuple[str, str, tuple[str, ...]] | None:
    """Returns what is wrong with a place, the wrong word, and the valid ones; or None."""
    if place.name == TF_CONFIG:
        # TF_CONFIG has an address and a port for each task.
        tasks = tuple(task for task in TF_TASKS if task in ports)
        words = f"{place}: expected {{tf_config:TASK}} with a task that has a port"
        if place.port in tasks:
            return None
        return (words, place.port, tasks or TF_TASKS)
    is_plain = place.name in PLAIN or place.name in ports
    if not is_plain and place.name not in WITH_PORT:
        return f"unknown place {place}", place.name, (*NAMES, *ports)
    if is_plain and place.port:
        return f"{place}: {place.name} takes no port", place.name, WITH_PORT
    if place.port and place.port not in ports:
        return f"{place}: the engine has no port {place.port}", place.port, tuple(ports)
    return None


_TF_DATA_WORKER = EngineCommand(
    command=(
        *(*_TF_DATA, "worker", "--dispatcher", "{leader:dispatcher}"),
        *("--address", "{address:worker}", "--cores", "{workers}"),
    ),
    ready=ReadyProbe(port="worker"),
    needs_workers=True,
)


def _ray(role: str, *, followers_only: bool = False) -> EngineCommand:
    return EngineCommand(
        command=("python", "-P", "{engines}/ray_node.py", role, *_RAY_NODE),
        # Opened by ray_node when the node has joined; Ray's own ports open earlier.
        ready=ReadyProbe(port="joined"),
        environment=_RAY_TOKEN,
        followers_only=followers_only,
    )


PRESETS: Mapping[EngineName, EngineSettings] = {
    "tf.data.service": EngineSettings(
        name="tf.data.service",
        leader=EngineCommand(
            command=(*_TF_DATA, "dispatcher", "--port", "{dispatcher}"),
            ready=ReadyProbe(port="dispatcher"),
        ),
        dnn=_TF_DATA_WORKER,
        data=_TF_DATA_WORKER,
        ports={"dispatcher": 5050, "worker": 5051},
        # For tf.data.experimental.service.distribute.
        environment={"TF_DATA_SERVICE_ADDRESS": "grpc://{leader:dispatcher}"},
        # A training run waits for a lost worker forever (measured with 2.21).
        needs_all=True,
    ),
    "ray": EngineSettings(
        name="ray",
        leader=_ray("head"),
        # The first dnn host's head is itself a node.
        dnn=_ray("node", followers_only=True),
        data=_ray("node"),
        ports={
            "gcs": 6379,
            "node_manager": 6380,
            "object_manager": 6381,
            "client": 6382,
            "joined": 6383,
        },
        # `ray.init()` finds the cluster with it.
        environment={"RAY_ADDRESS": "{leader:gcs}", "RAY_USAGE_STATS_ENABLED": "0", **_RAY_TOKEN},
        # Tasks that no node can run wait forever.
        needs_all=True,
    ),
}


def completed(settings: EngineSettings) -> EngineSettings:
    """Returns the engine, with its preset in place of what the settings leave open."""
    preset = PRESETS.get(settings.name)
    if preset is None:
        return settings
    return replace(
        settings,
        leader=settings.leader or preset.leader,
        dnn=settings.dnn or preset.dnn,
        data=settings.data or preset.data,
        ports={**preset.ports, **settings.ports},
        environment={**preset.environment, **settings.environment},
        needs_all=preset.needs_all if settings.needs_all is None else settings.needs_all,
    )


def check_engine(engine: EngineSettings, *, taken: Mapping[int, str], place: Place) -> None:
    """Checks an engine's settings before hosts are started.

    Args:
        taken: Ports of the feed, each with the key that sets it.

    Raises:
        UsageError: With the key, and the nearest known word for an unknown one.
    """
    whole = completed(engine)
    if engine.name == "feed":
        if engine != EngineSettings():
            raise UsageError(
                "engine feed takes no other keys",
                where=place.at("engine"),
                fix="set engine.name to command, or remove the other keys",
            )
        return
    if whole.data is None:
        raise UsageError(
            f"engine {engine.name} needs engine.data.command",
            where=place.at("engine"),
            fix="set it to the data group's program and arguments, a list",
        )
    _check_ports(whole, taken, place)
    for group, command in (("leader", whole.leader), ("dnn", whole.dnn), ("data", whole.data)):
        if command:
            _check_command(f"engine.{group}", command, whole, place)
    for name, text in whole.environment.items():
        _check_variable(f"engine.environment.{name}", name, text, whole, place)


def _check_ports(engine: EngineSettings, taken: Mapping[int, str], place: Place) -> None:
    numbers = dict(taken)
    for name, number in engine.ports.items():
        key = f"engine.ports.{name}"
        if not PORT_NAME.fullmatch(name) or name in NAMES:
            fix = "use letters, digits, _ and -, with a letter first, and none of: "
            fix += ", ".join(sorted(NAMES))
            raise UsageError(f"invalid port name {name}", where=place.at(key), fix=fix)
        if number in numbers:
            used = {*numbers, *engine.ports.values()}
            free = next(number for number in range(5050, _MAX_PORT) if number not in used)
            raise UsageError(
                f"port {number} is already used by {numbers[number]}",
                where=place.at(key),
                fix=f"use another, such as {free}",
            )
        numbers[number] = key


def _check_command(key: str, command: EngineCommand, engine: EngineSettings, place: Place) -> None:
    for index, word in enumerate(command.command):
        _check_text(f"{key}.command[{index}]", word, engine, place)
    for name, text in command.environment.items():
        _check_variable(f"{key}.environment.{name}", name, text, engine, place)
    ready = command.ready
    if ready and ready.port not in engine.ports:
        fix = nearest(ready.port, list(engine.ports))
        fix = fix if engine.ports else f"set engine.ports.{ready.port} to its number"
        what = f"the engine has no port {ready.port}"
        raise UsageError(what, where=place.at(f"{key}.ready.port"), fix=fix)


def _check_variable(key: str, name: str, text: str, engine: EngineSettings, place: Place) -> None:
    if name.startswith("STOKER_") or "=" in name:
        raise UsageError(
            f"an engine cannot set variable {name}",
            where=place.at(key),
            fix="use another name; STOKER_... are reserved",
        )
    _check_text(key, text, engine, place)


def _check_text(key: str, text: str, engine: EngineSettings, place: Place) -> None:
    for named in places_in(text):
        if wrong := _mistake(named, engine.ports):
            what, word, choices = wrong
            fix = nearest(word, choices) if choices else "set engine.ports: names and numbers"
            fix += "; for literal braces: {" + str(named) + "}"
            raise UsageError(what, where=place.at(key), fix=fix)
