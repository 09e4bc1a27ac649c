"""A notebook's loaders are fed: what its cells define is there on data hosts, also redefined."""

import importlib.util
import os
from pathlib import Path

import pytest

import stoker
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).parent / "scripts" / "notebook_cells.py")
STARTUP = Path(stoker.__file__).parent / "startup"
LAUNCHED = {
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "PYTHONPATH": str(STARTUP),
    "RUN_REPLACE_DATALOADER": "true",
}


def test_what_cells_define_is_there_on_data_hosts(tmp_path):
    if importlib.util.find_spec("nbclient") is None:
        pytest.skip("no nbclient here: make test-libraries")
    quiet = {"IPYTHONDIR": str(tmp_path / ".ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    plain = run_script({}, script=SCRIPT, env=quiet).finish()
    with Cluster(agents=2, feed={"start_deadline_seconds": 120.0}) as cluster:
        cluster.wait_for_agents()
        fed = cluster.train(script=SCRIPT, workers=0, env=quiet | LAUNCHED).finish()
        logs = [cluster.log_of(number).read_text() for number in range(2)]
    assert fed == plain
    assert len(plain) == 5
    # Of each loader, wherever its batches were made in the end.
    assert any("spec_received" in log for log in logs)
