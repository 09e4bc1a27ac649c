"""Checks what a host runs of an engine, and what is refused before any host runs."""

import json
import queue
from io import StringIO
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.launch.engines.server import order_of
from stoker.launch.leader_connection import HostRun
from stoker.launch.topology import HostGroup, Topology
from stoker.logs import Log
from stoker.platforms.base import JobSpec, run_environment
from stoker.records import (
    EngineCommand,
    EngineSettings,
    Group,
    Json,
    to_document,
)
from stoker.records.engine import PLAIN, PRESETS, WITH_PORT, completed, fill, places_in
from stoker.settings import from_environment, workload_from

GROUPS = (
    HostGroup(name="gpu", role="dnn", instance_type="ml.g5.xlarge", hosts=("g1", "g0")),
    HostGroup(name="cpu", role="data", instance_type="ml.c5.xlarge", hosts=("c2", "c0")),
)
PORTS = {"server": 5050, "worker": 5051}


def order(tmp_path, engine, *, host="c2", groups=GROUPS, **variables):
    environ = {
        "STOKER_BASE_DIR": str(tmp_path),
        "STOKER_ENGINE": json.dumps(to_document(engine)),
        **variables,
    }
    run = HostRun(
        settings=from_environment(environ),
        topology=Topology(host=host, groups=groups),
        environ={"PATH": "/bin", "PYTHONPATH": "/theirs"},
        output=tmp_path / "out",
        log=Log(run="r", host=host, stream=StringIO()),
        inbox=queue.SimpleQueue(),
        keys=None,
        folder=Path("/code"),
    )
    return order_of(run)


def filled(tmp_path, text, *, host="c2", **variables):
    own = EngineSettings(name="command", data=_echo(text), dnn=_echo(text), ports=PORTS)
    found = order(tmp_path, own, host=host, **variables)
    return found.servers[-1].command[-1]


def _echo(text, **more):
    return EngineCommand(command=("echo", text), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "host", "expected"),
    [
        ("{host} {index} {address}", "c0", "c0 1 c0"),
        ("{host} {index} {address}", "g1", "g1 0 g1"),
        ("{leader} {leader:server}", "c2", "g1 g1:5050"),
        ("{data_hosts} {dnn_hosts}", "g0", "c2,c0 g1,g0"),
        ("{data_addresses:server}", "g0", "c2:5050,c0:5050"),
        ("{dnn_addresses:worker}", "c0", "g1:5051,g0:5051"),
        ("--port={server}", "c0", "--port=5050"),
        ("{{server}} is {server}", "c0", "{server} is 5050"),
        ('{"a": {"b": [1]}} ${HOME:-x} { host }', "c0", '{"a": {"b": [1]}} ${HOME:-x} { host }'),
    ],
)
def test_places_stand_for_what_the_host_knows(tmp_path, text, host, expected):
    assert filled(tmp_path, text, host=host) == expected


def test_folders_are_those_of_the_job(tmp_path):
    assert filled(tmp_path, "{input} {output}") == f"{tmp_path}/input/data {tmp_path}/out"


@pytest.mark.parametrize(
    ("host", "variables", "expected"),
    [
        ("c2", {"STOKER_WORKERS": '{"data": 7}'}, "7"),
        ("g1", {"STOKER_WORKERS": '{"dnn": 3}'}, "3"),
        ("g1", {"STOKER_FEED": '{"local_workers": 2}'}, "2"),
        ("g1", {}, "0"),
    ],
)
def test_workers_are_the_plans_or_the_local_ones(tmp_path, host, variables, expected):
    assert filled(tmp_path, "{workers}", host=host, **variables) == expected


def test_hosts_that_share_an_address_have_ports_of_their_own(tmp_path):
    reached = {
        host: {"address": "127.0.0.1", "ports": {"server": 100 + n, "worker": 200 + n}}
        for n, host in enumerate(("g1", "g0", "c2", "c0"))
    }
    text = "{server} {leader:server} {data_addresses:worker} {address}"
    found = filled(tmp_path, text, host="c0", STOKER_ENGINE_HOSTS=json.dumps(reached))
    assert found == "103 127.0.0.1:100 127.0.0.1:202,127.0.0.1:203 127.0.0.1"


def test_an_address_with_colons_is_in_brackets_before_a_port(tmp_path):
    assert filled(tmp_path, "{address:server}", STOKER_ADVERTISE="fd00::1") == "[fd00::1]:5050"


@pytest.mark.parametrize(
    ("host", "task", "index"),
    [("g1", "chief", 0), ("g0", "worker", 1), ("c2", "ps", 0), ("c0", "ps", 1)],
)
def test_tf_config_is_made_from_the_groups(tmp_path, host, task, index):
    config = EngineCommand(command=("x",), environment={"TF_CONFIG": f"{{tf_config:{task}}}"})
    ports = {"chief": 1, "worker": 2, "ps": 3}
    own = EngineSettings(name="command", data=config, dnn=config, ports=ports)
    found = order(tmp_path, own, host=host)
    assert json.loads(found.servers[-1].environ["TF_CONFIG"]) == {
        "cluster": {"chief": ["g1:1"], "worker": ["g1:2", "g0:2"], "ps": ["c2:3", "c0:3"]},
        "task": {"type": task, "index": index},
    }


def test_each_host_runs_the_commands_of_its_role_in_order(tmp_path):
    own = EngineSettings(
        name="command", leader=_echo("l"), dnn=_echo("n"), data=_echo("d"), ports=PORTS
    )

    def parts(host):
        found = order(tmp_path, own, host=host)
        return [server.part for server in found.servers]

    assert [parts(host) for host in ("g1", "g0", "c2")] == [["leader", "dnn"], ["dnn"], ["data"]]


@pytest.mark.parametrize(("local", "parts"), [("0", ["leader"]), ("2", ["leader", "dnn"])])
def test_a_command_that_needs_workers_runs_where_there_are_some(tmp_path, local, parts):
    preset = EngineSettings(name="tf.data.service")
    feed = json.dumps({"local_workers": int(local)})
    found = order(tmp_path, preset, host="g1", STOKER_FEED=feed)
    assert [server.part for server in found.servers] == parts


def test_the_training_finds_the_engine_and_no_data_group_of_the_feed(tmp_path):
    found = order(tmp_path, EngineSettings(name="tf.data.service"), host="g1")
    assert found.environment == {
        "TF_DATA_SERVICE_ADDRESS": "grpc://g1:5050",
        "STOKER_HAS_DATA_GROUP": "0",
    }


def test_a_server_finds_the_code_and_its_own_variables(tmp_path):
    own = EngineSettings(
        name="command", data=_echo("x", environment={"ME": "{host}", "PATH": "/own"})
    )
    found = order(tmp_path, own)
    environ = found.servers[0].environ
    assert (environ["ME"], environ["PATH"], environ["PYTHONPATH"]) == (
        "c2",
        "/own",
        "/code:/theirs",
    )
    assert environ["SM_CURRENT_HOST"] == "c2"


@pytest.mark.parametrize("name", ["feed", "command"])
def test_nothing_runs_with_the_feed_or_without_a_data_group(tmp_path, name):
    if name == "feed":
        assert order(tmp_path, EngineSettings()) is None
    else:
        own = EngineSettings(name="command", data=_echo("x"))
        assert order(tmp_path, own, host="g1", groups=GROUPS[:1]) is None


def test_what_a_preset_says_is_replaced_where_the_settings_say_it():
    own = EngineSettings(name="tf.data.service", data=_echo("mine"), ports={"worker": 9})
    found = completed(own)
    assert found.data == own.data
    assert found.leader == PRESETS["tf.data.service"].leader
    assert found.ports == {"dispatcher": 5050, "worker": 9}


def load(engine, **more):
    document: dict[str, Json] = {"name": "w", "command": ["x"], "engine": engine, **more}
    return workload_from(document).engine_settings


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_right_as_it_is(name):
    assert load(name).name == name


def test_all_places_of_the_table_are_known():
    words = [f"{{{name}}}" for name in (*PLAIN, *WITH_PORT, "s")]
    words += [f"{{{name}:s}}" for name in WITH_PORT]
    assert load({"name": "command", "data": {"command": words}, "ports": {"s": 5000}})


DATA: Json = {"command": ["x"]}


@pytest.mark.parametrize(
    ("engine", "key", "words"),
    [
        ({"name": "feed", "data": DATA}, "engine", "engine feed takes no other keys"),
        ({"name": "command"}, "engine", "needs engine.data.command"),
        (
            {"name": "command", "data": {"command": ["x", "{hosst}"]}},
            "engine.data.command[1]",
            "did you mean host?",
        ),
        (
            {"name": "command", "data": {"command": ["{sever}"]}, "ports": {"server": 5000}},
            "engine.data.command[0]",
            "did you mean server?",
        ),
        (
            {"name": "command", "data": {"command": ["{leader:sever}"]}, "ports": {"server": 5}},
            "engine.data.command[0]",
            "did you mean server?",
        ),
        (
            {"name": "command", "data": {"command": ["{host:server}"]}, "ports": {"server": 5}},
            "engine.data.command[0]",
            "host takes no port",
        ),
        (
            {"name": "command", "data": {"command": ["{tf_config:boss}"]}, "ports": {"ps": 5}},
            "engine.data.command[0]",
            "known are: ps",
        ),
        (
            {"name": "command", "data": DATA, "environment": {"A": "{nowhere}"}},
            "engine.environment.A",
            "unknown place {nowhere}",
        ),
        (
            {"name": "command", "data": {**DATA, "ready": {"port": "x"}}, "ports": {"y": 5}},
            "engine.data.ready.port",
            "no port x",
        ),
        (
            {"name": "command", "data": {**DATA, "environment": {"STOKER_X": "1"}}},
            "engine.data.environment.STOKER_X",
            "are reserved",
        ),
        (
            {"name": "command", "data": DATA, "ports": {"a": 7601}},
            "engine.ports.a",
            "used by feed.port",
        ),
        (
            {"name": "command", "data": DATA, "ports": {"a": 5000, "b": 5000}},
            "engine.ports.b",
            "used by engine.ports.a",
        ),
        (
            {"name": "command", "data": DATA, "ports": {"host": 5}},
            "engine.ports.host",
            "invalid port name",
        ),
        ({"name": "comand", "data": DATA}, "engine", "comand"),
    ],
)
def test_a_mistake_is_said_at_load_with_its_key(engine, key, words):
    with pytest.raises(UsageError) as caught:
        load(engine)
    assert words in str(caught.value)
    assert key in caught.value.where


def test_text_without_places_is_left_as_it_is():
    for text in ("", "{}", "{1}", "{a b}", '{"host": 1}', "{{", "%{x"):
        assert list(places_in(text)) == []
        assert fill(text, lambda place: f"<{place}>") == text


def job_of(engine, tmp_path):
    workload = workload_from({"name": "w", "command": ["x"], "engine": engine})
    group = Group(name="dnn", role="dnn", instance_type="local.c1", count=1)
    return JobSpec.of(workload, groups=[group], run_dir=tmp_path)


def test_launchers_are_told_of_an_engine_but_not_of_the_feed(tmp_path):
    assert "STOKER_ENGINE" not in run_environment(job_of("feed", tmp_path)).to_environ()
    told = run_environment(job_of("tf.data.service", tmp_path)).to_environ()["STOKER_ENGINE"]
    assert told == '{"name":"tf.data.service"}'
    engine: Json = {"name": "command", "data": {"command": ["x", "{host}"]}, "stop_seconds": 3}
    job = job_of(engine, tmp_path)
    told = run_environment(job).to_environ()["STOKER_ENGINE"]
    assert from_environment({"STOKER_ENGINE": told}).engine == job.settings.engine
