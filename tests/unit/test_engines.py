"""What a host runs of an engine, and what is refused before any host runs."""

import json

import pytest

from stoker.errors import UsageError
from stoker.feed.engine.crypto import Keys
from stoker.launch.engine import Engine
from stoker.records import EngineCommand, EngineSettings, Json, to_document
from support import builders
from support.run_file import in_run

GROUPS = {"gpu": ("dnn", ("g1", "g0")), "cpu": ("data", ("c2", "c0"))}
PORTS = {"server": 5050, "worker": 5051}


def host_run(tmp_path, engine, *, host, keys=None, **variables):
    told = {"STOKER_BASE_DIR": str(tmp_path), "RUN_ENGINE": json.dumps(to_document(engine))}
    topology = builders.topology(host, **GROUPS)
    return builders.host_run(tmp_path, topology, in_run({**told, **variables}), keys=keys)


def engine_of(tmp_path, engine, *, host="c2", **more):
    return Engine(host_run(tmp_path, engine, host=host, **more))


def filled(tmp_path, text, *, host="c2", **variables):
    own = EngineSettings(name="command", data=_echo(text), ports=PORTS)
    return engine_of(tmp_path, own, host=host, **variables).fill(text)


def _echo(text, **more):
    return EngineCommand(command=("echo", text), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "host", "variables", "expected"),
    [
        ("{host} {index} {address}", "c0", {}, "c0 1 c0"),
        ("{leader} {leader:server}", "c2", {}, "g1 g1:5050"),
        ("{dnn_addresses:worker}", "c0", {}, "g1:5051,g0:5051"),
        ("{workers}", "c2", {"RUN_WORKERS": '{"data": 7}'}, "7"),
    ],
)
def test_places_stand_for_what_the_host_knows(tmp_path, text, host, variables, expected):
    assert filled(tmp_path, text, host=host, **variables) == expected


def test_each_host_runs_the_command_of_its_role_and_the_training_finds_the_engine(tmp_path):
    tf = EngineSettings(name="tf.data.service")
    engines = {host: engine_of(tmp_path, tf, host=host) for host in ("g1", "g0", "c2")}
    commands = {host: engine.command() for host, engine in engines.items()}
    assert [part for part, _ in commands.values()] == ["leader", "dnn", "data"]
    assert commands["g0"][1] is None
    assert engines["g1"].environment() == {"TF_DATA_SERVICE_ADDRESS": "grpc://g1:5050"}


def load(engine):
    return builders.workload(engine=engine).engine_settings


DATA: Json = {"command": ["x"]}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"data": None}, "engine", "need data.command"),
        ({"data": ["x", "{hosst}"]}, "engine", "did you mean host?"),
        ({"data": ["{address:serve}"]}, "engine", "did you mean server?"),
        ({"environment": {"A": "{nowhere}"}}, "engine", "unknown place {nowhere}"),
        ({"data": {**DATA, "ready": "x"}}, "engine", "unknown place {address:x}"),
        ({"name": "comand"}, "engine", "comand"),
    ],
)
def test_a_mistake_is_said_at_load_with_its_key(changes, key, words):
    engine = {"name": "command", "data": DATA, "ports": {"server": 5000}} | changes
    if isinstance(engine["data"], list):
        engine["data"] = {"command": engine["data"]}
    with pytest.raises(UsageError) as caught:
        load({name: value for name, value in engine.items() if value is not None})
    assert words in str(caught.value)
    assert key in caught.value.where


@pytest.mark.parametrize(
    ("host", "part", "role", "cpus"),
    [("g1", "leader", "head", "0"), ("g0", "dnn", "node", "0"), ("c2", "data", "node", "7")],
)
def test_each_host_runs_a_node_and_data_hosts_run_tasks(tmp_path, host, part, role, cpus):
    keys = Keys.from_token(b"t" * 32)
    ray = EngineSettings(name="ray")
    engine = engine_of(tmp_path, ray, host=host, keys=keys, RUN_WORKERS='{"data": 7}')
    found, command = engine.command()
    assert found == part
    words = [engine.fill(word) for word in command.command]
    assert role in words
    assert words[words.index("--cpus") + 1] == cpus
    assert words[words.index("--gcs") + 1] == "g1:6379"
    assert engine.environment()["RAY_ADDRESS"] == "g1:6379"
