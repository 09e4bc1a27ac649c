import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

from stoker.environment import RunEnvironment, from_environment
from stoker.errors import UsageError
from stoker.launch.strategies import mpi, mpi_programs, torchrun
from stoker.launch.strategies.start import Trainer
from stoker.platforms.base import JobSpec, check_job
from stoker.records import FeedSettings, StrategySettings
from support import builders

HOSTS = ("algo-3", "algo-2")
TOPOLOGY = builders.topology("algo-3", kinds={"gpu": "ml.p4d.24xlarge"}, gpu=("dnn", HOSTS))


def group(name="dnn", **changes):
    return msgspec.structs.replace(builders.group("dnn", name=name), **changes)


@pytest.mark.parametrize(
    ("strategy", "feed", "words"),
    [
        ({"name": "mpi", "max_restarts": 2}, {}, "strategy mpi does not use max_restarts"),
        ({"name": "torchrun", "fallback": "nccl"}, {}, "strategy torchrun does not use fallback"),
        ({"name": "torchrun", "mpi_arguments": ["-v"]}, {}, "torchrun does not use mpi_arguments"),
        ("horovod", {}, "horovod"),
        # Replicas are said once, and no rank is in two.
        ("auto", {"replicas": [[0, 1]], "model_parallel_size": 2}, "replica"),
        ("auto", {"replicas": [[0, 1], [1, 2]]}, "replica"),
    ],
)
def test_settings_of_another_strategy_and_wrong_replicas_are_refused_at_load(strategy, feed, words):
    with pytest.raises(UsageError, match=words):
        builders.workload(strategy=strategy, feed=feed)


def test_smddp_on_a_type_that_it_is_not_for_is_refused_at_load_unless_it_may_fall_back():
    cluster = {"dnn": {"instance_type": "g5.48xlarge"}}
    with pytest.raises(UsageError, match=r"does not support g5.48xlarge, only ml.p4d"):
        builders.workload(strategy="smddp", cluster=cluster)
    builders.workload(strategy={"name": "smddp", "fallback": "nccl"}, cluster=cluster)
    builders.workload(strategy="smddp", cluster={"dnn": {"instance_type": "p4d.24xlarge"}})


def test_the_replica_of_a_rank():
    assert [FeedSettings().replica(rank) for rank in range(3)] == [0, 1, 2]
    assert [FeedSettings(model_parallel_size=2).replica(r) for r in range(4)] == [0, 0, 1, 1]
    listed = FeedSettings(replicas=((0, 2), (1, 3)))
    assert [listed.replica(rank) for rank in range(5)] == [0, 1, 0, 1, 6]


@pytest.mark.parametrize(
    ("strategy", "groups", "words"),
    [
        ("none", [group(processes_per_host=2)], "one process per host, not 2"),
        ("smddp", [group()], r"does not support local.c1"),
    ],
)
def test_what_cannot_train_so_is_refused_at_plan(strategy, groups, words, tmp_path):
    settings = RunEnvironment(strategy=StrategySettings(name=strategy))
    known = {"command": ("true",), "groups": tuple(groups), "run_dir": tmp_path}
    job = JobSpec(name="j", settings=settings, **known)
    with pytest.raises(UsageError, match=words):
        check_job(job)


def test_restarts_over_hosts_have_a_store_for_each_attempt(tmp_path):
    def trainer(**strategy):
        told = json.dumps({"name": "torchrun", **strategy})
        environ = {"STOKER_BASE_DIR": str(tmp_path), "STOKER_STRATEGY": told}
        return Trainer.of(from_environment(environ), TOPOLOGY, environ)

    made = trainer(max_restarts=2)
    command = made.command(("a",), TOPOLOGY, master=("10.0.0.3", 7602), feed=FeedSettings())
    assert {"--max-restarts=2", "--rdzv-backend=c10d", "--local-addr=10.0.0.3"} < set(command)
    assert made.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in trainer().variables


def open_mpi(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_mpirun_spans_the_dnn_group_and_starts_daemons_through_the_agent(tmp_path):
    command = mpi.command_of(
        ("/usr/bin/python3", "t.py", "--lr", "0.1"),
        hosts=HOSTS,
        processes_per_host=2,
        agent_socket=Path("/tmp/s/starts"),
        more=("-x", "NCCL_DEBUG=INFO"),
        environ=open_mpi(tmp_path / "bin", "mpirun", "orted"),
        start_deadline_seconds=60,
    )
    assert command[0] == "mpirun"
    assert "localhost:2,algo-2:2" in command
    agent = command[command.index("plm_rsh_agent") + 1]
    assert agent.endswith(f"{mpi_programs.__file__} agent /tmp/s/starts")
    assert command[command.index("-np") + 1] == "4"
    script = ("/usr/bin/python3", "t.py", "--lr", "0.1")
    assert command[-6:] == (mpi_programs.__file__, "rank", *script)


@pytest.mark.parametrize("names", [(), ("mpirun",), ("orted",)])
def test_a_host_without_open_mpi_4_is_told_what_to_install(tmp_path, names):
    with pytest.raises(UsageError, match=r"(?s)needs Open MPI 4.*openmpi-bin"):
        mpi.find_program("mpirun", open_mpi(tmp_path / "bin", *names))


@pytest.mark.parametrize(
    "line",
    ["", "sh -c reboot", "orted -mca a b; reboot", "orted --prefix /x", "orted -mca a", "ortedx"],
)
def test_only_the_daemon_with_settings_is_started(line):
    with pytest.raises(ValueError, match="orted"):
        mpi.daemon_arguments(shlex.split(line))


def test_a_stop_while_torchrun_s_log_files_are_deleted_leaves_none(tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    delete = shutil.rmtree

    def run(options):
        signal.signal(signal.SIGTERM, _terminate_process_handler)
        (Path(options.log_dir) / "0.log").touch()

    def delete_while_stopped(path, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        delete(path, **options)

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(shutil, "rmtree", delete_while_stopped)
    monkeypatch.setenv("STOKER_OUTPUT", str(tmp_path))
    try:
        assert torchrun.main(["train.py"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not [*tmp_path.rglob("*.log")]
