"""A gate's metric from what the script prints: on this machine, and in what services are told."""

import json
import os
import threading
from pathlib import Path

import psutil
import pytest

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.launch.log_metrics import LogMetrics, metrics_in_log
from stoker.parameters import overrides_of
from stoker.records import Gate, Workload
from stoker.workload_file import workload_from
from support.command import process

PRINTS = """
import sys
for epoch in range(3):
    print(f"epoch {epoch}: loss {1 / (epoch + 1):.3f} accuracy 0.{epoch + 7}", flush=True)
print("INFO validation {'f1': 0.875}", file=sys.stderr, flush=True)
print("best so far: accuracy=none", flush=True)
print("x" * 500, flush=True)
"""


def workload(*gates, **more) -> Workload:
    return workload_from({"name": "w", "command": ["python", "t.py"], "gate": [*gates], **more})


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("accuracy [0-9.]+", "has 0 groups"),
        ("(accuracy) ([0-9.]+)", "has 2 groups"),
        ("accuracy ([0-9.]+", "is no pattern of Python"),
        ("accuracy (*)", "is no pattern of Python"),
        ("", "regex"),
        ("x" * 401, "regex"),
    ],
)
def test_a_pattern_that_finds_no_value_is_refused(pattern, words):
    with pytest.raises(UsageError, match=words):
        workload({"metric": "accuracy", "min": 0.9, "regex": pattern})


def test_one_metric_has_one_pattern_and_all_fit_into_a_variable():
    same = {"metric": "loss", "regex": "loss ([0-9.]+)"}
    assert workload({**same, "min": 0}, {**same, "max": 1}).metric_patterns == {
        "loss": "loss ([0-9.]+)"
    }
    with pytest.raises(UsageError, match="two gates have different patterns"):
        workload({**same, "min": 0}, {"metric": "loss", "max": 1, "regex": "l=([0-9.]+)"})
    with pytest.raises(UsageError, match="shorten them"):
        workload(*[{"metric": f"m{n}", "min": 0, "regex": f"({'x' * 390})"} for n in range(2)])


@pytest.mark.parametrize(
    ("pattern", "lines", "expected"),
    [
        ("accuracy ([0-9.]+)", ["accuracy 0.5", "accuracy 0.9"], "0.9"),
        ("acc=([0-9.]+)", ["acc=0.1 acc=0.2"], "0.2"),
        (r"loss: (\S+)", ["loss: nan"], "nan"),
        ("top1 ([-+0-9.e]+)", ["\x1b[1mtop1 1.5e-3\x1b[0m"], "1.5e-3"),
        ("f1 ([0-9.]+)", ["10%|#  |\rf1 0.3\rf1 0.4"], "0.4"),
        ("val ([0-9.]+)|loss", ["val 0.5", "loss"], "0.5"),
        ("dice ([0-9.]+)", ["\xff\xfe dice 0.7"], "0.7"),
        ("far ([0-9]+)", ["." * 1000 + "far 1"], None),
        ("accuracy ([0-9.]+)", ["nothing"], None),
    ],
)
def test_the_last_match_counts(pattern, lines, expected, tmp_path):
    read = LogMetrics({"m": pattern})
    for line in lines:
        read.read(f"{line}\n".encode("latin-1"))
    read.close()
    read.write(tmp_path)
    assert metrics_in_log(tmp_path).get("m") == expected


# Each takes minutes to for ever on its line: a repetition of repetitions, of alternatives that
# begin alike, of what may be empty, and many that match the same letters.
SLOW = {
    "(a+)+b": "a" * 900,
    "(?:a|a)*b(x)": "a" * 900,
    r"(\w+\s*)*=": "word " * 150,
    r"(?:.*,){40}(\d+)": "," * 900,
    "(?:a?){60}a{60}(b)": "a" * 90,
    r"(\S*\S*\S*\S*\S*\S*)!": "x" * 900,
}


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_takes_for_ever_on_a_line_holds_up_nothing(pattern):
    read = LogMetrics({"m": pattern, "accuracy": "accuracy ([0-9.]+)"})
    is_over = threading.Event()
    ticking = threading.Thread(target=lambda: [*iter(lambda: is_over.wait(0.01), True)])
    ticking.start()
    for _ in range(4):
        read.read(f"{SLOW[pattern]}\n".encode())
    read.read(b"accuracy 0.9\n")
    # Other threads of the launcher run while a line is searched.
    is_over.set()
    ticking.join(150)
    assert not ticking.is_alive()
    read.close()
    read.close()
    assert (read.values, read.slow) == ({"accuracy": "0.9"}, ("m",))
    read.read(b"accuracy 0.1\n")
    assert read.values == {"accuracy": "0.9"}


def test_a_search_whose_process_was_killed_finds_nothing_and_raises_nothing():
    read = LogMetrics({"m": "m ([0-9]+)"})
    (child,) = (c for c in psutil.Process().children() if "match_patterns.py" in str(c.cmdline()))
    child.kill()
    child.wait(150)
    for number in range(3):
        read.read(f"m {number}\n".encode())
    read.close()
    assert read.values == {}


def test_a_service_s_launcher_is_told_the_patterns_and_a_run_s_gate_keeps_them():
    of = workload({"metric": "accuracy", "min": 0.9, "regex": "accuracy: ([0-9.]+)"})
    told = RunEnvironment.of(of).to_environ()
    assert json.loads(told["STOKER_METRIC_PATTERNS"]) == {"accuracy": "accuracy: ([0-9.]+)"}
    (text,) = overrides_of(["gate=accuracy>=0.5, loss<=1"], workload=of)
    changed = workload_from({"name": "w", "command": ["x"]}, overrides=[text])
    pattern = "accuracy: ([0-9.]+)"
    assert changed.gate == (
        Gate(metric="accuracy", min=0.5, regex=pattern),
        Gate(metric="loss", max=1.0),
    )


GATES = """
- {metric: accuracy, min: 0.85, regex: 'accuracy ([0-9.]+)'}
- {metric: f1, min: 0.8, regex: "'f1': ([0-9.]+)"}
- {metric: recall, min: 0.5, regex: 'recall ([0-9.]+)'}
- {metric: best, min: 0.5, regex: 'best so far: accuracy=(.*)'}
- {metric: slow, min: 0.5, regex: '(?:[a-z]+)+!(.*)'}
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_only_prints_is_judged(tmp_path, ranks):
    (tmp_path / "t.py").write_text(PRINTS)
    (tmp_path / "w.yaml").write_text(
        f"name: w\ncommand: [python, t.py]\ngate:{GATES}"
        f"cluster: {{dnn: {{instance_type: local.c1, processes_per_host: {ranks}}}}}\n"
    )
    done = process("train", "w.yaml", "--out", "training.json", cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    record = json.loads(Path(tmp_path, "training.json").read_text())
    assert record["metrics"] == {"accuracy": 0.9, "f1": 0.875}
    logs = "".join(file.read_text() for file in tmp_path.glob("runs/*/logs/*.log"))
    assert "metric_not_in_log metric=recall" in logs
    assert "metric_read_failed metric=best" in logs
    assert "metric_pattern_slow metric=slow" in logs
