"""Places in the commands of an engine: what `{host}` or `{leader:PORT}` in an argument stands for.

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

PLAIN = ("host", "index", "data_hosts", "dnn_hosts", "workers", "input", "output", "secret_file")
WITH_PORT = ("address", "leader", "data_addresses", "dnn_addresses")
TF_CONFIG = "tf_config"
TF_TASKS = ("chief", "worker", "ps")
NAMES = (*PLAIN, *WITH_PORT, TF_CONFIG)
PORT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

_NAMED = r"([A-Za-z][A-Za-z0-9_-]*)(?::([A-Za-z][A-Za-z0-9_-]*))?"
_PLACE = re.compile(rf"\{{(\{{{_NAMED}\}})\}}|\{{{_NAMED}\}}")


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """A place in a text: `{name}`, or `{name:port}`."""

    name: str
    port: str = ""

    def __str__(self) -> str:
        return "{" + self.name + (f":{self.port}" if self.port else "") + "}"


def places_in(text: str) -> Iterator[EnginePlace]:
    """The places in a text, known or not."""
    for found in _PLACE.finditer(text):
        if not found[1]:
            yield EnginePlace(found[4], found[5] or "")


def fill(text: str, value_of: Callable[[EnginePlace], str]) -> str:
    """The text with each place replaced by what `value_of` gives for it."""

    def replaced(found: "re.Match[str]") -> str:
        return found[1] or value_of(EnginePlace(found[4], found[5] or ""))

    return _PLACE.sub(replaced, text)


def mistake(
    place: EnginePlace, ports: Mapping[str, int]
) -> tuple[str, str, tuple[str, ...]] | None:
    """What is wrong with a place: in words, the wrong word, and those it may be; None if nothing.

    Args:
        place: From a text.
        ports: Of the engine.
    """
    if place.name == TF_CONFIG:
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
        return f"{place}: no port can stand behind {place.name}", place.name, WITH_PORT
    return f"unknown place {place}", place.name, (*NAMES, *ports)
