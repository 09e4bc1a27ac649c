"""SageMaker's toolkit starts the launcher as its entry point, by the public container contract.

One job is run twice on three simulated hosts: in the toolkit's script mode, as in AWS's images, and
as an image of its own that the service starts with the one word `train`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local_job import WITHOUT_TORCH
from support.namespaces import Hosts
from support.toolkit import toolkit

# The toolkit's environment is made by the first test that needs it.
pytestmark = [pytest.mark.root, pytest.mark.fault, pytest.mark.timeout(900)]

# Hosts of a group are not sorted: the leader is algo-3.
GROUPS = {"data_group": ["algo-1"], "gpu": ["algo-3", "algo-2"]}
CHANNELS = {"train": None, "images": ["data_group"]}
HYPERPARAMETERS = {
    "sagemaker_program": '"launcher.py"',
    "sagemaker_job_name": '"job-1"',
    "sagemaker_region": '"us-east-1"',
    "sagemaker_container_log_level": "30",
    "_tuning_objective_metric": '"loss"',
    "epochs": "2",
    "lr": "0.1",
    "name": '"a b"',
    "flag": "true",
    "nothing": "null",
    "sizes": "[1, 2]",
    # Texts, as the SDK encodes them, and as a request of boto3's may have them.
    "version": '"1.10"',
    "spec": '"{\\"a\\": [1]}"',
    "lines": '"a\\nb"',
    "word": '"null"',
    "raw": "1.10",
    "plain": "007",
    "names": '["a", true, null]',
    "map": '{"b": {"d": 1, "c": 2}, "a": "x"}',
    "clip": "Infinity",
    "k": "3",
    "batch-size": "8",
}
ARGUMENTS = [
    *("--batch-size", "8", "--clip", "inf", "--epochs", "2", "--flag", "True", "-k", "3"),
    *("--lines", "a\nb", "--lr", "0.1", "--map", "a=x,b={'d': 1, 'c': 2}", "--name", "a b"),
    *("--names", "['a', True, None]", "--nothing", "", "--plain", "007", "--raw", "1.1"),
    *("--sizes", "[1, 2]", "--spec", '{"a": [1]}', "--version", "1.10", "--word", "null"),
]

# What is shipped for AWS's images, as it is.
LAUNCHER = Path(__file__).parents[2] / "examples" / "sagemaker_estimator" / "launcher.py"

# There, toolkit and stoker share one Python; here they do not, and must not see each other's.
STOKER = f"""#!/bin/sh
export PYTHONPATH="$STOKER_TEST_PYTHONPATH"
exec {sys.executable} -m stoker.cli "$@"
"""

SOURCE = """
import os, pathlib
from torch.utils.data import Dataset

class Images(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        channel = pathlib.Path("/opt/ml/input/data/images/origin").read_text()
        return f"{index} from {channel} in {os.getcwd()}"
"""

# In the image of its own nothing needs torch: its ranks say only what they were told.
MEET = """
import torch, torch.distributed as dist
from stoker import DataLoader, log_metrics
from source import Images

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
made = [item for batch in DataLoader(Images(), batch_size=4, num_workers=0) for item in batch]
log_metrics(total=total.item())
dist.destroy_process_group()
met = {"total": total.item(), "made": made}
"""

SAY = """
import json, os, sys
facts = {
    "rank": os.environ["RANK"], "world": os.environ["WORLD_SIZE"],
    "local_rank": os.environ["LOCAL_RANK"], "arguments": sys.argv[1:],
    "channels": sorted(os.listdir("/opt/ml/input/data")), "folder": os.getcwd(),
    "environ": {k: v for k, v in os.environ.items() if k.startswith("SM_")},
}
with open(os.path.join(os.environ["SM_MODEL_DIR"], f"rank{facts['rank']}.json"), "w") as file:
    json.dump(facts | met, file)
"""
TRAIN = MEET + SAY


def lay_out(folder: Path, train: str) -> Hosts:
    hosts = Hosts(folder, GROUPS, hyperparameters=HYPERPARAMETERS, channels=CHANNELS)
    for host in hosts.names:
        code = hosts.ml(host) / "code"
        code.mkdir()
        (code / "launcher.py").write_text(LAUNCHER.read_text())
        (code / "source.py").write_text(SOURCE)
        (code / "train.py").write_text(train)
    return hosts


def start_toolkit(hosts: Hosts, train: Path, **environ: str) -> None:
    stoker = hosts.folder / "bin" / "stoker"
    stoker.parent.mkdir()
    stoker.write_text(STOKER)
    stoker.chmod(0o755)
    path = f"{stoker.parent}:{os.environ['PATH']}"
    for host in hosts.names:
        hosts.start(host, str(train), **{"PATH": path, **environ})


class Ran:
    def __init__(self, hosts: Hosts) -> None:
        self.codes = hosts.codes()
        self.logs = {host: hosts.log(host) for host in hosts.names}
        self.ml = {host: hosts.ml(host) for host in hosts.names}

    def rank(self, number: int) -> dict[str, Any]:
        file = self.ml[GROUPS["gpu"][number]] / "model" / f"rank{number}.json"
        return json.loads(file.read_text())

    def environ(self, number: int) -> dict[str, str]:
        return self.rank(number)["environ"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    train = toolkit()
    with lay_out(tmp_path_factory.mktemp("scripted"), TRAIN) as hosts:
        start_toolkit(hosts, train)
        yield Ran(hosts)


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    with lay_out(tmp_path_factory.mktemp("brought"), f"met = {{}}\n{SAY}") as hosts:
        for host in hosts.names:
            hosts.start(
                host,
                *(sys.executable, "-m", "stoker.cli", "launch", "train"),
                STOKER_COMMAND=json.dumps(["python", "/opt/ml/code/train.py"]),
            )
        yield Ran(hosts)


@pytest.fixture(params=["scripted", "brought"])
def ran(request):
    return request.getfixturevalue(request.param)


def test_hosts_have_the_roles_of_their_groups_and_the_leader_is_the_first_as_given(ran):
    assert ran.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0}, ran.logs
    assert "host_role group=data_group role=data" in ran.logs["algo-1"]
    for host in ("algo-2", "algo-3"):
        assert "host_role group=gpu role=dnn" in ran.logs[host]
        assert "leader=algo-3" in ran.logs[host]
    assert [host for host, log in ran.logs.items() if " roster " in log] == ["algo-3"]


def test_scripts_run_on_the_dnn_group_with_its_ranks_arguments_and_channels(ran):
    for number in (0, 1):
        facts = ran.rank(number)
        assert (facts["rank"], facts["world"], facts["local_rank"]) == (str(number), "2", "0")
        assert facts["arguments"] == ARGUMENTS
        # The other channel is the data group's.
        assert facts["channels"] == ["stoker_token", "train"]
        assert "SM_CHANNEL_IMAGES" not in ran.environ(number)
        assert ran.environ(number)["SM_CHANNEL_TRAIN"] == "/opt/ml/input/data/train"
    assert not list((ran.ml["algo-1"] / "model").glob("*"))


def test_ranks_meet_and_a_channel_of_the_data_group_is_read_there(scripted):
    for number in (0, 1):
        facts = scripted.rank(number)
        assert facts["total"] == 3.0
        made = [item.split(" in ")[0] for item in facts["made"]]
        assert made == [f"{n} from images" for n in range(8)]


def test_what_hosts_leave_behind_can_be_laid_into_one_folder(ran):
    for part in ("model", "output/data"):
        left = [
            path.relative_to(ran.ml[host])
            for host in ran.ml
            for path in (ran.ml[host] / part).rglob("*")
            if path.is_file()
        ]
        assert len(left) == len(set(left)), left
    assert (ran.ml["algo-3"] / "output/data/stoker/training.json").exists()


def test_a_bring_your_own_image_exports_what_the_toolkit_exports(scripted, brought):
    for number in (0, 1):
        theirs, ours = scripted.environ(number), brought.environ(number)
        assert set(ours) <= set(theirs)
        # The run's token and packed code are no data of the training's.
        assert set(theirs) - set(ours) == {"SM_CHANNEL_STOKER_TOKEN"}
        assert {name for name in ours if ours[name] != theirs[name]} == {
            # The same: without the channels that stoker adds.
            *("SM_CHANNELS", "SM_INPUT_DATA_CONFIG"),
            # The toolkit knows of no distribution here; the launcher spans the dnn group.
            "SM_DISTRIBUTION_INSTANCE_GROUPS",
            # Both of them, see the next test.
            "SM_TRAINING_ENV",
        }
        assert json.loads(ours["SM_CHANNELS"]) == ["train"]
        assert json.loads(ours["SM_DISTRIBUTION_INSTANCE_GROUPS"]) == ["gpu"]


def test_the_training_env_differs_by_what_the_launcher_does_otherwise_only(scripted, brought):
    for number in (0, 1):
        theirs = json.loads(scripted.environ(number)["SM_TRAINING_ENV"])
        ours = json.loads(brought.environ(number)["SM_TRAINING_ENV"])
        assert set(ours) <= set(theirs)
        # Of libraries that are AWS's own.
        libraries = ("modelparallel_enabled", "smddpmprun_installed", "smddprun_installed")
        assert set(theirs) - set(ours) == {f"is_{name}" for name in libraries}
        assert {name for name in ours if ours[name] != theirs[name]} <= {
            *("channel_input_dirs", "input_data_config"),
            *("distribution_hosts", "distribution_instance_groups"),
            # The toolkit takes the first of all hosts, even if it is a data host.
            *("master_hostname", "is_master"),
        }
        assert ours["master_hostname"] == "algo-3"
        assert ours["is_master"] is (number == 0)
        assert ours["distribution_hosts"] == ["algo-3", "algo-2"]


# Of jobs whose training needs no torch.
QUICK = {"STOKER_TEST_PYTHONPATH": WITHOUT_TORCH["PYTHONPATH"], "STOKER_STRATEGY": "none"}

FAILING = """
import os, time
if os.environ["STOKER_HOST"] == "algo-2":
    raise LookupError("sample 7 is broken")
time.sleep(300)
"""


def test_a_training_error_is_the_failure_reason_on_the_dnn_hosts_only(tmp_path):
    train = toolkit()
    with lay_out(tmp_path, FAILING) as hosts:
        start_toolkit(hosts, train, **QUICK)
        ran = Ran(hosts)
    assert ran.codes["algo-1"] == 0, ran.logs
    assert ran.codes["algo-2"] != 0
    assert ran.codes["algo-3"] != 0
    for host in GROUPS["gpu"]:
        # The toolkit writes none where there is one: the launcher's words stand.
        reason = (ran.ml[host] / "output" / "failure").read_text()
        assert reason.startswith("rank 0 on algo-2: LookupError: sample 7 is broken\n")
        assert len(reason) <= 1024
    assert not (ran.ml["algo-1"] / "output" / "failure").exists()
