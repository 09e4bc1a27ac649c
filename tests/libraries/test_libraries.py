"""Libraries as their users have them get the batches that torch gives, made by data hosts.

Each script runs twice: without stoker; and unchanged as `stoker train` feeds it, with no local
workers and two data hosts, of which one is killed in the middle.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from support import cluster as cluster_module
from support.cluster import Cluster, run_script, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
STARTUP = Path(stoker.__file__).parent / "startup"
LAUNCHED = {"STOKER_LAUNCHER_PID": str(os.getpid()), "PYTHONPATH": str(STARTUP)}
PAUSE_AT = 6

# Its script: what must be there to run it.
LIBRARIES = {
    "accelerate_prepared": "accelerate",
    "datasets_torch": "datasets",
    "geometric_loader": "torch_geometric",
    # Handles that a dataset opened in its constructor are made again on the data hosts.
    "h5py_rows": "h5py",
    "ignite_engine": "ignite",
    "lightning_trainer": "lightning",
    "lmdb_rows": "lmdb",
    "monai_loader": "monai",
    "skorch_classifier": "skorch",
    "torchdata_stateful": "torchdata",
    "transformers_trainer": "transformers",
    "webdataset_tars": "webdataset",
}

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster():
    with (
        pytest.MonkeyPatch.context() as patch,
        Cluster(agents=2, workers=1, feed={"start_deadline_seconds": 120.0}) as made,
    ):
        # Next to other work, monai alone is imported for a minute.
        patch.setattr(cluster_module, "DEADLINE_SECONDS", 180.0)
        made.wait_for_agents()
        yield made


@pytest.mark.parametrize("script", LIBRARIES)
def test_a_librarys_batches_are_torchs_also_when_a_data_host_dies(cluster, script):
    if importlib.util.find_spec(LIBRARIES[script]) is None:
        pytest.skip(f"no {LIBRARIES[script]} here: make test-libraries")
    name = str(SCRIPTS / f"{script}.py")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    plain = run_script({}, script=name, env=quiet)
    heard = [cluster.log_of(number).stat().st_size for number in (0, 1)]
    fed = {"RUN_REPLACE_DATALOADER": "true", "STOKER_TEST_PAUSE_AT": str(PAUSE_AT)}
    trainer = cluster.train(script=name, workers=0, env=quiet | LAUNCHED | fed)
    trainer.until("pause")
    # Both have the dataset, so that one can be lost.
    for number in (0, 1):
        wait_until(
            lambda number=number: (
                "spec_received" in since(cluster, number, heard[number])
                or "made_here" in trainer.errors
            ),
            f"host {number} has the dataset",
            180.0,
        )
    assert "made_here" not in trainer.errors
    cluster.kill(0)
    cluster.hosts[0].wait()
    trainer.go_on()
    found = trainer.finish()
    size = cluster.log_of(0).stat().st_size
    cluster.start_agent(0)
    # A stream that begins without it is made by the other host alone.
    wait_until(lambda: "run_joined" in since(cluster, 0, size), "it is there again")
    expected = plain.finish()
    assert len(expected) > PAUSE_AT
    assert found == expected
    assert "session_opened" in since(cluster, 1, heard[1])


def test_a_profile_sees_torchdatas_loader(tmp_path):
    if importlib.util.find_spec("torchdata") is None:
        pytest.skip("no torchdata here: make test-libraries")
    code = """
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
loader = StatefulDataLoader(torch.arange(8), batch_size=4)
print([batch.tolist() for batch in loader])
"""
    profiled = {"STOKER_OUTPUT": str(tmp_path), "STOKER_RUN": '{"profile": {"budget_seconds": 8}}'}
    words, environ = [sys.executable, "-c", code], os.environ | LAUNCHED | profiled
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[[0, 1, 2, 3], [4, 5, 6, 7]]\n", done.stderr
    assert "profile_started" in done.stderr


def since(cluster: Cluster, number: int, size: int) -> str:
    return cluster.log_of(number).read_bytes()[size:].decode(errors="replace")
