import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from stoker import doctor
from stoker.cli.doctor import doctor_verb
from stoker.doctor import Finding, examine, peer_check
from stoker.errors import UsageError
from stoker.feed.wire.crypto import Keys
from stoker.host.gpus import GpuReader
from stoker.host.processes import free_ports
from stoker.launch.coordinator import Coordinator
from stoker.launch.roster import ExpectedHosts
from stoker.launch.topology import Topology, from_resourceconfig
from stoker.logs import Log
from stoker.records import FeedSettings
from support.local_job import resource_config
from support.nvml import FakeGpu, FakeNvml
from support.tokens import new_token

GROUPS = {"dnn": ["localhost"], "data": ["data-1.invalid"]}


@pytest.fixture
def token_file(tmp_path):
    (tmp_path / "token").write_text(new_token())
    return tmp_path / "token"


@pytest.fixture
def port():
    return free_ports(set())


@contextlib.contextmanager
def coordinator_at(port: int, token_file: Path) -> Iterator[None]:
    with open(os.devnull, "w") as nowhere:
        expected = ExpectedHosts(
            run_id="run",
            agents=("d1",),
            followers=(),
            lease_seconds=FeedSettings().lease_seconds,
            start_deadline_seconds=FeedSettings().start_deadline_seconds,
        )
        coordinator = Coordinator(
            keys=Keys.from_token(bytes.fromhex(token_file.read_text())),
            expected=expected,
            log=Log(run="run", host="leader", stream=nowhere),
            address="127.0.0.1",
            port=port,
            on_failure=lambda change: None,
        )
        coordinator.start()
        with contextlib.closing(coordinator):
            yield


@contextlib.contextmanager
def stranger_at(port):
    """Plays a stranger that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", port)):
        yield


def topology(tmp_path: Path, host: str = "localhost") -> Topology:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "resourceconfig.json").write_text(resource_config(host, GROUPS))
    return from_resourceconfig(tmp_path, {})


def findings(environ: Mapping[str, str], *, peer: str | None = None) -> dict[str, Finding]:
    return {check.name: check for check in examine(environ, peer=peer)}


def test_a_host_by_itself_is_healthy(tmp_path, port):
    found = findings({"STOKER_BASE_DIR": str(tmp_path), "STOKER_PORT": str(port)})
    assert [check for check in found.values() if check.state == "fail"] == []
    # Of a job, which a laptop is not in.
    assert not {"role", "names", "token"} & set(found)
    assert "folder" in found
    outside = {"STOKER_BASE_DIR": str(tmp_path / "opt" / "ml"), "STOKER_PORT": str(port)}
    assert "folder" not in findings(outside)


def test_a_job_without_its_token_and_with_an_unknown_host_fails(tmp_path, port):
    topology(tmp_path)
    found = findings({"STOKER_BASE_DIR": str(tmp_path), "STOKER_PORT": str(port)})
    assert found["role"].text.endswith("dnn, group dnn, host 1 of 1, ml.c5.xlarge, leader")
    assert found["names"].state == "fail"
    assert "data-1.invalid" in found["names"].text
    assert found["token"].state == "fail"


def test_the_tokens_content_is_never_shown(tmp_path, token_file):
    run = topology(tmp_path)
    token = token_file.read_text()
    good = doctor.token_check(run, token_file)
    token_file.write_text(token[:-1])
    bad = doctor.token_check(run, token_file)
    gone = doctor.token_check(run, tmp_path / "no-such-file")
    assert [good.state, bad.state, gone.state] == ["ok", "fail", "fail"]
    assert token[:20] not in f"{good}{bad}{gone}"


def test_malformed_settings_and_job_descriptions_are_findings_and_no_end(tmp_path):
    found = findings({"STOKER_BASE_DIR": str(tmp_path), "STOKER_FEED": "{nonsense"})
    assert found["settings"].state == "fail"
    assert "STOKER_FEED" in found["settings"].text
    assert "port" in found
    topology(tmp_path)
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text("{}")
    found = findings({"STOKER_BASE_DIR": str(tmp_path)})
    assert (found["role"].state, "port" in found) == ("fail", True)


def test_a_port_is_free_or_our_own_or_taken(port, token_file):
    assert doctor.port_check(port, token_file).state == "ok"
    with coordinator_at(port, token_file):
        assert doctor.port_check(port, token_file).text.endswith("used by this run's launcher")
        assert doctor.port_check(port, None).state == "fail"
    with stranger_at(port):
        assert doctor.port_check(port, None).state == "fail"


def test_a_peer_of_the_same_run_is_known_by_its_handshake(port, token_file):
    with coordinator_at(port, token_file):
        found = peer_check(f"localhost:{port}", port=1, token_file=token_file)
        assert found.state == "ok"
        assert found.text.endswith("and is of this run")
        assert peer_check("127.0.0.1", port=port, token_file=None).state == "ok"


def test_a_peer_without_the_token_is_not_of_this_run(port, token_file, tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.doctor.HANDSHAKE_SECONDS", 0.5)
    (tmp_path / "other").write_text(new_token())
    for listener in (coordinator_at(port, token_file), stranger_at(port)):
        with listener:
            found = peer_check("127.0.0.1", port=port, token_file=tmp_path / "other")
        assert found.state == "fail"
        assert "is not of this run" in found.text


def test_a_peer_that_does_not_listen_or_has_no_name_fails(port):
    assert "refused" in peer_check("127.0.0.1", port=port, token_file=None).text
    found = peer_check("nobody.invalid", port=port, token_file=None)
    assert "cannot resolve nobody.invalid" in found.text


def test_torch_is_needed_by_a_host_with_a_part_in_a_run(monkeypatch):
    assert doctor.torch_check(trains=True).state == "ok"
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert doctor.torch_check(trains=True).state == "fail"
    assert doctor.torch_check(trains=False).state == "warn"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        *(("2.3.0+cu121", "fail"), ("2.3.1", "fail"), ("2.4.0a0+git1", "ok"), ("2.10.0", "ok")),
        # Not to be read.
        *(("unknown", "warn"), ("2", "warn")),
    ],
)
def test_a_pytorch_older_than_what_stoker_leans_on_fails(monkeypatch, version, state):
    monkeypatch.setattr("torch.__version__", version)
    finding = doctor.torch_check(trains=True)
    assert (finding.state, version in finding.text) == (state, True)
    assert ("2.4" in finding.fix) == (state != "ok")
    # As the control image on a base with it.
    assert doctor.torch_check(trains=False).state == ("ok" if state == "ok" else "warn")


def test_the_oldest_pytorch_is_the_one_that_the_package_asks_for():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, doctor.MIN_TORCH))}"' in project


def test_what_a_host_lacks_is_noticed(tmp_path, monkeypatch):
    assert doctor.folder_check(tmp_path / "new" / "folder").state == "ok"
    (tmp_path / "file").touch()
    assert doctor.folder_check(tmp_path / "file" / "ml").state == "fail"
    assert doctor.shared_memory_check(tmp_path / "none").state == "warn"
    monkeypatch.setattr(doctor, "MIN_SHARED_MEMORY_BYTES", 1 << 60)
    assert doctor.shared_memory_check(tmp_path).state == "warn"
    assert doctor.accelerators_check({"CUDA_VISIBLE_DEVICES": ""}).text == "none"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.accelerators_check({"CUDA_VISIBLE_DEVICES": "0,1"}).state == "fail"


def gpu_checks(library, tmp_path, *, has_gpus=True, **environ):
    found = doctor.gpu_load_checks(
        lambda: GpuReader(environ, nvml=lambda: library, devices=tmp_path), has_gpus=has_gpus
    )
    return [(each.state, each.text) for each in found]


def test_each_gpu_has_a_line_with_its_load_and_what_it_does_not_tell(tmp_path):
    second = FakeGpu(uuid="GPU-2", refuses={"nvmlDeviceGetPcieThroughput": 3}, reasons=0x4)
    found = gpu_checks(FakeNvml(FakeGpu(uuid="GPU-1"), second), tmp_path)
    assert [state for state, _ in found] == ["ok", "ok"]
    first, other = (text for _, text in found)
    figures = "GPU 0: 28% busy, 12.9 GB of 85.9 GB, 210 W, 1755 MHz, 1.20 GB/s received, GPU-1; "
    assert first.startswith(figures)
    assert re.search(r"a look takes \d+ ms, [\d.]+ ms of CPU; not known: PCIe traffic", first)
    assert other.endswith("1755 MHz, clocks lowered (power), GPU-2")


def test_what_keeps_the_load_from_being_read_is_a_warning_where_there_is_a_gpu(tmp_path):
    ((state, text),) = gpu_checks(FakeNvml(init_code=12), tmp_path)
    assert (state, text.partition(" (")[0]) == ("warn", "NVML: NVML Shared Library Not Found")
    assert gpu_checks(FakeNvml(init_code=12), tmp_path, has_gpus=False) == []
    hidden = gpu_checks(FakeNvml(FakeGpu()), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert hidden == [("warn", "CUDA_VISIBLE_DEVICES='' names none")]
    (lost,) = gpu_checks(FakeNvml(FakeGpu(lost_after=0)), tmp_path)
    assert lost[0] == "fail"
    assert "GPU is lost" in lost[1]


def test_the_verb_ends_with_4_where_something_fails(tmp_path, port, capsys, monkeypatch):
    monkeypatch.setenv("STOKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("STOKER_PORT", str(port))
    assert doctor_verb(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["healthy"]
    with stranger_at(port):
        assert doctor_verb() == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("fail")] == [
        f"fail  port     {port}: Address already in use"
    ]
    assert any(line.strip().startswith("try: ") for line in lines)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"cluster": True}, "--cluster needs a workload"),
        ({"overrides": ["name=a"]}, "--set needs a workload"),
        ({"workload": "mnist.yaml"}, "a workload needs --cluster"),
        (
            {"workload": "mnist.yaml", "cluster": True, "peer": "data-1"},
            "--peer cannot be used with --cluster",
        ),
    ],
)
def test_a_workload_and_what_is_to_be_looked_at_go_together(given, what):
    with pytest.raises(UsageError, match=what):
        doctor_verb(**given)
