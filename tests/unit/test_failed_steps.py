"""What is shown of a run's failed steps on Kubeflow, read from logs and states of any size."""

import pytest

from stoker.pipelines.base import RunStep
from stoker.pipelines.kubeflow.run_steps import exit_code_of, own_lines, reason_in

LAUNCHER = "I1126 10:00:00.123456       1 launcher_v2.go:191] publish success."


def test_of_a_log_beyond_a_mebibyte_the_last_lines_are_kept():
    steps = [f"step {number} loss=0.1 {'x' * 40}" for number in range(30_000)]
    log = "\n".join(line for step in steps for line in (LAUNCHER, step))
    assert len(log) > 2 << 20
    assert own_lines(log) == tuple(steps[-20:])
    assert reason_in(own_lines(f"{log}\nerror: the disk is full\ntry:   another one")) == (
        "the disk is full"
    )


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], ""),
        (["Killed"], "Killed"),
        (["error: first", "error: second"], "second"),
        (["an error: in a line"], "an error: in a line"),
        (["error: Zähler läuft über: 日本語", "where: rank 0"], "Zähler läuft über: 日本語"),
        (["error: \x1b[31mred\x1b[0m"], "\x1b[31mred\x1b[0m"),
    ],
)
def test_the_reason_is_the_last_error_or_else_the_last_line(lines, reason):
    assert reason_in(lines) == reason


GATE = "the gate accuracy>=0.9 is missed: 0.7"
CRASH = "the training failed (exit code 1): ValueError"


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ({"gate": GATE}, 3),
        ({"gate": ""}, 3),
        ({"gate[1]": GATE, "gate[0]": GATE}, 3),
        ({"gate-2": GATE}, 3),
        ({"gate-keeper": GATE}, 4),
        ({"train": CRASH}, 4),
        ({"profile": "no capacity", "train": CRASH}, 4),
        ({"evaluate": "OOMKilled", "gate-3[12]": GATE}, 3),
    ],
)
def test_of_several_failed_steps_the_gates_decide_the_exit_code(failed, code):
    steps = [RunStep(name=name, status="FAILED", reason=why) for name, why in failed.items()]
    steps.append(RunStep(name="gate-9", status="not run"))
    assert exit_code_of("FAILED", steps) == code
