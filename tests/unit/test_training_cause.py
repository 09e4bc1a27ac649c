from stoker.failure_reasons import cause_of
from stoker.feed.why_unfed import advice_on
from stoker.feed.workers.pool import describe_exit
from stoker.host.processes import why_not_found
from stoker.launch.finish import words_of_end

WHO = "the training command on algo-3"
LOG = (
    "stoker 2026-11-21T11:47:03.703Z run=r host=algo-3 agent_ready agent=algo-1 workers=2 credits=4"
)
TRACE = "Traceback (most recent call last):\n  File \"a.py\", line 3\nKeyError: 'x'\n"


def test_a_killed_command_is_named_with_its_signal_and_not_with_the_last_log_line():
    words = words_of_end(WHO, exit_code=137, stderr=f"epoch 1\n{LOG}\n")
    assert cause_of(words) == f"{WHO} ended with signal 9 (SIGKILL), perhaps out of memory"
    assert words.splitlines()[1:] == ["epoch 1"]


def test_the_cause_of_a_bare_traceback_is_its_exception():
    assert cause_of(f"{TRACE}{LOG}\nsomething behind it\n") == "KeyError: 'x'"
    # What was raised does not paint on the terminal.
    assert cause_of("rank 0: ValueError: \x1b[2Jgone") == r"rank 0: ValueError: \x1b[2Jgone"


def test_a_script_that_may_not_be_executed_is_told_from_one_that_is_missing(tmp_path):
    (tmp_path / "q.py").write_text("")
    what, fix = why_not_found("./q.py", folder=tmp_path)
    assert what == "./q.py is not executable"
    assert "chmod +x ./q.py" in fix
    assert "python ./q.py" in fix
    assert why_not_found("./r.py", folder=tmp_path)[0] == "command not found: ./r.py"


def test_sys_exit_in_a_data_worker_keeps_its_code():
    assert describe_exit(3) == "ended with exit code 3"
    assert "sys.exit" in advice_on(f"data worker 0 {describe_exit(3)}")
    assert "memory" in advice_on(describe_exit(-9))
    assert "memory" not in advice_on(describe_exit(-11))
