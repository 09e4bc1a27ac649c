"""`--last-skipped` runs what an earlier run of the tests skipped, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SKIPS = """
import os, pytest
@pytest.mark.parametrize("number", [1, 2])
def test_lacks(number):
    if "HAS_ALL" not in os.environ:
        pytest.skip("lacks")
def test_lacks_nothing():
    pass
"""
SKIPS_AS_A_WHOLE = """
import os, pytest
if "HAS_ALL" not in os.environ:
    pytest.skip("lacks", allow_module_level=True)
def test_in_a_file_that_was_skipped():
    pass
"""


@pytest.mark.timeout(300)
def test_what_was_skipped_runs_once_it_can(tmp_path):
    (tmp_path / "test_one.py").write_text(SKIPS)
    (tmp_path / "test_two.py").write_text(SKIPS_AS_A_WHOLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    # This test's own pytest may be one of several processes.
    environ = {name: own for name, own in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    def closing_line(*options, **variables):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini"),
                *("-p", "xdist.plugin", "-p", "conftest", *options, "."),
            ],
            cwd=tmp_path,
            env={**environ, "PYTHONPATH": str(TESTS), **variables},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode in (0, 5), done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    assert "1 passed, 3 skipped" in closing_line("-n", "1")
    assert "3 passed" in closing_line("--last-skipped", "-n", "1", HAS_ALL="1")
    assert "passed" not in closing_line("--last-skipped", HAS_ALL="1")
