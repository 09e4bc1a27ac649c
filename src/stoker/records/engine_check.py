"""Whether an engine's settings agree with themselves and with the feed's."""

from collections.abc import Iterator

from stoker.errors import UsageError
from stoker.records.base import Place, nearest
from stoker.records.engine import EngineCommand, EngineSettings
from stoker.records.engine_places import NAMES, PORT_NAME, mistake, places_in
from stoker.records.engine_presets import completed
from stoker.records.workload import FeedSettings

# Of the feed, from feed.port on: coordinator and agents, batches, the store of torchrun.
_NUM_FEED_PORTS = 3
_MAX_PORT = 65535


def check_engine(engine: EngineSettings, *, feed: FeedSettings, place: Place) -> None:
    """Checks what a launcher would else find out when all hosts are up.

    Args:
        engine: As the workload has it.
        feed: Its ports are not the engine's.
        place: Of the workload.

    Raises:
        UsageError: With the key, and the nearest known word for an unknown one.
    """
    whole = completed(engine)
    if engine.name == "feed":
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
                f"{name} is no name for a port",
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
            f"{name} is no variable that an engine may set",
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
