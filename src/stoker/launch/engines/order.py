"""What this host runs of an engine: its commands with all places filled in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.launch import exports, machine
from stoker.launch.engines.secret import secret_file
from stoker.launch.hostrun import HostRun
from stoker.records import EngineCommand, EngineSettings
from stoker.records.engine import TF_CONFIG, TF_TASKS, EnginePlace, fill
from stoker.records.engine_check import completed

Part = Literal["leader", "dnn", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How it is known that a server takes work; see `stoker.records.Ready`."""

    address: str
    port: int
    path: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """One command of an engine as this host runs it.

    Attributes:
        command: Program and arguments.
        environ: Its whole environment.
        probe: None: it counts as started at once.
    """

    part: Part
    command: tuple[str, ...]
    environ: Mapping[str, str]
    probe: Probe | None


@dataclass(frozen=True, kw_only=True)
class EngineOrder:
    """What this host runs of the run's engine.

    Attributes:
        servers: In the order in which they are started.
        environment: More variables for the training command.
        stop_seconds: From the end of the training until what still runs is killed.
        needs_all: The training cannot go on without one of the data hosts.
    """

    name: str
    servers: tuple[ServerOrder, ...]
    environment: Mapping[str, str]
    stop_seconds: float
    needs_all: bool


def order_of(run: HostRun) -> EngineOrder | None:
    """What this host runs of the engine; None with the feed, and without a data group."""
    engine = completed(run.settings.engine)
    if engine.name == "feed" or not run.topology.data_hosts:
        return None
    known = _Known(run, engine)
    topology = run.topology
    if topology.role == "data":
        chosen: list[tuple[Part, EngineCommand | None]] = [("data", engine.data)]
    else:
        chosen = [("leader", engine.leader)] if topology.is_leader else []
        chosen.append(("dnn", engine.dnn))
    environment = {name: known.fill(text) for name, text in engine.environment.items()}
    # No host of this run has an agent of the feed: loaders have their own workers only.
    environment["STOKER_HAS_DATA_GROUP"] = "0"
    base = _environ(run)
    return EngineOrder(
        name=engine.name,
        servers=tuple(
            known.server(part, command, base)
            for part, command in chosen
            if command
            and (known.num_workers or not command.needs_workers)
            and not (part == "dnn" and command.followers_only and topology.is_leader)
        ),
        environment=environment,
        stop_seconds=engine.stop_seconds,
        # Those that are started again are waited for.
        needs_all=bool(engine.needs_all) and not run.settings.comes_back,
    )


class _Known:
    """What the places of this host stand for."""

    def __init__(self, run: HostRun, engine: EngineSettings) -> None:
        self._run = run
        self._engine = engine
        self.num_workers = _num_workers(run)

    def fill(self, text: str) -> str:
        return fill(text, self._value_of)

    def server(self, part: Part, command: EngineCommand, base: Mapping[str, str]) -> ServerOrder:
        more = {name: self.fill(text) for name, text in command.environment.items()}
        ready = command.ready
        host = self._run.topology.host
        return ServerOrder(
            part=part,
            command=tuple(self.fill(word) for word in command.command),
            environ={**base, **more},
            probe=Probe(
                address=self._address(host),
                port=self._port(host, ready.port),
                path=self.fill(ready.path) if ready.path else None,
                seconds=ready.seconds,
            )
            if ready
            else None,
        )

    def _value_of(self, place: EnginePlace) -> str:
        topology, port = self._run.topology, place.port
        match place.name:
            case "host":
                return topology.host
            case "index":
                return str(topology.group.hosts.index(topology.host))
            case "workers":
                return str(self.num_workers)
            case "input":
                return str(self._run.settings.base_dir / "input" / "data")
            case "output":
                return str(self._run.output)
            case "secret_file":
                return str(secret_file(self._run))
            case "data_hosts":
                return ",".join(topology.data_hosts)
            case "dnn_hosts":
                return ",".join(topology.dnn_hosts)
            case "address":
                return self._reached(topology.host, port)
            case "leader":
                return self._reached(topology.leader, port)
            case "data_addresses":
                return ",".join(self._reached(host, port) for host in topology.data_hosts)
            case "dnn_addresses":
                return ",".join(self._reached(host, port) for host in topology.dnn_hosts)
            case name if name == TF_CONFIG:
                return self._tf_config(port)
            case name:
                return str(self._port(topology.host, name))

    def _reached(self, host: str, port: str) -> str:
        address = self._address(host)
        if not port:
            return address
        number = self._port(host, port)
        return f"[{address}]:{number}" if ":" in address else f"{address}:{number}"

    def _address(self, host: str) -> str:
        known = self._run.settings.engine_hosts.get(host)
        if known:
            return known.address
        if host == self._run.topology.host:
            return self._run.settings.advertise or host
        return self._run.coordinator_address[0] if host == self._run.topology.leader else host

    def _port(self, host: str, name: str) -> int:
        known = self._run.settings.engine_hosts.get(host)
        return (known.ports if known else {}).get(name) or self._engine.ports[name]

    def _tf_config(self, task: str) -> str:
        topology = self._run.topology
        hosts = dict(
            zip(
                TF_TASKS,
                ((topology.leader,), topology.dnn_hosts, topology.data_hosts),
                strict=True,
            )
        )
        cluster = {
            name: [self._reached(host, name) for host in hosts[name]]
            for name in TF_TASKS
            if name in self._engine.ports
        }
        is_one = topology.host in hosts[task]
        index = hosts[task].index(topology.host) if is_one else 0
        return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


def _num_workers(run: HostRun) -> int:
    role = run.topology.role
    decided = run.settings.workers.get(role)
    if decided is not None:
        return decided
    if role == "data":
        return machine.usable_vcpus()
    local = run.settings.feed.local_workers
    # `auto` is what the script says to a loader; it says nothing to an engine.
    return 0 if local == "auto" else local


def _environ(run: HostRun) -> dict[str, str]:
    """What a command of the engine finds: what the training does, but for the loader's variables.

    Raises:
        UsageError: If a file of the job folder is malformed.
    """
    settings, topology = run.settings, run.topology
    variables = exports.sagemaker_variables(
        topology,
        settings.base_dir,
        values=exports.hyperparameters(settings.base_dir),
        num_cpus=machine.usable_vcpus(),
        num_accelerators=machine.num_accelerators(run.environ),
        environ=run.environ,
    )
    places = filter(None, (str(run.folder or ""), run.environ.get("PYTHONPATH", "")))
    ours = {
        "PYTHONPATH": ":".join(places),
        # Its output comes through a pipe: lines must not wait in its buffer.
        "PYTHONUNBUFFERED": "1",
        "STOKER_RUN_ID": settings.run_id,
        "STOKER_BASE_DIR": str(settings.base_dir),
        "STOKER_HOST": topology.host,
        "STOKER_GROUP": topology.group.name,
        "STOKER_HAS_DATA_GROUP": "0",
        "STOKER_OUTPUT": str(run.output),
    }
    return {**variables, **run.environ, **ours}
