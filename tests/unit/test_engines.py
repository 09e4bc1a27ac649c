"""What a host runs of an engine, and what is refused before any host runs."""

import argparse
import fcntl
import json
import os
import queue
import sys
from io import StringIO
from pathlib import Path

import pytest
import ray_node
import tf_server
from ray_node import (
    MAX_FOLDER_BYTES,
    MIN_STORE_BYTES,
    node_command,
    own_variables,
    session_folder,
    store_bytes,
)

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.feed.wire.crypto import Keys
from stoker.launch.engines import server
from stoker.launch.engines.server import forget_secret, order_of, secret_file
from stoker.launch.leader_connection import HostRun
from stoker.logs import Log
from stoker.platforms.base import JobSpec, run_environment
from stoker.records import EngineCommand, EngineSettings, Json, to_document
from stoker.records.engine import PLAIN, PRESETS, WITH_PORT, completed, fill, places_in
from support import builders

GROUPS = {"gpu": ("dnn", ("g1", "g0")), "cpu": ("data", ("c2", "c0"))}
PORTS = {"server": 5050, "worker": 5051}


def host_run(tmp_path, engine, *, host, groups=GROUPS, keys=None, **variables):
    told = {"STOKER_BASE_DIR": str(tmp_path), "STOKER_ENGINE": json.dumps(to_document(engine))}
    return HostRun(
        settings=from_environment({**told, **variables}),
        topology=builders.topology(host, **groups),
        environ={"PATH": "/bin", "PYTHONPATH": "/theirs"},
        output=tmp_path / "out",
        log=Log(run="r", host=host, stream=StringIO()),
        inbox=queue.SimpleQueue(),
        keys=keys,
        folder=Path("/code"),
    )


def order(tmp_path, engine, *, host="c2", **more):
    return order_of(host_run(tmp_path, engine, host=host, **more))


def filled(tmp_path, text, *, host="c2", **variables):
    own = EngineSettings(name="command", data=_echo(text), dnn=_echo(text), ports=PORTS)
    return order(tmp_path, own, host=host, **variables).servers[-1].command[-1]


def _echo(text, **more):
    return EngineCommand(command=("echo", text), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "host", "variables", "expected"),
    [
        ("{host} {index} {address}", "c0", {}, "c0 1 c0"),
        ("{host} {index} {address}", "g1", {}, "g1 0 g1"),
        ("{leader} {leader:server}", "c2", {}, "g1 g1:5050"),
        ("{data_hosts} {dnn_hosts}", "g0", {}, "c2,c0 g1,g0"),
        ("{data_addresses:server}", "g0", {}, "c2:5050,c0:5050"),
        ("{dnn_addresses:worker}", "c0", {}, "g1:5051,g0:5051"),
        ("--port={server}", "c0", {}, "--port=5050"),
        ("{{server}} is {server}", "c0", {}, "{server} is 5050"),
        ('{"a": {"b": 1}} ${H:-x} { host }', "c0", {}, '{"a": {"b": 1}} ${H:-x} { host }'),
        ("{input} {output}", "c2", {}, "{folder}/input/data {folder}/out"),
        ("{workers}", "c2", {"STOKER_WORKERS": '{"data": 7}'}, "7"),
        ("{workers}", "g1", {"STOKER_WORKERS": '{"dnn": 3}'}, "3"),
        ("{workers}", "g1", {"STOKER_FEED": '{"local_workers": 2}'}, "2"),
        ("{workers}", "g1", {}, "0"),
        ("{address:server}", "c2", {"STOKER_ADVERTISE": "fd00::1"}, "[fd00::1]:5050"),
    ],
)
def test_places_stand_for_what_the_host_knows(tmp_path, text, host, variables, expected):
    found = filled(tmp_path, text, host=host, **variables)
    assert found == expected.replace("{folder}", str(tmp_path))


def test_hosts_that_share_an_address_have_ports_of_their_own(tmp_path):
    reached = {
        host: {"address": "127.0.0.1", "ports": {"server": 100 + n, "worker": 200 + n}}
        for n, host in enumerate(("g1", "g0", "c2", "c0"))
    }
    text = "{server} {leader:server} {data_addresses:worker} {address}"
    found = filled(tmp_path, text, host="c0", STOKER_ENGINE_HOSTS=json.dumps(reached))
    assert found == "103 127.0.0.1:100 127.0.0.1:202,127.0.0.1:203 127.0.0.1"


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


@pytest.mark.parametrize(
    ("host", "local", "parts"),
    [
        ("g1", 2, ["leader", "dnn"]),
        # A command that needs workers runs where there are some.
        ("g1", 0, ["leader"]),
        ("g0", 2, ["dnn"]),
        ("c2", 2, ["data"]),
    ],
)
def test_each_host_runs_the_commands_of_its_role_in_order(tmp_path, host, local, parts):
    feed = json.dumps({"local_workers": local})
    found = order(tmp_path, EngineSettings(name="tf.data.service"), host=host, STOKER_FEED=feed)
    assert [server.part for server in found.servers] == parts
    # The training finds the engine, and no data group of the feed.
    assert found.environment == {
        "TF_DATA_SERVICE_ADDRESS": "grpc://g1:5050",
        "STOKER_HAS_DATA_GROUP": "0",
    }


def test_a_server_finds_the_code_and_its_own_variables(tmp_path):
    variables = {"ME": "{host}", "PATH": "/own"}
    found = order(tmp_path, EngineSettings(name="command", data=_echo("x", environment=variables)))
    expected = {"ME": "c2", "PATH": "/own", "PYTHONPATH": "/code:/theirs", "SM_CURRENT_HOST": "c2"}
    environ = found.servers[0].environ
    assert {name: environ[name] for name in expected} == expected


def test_nothing_runs_with_the_feed_or_without_a_data_group(tmp_path):
    assert order(tmp_path, EngineSettings()) is None
    own = EngineSettings(name="command", data=_echo("x"))
    assert order(tmp_path, own, host="g1", groups={"gpu": GROUPS["gpu"]}) is None


def test_what_a_preset_says_is_replaced_where_the_settings_say_it():
    own = EngineSettings(name="tf.data.service", data=_echo("mine"), ports={"worker": 9})
    found = completed(own)
    assert found.data == own.data
    assert found.leader == PRESETS["tf.data.service"].leader
    assert found.ports == {"dispatcher": 5050, "worker": 9}


def load(engine):
    return builders.workload(engine=engine).engine_settings


def test_presets_and_all_places_of_the_table_are_known():
    for name in PRESETS:
        assert load(name).name == name
    words = [f"{{{name}}}" for name in (*PLAIN, *WITH_PORT, "s")]
    words += [f"{{{name}:s}}" for name in WITH_PORT]
    assert load({"name": "command", "data": {"command": words}, "ports": {"s": 5000}})


DATA: Json = {"command": ["x"]}
RESERVED: Json = {**DATA, "environment": {"STOKER_X": "1"}}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"name": "feed"}, "engine", "engine feed takes no other keys"),
        ({"data": None}, "engine", "needs engine.data.command"),
        ({"data": ["x", "{hosst}"]}, "engine.data.command[1]", "did you mean host?"),
        ({"data": ["{sever}"]}, "engine.data.command[0]", "did you mean server?"),
        ({"data": ["{leader:sever}"]}, "engine.data.command[0]", "did you mean server?"),
        ({"data": ["{host:server}"]}, "engine.data.command[0]", "host takes no port"),
        ({"data": ["{tf_config:boss}"], "ports": {"ps": 5}}, "data.command[0]", "known are: ps"),
        ({"environment": {"A": "{nowhere}"}}, "engine.environment.A", "unknown place {nowhere}"),
        ({"data": {**DATA, "ready": {"port": "x"}}}, "engine.data.ready.port", "no port x"),
        ({"data": RESERVED}, "engine.data.environment.STOKER_X", "are reserved"),
        ({"ports": {"a": 7601}}, "engine.ports.a", "used by feed.port"),
        ({"ports": {"a": 5000, "b": 5000}}, "engine.ports.b", "used by engine.ports.a"),
        ({"ports": {"host": 5}}, "engine.ports.host", "invalid port name"),
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


@pytest.mark.parametrize("text", ["", "{}", "{1}", "{a b}", '{"host": 1}', "{{", "%{x"])
def test_text_without_places_is_left_as_it_is(text):
    assert list(places_in(text)) == []
    assert fill(text, lambda place: f"<{place}>") == text


def test_launchers_are_told_of_an_engine_but_not_of_the_feed(tmp_path):
    def told(engine: Json) -> str | None:
        workload = builders.workload("w", engine=engine)
        job = JobSpec.of(workload, groups=[builders.group("dnn")], run_dir=tmp_path)
        return run_environment(job).to_environ().get("STOKER_ENGINE")

    assert told("feed") is None
    assert told("tf.data.service") == '{"name":"tf.data.service"}'
    engine: Json = {"name": "command", "data": {"command": ["x", "{host}"]}, "stop_seconds": 3}
    assert from_environment({"STOKER_ENGINE": told(engine)}).engine == load(engine)


GB = 1 << 30


def ray_run(tmp_path, host, *, token=b"t" * 32):
    workers, keys = '{"data": 7}', Keys.from_token(token)
    ray = EngineSettings(name="ray")
    return host_run(tmp_path / host, ray, host=host, keys=keys, STOKER_WORKERS=workers)


@pytest.mark.parametrize(
    ("host", "parts", "role", "cpus"),
    [("g1", ["leader"], "head", "0"), ("g0", ["dnn"], "node", "0"), ("c2", ["data"], "node", "7")],
)
def test_each_host_runs_a_node_and_data_hosts_run_tasks(tmp_path, host, parts, role, cpus):
    order = order_of(ray_run(tmp_path, host))
    assert [server.part for server in order.servers] == parts
    command = order.servers[0].command
    assert role in command
    assert command[command.index("--cpus") + 1] == cpus
    assert command[command.index("--gcs") + 1] == "g1:6379"
    assert order.environment["RAY_ADDRESS"] == "g1:6379"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_programs_that_come_with_stoker(tmp_path, name):
    programs = set()
    for host in ("g1", "g0", "c2"):
        settings = EngineSettings(name=name)
        run = host_run(tmp_path / host, settings, host=host, keys=Keys.from_token(b"t" * 32))
        programs |= {started.command[2] for started in order_of(run).servers}
    assert programs
    for program in map(Path, programs):
        assert program.is_file()
        assert program.parent == Path(ray_node.__file__).parent


def test_without_the_programs_it_is_said_what_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "CARRIED", (tmp_path / "project", tmp_path))
    with pytest.raises(UsageError) as caught:
        order(tmp_path, EngineSettings(name="ray"), host="c2", keys=Keys.from_token(b"t" * 32))
    assert str(tmp_path / "project" / "examples" / "engines") in str(caught.value.where)
    assert "engine.data.command" in str(caught.value.fix)
    # Commands of the user's own need none of them.
    own = EngineSettings(name="command", data=_echo("x"))
    assert order(tmp_path, own, host="c2").servers


def test_all_hosts_of_a_run_share_a_secret_that_is_not_in_what_they_run(tmp_path):
    found = set()
    for host in ("g1", "c2"):
        run = ray_run(tmp_path, host)
        order = order_of(run)
        path = Path(order.servers[0].environ["RAY_AUTH_TOKEN_PATH"])
        assert order.environment["RAY_AUTH_TOKEN_PATH"] == str(path)
        assert path.stat().st_mode & 0o777 == 0o600
        secret = path.read_text()
        assert secret not in repr(order)
        found.add(secret)
        forget_secret(run)
        assert not path.exists()
        forget_secret(run)
    assert len(found) == 1
    assert secret_file(ray_run(tmp_path, "c2", token=b"u" * 32)).read_text() not in found


@pytest.mark.parametrize(
    ("memory", "shm", "share", "expected"),
    [
        (100 * GB, 64 * GB, 0.3, 30 * GB),
        (100 * GB, 10 * GB, 0.3, 8 * GB),
        (100 * GB, None, 0.1, 10 * GB),
        (100 * GB, 64 << 20, 0.3, MIN_STORE_BYTES),
    ],
)
def test_the_store_is_a_share_of_memory_that_fits_into_shared_memory(memory, shm, share, expected):
    found = store_bytes(memory, free_shm_bytes=shm, share=share)
    assert found == pytest.approx(expected, rel=1e-6)


def test_ray_variables_of_the_engine_hold_for_nodes_but_for_the_address_and_places():
    places = {"RAY_ADDRESS": "a:1", "OTHER": "2", "RAY_AUTH_TOKEN_PATH": "{secret_file}"}
    found = own_variables({"RAY_x": "1", **places})
    assert found["RAY_x"] == "1"
    assert not places.keys() & found.keys()


def options(role):
    return argparse.Namespace(
        role=role, gcs="g1:6379", address="127.0.0.1", ports="11,12,13", cpus=4, joined=14
    )


def test_a_head_and_a_node_differ_in_whom_they_know():
    head = node_command(options("head"), folder=Path("/f"), store=5)
    node = node_command(options("node"), folder=Path("/f"), store=5)
    assert {"--head", "--port=6379", "--include-dashboard=false"} <= set(head) - set(node)
    assert "--address=g1:6379" in node
    both = {"--block", "--node-manager-port=11", "--num-cpus=4", "--temp-dir=/f"}
    assert both | {"--object-store-memory=5"} <= set(head) & set(node)


def test_the_folder_of_sockets_is_short_and_gone_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    with session_folder() as folder:
        assert folder.parent == Path("/tmp")
        assert len(os.fsencode(folder)) <= MAX_FOLDER_BYTES
        (folder / "socket").write_text("x")
    assert not folder.exists()


def test_a_node_that_starts_at_the_same_time_removes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ray_node, "MAX_FOLDER_BYTES", 4096)
    flock = fcntl.flock

    def late(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        # Another node begins, before this one holds its lock.
        ray_node._remove_forsaken(tmp_path)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with session_folder() as folder:
        assert (folder / "lock").exists()
        ray_node._remove_forsaken(tmp_path)
        assert (folder / "lock").exists()
    assert not [*tmp_path.iterdir()]


def test_without_a_place_for_sockets_the_limit_is_said(monkeypatch):
    monkeypatch.setattr(ray_node, "MAX_FOLDER_BYTES", 10)
    with pytest.raises(UsageError, match="at most 10 bytes"), session_folder():
        pass


MAIN = [
    *("head", "--gcs", "a:1", "--address", "127.0.0.1", "--ports", "1,2,3"),
    *("--joined", "4", "--cpus", "1"),
]


def test_a_share_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    name = ray_node.STORE_SHARE_VARIABLE
    monkeypatch.setenv("STOKER_ENGINE", f'{{"name": "ray", "environment": {{"{name}": "a lot"}}}}')
    assert ray_node.main(MAIN) == 2
    assert "between 0 and 1, found a lot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "words", "library"),
    [
        (ray_node, MAIN, "Ray"),
        (tf_server, ["dispatcher", "--port", "5050"], "TensorFlow"),
        (tf_server, ["worker", "--dispatcher", "a:1", "--address", "b:2"], "TensorFlow"),
        (tf_server, [], "TensorFlow"),  # Of TF_CONFIG.
    ],
)
def test_a_server_says_what_is_missing(program, words, library, monkeypatch, capsys):
    # Restored afterwards: the servers hide accelerators from TensorFlow.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setitem(sys.modules, library.lower(), None)
    assert program.main(words) == 2
    said = capsys.readouterr().err
    assert f"error: this engine needs {library}" in said
    assert f"try:   install {library.lower()}" in said
