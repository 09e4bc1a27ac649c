"""The script of `stoker train` and `stoker profile` reads the standard input of the command."""

import shlex
import sys
from pathlib import Path

import pytest

from support.processes import ran

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

READ = "import sys; print('read', repr(sys.stdin.read()), flush=True)"


def said(tmp_path, *words, given):
    command = [Path(sys.executable).with_name("stoker"), *words, "--", sys.executable, "-c", READ]
    how = {} if given is None else {"input": given}
    ended = ran(command, cwd=tmp_path, timeout=100, **how)
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/*/logs/**/*") if path.is_file())
    return ended.stdout + ended.stderr + logs


@pytest.mark.parametrize("given", ["hello\n", None])
def test_a_training_reads_what_the_command_is_given(tmp_path, given):
    assert f"read {given or ''!r}" in said(tmp_path, "train", given=given)


def test_a_training_whose_command_has_no_standard_input_reads_nothing(tmp_path):
    stoker = Path(sys.executable).with_name("stoker")
    train = shlex.join([str(stoker), "train", "--", sys.executable, "-c", READ])
    ended = ran(["bash", "-c", f"{train} <&-"], cwd=tmp_path, timeout=100)
    assert "read ''" in ended.stdout + ended.stderr


def test_a_profiled_script_reads_it_too(tmp_path):
    assert "read 'hello\\n'" in said(tmp_path, "profile", "--budget", "5", given="hello\n")


def test_ranks_of_torchrun_are_given_nothing(tmp_path):
    found = said(tmp_path, "train", "--set", "strategy.name=torchrun", given="hello\n")
    assert "read ''" in found
    assert "hello" not in found.replace(READ, "")
