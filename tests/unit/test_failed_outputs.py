"""The line that names the cause, in what scripts printed that start ranks or processes themselves.

The outputs are real ones, of torch 2.13, Lightning 2.6, Accelerate 1.15 and Open MPI 5, without
most frames of libraries.
"""

from pathlib import Path

import pytest

from stoker.failure_reasons import failure_of_child, reason_of_failure
from stoker.launch.finish import RankFailure

OUTPUTS = Path(__file__).parents[1] / "data" / "failed_outputs"
LABEL = "KeyError: 'label 7 is not in the table'"
SHARD = "LookupError: no shard 3"
HEADER = "ValueError: bad header in 3.rec"
SPACE = "OSError: no space on /data"
OF_COMMAND = {
    "cause": "RuntimeError: config.yaml has no lr",
    "colour": LABEL,
    "empty_first_line": "ValueError: the table has no column label its columns: a, b",
    "futures": HEADER,
    "futures_killed": "concurrent.futures.process.BrokenProcessPool: A process in the process pool "
    "was terminated abruptly while the future was running or pending.",
    "group": f"ExceptionGroup: two readers failed (2 sub-exceptions): {HEADER}; {SPACE}",
    "lines_of_message": "ValueError: 2 shapes differ: a: (3, 4) b: (3, 5)",
    "printed_after": LABEL,
    # The script's own words, which may be of something else.
    "process_raise": f"RuntimeError: Process-2 failed with 1; before it, Process-2: {SHARD}",
    "progress_bar": LABEL,
    "rich": LABEL,
    "subprocess_tool": "subprocess.CalledProcessError: Command '['cp', '/no/such/file', 'x']' "
    "returned non-zero exit status 1; the line before: cp: cannot stat '/no/such/file': No such "
    "file or directory",
    "taskgroup": f"ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): {HEADER}",
}
OF_CHILD = {
    "accelerate": f"rank 1: {LABEL}",
    "cascade": "rank 2: ValueError: shard 2 is too short",
    "debug_launcher": f"process 1: {LABEL}",
    "lightning": f"rank 1: {LABEL}",
    "lightning_spawn": f"process 1: {LABEL}",
    "mpirun_raise": f"rank 1: {LABEL}",
    "mpirun_sigkill": "rank 1 ended with signal 9 (SIGKILL), perhaps out of memory",
    "notebook_launcher": f"process 1: {LABEL}",
    "process": f"Process-2: {SHARD}",
    "processes_of_gloo": f"trainer 1: {SHARD}",
    "spawn_exit": "process 1 ended with exit code 3",
    "spawn_raise": f"process 1: {SHARD}",
    "spawn_sigkill": "process 1 ended with signal 9 (SIGKILL), perhaps out of memory",
    "subprocess": f"a child process: {SPACE}",
    "torchrun_early": f"rank 1: {LABEL}",
    "torchrun_inside": f"rank 1: {LABEL}",
    "torchrun_raise": f"rank 1: {LABEL}",
    "torchrun_record": f"rank 1: {LABEL}",
    "torchrun_say": "rank 1 ended with exit code 1; the line before: no shard 3 in /data",
    "torchrun_sigkill": "rank 1 ended with signal 9 (SIGKILL), perhaps out of memory",
    "torchrun_sigsegv": "rank 1 ended with signal 11 (SIGSEGV)",
    "torchrun_tee": f"rank 1: {LABEL}",
}
TRACE = ["Traceback (most recent call last):", '  File "a.py", line 3, in f']
GONE = [*TRACE, "RuntimeError: Connection closed by peer"]
SAID = OF_COMMAND | OF_CHILD


def lines_of(name: str) -> list[str]:
    # As the launcher does: a bar of tqdm's ends with a carriage return, too.
    return (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def test_each_output_has_its_line():
    assert sorted(file.stem for file in OUTPUTS.iterdir()) == sorted(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_the_line_names_what_failed_first_and_the_rank(name):
    line = reason_of_failure(lines_of(name), who="it", exit_code=1)
    assert line == f"it ended with exit code 1: {SAID[name]}"


@pytest.mark.parametrize("name", sorted(OF_CHILD))
def test_a_child_that_failed_is_told_with_its_host_and_its_traceback(name):
    who, words = OF_CHILD[name].split(": ", 1) if ": " in OF_CHILD[name] else (OF_CHILD[name], "")
    first, *rest = failure_of_child(lines_of(name), host="algo-1").splitlines()
    if " ended with " in who:
        assert first == OF_CHILD[name].replace(" ended with", " on algo-1 ended with")
        assert rest == []
        return
    assert first == f"{who} on algo-1: {words}"
    assert rest[0].endswith("Traceback (most recent call last):")
    assert words.partition(" too short")[0] in "\n".join(rest)
    assert "ChildFailedError" not in "\n".join(rest)


@pytest.mark.parametrize("name", sorted(OF_COMMAND))
def test_the_command_s_own_error_is_not_a_child_s(name):
    assert failure_of_child(lines_of(name), host="algo-1") == ""


def test_ranks_whose_lines_stand_among_each_other_are_told_apart():
    first = [f"[rank1]: {line}" for line in [*TRACE, SHARD]]
    later = [f"[rank0]: {line}" for line in GONE]
    mixed = [line for pair in zip(later, first, strict=True) for line in pair]
    line = reason_of_failure(mixed, who="it", exit_code=1)
    assert line == f"it ended with exit code 1: rank 1: {SHARD}"


def test_an_error_without_a_mark_counts_before_a_rank_that_is_left_alone():
    lone = [f"[rank0]: {line}" for line in GONE]
    line = reason_of_failure([*TRACE, SHARD, "bye", *lone], who="it", exit_code=1)
    assert line == f"it ended with exit code 1: a child process: {SHARD}"


def test_an_error_that_was_caught_before_is_no_cause_of_a_tool_s_failure():
    lines = [
        *lines_of("colour"),
        "epoch 2",
        *lines_of("subprocess_tool"),
    ]
    line = reason_of_failure(lines, who="it", exit_code=1)
    assert line.endswith(SAID["subprocess_tool"])


@pytest.mark.parametrize(
    ("kind", "message", "is_of_another"),
    [
        ("ChildFailedError", "\n====", True),
        ("CalledProcessError", "Command 'torchrun' returned non-zero exit status 1.", True),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:8397", True),
        ("KeyError", "'label'", False),
    ],
)
def test_what_only_says_that_another_process_failed_is_known(kind, message, is_of_another):
    failure = RankFailure(rank=0, host="algo-1", type=kind, message=message)
    assert failure.is_of_another is is_of_another
