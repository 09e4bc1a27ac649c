"""The value of a secret reaches the training command, and no file, log or record of its run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.local import LocalPlatform
from stoker.platforms.sagemaker.request import plan_request
from stoker.workload_file import workload_from
from support.builders import group
from support.moto_server import REGION, ROLE

pytestmark = pytest.mark.fault

VALUE = "s3cr3t-of-the-team"
PEM = "-----BEGIN KEY-----\nline-one-of-it\nline-two-of-it\n-----END KEY-----"
ARN = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:x-AbCdEf"

# Prints it, also in part lines, on both streams, and fails with it.
SCRIPT = """
import os, sys
value = os.environ["HF_TOKEN"]
print("plain", os.environ["WANDB_PROJECT"], len(value), flush=True)
print("token", value, flush=True)
sys.stderr.write(value[:7]); sys.stderr.flush(); sys.stderr.write(value[7:] + "\\n")
if "fail" in sys.argv:
    raise RuntimeError(f"the server refused {value}")
"""
READER = """
import os, time
from torch.utils.data import DataLoader, Dataset
class Names(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(0.05)
        return int("HF_TOKEN" in os.environ), int(os.getppid() == TRAINER or os.getpid() == TRAINER)
TRAINER = os.getpid()
loader = DataLoader(Names(), batch_size=2, num_workers=1)
pairs = [(int(a), int(b)) for one in loader for a, b in zip(*one)]
print("seen", *sorted(set(pairs)), sep=";", flush=True)
"""


def files_with(value: str, folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    parts = [part.encode() for part in value.splitlines()]
    return [str(file) for file in files if any(part in file.read_bytes() for part in parts)]


def described(*command: str, hosts: str = "dnn", **more: object) -> dict[str, object]:
    return {
        "name": "digits",
        "command": [sys.executable, *command],
        "environment": {"WANDB_PROJECT": "digits"},
        "secrets": {"HF_TOKEN": {"arn": ARN, "hosts": hosts}},
        # Else the trainer makes all batches where hosts are late, or samples say where they are.
        "feed": {"lease_seconds": 20.0, "local_workers": 0, "seeding": "torch"},
        **more,
    }


def run_here(tmp_path: Path, text: str, *words: str, value=VALUE, data=0, hosts="dnn"):
    script = tmp_path / "train.py"
    script.write_text(text)
    groups = [group("dnn"), *([group("data", count=data)] if data else [])]
    job = JobSpec.of(
        workload_from(described(str(script), *words, hosts=hosts)),
        groups=groups,
        run_dir=tmp_path / "run",
    )
    platform = LocalPlatform(environ={**os.environ, "HF_TOKEN": value})
    run = platform.submit(platform.plan(job))
    lines = [line.text for line in run.lines()]
    return run.wait(), lines


@pytest.mark.parametrize("value", [VALUE, PEM], ids=["a word", "lines"])
def test_a_run_here_hands_the_callers_secret_on_and_shows_it_nowhere(tmp_path, value):
    end, lines = run_here(tmp_path, SCRIPT, "fail", value=value)
    assert f"plain digits {len(value)}" in lines
    assert files_with(value, tmp_path / "run") == []
    assert not any(part in line for line in lines for part in value.splitlines())
    assert "the server refused ***" in str(end.failure)


@pytest.mark.e2e
@pytest.mark.parametrize(("hosts", "seen"), [("dnn", 0), ("all", 1)])
def test_datasets_on_data_hosts_have_a_secret_only_where_the_workload_says_so(
    tmp_path, hosts, seen
):
    end, lines = run_here(tmp_path, READER, data=2, hosts=hosts)
    assert end.status == "succeeded", lines
    (line,) = [line for line in lines if line.startswith("seen")]
    # Whether it was there, and whether the trainer's own host made the sample.
    assert line.split(";")[1:] == [f"({seen}, 0)"]


def launched(tmp_path, aws_server, arn: str):
    """Runs the launcher as SageMaker's container would; returns its code and output."""
    base = tmp_path / "ml"
    (base / "input" / "config").mkdir(parents=True)
    config = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}
    (base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = {
        **os.environ,
        **aws_server.environ(),
        "STOKER_BASE_DIR": str(base),
        "STOKER_RUN": json.dumps({"secrets": {"HF_TOKEN": {"arn": arn}}}),
        "WANDB_PROJECT": "digits",
        "TRAINING_JOB_NAME": "digits-1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "launch", "--", sys.executable, str(script)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return base, ended


def test_a_host_of_sagemaker_reads_the_secret_and_shows_it_nowhere(tmp_path, aws_server):
    aws = Aws(region=REGION)
    arn = str(aws.call("secretsmanager", "CreateSecret", Name="x", SecretString=VALUE)["ARN"])
    base, ended = launched(tmp_path, aws_server, arn)
    assert f"plain digits {len(VALUE)}" in ended.stdout, ended.stdout
    assert ended.returncode == 0
    assert VALUE not in ended.stdout
    assert files_with(VALUE, base) == []


def test_a_host_that_cannot_read_it_does_not_start_the_training_and_says_why(tmp_path, aws_server):
    base, ended = launched(tmp_path, aws_server, ARN)
    assert ended.returncode == 4, ended.stdout
    assert "plain" not in ended.stdout
    reason = (base / "output" / "failure").read_text()
    assert "the secret HF_TOKEN cannot be read" in reason
    assert ARN in reason


def test_no_request_has_the_value_though_the_caller_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", VALUE)
    settings = {"role": ROLE, "output_uri": "s3://bucket/out"}
    image = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/stoker:1.0"
    told = described("train.py", image=image, platform="sagemaker", sagemaker=settings)
    groups = [group("dnn", "ml.g5.2xlarge")]
    job = JobSpec.of(workload_from(told), groups=groups, run_dir=tmp_path / "digits-1")
    assert VALUE not in json.dumps(plan_request(job).body)
