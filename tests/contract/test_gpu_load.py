"""The load of GPUs in real local runs, with a double of NVML in the hosts' launchers."""

import dataclasses
import os
import re
from pathlib import Path

import pytest

from stoker.figures.gpu_log import gpus_in, read_rows
from stoker.logs import parse_line
from stoker.records import read_json
from stoker.records.profile import Profile
from support import nvml
from support.command import process
from support.local_job import LocalJob
from support.nvml import FakeGpu, FakeSlice

TESTS = Path(__file__).parents[1]
# Two epochs of steps of 20 ms, after a start of a second in which the GPU is idle.
SCRIPT = """
import time
import torch
from stoker import DataLoader
time.sleep(1.0)
for epoch in range(2):
    for batch in DataLoader(torch.utils.data.TensorDataset(torch.zeros(320, 2)), batch_size=4):
        time.sleep(0.02)
"""
# Without torch, which is half of such a run's CPU time: what it tests is in the launcher.
QUIET = """
import time
time.sleep(0.5)
"""
# Ends once a launcher has logged the event of its argument.
UNTIL_LOGGED = """
import os, sys, time
from pathlib import Path
logs, deadline = Path(os.environ["STOKER_TEST_DIR"], "run", "logs"), time.monotonic() + 60
while not any(sys.argv[1] in log.read_text(errors="replace") for log in logs.iterdir()):
    assert time.monotonic() < deadline, f"no {sys.argv[1]} was logged"
    time.sleep(0.05)
"""
UUIDS = ("GPU-aa11", "GPU-bb22")


def variables(*gpus, init_code=None):
    """Returns the variables of a process that finds the double in place of the package."""
    folders = (str(TESTS / "support" / "fake_nvml"), str(TESTS), os.environ.get("PYTHONPATH"))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        nvml.VARIABLE: nvml.environment(*gpus, init_code=init_code),
    }


def job(tmp_path, *gpus, init_code=None, environment=None, script=SCRIPT, **options):
    found = LocalJob(tmp_path, script, **options)
    double = {**variables(*gpus, init_code=init_code), **(environment or {})}
    found.spec = dataclasses.replace(found.spec, environment={**found.spec.environment, **double})
    return found


def events(text, name):
    found = (parse_line(line) for line in text.splitlines())
    return [event for event in found if event and event.event == name]


def test_a_run_of_one_host_has_its_gpus_load_in_all_places(tmp_path):
    first = FakeGpu(uuid=UUIDS[0], utilization=(20, 30, 40), reasons=0x4)
    idle = FakeGpu(uuid=UUIDS[1], utilization=(0,), memory_used=1 << 20)
    with job(tmp_path, first, idle) as run:
        record = run.training()
        log = run.log(run.leader)
        output = run.base_dir(run.leader) / "output" / "data" / "stoker"
    busy, other = record.gpus
    assert (busy.host, busy.uuid, busy.number) == (run.leader, UUIDS[0], "0")
    assert (busy.model, busy.during) == ("NVIDIA H100 80GB HBM3", "steps")
    # The start, a second and the imports, is not among them.
    assert busy.begin_seconds is not None
    assert busy.begin_seconds >= 1.0
    assert busy.utilization is not None
    assert 0.2 <= busy.utilization.mean <= 0.4
    assert busy.step_utilization is not None
    assert busy.throttled == pytest.approx({"power": 1.0, "thermal": 0.0, "other": 0.0})
    assert other.utilization is not None
    assert other.utilization.mean == 0.0
    assert {row.gpu for row in read_rows(output / "gpu.csv")} == {"0", "1"}
    assert (tmp_path / "run" / "gpu.csv").read_text() == (output / "gpu.csv").read_text()
    now = gpus_in(events(log, "gpu_load")[0])
    assert now is not None
    assert now.count == 2
    passive = read_json(output / "passive-profile.json", Profile)
    assert passive.observed is not None
    assert passive.observed.gpu_utilization == busy.step_utilization
    assert [gpu.uuid for gpu in passive.observed.gpus] == [*UUIDS]
    assert events(log, "gpu_load_unread") == []


# Computes on the second of three GPUs, which it chose itself, until the load of one is logged.
CHOOSES = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).mkdir()
Path(sys.argv[1], str(os.getpid())).touch()
logs, deadline = Path(os.environ["STOKER_TEST_DIR"], "run", "logs"), time.monotonic() + 60
while not any("gpu_load count=1" in log.read_text(errors="replace") for log in logs.iterdir()):
    assert time.monotonic() < deadline, "the load of one GPU was not logged"
    time.sleep(0.05)
"""


def test_a_run_has_the_load_of_its_own_gpus_and_not_of_other_peoples(tmp_path):
    contexts = tmp_path / "contexts"
    theirs = FakeGpu(uuid=UUIDS[0], utilization=(97,), foreign_pids=(os.getpid(),))
    own = FakeGpu(uuid=UUIDS[1], utilization=(25,), contexts=str(contexts))
    idle = FakeGpu(uuid="GPU-cc33", utilization=(0,))
    script = {"script": CHOOSES, "arguments": [str(contexts)]}
    with job(tmp_path, theirs, own, idle, **script) as run:
        record = run.training()
        log = run.log(run.leader)
    assert [gpu.uuid for gpu in record.gpus] == [UUIDS[1]]
    now = gpus_in(events(log, "gpu_load")[-1])
    assert now is not None
    assert (now.count, now.utilization) == (1, 0.25)
    assert events(log, "gpu_load_incomplete") == []


def test_where_no_process_is_named_all_gpus_count_and_a_note_says_so(tmp_path):
    first = FakeGpu(uuid=UUIDS[0], utilization=(97,), foreign_pids=(4_190_000,))
    second = FakeGpu(uuid=UUIDS[1], utilization=(25,), foreign_pids=(4_190_001,))
    script = {"script": UNTIL_LOGGED, "arguments": ["gpu_load count=2"]}
    with job(tmp_path, first, second, **script) as run:
        record = run.training()
        log = run.log(run.leader)
    assert (record.status, len(record.gpus)) == ("succeeded", 2)
    (event,) = events(log, "gpu_load_incomplete")
    assert "which of the 2 GPUs the run uses is not known" in event.values["text"]


def test_the_gpus_of_all_training_hosts_are_in_the_leaders_record(tmp_path):
    script = {"script": UNTIL_LOGGED, "arguments": ["gpu_load count=2"]}
    with job(tmp_path, FakeGpu(), dnn=2, strategy="none", **script) as run:
        record = run.training()
        log = run.log(run.leader)
    assert {gpu.host for gpu in record.gpus} == {host.name for host in run.request.hosts}
    seen = [gpus_in(event) for event in events(log, "gpu_load")]
    assert max(now.count for now in seen if now) == 2


@pytest.mark.parametrize(
    ("gpus", "environment", "init_code", "words"),
    [
        ((), {}, 18, "GPU load: NVML: RM has detected an NVML/RM version mismatch."),
        ((FakeGpu(),), {"CUDA_VISIBLE_DEVICES": ""}, None, "CUDA_VISIBLE_DEVICES='' names none"),
        ((FakeGpu(slices=()),), {}, None, "GPU load: all are in MIG mode, without a slice"),
    ],
    ids=["driver and library differ", "no visible GPU", "no slice"],
)
def test_without_a_gpu_to_read_there_is_one_line_and_the_training_succeeds(
    tmp_path, gpus, environment, init_code, words
):
    script = {"script": UNTIL_LOGGED, "arguments": ["gpu_load_unread"]}
    with job(tmp_path, *gpus, environment=environment, init_code=init_code, **script) as run:
        record = run.training()
        log = run.log(run.leader)
    assert (record.status, record.gpus) == ("succeeded", ())
    (event,) = events(log, "gpu_load_unread")
    assert words in event.values["text"]


def test_a_host_without_a_driver_says_nothing(tmp_path):
    with job(tmp_path, init_code=12, script=QUIET) as run:
        assert run.training().gpus == ()
        assert "gpu_load" not in run.log(run.leader)


def test_a_gpu_that_falls_off_the_bus_is_one_line_and_the_training_succeeds(tmp_path):
    gone = FakeGpu(uuid=UUIDS[0], lost_after=2)
    script = {"script": UNTIL_LOGGED, "arguments": ["gpu_lost"]}
    with job(tmp_path, gone, FakeGpu(uuid=UUIDS[1]), **script) as run:
        record = run.training()
        log = run.log(run.leader)
    assert record.status == "succeeded"
    (event,) = events(log, "gpu_lost")
    assert re.match(r"GPU 0 \(GPU-aa11\): GPU is lost; .* training continues", event.values["text"])
    assert [gpu.uuid for gpu in record.gpus] == [*UUIDS]
    assert record.gpus[0].samples < record.gpus[1].samples


def test_a_mig_slice_and_a_uuid_are_read_and_what_they_do_not_tell_is_one_line(tmp_path):
    sliced = FakeGpu(uuid=UUIDS[0], slices=(FakeSlice(uuid="MIG-1"), FakeSlice(uuid="MIG-2")))
    whole = FakeGpu(uuid=UUIDS[1], refuses={"nvmlDeviceGetPcieThroughput": 3})
    seen = {"CUDA_VISIBLE_DEVICES": "MIG-2"}
    script = {"script": UNTIL_LOGGED, "arguments": ["gpu_load_incomplete"]}
    with job(tmp_path, sliced, whole, environment=seen, **script) as run:
        record = run.training()
        log = run.log(run.leader)
    (gpu,) = record.gpus
    assert (gpu.uuid, gpu.number, gpu.utilization) == ("MIG-2", "0.1", None)
    assert gpu.memory_bytes is not None
    (event,) = events(log, "gpu_load_incomplete")
    assert "utilization (Not Supported) of GPU 0.1" in event.values["text"]


PROFILED = """
import time
import torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.zeros(10)
for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):
    time.sleep(0.01)
"""


def test_a_profile_has_the_load_of_the_unchanged_steps_alone(tmp_path):
    """Phases with cached batches and without the model take most of the budget."""
    script = tmp_path / "script.py"
    script.write_text(PROFILED)
    environ = {**os.environ, **variables(FakeGpu(uuid=UUIDS[0]))}
    words = ("profile", "--budget", "20", "--out", "profile.json", "--", "python", str(script))
    done = process(*words, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    found = read_json(tmp_path / "profile.json", Profile)
    assert found.observed is not None
    (gpu,) = found.observed.gpus
    assert (gpu.uuid, gpu.during) == (UUIDS[0], "steps")
    assert found.observed.gpu_utilization == gpu.step_utilization == pytest.approx(0.28)
    (file,) = (tmp_path / "runs").glob("*/baseline-gpu.csv")
    rows = read_rows(file)
    assert gpu.begin_seconds is not None
    assert gpu.begin_seconds > 0, "the start is not among them"
    assert gpu.samples < sum(row.samples for row in rows) / 2
    assert "GPU 28% busy" in done.stdout
