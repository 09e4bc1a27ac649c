import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from stoker.environment import RunGroup, RunSettings, from_environment
from stoker.errors import UsageError
from stoker.host import machine
from stoker.launch import job_environment, launch, mpi, mpi_programs
from stoker.launch.job_environment import Trainer
from stoker.records import FeedSettings
from support import builders
from support.run_file import in_run

TOPOLOGY = replace(
    builders.topology("algo-3", data=("data", ("algo-1",)), gpu=("dnn", ("algo-3", "algo-2"))),
    network_interface="eth1",
)


def host_run(tmp_path, topology, **environ):
    own = {"STOKER_BASE_DIR": str(tmp_path), "STOKER_COORDINATOR": "10.0.0.3:7600"}
    return builders.host_run(tmp_path, topology, in_run({**own, **environ}))


@pytest.fixture
def base_dir(tmp_path):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    values = {"lr": "0.1", "name": "a b", "flag": "true", "x": "3", "sizes": "[1, 2]"}
    values["sagemaker_program"] = '"train.py"'
    (config / "hyperparameters.json").write_text(json.dumps(values))
    (config / "inputdataconfig.json").write_text(json.dumps({"train": {}, "val-2": {}}))
    return tmp_path


def hyperparameters(base_dir):
    settings = from_environment({"STOKER_BASE_DIR": str(base_dir)})
    return job_environment.hyperparameters(settings)


def variables(base_dir):
    environ = {"TRAINING_JOB_NAME": "job-1", "CUDA_VISIBLE_DEVICES": "0,1"}
    return job_environment.toolkit_variables(TOPOLOGY, base_dir, environ=environ)


def test_the_toolkits_variables_are_exported(base_dir):
    found = variables(base_dir)
    # A script starts its process group over them: they are those that train.
    hosts = ["algo-3", "algo-2"]
    assert json.loads(found["SM_HOSTS"]) == hosts
    assert json.loads(found["SM_TRAINING_ENV"])["hosts"] == hosts
    assert json.loads(found["SM_RESOURCE_CONFIG"])["hosts"] == hosts
    assert json.loads(found["SM_CHANNELS"]) == ["train", "val-2"]
    assert json.loads(found["SM_TRAINING_ENV"])["job_name"] == "job-1"
    assert "sagemaker_program" not in found["SM_HPS"]
    expected = {
        "SM_CURRENT_HOST": "algo-3",
        "SM_CURRENT_INSTANCE_GROUP": "gpu",
        "SM_CHANNEL_TRAIN": str(base_dir / "input" / "data" / "train"),
        "SM_CHANNEL_VAL-2": str(base_dir / "input" / "data" / "val-2"),
        "SM_MODEL_DIR": str(base_dir / "model"),
        "SM_OUTPUT_DATA_DIR": str(base_dir / "output" / "data"),
        "SM_NUM_CPUS": str(machine.usable_vcpus()),
        "SM_NUM_GPUS": "2",
        "SM_HP_LR": "0.1",
        "SM_HP_FLAG": "true",
        "SM_HP_NAME": "a b",
        "SM_NETWORK_INTERFACE_NAME": "eth1",
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("environ", "hosts", "strategy"),
    [
        ({}, ("a",), "none"),
        ({}, ("a", "b"), "torchrun"),
        ({"RUN_PROCESSES_PER_HOST": "2"}, ("a",), "torchrun"),
        ({"RUN_STRATEGY": "none"}, ("a", "b"), "none"),
        ({"RUN_STRATEGY": "torchrun"}, ("a",), "torchrun"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("a",), "torchrun"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("a",), "none"),
    ],
)
def test_torchrun_is_used_where_more_than_one_process_trains(tmp_path, environ, hosts, strategy):
    topology = builders.topology("a", dnn=("dnn", hosts))
    environ = {"CUDA_VISIBLE_DEVICES": "", **environ}
    assert Trainer(host_run(tmp_path, topology, **environ)).strategy == strategy


def test_torchrun_spans_the_dnn_group_only_and_the_leader_is_its_master(tmp_path):
    trainer = Trainer(host_run(tmp_path, TOPOLOGY, RUN_PROCESSES_PER_HOST="4"))
    command = trainer.command(("python", "t.py"))
    assert {"--nnodes=2", "--node-rank=0", "--nproc-per-node=4"} < set(command)
    assert {"--master-addr=10.0.0.3", "--master-port=7602"} < set(command)
    assert command[-2:] == ("python", "t.py")


def test_a_command_that_starts_its_ranks_itself_is_told_where_they_meet(tmp_path):
    follower = replace(TOPOLOGY, host="algo-2")
    made = Trainer(host_run(tmp_path, follower, RUN_STRATEGY="none")).environ()
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES")
    assert [made[name] for name in names] == ["10.0.0.3", "7602", "1", "2"]


HOSTS = ("algo-3", "algo-2")


@pytest.mark.parametrize(
    ("strategy", "feed", "words"),
    [
        ("horovod", {}, "horovod"),
        # Replicas are said once, and no rank is in two.
        ("auto", {"replicas": [[0, 1]], "model_parallel_size": 2}, "replica"),
    ],
)
def test_settings_of_another_strategy_and_wrong_replicas_are_refused_at_load(strategy, feed, words):
    with pytest.raises(UsageError, match=words):
        builders.workload(strategy=strategy, feed=feed)


def test_the_replica_of_a_rank():
    assert [FeedSettings().replica(rank) for rank in range(3)] == [0, 1, 2]
    assert [FeedSettings(model_parallel_size=2).replica(r) for r in range(4)] == [0, 0, 1, 1]


def test_mpirun_spans_the_dnn_group_and_starts_daemons_through_the_agent():
    command = mpi.command_of(
        ("/usr/bin/python3", "t.py", "--lr", "0.1"),
        hosts=HOSTS,
        processes_per_host=2,
        folder=Path("/tmp/s"),
        start_deadline_seconds=60,
    )
    assert command[0] == "mpirun"
    assert "localhost:2,algo-2:2" in command
    agent = command[command.index("plm_rsh_agent") + 1]
    assert agent.endswith(f"{mpi_programs.__file__} agent /tmp/s")
    assert command[command.index("-np") + 1] == "4"
    script = ("/usr/bin/python3", "t.py", "--lr", "0.1")
    assert command[-6:] == (mpi_programs.__file__, "rank", *script)


USER = 1000


@contextmanager
def as_a_pods_user():
    if os.geteuid():
        yield
        return
    os.setegid(USER)
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def pods_folder():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        for name in ("model", "checkpoints", "output"):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)
        yield folder
        for name in ("model", "checkpoints", "output"):
            (folder / name).chmod(0o777)


def environ(pods_folder):
    group = RunGroup(name="dnn", instance_type="gpu", count=1, hosts="mini-dnn-0-{index}.mini")
    run = RunSettings(pod_groups=(group,)).to_json()
    own = {"STOKER_GROUP": "dnn", "STOKER_BASE_DIR": str(pods_folder), "JOB_COMPLETION_INDEX": "0"}
    return {"STOKER_RUN": run, **own}


def test_a_folder_of_a_claim_that_cannot_be_written_ends_the_launcher_at_once(
    pods_folder, monkeypatch
):
    # This process keeps its handlers.
    monkeypatch.setattr("stoker.launch.launcher.catch_signals", lambda inbox: None)
    name = "checkpoints"
    (pods_folder / name).chmod(0o555)
    who = "cannot write" if os.geteuid() else f"user {USER} cannot write to {pods_folder / name}"
    with as_a_pods_user(), pytest.raises(UsageError, match=who) as caught:
        launch(["touch", str(pods_folder / "began")], environ(pods_folder))
    assert "access point" in caught.value.fix
    assert "NFS" in caught.value.fix
    assert not (pods_folder / "began").exists()
