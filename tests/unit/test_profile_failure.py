"""Checks what a profile says of a command that failed."""

import sys

from stoker.profile.profiled_job import fix_of_missing_module


def test_a_missing_module_is_installed_from_the_requirements_next_to_the_script(tmp_path):
    script = tmp_path / "train.py"
    command = ("python", str(script), "--data", "other.py")
    assert fix_of_missing_module("PIL.Image", command) == (
        f"install the package of module PIL for {sys.executable}"
    )
    (tmp_path / "requirements.txt").write_text("pillow")
    assert fix_of_missing_module("PIL.Image", command) == (
        f"{sys.executable} -m pip install -r {tmp_path / 'requirements.txt'}"
    )
