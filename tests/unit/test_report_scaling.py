"""Checks scaling over runs: what is compared, what the ideal is, what page and table say."""

import json
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.cli.report import report_scaling
from stoker.errors import UsageError
from stoker.records import Group, Training, write_json
from stoker.report import headline, scaling_of_runs
from stoker.report.scaling import draw_scaling, usd_per_million, words_of_scaling
from support import sample_records

replace = msgspec.structs.replace


def run(rate: float, *, hosts: int = 1, processes: int = 1, data: int = 0, **changes) -> Training:
    groups = [
        Group(
            name="dnn",
            role="dnn",
            instance_type="ml.g5.xlarge",
            count=hosts,
            processes_per_host=processes,
        )
    ]
    if data:
        groups.append(Group(name="data", role="data", instance_type="ml.c7i.8xlarge", count=data))
    training = sample_records.training()
    measured = replace(
        training.measured,
        samples_per_second=rate,
        step_seconds=32 * hosts * processes / rate,
        usd_per_1000_steps=changes.pop("usd", 0.1),
    )
    return replace(training, groups=tuple(groups), measured=measured, **changes)


def test_processes_are_the_scale_where_they_differ_and_the_smallest_is_the_ideal():
    scaling = scaling_of_runs(
        {"a": run(100, processes=1), "b": run(190, processes=2), "c": run(300, processes=4)}
    )
    assert scaling.what == "trainer processes"
    assert [point.size for point in scaling.points] == [1, 2, 4]
    assert [point.efficiency for point in scaling.points] == pytest.approx([1, 0.95, 0.75])
    assert scaling.ideal(4) == pytest.approx(400)
    assert "3.00 times" in headline(scaling)
    assert "75 % of the ideal" in headline(scaling).replace("\N{NO-BREAK SPACE}", " ")


def test_a_scale_in_data_hosts_has_no_ideal_at_none_of_them():
    scaling = scaling_of_runs({"0": run(50), "1": run(100, data=1), "2": run(150, data=2)})
    assert scaling.what == "data hosts"
    assert [point.efficiency for point in scaling.points] == [None, 1.0, pytest.approx(0.75)]


def test_runs_of_one_size_are_one_point_with_its_spread():
    scaling = scaling_of_runs({"a": run(90), "b": run(110), "c": run(100), "d": run(180, hosts=2)})
    first = scaling.points[0]
    assert (first.samples_per_second, first.low, first.high, first.num_runs) == (100, 90, 110, 3)
    assert scaling.points[1].efficiency == pytest.approx(0.9)


def test_a_million_samples_cost_the_price_of_their_time():
    # 0.1 $ for 1000 steps of 32 samples: 3.125 $ for a million samples.
    assert usd_per_million(run(100)) == pytest.approx(0.1 / 1000 / 32 * 1e6)


def test_without_a_price_there_is_no_cost_panel():
    with_price = scaling_of_runs({"a": run(100), "b": run(190, hosts=2)})
    without = scaling_of_runs({"a": run(100, usd=None), "b": run(190, hosts=2)})
    assert without.points[0].usd is None
    assert "for a million samples" in draw_scaling(with_price, width=960, name="x")
    assert "for a million samples" not in draw_scaling(without, width=960, name="x")


def test_what_makes_runs_hard_to_compare_is_said():
    scaling = scaling_of_runs(
        {"a": run(100, workload_sha256="0" * 64), "b": run(190, hosts=2, data=1)}
    )
    text = " ".join(scaling.notes)
    assert "different workloads" in text
    assert "number of data hosts" in text


@pytest.mark.parametrize("width", [960, 360])
def test_the_picture_is_well_formed_and_says_its_figures(width):
    scaling = scaling_of_runs(
        {str(n): run(100 * n**0.9, processes=n) for n in (1, 2, 4, 8, 16, 32)}
    )
    drawn = draw_scaling(scaling, width=width, name="x")
    root = ElementTree.fromstring(drawn)
    assert words_of_scaling(scaling) in "".join(root.itertext())
    assert all(str(point.size) in drawn for point in scaling.points[-2:])


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"a": run(100)}, "nothing scales"),
        ({"a": run(100), "b": run(120)}, "nothing scales"),
        (
            {"a": run(100), "b": replace(run(1, hosts=2), measured=None, status="failed")},
            "run b has no throughput: it failed",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs, words):
    with pytest.raises(UsageError, match=words):
        scaling_of_runs(runs)


def test_the_verb_prints_a_table_and_writes_a_page(tmp_path, capsys):
    folders = []
    for size in (1, 2):
        folder = tmp_path / f"run-{size}"
        folder.mkdir()
        write_json(folder / "training.json", run(100 * size, hosts=size))
        folders.append(folder)
    out = tmp_path / "scaling.html"
    report_scaling(folders, out=out, as_json=False)
    printed = capsys.readouterr().out
    assert "200.0" in printed
    assert "100%" in printed
    assert "<svg" in out.read_text(encoding="utf-8")
    report_scaling(folders, out=out, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [point["efficiency"] for point in document["points"]] == [1.0, 1.0]
    with pytest.raises(UsageError, match=r"no training\.json in"):
        report_scaling([tmp_path / "none"], out=out, as_json=False)


@pytest.mark.parametrize("words", [["scaling"], ["--scaling"]])
def test_the_word_and_the_flag_draw_the_same_page(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, training in (("a", run(100)), ("b", run(190, processes=2))):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "training.json", training)
    result = CliRunner().invoke(
        app_for("report"), ["report", *words, "a", "b", "--out", "both.html"]
    )
    assert result.exit_code == 0, result.output
    assert "95%" in result.output
    assert "1.90 times" in (tmp_path / "both.html").read_text()


def test_runs_on_this_machine_cost_what_a_price_file_says():
    groups = sample_records.decision().plan.groups
    assert usd_per_million(replace(run(100, usd=0.1), groups=groups)) is not None
    assert usd_per_million(replace(run(100, usd=None), groups=groups)) is None
