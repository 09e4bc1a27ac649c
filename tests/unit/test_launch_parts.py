import dataclasses
import json
import os
import sys
from io import StringIO
from pathlib import Path

import pytest

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.feed.timeline import read_timeline, steady
from stoker.feed.training_steps import read_timelines, training_steps
from stoker.feed.wire.protocol import Progress
from stoker.figures.passive_profile import measure
from stoker.figures.step_progress import ProgressLog
from stoker.launch import sagemaker_variables
from stoker.launch.finish import (
    FAILURE_CHARACTERS,
    RankEnd,
    RankFailure,
    first_cause,
    forget_failures,
    read_cause,
    read_failures,
    write_cause,
    write_failure,
)
from stoker.launch.launcher import output_folder
from stoker.launch.strategies.start import STARTUP_DIR, Trainer
from stoker.launch.supervise import resolve_program
from stoker.logs import Log, parse_line
from stoker.records.hyperparameters import arguments
from support import builders

TOPOLOGY = dataclasses.replace(
    builders.topology("algo-3", data=("data", ("algo-1",)), gpu=("dnn", ("algo-3", "algo-2"))),
    network_interface="eth1",
)


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
    return sagemaker_variables.hyperparameters(settings)


def variables(base_dir):
    return sagemaker_variables.environment(
        TOPOLOGY,
        base_dir,
        values=hyperparameters(base_dir),
        num_cpus=4,
        num_accelerators=2,
        environ={"TRAINING_JOB_NAME": "job-1"},
    )


def test_hyperparameters_become_arguments_as_the_toolkit_makes_them(base_dir):
    assert arguments({}) == []
    words = arguments(hyperparameters(base_dir))
    assert words == (
        ["--flag", "True", "--lr", "0.1", "--name", "a b", "--sizes", "[1, 2]", "-x", "3"]
    )


def test_the_toolkits_variables_are_exported(base_dir):
    found = variables(base_dir)
    assert json.loads(found["SM_HOSTS"]) == ["algo-1", "algo-3", "algo-2"]
    assert json.loads(found["SM_INSTANCE_GROUPS_DICT"])["data"]["hosts"] == ["algo-1"]
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
        "SM_NUM_CPUS": "4",
        "SM_NUM_GPUS": "2",
        "SM_HP_LR": "0.1",
        "SM_HP_FLAG": "true",
        "SM_HP_NAME": "a b",
        "SM_NETWORK_INTERFACE_NAME": "eth1",
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_MODULE_NAME": "train",
        "SM_MODULE_DIR": str(base_dir / "code"),
    }
    assert {name: found[name] for name in expected} == expected


def test_channels_are_the_folders_where_no_file_names_them_but_for_those_that_stoker_adds(base_dir):
    inputs = base_dir / "input" / "config" / "inputdataconfig.json"
    inputs.write_text('{"train": {}, "stoker_token": {}, "stoker_code": {}}')
    found = variables(base_dir)
    assert json.loads(found["SM_CHANNELS"]) == ["train"]
    assert not [name for name in found if "STOKER" in name.upper()]
    assert "stoker_token" not in "".join(found.values())
    inputs.unlink()
    for name in ("images", "stoker_token"):
        (base_dir / "input" / "data" / name).mkdir(parents=True)
    assert json.loads(variables(base_dir)["SM_CHANNELS"]) == ["images"]


def test_the_resource_configuration_is_exported_as_the_service_wrote_it(base_dir):
    config = {"current_host": "algo-3", "hosts": ["algo-1", "algo-2", "algo-3"], "topology": [1]}
    (base_dir / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))
    found = variables(base_dir)
    assert json.loads(found["SM_RESOURCE_CONFIG"]) == config
    assert json.loads(found["SM_HOSTS"]) == ["algo-1", "algo-2", "algo-3"]
    assert json.loads(found["SM_TRAINING_ENV"])["topology"] == [1]


@pytest.mark.parametrize(("interface", "is_exported"), [("lo", True), ("eth77", False)])
def test_collectives_are_told_the_interface_if_this_host_has_it(tmp_path, interface, is_exported):
    environ = {"STOKER_BASE_DIR": str(tmp_path)}
    topology = dataclasses.replace(TOPOLOGY, network_interface=interface)
    found = Trainer.of(from_environment(environ), topology, environ).variables
    assert found["SM_NETWORK_INTERFACE_NAME"] == interface
    names = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert {found.get(name) for name in names} == {interface if is_exported else None}


@pytest.mark.parametrize(
    ("asked", "processes", "own", "threads"),
    [("6000", 2, None, "3"), ("500", 1, None, "1"), ("6000", 2, "5", None), (None, 2, None, None)],
)
def test_ranks_of_a_pod_begin_threads_for_the_cpus_that_it_asks_for(
    tmp_path, monkeypatch, asked, processes, own, threads
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr("stoker.host.machine.cpu_quota", lambda: None)
    environ = {"STOKER_BASE_DIR": str(tmp_path), "STOKER_PROCESSES_PER_HOST": str(processes)}
    environ |= {"STOKER_CPU_REQUEST_MILLI": asked} if asked else {}
    environ |= {"OMP_NUM_THREADS": own} if own else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = Trainer.of(from_environment(environ), TOPOLOGY, environ).variables
    assert found.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_malformed_hyperparameters_are_a_usage_error(base_dir, text):
    (base_dir / "input" / "config" / "hyperparameters.json").write_text(text)
    with pytest.raises(UsageError, match="JSON"):
        hyperparameters(base_dir)


@pytest.mark.parametrize(
    ("environ", "hosts", "strategy"),
    [
        ({}, ("a",), "none"),
        ({}, ("a", "b"), "torchrun"),
        ({"STOKER_PROCESSES_PER_HOST": "2"}, ("a",), "torchrun"),
        ({"STOKER_STRATEGY": "none"}, ("a", "b"), "none"),
        ({"STOKER_STRATEGY": "torchrun"}, ("a",), "torchrun"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("a",), "torchrun"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("a",), "none"),
    ],
)
def test_torchrun_is_used_where_more_than_one_process_trains(tmp_path, environ, hosts, strategy):
    environ = {"CUDA_VISIBLE_DEVICES": "", "STOKER_BASE_DIR": str(tmp_path)} | environ
    topology = builders.topology("a", dnn=("dnn", hosts))
    assert Trainer.of(from_environment(environ), topology, environ).strategy == strategy


def test_torchrun_spans_the_dnn_group_only_and_the_leader_is_its_master(tmp_path):
    environ = {"STOKER_BASE_DIR": str(tmp_path), "STOKER_PROCESSES_PER_HOST": "4"}
    settings = from_environment(environ)
    trainer = Trainer.of(settings, TOPOLOGY, environ)
    master = ("10.0.0.3", 7602)
    command = trainer.command(("python", "t.py"), TOPOLOGY, master=master, feed=settings.feed)
    assert {"--nnodes=2", "--node-rank=0", "--nproc-per-node=4"} < set(command)
    assert {"--master-addr=10.0.0.3", "--master-port=7602"} < set(command)
    assert command[-2:] == ("python", "t.py")


def test_ranks_learn_what_the_settings_table_says_and_keep_what_is_set_already(tmp_path):
    environ = {
        "STOKER_BASE_DIR": str(tmp_path),
        "STOKER_HOST": "not-this-one",
        "PYTHONPATH": "/theirs",
        "SM_NUM_NEURONS": "32",
        "NCCL_SOCKET_IFNAME": "mine",
    }
    settings = from_environment(environ)
    made = Trainer.of(settings, TOPOLOGY, environ).environ(
        settings,
        TOPOLOGY,
        environ,
        output=tmp_path / "out",
        coordinator=("algo-3", 7600),
        launcher_pid=42,
        folder=Path("/opt/ml/code"),
    )
    process = from_environment(made)
    assert (process.host, process.group, process.launcher_pid) == ("algo-3", "gpu", 42)
    assert process.has_data_group
    assert process.coordinator == "algo-3:7600"
    assert process.output == tmp_path / "out"
    assert process.metrics == tmp_path / "out" / "metrics.json"
    # Modules of the code's folder come before those of the image.
    assert made["PYTHONPATH"] == f"{STARTUP_DIR}:/opt/ml/code:/theirs"
    assert (made["SM_NUM_NEURONS"], made["NCCL_SOCKET_IFNAME"]) == ("32", "mine")


def test_only_the_leader_writes_to_the_folder_that_all_hosts_share_in_the_end(tmp_path):
    settings = from_environment({"STOKER_BASE_DIR": str(tmp_path)})
    follower = dataclasses.replace(TOPOLOGY, host="algo-2")
    shared = tmp_path / "output" / "data" / "stoker"
    assert output_folder(settings, TOPOLOGY) == shared
    assert output_folder(settings, follower) == shared / "algo-2"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "-u", "t.py"], (sys.executable, "-u", "t.py")),
        (["./run.sh", "x"], ("{folder}/./run.sh", "x")),
        (["no-such-program"], None),
    ],
    ids=["the Python that runs stoker", "a path below the folder", "nowhere"],
)
def test_a_program_is_looked_for_where_it_will_run(tmp_path, command, found):
    (tmp_path / "run.sh").touch(mode=0o755)
    expected = found and tuple(word.format(folder=tmp_path) for word in found)
    assert resolve_program(command, {"PATH": os.environ["PATH"]}, folder=tmp_path) == expected


def rows(*steps):
    head = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps,weight\n"
    lines, start = [], 0.0
    for loader, epoch, wait, compute, samples in steps:
        lines.append(f"{loader},{epoch},0,{start},{wait},{compute},{samples},1,1\n")
        # One after the other, as in a training.
        start += wait + compute
    return head + "".join(lines)


def test_measures_are_medians_of_the_main_loader_without_its_first_steps(tmp_path):
    train = [(0, epoch, w, 1.0, 4) for epoch in (0, 1) for w in (50.0, 40.0, 1.0, 2.0, 3.0)]
    validation = [(1, 0, 9.0, 9.0, 4)] * 3
    (tmp_path / "timeline-rank0.csv").write_text(rows(*train, *validation))
    found = measure(read_timelines(tmp_path), {})
    assert (found.wait_seconds, found.compute_seconds, found.step_seconds) == (2.0, 1.0, 3.0)
    assert found.steps == 10
    # Of whole epochs, without the run's first two steps: the second epoch's first ones count.
    assert found.samples_per_second == pytest.approx(8 * 4 / 110.0)
    assert found.spread["wait_seconds"].samples == 2  # one short block an epoch
    assert found.timeline_file == "timeline-rank0.csv"


def test_a_wait_that_ends_a_burst_is_not_missed(tmp_path):
    # Three batches at once, then a wait for the next three.
    burst = [(0, 0, 0.06 if batch % 3 == 0 else 0.0, 0.02, 4) for batch in range(100)]
    (tmp_path / "timeline-rank0.csv").write_text(rows(*burst))
    found = measure(read_timelines(tmp_path), {})
    assert found.step_seconds == pytest.approx(0.04, rel=0.05)
    assert found.wait_seconds == pytest.approx(0.02, rel=0.1)
    spread = found.spread["wait_seconds"]
    assert 0.015 < spread.low <= found.wait_seconds <= spread.high < 0.025


def test_rates_of_all_ranks_add_up_wherever_they_run(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"timeline-rank{rank}.csv").write_text(rows(*[(0, 0, 0.5, 0.5, 8)] * 4))
    far = Progress(rank=2, steps=4, samples=40, wait_seconds=1.0, compute_seconds=3.0)
    near = Progress(rank=1, steps=4, samples=999, wait_seconds=1.0, compute_seconds=3.0)
    found = measure(read_timelines(tmp_path), {2: far, 1: near})
    assert found.samples_per_second == pytest.approx(8 + 8 + 10)


def test_short_epochs_are_measured_whole_and_cut_rows_left_out(tmp_path):
    path = tmp_path / "timeline-rank0.csv"
    path.write_text(rows())
    assert measure(read_timelines(tmp_path), {}) is None
    path.write_text(rows((0, 0, 1.0, 1.0, 4), (0, 0, 2.0, 1.0, 4)) + "0,0,2,0.0,3")
    steps = read_timeline(path)
    assert len(steps) == 2
    assert steady(training_steps(steps)) == steps


def test_progress_is_logged_for_the_main_loader_at_most_every_two_seconds(tmp_path):
    now = [0.0]
    stream = StringIO()
    path = tmp_path / "timeline-rank0.csv"
    progress = ProgressLog(tmp_path, Log(run="r", host="h", stream=stream), clock=lambda: now[0])
    progress.tick()
    path.write_text(rows(*[(0, 0, 1.0, 2.0, 4)] * 3))
    progress.tick()
    with path.open("a") as file:
        file.write("0,0,3,9.0,3.0,2.0,4,1,1\n1,0,0,14.0,9.0,9.0,4,1,1\n0,0,4,32.0")
    progress.tick()
    now[0] = 2.0
    progress.tick()
    progress.close()
    events = [parse_line(line) for line in stream.getvalue().splitlines()]
    values = [dict(event.values) for event in events if event and event.event == "progress"]
    names = "steps", "step_seconds", "wait_seconds", "whole_step_seconds", "whole_wait_seconds"
    assert values == [
        dict(zip(names, ("3", "3", "1", "3", "1"), strict=True)),
        dict(zip(names, ("4", "5", "3", "4", "2"), strict=True)),
    ]


def end(rank, code, kind="", message=""):
    failure = RankFailure(rank=rank, type=kind, message=message) if kind else None
    return RankEnd(rank=rank, exit_code=code, failure=failure)


@pytest.mark.parametrize(
    "consequence",
    [
        end(0, 1, "RuntimeError", "Connection closed by peer [127.0.0.1]:1"),
        end(0, 1, "DistBackendError", "NCCL error"),
        end(0, 143),
        end(0, 134),
    ],
)
def test_a_rank_that_only_lost_its_peer_is_not_the_cause(consequence):
    assert first_cause([consequence, end(1, 7)]).rank == 1
    assert first_cause([end(1, 137), consequence]).rank == 1
    assert first_cause([consequence]) is consequence
    # Of two real failures the first one seen.
    assert first_cause([consequence, end(3, 1, "ValueError"), end(1, 1, "ValueError")]).rank == 3


def test_failures_are_read_by_rank_and_forgotten(tmp_path):
    for rank in (10, 2):
        text = json.dumps({"rank": rank, "type": "ValueError", "message": "m", "more": 1})
        (tmp_path / f"failure-rank{rank}.json").write_text(text)
    (tmp_path / "failure-rank3.json").write_text("{")
    write_cause(tmp_path, 10)
    assert [failure.rank for failure in read_failures(tmp_path)] == [2, 10]
    assert read_cause(tmp_path) == 10
    forget_failures(tmp_path)
    assert read_failures(tmp_path) == []
    assert read_cause(tmp_path) is None


def test_the_failure_file_keeps_the_first_line_and_the_end_of_a_long_text(tmp_path):
    write_failure(tmp_path, "ValueError: broken\n" + "frame\n" * 1000 + "the last line")
    text = (tmp_path / "output" / "failure").read_text()
    assert len(text) == FAILURE_CHARACTERS
    assert text.startswith("ValueError: broken\n")
    assert text.endswith("the last line")
