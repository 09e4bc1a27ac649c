"""A gate on a metric that nothing reports is told before the run is paid."""

import pytest

from stoker.project.unreported import unreported_words
from stoker.workload_file import workload_from


def words(tmp_path, source: str, **gate: object) -> str:
    (tmp_path / "train.py").write_text(source)
    document = {"name": "w", "command": ["python", "train.py"]}
    gates = [{"metric": "accuracy", "min": 0.9, **gate}]
    return unreported_words(workload_from({**document, "gate": gates}), folder=tmp_path)


def test_both_ways_are_named(tmp_path):
    said = words(tmp_path, "print('accuracy 0.93')\n")
    assert "stoker.log_metrics(accuracy=value)" in said
    assert "regex: 'accuracy[=: ]+([0-9.]+)'" in said


@pytest.mark.parametrize(
    "source",
    [
        "import stoker\nstoker.log_metrics(accuracy=0.9)\n",
        "from stoker import log_metrics as report\nreport(accuracy=0.9)\n",
        "import os\nopen(os.environ['STOKER_METRICS'], 'w')\n",
    ],
)
def test_a_script_that_reports_is_not_warned_of(tmp_path, source):
    assert words(tmp_path, source) == ""


def test_a_report_in_a_module_beside_the_script_is_seen(tmp_path):
    (tmp_path / "loop.py").write_text("from stoker import log_metrics\n")
    assert words(tmp_path, "import loop\nloop.main()\n") == ""


def test_a_gate_with_a_pattern_and_a_script_that_is_elsewhere_are_not_warned_of(tmp_path):
    assert words(tmp_path, "print(1)\n", regex="accuracy ([0-9.]+)") == ""
    gates = [{"metric": "accuracy", "min": 0.9}]
    elsewhere = workload_from({"name": "w", "command": ["/opt/train"], "gate": gates})
    assert unreported_words(elsewhere, folder=tmp_path) == ""
