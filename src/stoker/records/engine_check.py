"""Engines are known by name; this checks whether an engine's settings agree with each other."""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from stoker.errors import UsageError
from stoker.records.base import Place, nearest
from stoker.records.engine import (
    NAMES,
    PORT_NAME,
    EngineCommand,
    EngineName,
    EngineSettings,
    ReadyProbe,
    mistake,
    places_in,
)
from stoker.records.workload import FeedSettings

# -P: without the training's own folder on the path, in which a file may be called as a module that
# the server imports.
_TF_DATA = ("python", "-P", "-m", "stoker.launch.engines.tf_server")
_TF_DATA_WORKER = EngineCommand(
    command=(
        *(*_TF_DATA, "worker", "--dispatcher", "{leader:dispatcher}"),
        *("--address", "{address:worker}", "--cores", "{workers}"),
    ),
    ready=ReadyProbe(port="worker"),
    needs_workers=True,
)

_RAY_NODE = (
    *("--gcs", "{leader:gcs}", "--address", "{address}", "--cpus", "{workers}"),
    *("--ports", "{node_manager},{object_manager},{client}", "--joined", "{joined}"),
)
# Ray has no encryption by default, but a token it has.
_RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{secret_file}"}


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


# Of the feed, from feed.port on: coordinator and agents, batches, the store of torchrun.
_NUM_FEED_PORTS = 3
_MAX_PORT = 65535


def check_engine(engine: EngineSettings, *, feed: FeedSettings, place: Place) -> None:
    """Checks what a launcher would else find out when all hosts are up.

    Args:
        engine: Engine of the workload.
        feed: Its ports are not the engine's.
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
    _check_ports(whole, feed, place)
    for key, command in _commands(whole):
        _check_command(key, command, whole, place)
    for name, text in whole.environment.items():
        _check_variable(f"engine.environment.{name}", name, text, whole, place)


def _commands(engine: EngineSettings) -> Iterator[tuple[str, EngineCommand]]:
    for group, command in (("leader", engine.leader), ("dnn", engine.dnn), ("data", engine.data)):
        if command:
            yield f"engine.{group}", command


def _check_ports(engine: EngineSettings, feed: FeedSettings, place: Place) -> None:
    numbers: dict[int, str] = {feed.port + i: "feed.port" for i in range(_NUM_FEED_PORTS)}
    if feed.metrics_port:
        numbers[feed.metrics_port] = "feed.metrics_port"
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
