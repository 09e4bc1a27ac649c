"""The launcher is the first process of SageMaker's containers: real processes, own /opt/ml each."""

import io
import json
import os
import signal
import sys
import zipfile
from pathlib import Path

import pytest

from stoker.logs import parse_line
from stoker.platforms.packing import package_of
from stoker.records import Profile, read_json
from support.namespaces import Hosts

pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.e2e]

# Hosts of a group are not sorted: the leader is algo-3.
GROUPS = {"data_group": ["algo-1"], "gpu": ["algo-3", "algo-2"]}
SMALL = {"data_group": ["algo-1"], "gpu": ["algo-2"]}
ALONE = {"homogeneousCluster": ["algo-1"]}

CLI = (sys.executable, "-m", "stoker.cli", "launch")
CODE_FILE = "/opt/ml/input/data/stoker_code/code.tar.gz"


def start_all(hosts, *command, **environ):
    for host in hosts.names:
        hosts.start(host, *command, **environ)


def give_code(hosts, files):
    source = hosts.folder / "source"
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    package = package_of(source).content
    for host in hosts.names:
        channel = hosts.ml(host) / "input" / "data" / "stoker_code"
        channel.mkdir(parents=True)
        (channel / "code.tar.gz").write_bytes(package)


def failure(hosts, host):
    path = hosts.ml(host) / "output" / "failure"
    return path.read_text() if path.exists() else None


# A module of the code may be called as one that is installed: the code's own comes first.
SHADOWING = """
import os
from torch.utils.data import Dataset
class Numbers(Dataset):
    def __init__(self):
        self.trainer = os.getpid()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        assert os.getpid() != self.trainer
        with open("numbers.txt") as file:
            return int(file.read().split()[index])
"""


PACKED = """
import os
from stoker import DataLoader
from jinja2 import Numbers
print(f'trains in {os.getcwd()}', flush=True)
for batch in DataLoader(Numbers(), batch_size=4, num_workers=0):
    print(f'batch {batch.tolist()}', flush=True)
"""


def test_packed_code_is_unpacked_on_all_hosts_and_all_run_in_it(tmp_path):
    with Hosts(tmp_path, SMALL) as hosts:
        code = {"train.py": PACKED, "jinja2.py": SHADOWING}
        give_code(hosts, {**code, "numbers.txt": "7 5 3 2"})
        start_all(hosts, *CLI, "--", "python", "train.py", RUN_CODE_FILE=CODE_FILE)
        assert hosts.codes() == {"algo-1": 0, "algo-2": 0}, hosts.log("algo-2")
        assert "trains in /opt/ml/code" in hosts.log("algo-2")
        assert "batch [7, 5, 3, 2]" in hosts.log("algo-2")
        assert (hosts.ml("algo-1") / "code" / "numbers.txt").exists()


def test_ranks_of_torchrun_and_their_children_run_in_the_packed_code(tmp_path):
    # One write: the ranks' words come through one pipe.
    child = "import os, mine; os.write(1, f'child {os.environ[\"RANK\"]} {mine.WORD}'.encode())"
    run = "cd / && exec python /opt/ml/code/steps/child.py\n"
    with Hosts(tmp_path, ALONE) as hosts:
        give_code(
            hosts, {"steps/run.sh": run, "steps/child.py": child, "mine.py": "WORD = 'found'"}
        )
        environ = {"RUN_CODE_FILE": CODE_FILE, "RUN_PROCESSES_PER_HOST": "2"}
        environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        start_all(hosts, *CLI, "--", "sh", "steps/run.sh", **environ)
        assert hosts.codes() == {"algo-1": 0}, hosts.log("algo-1")
        for rank in (0, 1):
            assert f"child {rank} found" in hosts.log("algo-1")


NEEDS_A_PACKAGE = """
from stoker import DataLoader
from torch.utils.data import Dataset
class Words(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        import tiny_words
        return len(tiny_words.WORD)
for batch in DataLoader(Words(), batch_size=4, num_workers=0):
    print(f'batch {batch.tolist()}', flush=True)
"""


def wheel_of(name, text):
    """Returns a wheel of one module, for which nothing is built or downloaded."""
    packed, info = io.BytesIO(), f"{name}-1.0.dist-info"
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return packed.getvalue()


def give_requirements(hosts, words):
    wheels = hosts.folder / "source" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / "tiny_words-1.0-py3-none-any.whl").write_bytes(
        wheel_of("tiny_words", "WORD = 'seven..'")
    )
    give_code(hosts, {"train.py": NEEDS_A_PACKAGE, "requirements.txt": words})
    # Not into this machine's Python.
    site = "/opt/ml/site"
    return {"RUN_CODE_FILE": CODE_FILE, "PIP_TARGET": site, "PYTHONPATH": site}


def test_requirements_of_the_code_are_installed_on_all_hosts_of_all_groups(tmp_path):
    with Hosts(tmp_path, SMALL) as hosts:
        environ = give_requirements(hosts, "--no-index\n--find-links wheels\ntiny-words\n")
        start_all(hosts, *CLI, "--", "python", "train.py", **environ)
        assert hosts.codes() == {"algo-1": 0, "algo-2": 0}, hosts.log("algo-2")
        assert "batch [7, 7, 7, 7]" in hosts.log("algo-2")
        for host in hosts.names:
            assert "requirements_installed file=requirements.txt" in hosts.log(host)
            assert (hosts.ml(host) / "site" / "tiny_words.py").is_file()


def test_requirements_that_cannot_be_installed_are_the_failure_reason(tmp_path):
    with Hosts(tmp_path, SMALL) as hosts:
        environ = give_requirements(hosts, "--no-index\n--find-links wheels\nno-such-package\n")
        start_all(hosts, *CLI, "--", "python", "train.py", **environ)
        assert hosts.codes() == {"algo-1": 2, "algo-2": 2}
        assert "pip could not install requirements.txt" in (failure(hosts, "algo-2") or "")
        assert "no-such-package" in (failure(hosts, "algo-2") or "")


def test_every_host_tells_its_role(tmp_path):
    with Hosts(tmp_path, GROUPS) as hosts:
        start_all(hosts, *CLI, "--", "python", "-c", "pass", RUN_STRATEGY="none")
        assert set(hosts.codes().values()) == {0}
        # The service merges these folders of all hosts.
        for folder in ("model", "output/data"):
            assert not list((hosts.ml("algo-1") / folder).iterdir())
        events = [
            event
            for host in hosts.names
            for line in hosts.log(host).splitlines()
            if (event := parse_line(line))
        ]
    roles = {e.host: e.values["group"] for e in events if e.event == "host_role"}
    assert roles == {"algo-1": "data_group", "algo-2": "gpu", "algo-3": "gpu"}


SAVING = """
import os, pathlib, signal, sys, time
def save(*_):
    # The leader ends first, and its verdict comes while the other host saves.
    time.sleep(1.0 if os.environ["SM_CURRENT_HOST"] == "algo-2" else 0.0)
    pathlib.Path("/opt/ml/checkpoints").mkdir()
    pathlib.Path("/opt/ml/checkpoints/last").write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready to save", flush=True)
time.sleep(300)
"""


def test_sigterm_to_the_containers_lets_the_training_save_and_ends_all_hosts(tmp_path):
    with Hosts(tmp_path, GROUPS) as hosts:
        words = ("--", "python", "-c", SAVING)
        start_all(hosts, *CLI, *words, RUN_STRATEGY="none")
        for host in GROUPS["gpu"]:
            hosts.wait_for_log(host, "ready to save")
        hosts.wait_for_log("algo-1", "run_joined")
        for host in hosts.names:
            hosts.first_process(host).send_signal(signal.SIGTERM)
        codes = hosts.codes()
        assert codes["algo-3"] == codes["algo-2"] == 0
        assert codes["algo-1"] in (0, 143)
        for host in GROUPS["gpu"]:
            assert (hosts.ml(host) / "checkpoints" / "last").read_text() == "saved"
            assert failure(hosts, host) is None
        record = json.loads((hosts.ml("algo-3") / "output/data/stoker/training.json").read_text())
        assert record["status"] == "stopped"


LOADING = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(64)
model = torch.nn.Linear(64, 64)
for batch in DataLoader(Slow(), batch_size=4, num_workers=1):
    model(batch).sum().backward()
"""
PROFILE = {
    "RUN_PROFILE": '{"budget_seconds": 5}',
    "RUN_PROFILE_FILE": "/opt/ml/checkpoints/profile.json",
}


def test_a_profile_job_that_is_stopped_leaves_the_verdict_so_far(tmp_path):
    long = PROFILE | {"RUN_PROFILE": '{"budget_seconds": 15}'}
    with Hosts(tmp_path, ALONE) as hosts:
        start_all(hosts, *CLI, "--", "python", "-c", LOADING, **long)
        hosts.wait_for_log("algo-1", "profile_accelerator")
        hosts.first_process("algo-1").send_signal(signal.SIGTERM)
        assert hosts.codes() == {"algo-1": 0}, hosts.log("algo-1")
        profile = read_json(hosts.ml("algo-1") / "checkpoints" / "profile.json", Profile)
        assert profile.step.accelerator_step_seconds is not None


def test_a_profile_job_without_a_profile_fails_with_the_words(tmp_path):
    code = "raise ValueError('no data today')"
    with Hosts(tmp_path, ALONE) as hosts:
        start_all(hosts, *CLI, "--", "python", "-c", code, **PROFILE)
        assert hosts.codes() == {"algo-1": 1}
        assert "ValueError: no data today" in (failure(hosts, "algo-1") or "")
        assert not (hosts.ml("algo-1") / "checkpoints" / "profile.json").exists()
