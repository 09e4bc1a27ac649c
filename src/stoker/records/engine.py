"""Engines, which make data on the data group: settings, presets, checks, and places in commands.

docs/engines.md lists the places; braces around anything but a name stay as they are.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from stoker.errors import UsageError
from stoker.records.base import Command, Name, Place, Record, nearest

Strategy = Literal["torchrun", "mpi", "none"]
StrategyName = Literal["auto", Strategy]
EngineName = Literal["feed", "command", "tf.data.service", "ray"]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# Places without a port, and those that may have one: `{address}`, `{address:PORT}`.
PLAIN = ("host", "index", "workers", "secret_file", "engines")
WITH_PORT = ("address", "leader", "data_addresses", "dnn_addresses")
_PLACE = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(?::([A-Za-z][A-Za-z0-9_-]*))?\}")


class EngineCommand(Record, frozen=True, kw_only=True):
    """A command of an engine, which runs in the foreground until the training has ended.

    Attributes:
        command: Program and arguments, with places such as `{address}` or `{leader}`: see
            docs/engines.md.
        ready: Name of the engine's port at which it listens once it is ready. None: it is at once.
        environment: More variables for it, with the same places.
    """

    command: Command
    ready: Name | None = None
    environment: dict[Name, str] = {}


class EngineSettings(Record, frozen=True, kw_only=True):
    """The program that makes data on the data group. Without a data group it does not run.

    Attributes:
        name: `feed`: stoker's own; `command`: the commands below; `tf.data.service`, `ray`:
            presets.
        leader: Command of the first dnn host, in place of `dnn`: a dispatcher, a head.
        dnn: Command of every dnn host.
        data: Command of every data host.
        ports: TCP ports by name, equal on every host. The local platform replaces them by free
            ones.
        environment: More variables for the training command, with the places of the commands.
    """

    name: EngineName = "feed"
    leader: EngineCommand | None = None
    dnn: EngineCommand | None = None
    data: EngineCommand | None = None
    ports: dict[Name, Port] = {}
    environment: dict[Name, str] = {}


class EngineHost(Record, frozen=True, kw_only=True):
    """How other hosts reach one host's servers of an engine.

    Attributes:
        address: Name or address.
        ports: In place of the engine's own.
    """

    address: Name
    ports: dict[Name, Port] = {}


def fill(text: str, value_of: Callable[[str, str], str]) -> str:
    """Fills the places in a text, with the value of a name and a port's name, or an empty one."""
    return _PLACE.sub(lambda found: value_of(found[1], found[2] or ""), text)


# The presets run example programs that come with stoker. -P: a file in the training's folder may
# have the name of a module that the server imports.
_TF_DATA = ("python", "-P", "{engines}/tf_server.py")
# Ray does not encrypt by default, but it can ask for a token.
_RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{secret_file}"}


def _ray(role: str) -> EngineCommand:
    node = ("--gcs", "{leader:gcs}", "--address", "{address}", "--cpus", "{workers}")
    ports = ("--ports", "{node_manager},{object_manager},{client}", "--joined", "{joined}")
    return EngineCommand(
        command=("python", "-P", "{engines}/ray_node.py", role, *node, *ports),
        # Opened by ray_node when the node has joined; Ray's own ports open earlier.
        ready="joined",
        environment=_RAY_TOKEN,
    )


PRESETS: Mapping[EngineName, EngineSettings] = {
    "tf.data.service": EngineSettings(
        name="tf.data.service",
        leader=EngineCommand(
            command=(*_TF_DATA, "dispatcher", "--port", "{dispatcher}"), ready="dispatcher"
        ),
        data=EngineCommand(
            command=(
                *(*_TF_DATA, "worker", "--dispatcher", "{leader:dispatcher}"),
                *("--address", "{address:worker}", "--cores", "{workers}"),
            ),
            ready="worker",
        ),
        ports={"dispatcher": 5050, "worker": 5051},
        # For tf.data.experimental.service.distribute.
        environment={"TF_DATA_SERVICE_ADDRESS": "grpc://{leader:dispatcher}"},
    ),
    "ray": EngineSettings(
        name="ray",
        leader=_ray("head"),
        dnn=_ray("node"),
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
    )


def check_engine(engine: EngineSettings, place: Place) -> None:
    """Refuses an engine without a command, and places that commands cannot have.

    Raises:
        UsageError: With the nearest known word for an unknown one.
    """
    whole = completed(engine)
    where = place.at("engine")
    if (whole.name == "feed") != (whole.data is None):
        what = f"engine {engine.name}: only other engines than feed have and need data.command"
        fix = "name: command, and data: {command: [PROGRAM, ARGUMENT]}, for a program of your own"
        raise UsageError(what, where=where, fix=fix)
    ports = [*whole.ports]
    texts = [*whole.environment.values()]
    for command in filter(None, (whole.leader, whole.dnn, whole.data)):
        texts += [*command.command, *command.environment.values()]
        if command.ready:
            texts.append(f"{{address:{command.ready}}}")
    for found in _PLACE.finditer(" ".join(texts)):
        word, port = found[1], found[2]
        known = ports if port and word in WITH_PORT else [*PLAIN, *WITH_PORT, *ports]
        if (port or word) not in known:
            fix = f"{nearest(port or word, known)} The places: docs/engines.md"
            raise UsageError(f"unknown place {found[0]}", where=where, fix=fix)
