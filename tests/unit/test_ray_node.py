"""Checks how a node of Ray starts, where its sockets are, what it may take, who may speak to it."""

import argparse
import os
import queue
import sys
from io import StringIO
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.feed.wire.crypto import Keys
from stoker.launch.engines import ray_node
from stoker.launch.engines.ray_node import (
    MAX_FOLDER_BYTES,
    MIN_STORE_BYTES,
    node_command,
    own_variables,
    session_folder,
    store_bytes,
)
from stoker.launch.engines.server import forget_secret, order_of, secret_file
from stoker.launch.leader_connection import HostRun
from stoker.launch.topology import HostGroup, Topology
from stoker.logs import Log
from stoker.settings import from_environment

GROUPS = (
    HostGroup(name="gpu", role="dnn", instance_type="", hosts=("g1", "g0")),
    HostGroup(name="cpu", role="data", instance_type="", hosts=("c2",)),
)
GB = 1 << 30


def host_run(tmp_path, host, *, token=b"t" * 32):
    environ = {"STOKER_BASE_DIR": str(tmp_path / host), "STOKER_ENGINE": '{"name": "ray"}'}
    return HostRun(
        settings=from_environment({**environ, "STOKER_WORKERS": '{"data": 7}'}),
        topology=Topology(host=host, groups=GROUPS),
        environ=environ,
        output=tmp_path / "out",
        log=Log(run="r", host=host, stream=StringIO()),
        inbox=queue.SimpleQueue(),
        keys=Keys.from_token(token),
    )


@pytest.mark.parametrize(
    ("host", "parts", "role", "cpus"),
    [("g1", ["leader"], "head", "0"), ("g0", ["dnn"], "node", "0"), ("c2", ["data"], "node", "7")],
)
def test_each_host_runs_one_node_and_tasks_run_where_data_workers_are(
    tmp_path, host, parts, role, cpus
):
    order = order_of(host_run(tmp_path, host))
    assert [server.part for server in order.servers] == parts
    command = order.servers[0].command
    assert role in command
    assert command[command.index("--cpus") + 1] == cpus
    assert command[command.index("--gcs") + 1] == "g1:6379"
    assert order.environment["RAY_ADDRESS"] == "g1:6379"


def test_all_hosts_of_a_run_share_a_secret_that_is_not_in_what_they_run(tmp_path):
    found = set()
    for host in ("g1", "c2"):
        run = host_run(tmp_path, host)
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
    other = secret_file(host_run(tmp_path, "c2", token=b"u" * 32)).read_text()
    assert other not in found


@pytest.mark.parametrize(
    ("memory", "shm", "share", "expected"),
    [
        (100 * GB, 64 * GB, 0.3, 30 * GB),
        (100 * GB, 10 * GB, 0.3, 8 * GB),
        (100 * GB, None, 0.1, 10 * GB),
        (100 * GB, 64 << 20, 0.3, MIN_STORE_BYTES),
    ],
)
def test_the_store_is_a_share_of_the_memory_that_fits_into_shared_memory(
    memory, shm, share, expected
):
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


def test_without_a_place_for_sockets_the_limit_is_said(monkeypatch):
    monkeypatch.setattr(ray_node, "MAX_FOLDER_BYTES", 10)
    with pytest.raises(UsageError, match="at most 10 bytes"), session_folder():
        pass


MAIN = [
    *("head", "--gcs", "a:1", "--address", "127.0.0.1", "--ports", "1,2,3"),
    *("--joined", "4", "--cpus", "1"),
]


def test_without_ray_the_node_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray_node.main(MAIN) == 2
    assert "error: this engine needs Ray" in capsys.readouterr().err


def test_a_share_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    name = ray_node.STORE_SHARE_VARIABLE
    monkeypatch.setenv("STOKER_ENGINE", f'{{"name": "ray", "environment": {{"{name}": "a lot"}}}}')
    assert ray_node.main(MAIN) == 2
    assert "between 0 and 1, found a lot" in capsys.readouterr().err
