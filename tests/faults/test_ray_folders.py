"""A node of Ray that was killed leaves a folder, which the next one removes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray_node
from ray_node import session_folder

pytestmark = pytest.mark.fault


def test_folders_of_killed_nodes_go_and_those_of_others_stay(monkeypatch):
    with session_folder() as mine:
        script = (
            "import time\nfrom ray_node import session_folder\n"
            "with session_folder() as folder:\n    print(folder, flush=True)\n    time.sleep(60)\n"
        )
        places = {**os.environ, "PYTHONPATH": str(Path(ray_node.__file__).parent)}
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=places
        ) as process:
            theirs = Path(process.stdout.readline().strip())
            with session_folder():
                assert mine.exists()
                assert theirs.exists()
            process.kill()
            process.wait()
        assert theirs.exists()
        with session_folder():
            assert mine.exists()
            assert not theirs.exists()
