"""An engine makes data on the data group: its settings, its commands, and the places in them.

Engines that are known by name have presets; `check_engine` finds what does not agree.

| place | on each host stands for |
| --- | --- |
| {PORT} | the number of the engine's port of that name |
| {host}, {address} | this host's name; the address under which the others reach it |
| {index} | this host's number in its group, from 0 |
| {leader} | the address of the first dnn host |
| {data_hosts}, {dnn_hosts} | names of the hosts, with commas |
| {data_addresses}, {dnn_addresses} | their addresses, with commas |
| {workers} | data workers of this host: the plan's, else its cores; on dnn hosts local workers |
| {input}, {output} | folders: of the channels, and for what is to be kept |
| {secret_file} | a file with a secret of this run, which all its hosts have: 64 hex digits |
| {tf_config:TASK} | TensorFlow's TF_CONFIG; chief: leader, worker: dnn hosts, ps: data hosts |

`{address:PORT}`, `{leader:PORT}`, `{data_addresses:PORT}` and `{dnn_addresses:PORT}` put a port
behind each address. `{{host}}` stands for `{host}` itself; other braces are left as they are.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from stoker.errors import UsageError
from stoker.records.base import Name, NonNegativeInt, Place, PositiveFloat, Record, nearest

Strategy = Literal["torchrun", "smddp", "mpi", "none"]
StrategyName = Literal["auto", Strategy]
EngineName = Literal["feed", "command", "tf.data.service", "ray"]
# What SageMaker's data-parallel library runs on; p3 types are no longer developed. No newer type is
# supported, nor PyTorch beyond 2.4.1 (library 2.5.0 of October 2024, the last one).
SMDDP_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p3dn.24xlarge", "ml.p3.16xlarge")
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# Places without a port, and those that may have one: `{address}`, `{address:PORT}`.
PLAIN = ("host", "index", "data_hosts", "dnn_hosts", "workers", "input", "output", "secret_file")
WITH_PORT = ("address", "leader", "data_addresses", "dnn_addresses")
TF_CONFIG = "tf_config"
TF_TASKS = ("chief", "worker", "ps")
NAMES = (*PLAIN, *WITH_PORT, TF_CONFIG)
PORT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NAMED = r"([A-Za-z][A-Za-z0-9_-]*)(?::([A-Za-z][A-Za-z0-9_-]*))?"
# Doubled braces first: what stays of them is group 1; a place is in groups 4 and 5.
_PLACE = re.compile(rf"\{{(\{{{_NAMED}\}})\}}|\{{{_NAMED}\}}")
# -P: without the training's own folder on the path, in which a file may be called as a module that
# the server imports.
_TF_DATA = ("python", "-P", "-m", "stoker.launch.engines.tf_server")
_RAY_NODE = (
    *("--gcs", "{leader:gcs}", "--address", "{address}", "--cpus", "{workers}"),
    *("--ports", "{node_manager},{object_manager},{client}", "--joined", "{joined}"),
)
# Ray has no encryption by default, but a token it has.
_RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{secret_file}"}
_MAX_PORT = 65535


class StrategySettings(Record, frozen=True, kw_only=True):
    """The strategy says how the training's processes are started on the hosts of the dnn group.

    Attributes:
        name: `auto`: torchrun where more than one process trains, else none; `torchrun`: one
            process per rank; `smddp`: torchrun with SageMaker's data-parallel backend; `mpi`:
            mpirun on the first dnn host, over all dnn hosts; `none`: the command itself, one
            process per host.
        max_restarts: How often torchrun starts all ranks again after one has failed; torchrun and
            smddp only. 0, as a script that saves no checkpoint would begin anew.
        fallback: Process group backend where SageMaker's is not there, with smddp only. nccl: for
            GPUs; gloo: for CPUs. Absent: the run is refused there.
        mpi_arguments: More arguments of mpirun, such as `["-x", "NCCL_DEBUG=INFO"]`; mpi only.
    """

    name: StrategyName = "auto"
    max_restarts: NonNegativeInt = 0
    fallback: Literal["nccl", "gloo"] | None = None
    mpi_arguments: tuple[str, ...] = ()

    def misfit(self) -> tuple[str, str] | None:
        """Returns the key that this strategy has no use for, and which have; None if no such key.

        `auto` may turn out to be torchrun, so it may be given what torchrun takes.
        """
        if self.max_restarts and self.name not in ("auto", "torchrun", "smddp"):
            return "max_restarts", "torchrun and smddp"
        if self.fallback and self.name != "smddp":
            return "fallback", "smddp"
        if self.mpi_arguments and self.name != "mpi":
            return "mpi_arguments", "mpi"
        return None

    def refusal(self, *, instance_type: str, processes_per_host: int) -> tuple[str, str] | None:
        """Says why a dnn group of such hosts cannot train so, and what to do; None: it can.

        Args:
            instance_type: Instance type, with or without `ml.`.
            processes_per_host: Processes of a host; 1 where it is not known.
        """
        if self.name == "none" and processes_per_host > 1:
            return (
                f"strategy none is one process a host, not {processes_per_host}",
                "use torchrun or mpi",
            )
        # With a fallback the training runs on any type, by another backend.
        is_smddp = self.name == "smddp" and self.fallback is None
        if is_smddp and f"ml.{instance_type.removeprefix('ml.')}" not in SMDDP_TYPES:
            return (
                f"SageMaker's data-parallel library does not support {instance_type}, only "
                + ", ".join(SMDDP_TYPES),
                "use torchrun, or strategy: {name: smddp, fallback: nccl}",
            )
        return None


# Here and below without defaults: the engine travels in one variable, of 512 characters on
# SageMaker.
class ReadyProbe(Record, frozen=True, kw_only=True, omit_defaults=True):
    """This test tells when an engine's server takes work.

    Attributes:
        port: Name of one of the engine's ports, on which it must listen.
        path: Path of an HTTP request on that port that must get a code below 400. Absent: a
            connection is enough.
        seconds: Seconds from the start of the command within which it must be ready; else it has
            failed. 120, as servers that import TensorFlow or Ray take some ten seconds on a host
            that has read neither.
    """

    port: Name
    path: str | None = None
    seconds: PositiveFloat = 120.0


class EngineCommand(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Describes a command that an engine runs on each host of a group, or on the leader.

    It stays in the foreground: if it ends before the training, with any code, it has failed.

    Attributes:
        command: Program and arguments. `{PLACE}` in an argument stands for what the host knows: one
            of the engine's ports by its name, `{host}`, `{address}`, `{leader}`, `{data_hosts}`,
            `{workers}`, `{output}`, ...; docs/engines.md has the list.
        ready: When it counts as started. Absent: at once.
        environment: More variables for it, with the same places.
        needs_workers: Whether it runs only on hosts that have data workers, as `feed.local_workers`
            or the plan say: of dnn hosts, those that help the data group.
        followers_only: Whether it leaves out the first dnn host, which has a command of its own
            then.
    """

    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    ready: ReadyProbe | None = None
    environment: dict[Name, str] = msgspec.field(default_factory=dict)
    needs_workers: bool = False
    followers_only: bool = False


class EngineSettings(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The engine makes data on the hosts of the data group.

    In a run without a data group no engine runs, whatever the settings are.

    Attributes:
        name: `feed`: stoker's own; `command`: the commands below; `tf.data.service` and `ray`: the
            same with commands of their own, each of which may be replaced below.
        leader: Command that runs next to the training on the first dnn host only: a dispatcher, a
            head.
        dnn: Command that runs next to the training on every dnn host.
        data: Command that runs on every data host.
        ports: TCP ports by name, the same on every host. On this machine all hosts share an
            address, and get free ones.
        environment: More variables for the training command. Their values may have the places of
            the engine's commands, such as `{leader}`.
        stop_seconds: Seconds from the end of the training until what still runs is killed. 10, as
            the data hosts are billed meanwhile.
        needs_all: Whether the run fails when a data host or its command is lost before the training
            ends, unless lost hosts are started again (Kubernetes); else the training goes on, or
            fails on its own. Absent: yes for tf.data.service and ray, whose trainings would wait
            for ever, else no.
    """

    name: EngineName = "feed"
    leader: EngineCommand | None = None
    dnn: EngineCommand | None = None
    data: EngineCommand | None = None
    ports: dict[Name, Port] = msgspec.field(default_factory=dict)
    environment: dict[Name, str] = msgspec.field(default_factory=dict)
    stop_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0
    needs_all: bool | None = None


class EngineHost(Record, frozen=True, kw_only=True):
    """Says how others reach one host's servers of an engine.

    Attributes:
        address: Name or address.
        ports: Instead of the engine's own.
    """

    address: Name
    ports: dict[Name, Port] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """A text has places to fill in: `{name}`, or `{name:port}`."""

    name: str
    port: str = ""

    def __str__(self) -> str:
        return "{" + self.name + (f":{self.port}" if self.port else "") + "}"


def places_in(text: str) -> Iterator[EnginePlace]:
    """Yields the places in a text, known or not."""
    for found in _PLACE.finditer(text):
        if not found[1]:
            yield EnginePlace(found[4], found[5] or "")


def fill(text: str, value_of: Callable[[EnginePlace], str]) -> str:
    """Returns the text with each place replaced by what `value_of` gives for it."""

    def replaced(found: "re.Match[str]") -> str:
        return found[1] or value_of(EnginePlace(found[4], found[5] or ""))

    return _PLACE.sub(replaced, text)


def mistake(
    place: EnginePlace, ports: Mapping[str, int]
) -> tuple[str, str, tuple[str, ...]] | None:
    """Returns what is wrong with a place: in words, the wrong word, and the valid ones; or None.

    Args:
        place: Name of a place in a text.
        ports: Ports of the engine.
    """
    if place.name == TF_CONFIG:
        # A task is known by its port: TF_CONFIG names an address and a port for each.
        tasks = tuple(task for task in TF_TASKS if task in ports)
        if place.port in tasks:
            return None
        words = f"{place}: expected a task that has a port, {{tf_config:TASK}}"
        return words, place.port, tasks or TF_TASKS
    if place.name in WITH_PORT:
        if not place.port or place.port in ports:
            return None
        return f"{place}: the engine has no port {place.port}", place.port, tuple(ports)
    if place.name in PLAIN or place.name in ports:
        if not place.port:
            return None
        return f"{place}: {place.name} takes no port", place.name, WITH_PORT
    return f"unknown place {place}", place.name, (*NAMES, *ports)


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
        command=("python", "-P", "-m", "stoker.launch.engines.ray_node", role, *_RAY_NODE),
        # Ray's own ports open before the node has joined: this one is opened by ray_node when it
        # has.
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
        # What a training gives to tf.data.experimental.service.distribute.
        environment={"TF_DATA_SERVICE_ADDRESS": "grpc://{leader:dispatcher}"},
        # A training that had asked a worker waits for it for ever (measured with 2.21).
        needs_all=True,
    ),
    "ray": EngineSettings(
        name="ray",
        leader=_ray("head"),
        # On the first dnn host the head is a node itself.
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
        # Tasks that no node can run any more wait for one for ever.
        needs_all=True,
    ),
}


def completed(settings: EngineSettings) -> EngineSettings:
    """Returns the engine with what its preset says and the settings leave open."""
    preset = PRESETS.get(settings.name)
    if preset is None:
        return settings
    return replace(
        settings,
        leader=settings.leader or preset.leader,
        dnn=settings.dnn or preset.dnn,
        data=settings.data or preset.data,
        # Name by name: whoever changes one port keeps the others.
        ports={**preset.ports, **settings.ports},
        environment={**preset.environment, **settings.environment},
        needs_all=preset.needs_all if settings.needs_all is None else settings.needs_all,
    )


def check_engine(engine: EngineSettings, *, taken: Mapping[int, str], place: Place) -> None:
    """Checks what a launcher would else find out when all hosts are up.

    Args:
        engine: Engine of the workload.
        taken: Ports that the feed takes, each with the key that says so.
        place: Place of the workload's document, for errors.

    Raises:
        UsageError: With the key, and the nearest known word for an unknown one.
    """
    whole = completed(engine)
    if engine.name == "feed":
        # Commands that nobody would ever run are a mistake, not a preference.
        if engine != EngineSettings():
            raise UsageError(
                "the feed runs no commands",
                where=place.at("engine"),
                fix="set engine.name to command, or leave the other keys out",
            )
        return
    if whole.data is None:
        raise UsageError(
            f"engine {engine.name} has nothing to run on the data group",
            where=place.at("engine"),
            fix="set engine.data.command, a list of words",
        )
    _check_ports(whole, taken, place)
    for key, command in _commands(whole):
        _check_command(key, command, whole, place)
    for name, text in whole.environment.items():
        _check_variable(f"engine.environment.{name}", name, text, whole, place)


def _commands(engine: EngineSettings) -> Iterator[tuple[str, EngineCommand]]:
    for group, command in (("leader", engine.leader), ("dnn", engine.dnn), ("data", engine.data)):
        if command:
            yield f"engine.{group}", command


def _check_ports(engine: EngineSettings, taken: Mapping[int, str], place: Place) -> None:
    numbers = dict(taken)
    for name, number in engine.ports.items():
        key = f"engine.ports.{name}"
        if not PORT_NAME.fullmatch(name) or name in NAMES:
            raise UsageError(
                f"{name} is not a name for a port",
                where=place.at(key),
                fix="letters, digits, _ and -, beginning with a letter, and none of: "
                + ", ".join(sorted(NAMES)),
            )
        if number in numbers:
            raise UsageError(
                f"port {number} is taken by {numbers[number]}",
                where=place.at(key),
                fix=f"take another, such as {_free_port(numbers, engine)}",
            )
        numbers[number] = key


def _free_port(taken: dict[int, str], engine: EngineSettings) -> int:
    used = {*taken, *engine.ports.values()}
    return next(number for number in range(5050, _MAX_PORT) if number not in used)


def _check_command(key: str, command: EngineCommand, engine: EngineSettings, place: Place) -> None:
    for index, word in enumerate(command.command):
        _check_text(f"{key}.command[{index}]", word, engine, place)
    for name, text in command.environment.items():
        _check_variable(f"{key}.environment.{name}", name, text, engine, place)
    ready = command.ready
    if ready and ready.port not in engine.ports:
        raise UsageError(
            f"the engine has no port {ready.port}",
            where=place.at(f"{key}.ready.port"),
            fix=nearest(ready.port, list(engine.ports))
            if engine.ports
            else f"set engine.ports.{ready.port} to its number",
        )


def _check_variable(key: str, name: str, text: str, engine: EngineSettings, place: Place) -> None:
    if name.startswith("STOKER_") or "=" in name:
        raise UsageError(
            f"{name} is not a variable that an engine may set",
            where=place.at(key),
            fix="STOKER_... are stoker's own; take another name",
        )
    _check_text(key, text, engine, place)


def _check_text(key: str, text: str, engine: EngineSettings, place: Place) -> None:
    for named in places_in(text):
        wrong = mistake(named, engine.ports)
        if wrong:
            what, word, known = wrong
            fix = nearest(word, known) if known else "set engine.ports, names to numbers"
            fix += "; for braces as they are: {" + str(named) + "}"
            raise UsageError(what, where=place.at(key), fix=fix)
