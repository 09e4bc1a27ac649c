import json

import msgspec
import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.cli.report import report_scaling
from stoker.errors import UsageError
from stoker.records import write_json
from stoker.report import scaling_of_runs
from support import builders, sample_records

replace = msgspec.structs.replace


def run(rate, *, hosts=1, processes=1, data=0, usd=0.1, **changes):
    groups = [builders.group("dnn", "ml.g5.xlarge", hosts, processes_per_host=processes)]
    groups += [builders.group("data", "ml.c7i.8xlarge", data)] if data else []
    training = sample_records.training()
    measured = replace(
        training.measured,
        samples_per_second=rate,
        step_seconds=32 * hosts * processes / rate,
        usd_per_1000_steps=usd,
    )
    return replace(training, groups=tuple(groups), measured=measured, **changes)


@pytest.mark.parametrize(
    ("runs", "what", "sizes", "efficiencies"),
    [
        (
            {"a": run(100, processes=1), "b": run(190, processes=2), "c": run(300, processes=4)},
            *("trainer processes", [1, 2, 4], [1, 0.95, 0.75]),
        ),
        # There is no ideal at no data host.
        (
            {"0": run(50), "1": run(100, data=1), "2": run(150, data=2)},
            *("data hosts", [0, 1, 2], [None, 1.0, 0.75]),
        ),
        # Runs of one size are one point, with their median.
        (
            {"a": run(90), "b": run(110), "c": run(100), "d": run(180, hosts=2)},
            *("trainer processes", [1, 2], [1, 0.9]),
        ),
    ],
)
def test_the_smallest_size_is_the_ideal(runs, what, sizes, efficiencies):
    scaling = scaling_of_runs(runs)
    assert scaling.what == what
    assert [point.size for point in scaling.points] == sizes
    assert [point.efficiency for point in scaling.points] == [
        each and pytest.approx(each) for each in efficiencies
    ]


def test_a_size_with_an_unpriced_run_has_no_price():
    scaling = scaling_of_runs({"a": run(100, usd=None), "b": run(100), "c": run(190, hosts=2)})
    assert scaling.points[0].usd_per_million_samples is None
    assert scaling.points[1].usd_per_million_samples is not None
    assert "not known" in scaling.table()[1]


def test_what_makes_runs_hard_to_compare_is_said():
    scaling = scaling_of_runs(
        {"a": run(100, workload_sha256="0" * 64), "b": run(190, hosts=2, data=1)}
    )
    text = " ".join(scaling.notes)
    assert "different workloads" in text
    assert "number of data hosts" in text


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"a": run(100)}, "same size: nothing to compare"),
        ({"a": run(100), "b": run(120)}, "same size: nothing to compare"),
        (
            {"a": run(100), "b": replace(run(1, hosts=2), measured=None, status="failed")},
            "run b has no throughput: it failed",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs, words):
    with pytest.raises(UsageError, match=words):
        scaling_of_runs(runs)


@pytest.fixture
def folders(tmp_path):
    for size in (1, 2):
        (tmp_path / f"run-{size}").mkdir()
        write_json(tmp_path / f"run-{size}" / "training.json", run(100 * size, hosts=size))
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["scaling", "--scaling"])
def test_the_word_and_the_flag_print_the_same_table(word, folders, capsys):
    result = CliRunner().invoke(app_for("report"), ["report", word, *map(str, folders)])
    assert result.exit_code == 0, result.output
    head, one, two = result.output.splitlines()
    assert head.split()[:2] == ["trainer", "processes"]
    assert [one.split(), two.split()] == [
        ["1", "100.0", "100%", "3.125", "1"],
        ["2", "200.0", "100%", "1.562", "1"],
    ]
    report_scaling(folders, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [point["efficiency"] for point in document["points"]] == [1.0, 1.0]


def test_folders_without_a_training_are_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match=r"no training\.json in"):
        report_scaling([tmp_path / "none"], as_json=False)
    assert "left out" in capsys.readouterr().err
