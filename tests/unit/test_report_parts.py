"""Pictures and tables of the report: the feed, the plans, how runs scale."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache, partial
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.cli.report import report_scaling
from stoker.decide import TakeAs, pareto_front
from stoker.errors import UsageError
from stoker.figures.feed_intervals import COLUMNS, FeedInterval, RankRate, csv_text
from stoker.records import write_json
from stoker.report import scaling_of_runs
from stoker.report.feed_picture import draw_feed, read_feed
from stoker.report.page import does_loading_wait
from stoker.report.plans import dots_of, draw_plans
from stoker.run.reports import report_of_decision
from stoker.units import MILLISECONDS, time_unit
from support import builders, decisions, gpu_profiles, sample_records
from support.feed_rows import host_rate, write_feed
from support.property_tests import examples

SVG = "{http://www.w3.org/2000/svg}"


def story_of(folder, *, hosts=2, intervals=60):
    return read_feed(write_feed(folder, hosts=hosts, intervals=intervals))


def page_of(folder, feed):
    none = dict.fromkeys(("profile", "decision", "evaluation"))
    text = sample_records.write_page(folder, **none, feed_file=feed)
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")


def paths(svg, css):
    drawn = [path.get("d", "") for path in svg.iter(f"{SVG}path") if path.get("class") == css]
    corner = re.compile(r"([-\d.]+) ([-\d.]+)")
    return [[(float(x), float(y)) for x, y in corner.findall(path)] for path in drawn]


def test_each_host_has_a_row_and_its_gap_is_where_it_was_lost(tmp_path):
    svg = ElementTree.fromstring(draw_feed(story_of(tmp_path), width=960, name="feed").markup())
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    for name in ("Waiting for data", "Batches ready", "data-1", "data-2", "gpu-1, own workers"):
        assert name in texts
    lost, steady, local = paths(svg, "compute")
    floor = max(y for _, y in lost)
    low = [x for x, y in lost if y == floor]
    # Lost from the 26th to the 40th of 60 intervals: so much of the width has no height.
    assert pytest.approx(min(x for x in low if x > 0), abs=17) == 960 * 26 / 60
    assert pytest.approx(max(x for x in low if x < 960), abs=17) == 960 * 40 / 60
    assert all(y < max(y for _, y in steady) for x, y in steady[1:-1])
    # One scale: the local workers' row is a third as high as a data host's.
    heights = [max(y for _, y in row) - min(y for _, y in row) for row in (steady, local)]
    assert heights[1] == pytest.approx(heights[0] * 7.5 / 22, rel=0.1)
    # What was made elsewhere is marked on the row of the host that was lost.
    titles = [title.text for title in svg.iter(f"{SVG}title") if "elsewhere" in (title.text or "")]
    assert titles == ["data-1: five batches made elsewhere instead"]
    (mark,) = [line for line in svg.iter(f"{SVG}line") if line.get("class") == "lead wait"]
    assert float(mark.get("x1", 0)) == pytest.approx(960 * 26.5 / 60, abs=0.1)


@pytest.mark.parametrize("width", [360.0, 960.0])
@pytest.mark.parametrize("hosts", [1, 12, 40])
def test_labels_of_the_feed_do_not_clash(tmp_path, width, hosts):
    drawing = draw_feed(story_of(tmp_path, hosts=hosts), width=width, name="feed")
    for one, other in combinations(drawing.labels, 2):
        assert not one.overlaps(other), f"{one.text} / {other.text}"
    assert all(box.left >= -1 and box.right <= width + 1 for box in drawing.labels)


def test_a_long_run_of_many_hosts_stays_a_small_picture(tmp_path):
    drawing = draw_feed(story_of(tmp_path, hosts=40, intervals=480), width=960, name="feed")
    assert len(drawing.markup()) < 120_000
    assert any(label.text == "30 more hosts" for label in drawing.labels)


def test_the_report_names_the_present_limit_and_the_one_of_the_whole_run(tmp_path):
    file = write_feed(tmp_path)
    names = {"data-1": "algo-2", "gpu-1": "algo-1", "data-2": "<script>alert(1)</script>"}
    for name, other in names.items():
        file.write_text(file.read_text().replace(name, other))
    text = page_of(tmp_path, file)
    assert "Who fed the trainer" in text
    assert "What limits it in the last quarter of the run: the trainer" in text
    assert "Over the whole run: the data workers" in text
    assert re.search(r"data host 1</th><td[^>]*>15\.\d", text)
    assert '<th scope="row" class="when">training host, own workers</th>' in text
    assert "<script" not in text


def test_a_report_without_a_feed_does_not_speak_of_it(tmp_path):
    assert "Who fed the trainer" not in page_of(tmp_path, None)
    assert "Who fed the trainer" not in page_of(tmp_path, tmp_path / "missing.csv")


@pytest.mark.parametrize(
    "text", ["", ",".join(COLUMNS) + "\n", "a,b\n1,2\n", "\0\0", ",".join(COLUMNS) + "\n1,2,ra"]
)
def test_a_broken_file_is_as_no_file(tmp_path, text):
    (tmp_path / "feed.csv").write_text(text)
    assert read_feed(tmp_path / "feed.csv") is None


@pytest.mark.parametrize(("wall", "is_storage_named"), [(0.0391, False), (0.39, True)])
def test_faster_storage_is_no_advice_for_a_cpu_bound_job(tmp_path, wall, is_storage_named):
    profile = sample_records.profile()
    step = msgspec.structs.replace(profile.step, loader_wall_seconds=wall)
    # Others have its cores: its worker is at work, and has a CPU for half of that.
    host = host_rate("algo-2", 9.0, workers=1)
    host = replace(host, busy_cpus=0.5, in_flight=1, credits=3)
    rank = RankRate(name="0", batches_per_second=9.0, wait_share=0.3, window=4)
    interval = FeedInterval(start_seconds=0.0, seconds=2.0, ranks=(rank,), hosts=(host,))
    feed = tmp_path / "feed.csv"
    feed.write_text(",".join(COLUMNS) + "\n" + csv_text(interval))
    waits = does_loading_wait(msgspec.structs.replace(profile, step=step))
    story = read_feed(feed, does_loading_wait=waits)
    assert ("faster storage" in story.limit.advice) == is_storage_named


changed = msgspec.structs.replace
WIDTHS = (960.0, 360.0)


def starved(**changes):
    return decisions.decided(builders.starved(**changes))


def page_of_decision(tmp_path, decision, profile=None):
    file = tmp_path / "decision.html"
    report_of_decision(
        file,
        workload=sample_records.workload(),
        profile=profile or sample_records.profile(),
        decision=decision,
    )
    return file.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")


draw = partial(draw_plans, unit=MILLISECONDS, width=960, name="plans")


def test_every_plan_that_may_run_is_a_spot_and_the_front_is_marked():
    decision = starved()
    dots = dots_of(decision)
    assert len(dots) == sum(p.feasible and p.predicted is not None for p in decision.plans)
    front = {
        (p.predicted.step_seconds, p.predicted.usd_per_1000_steps)
        for p in pareto_front(decision.plans)
    }
    assert {(s.step_seconds, s.cost) for s in dots if s.is_front} == front
    assert [dot.is_chosen for dot in dots] == [False] * (len(dots) - 1) + [True]
    assert sum(dot.is_today for dot in dots) == 1
    names = {dot.name for dot in dots_of(sample_records.decision())}
    assert names == {"today", "tuned", "+1 local.c1"}


# When one is drawn, not when tests are collected, which each process of `make test` does.
BASES = (
    partial(starved),
    partial(starved, accelerator_step_seconds=0.19),
    partial(starved, accelerator_step_seconds=0.002),
    partial(starved, loader_cpu_seconds=1.0, accelerator_step_seconds=0.199),
    sample_records.decision,
)


@cache
def made(base):
    return base()


def scaled(decision, *, time, money):
    def of_plan(plan):
        outcome = plan.predicted
        if outcome is None:
            return plan
        seconds = ("step_seconds", "step_seconds_low", "step_seconds_high")
        changes = {name: getattr(outcome, name) * time for name in seconds}
        changes["usd_per_1000_steps"] = outcome.usd_per_1000_steps * money
        return changed(plan, predicted=changed(outcome, **changes))

    return changed(decision, plan=of_plan(decision.plan), plans=tuple(map(of_plan, decision.plans)))


@settings(max_examples=examples(200), derandomize=True)
@given(
    base=st.sampled_from(BASES),
    time=st.floats(min_value=1e-3, max_value=1e3),
    money=st.floats(min_value=1e-3, max_value=1e3),
    width=st.sampled_from(WIDTHS),
)
def test_labels_stay_in_the_picture_and_off_each_other(base, time, money, width):
    decision = scaled(made(base), time=time, money=money)
    unit = time_unit([plan.predicted.step_seconds for plan in decision.plans if plan.predicted])
    drawing = draw(decision, unit=unit, width=width)
    for label in drawing.labels:
        assert -1 <= label.left <= label.right <= drawing.width + 1
        assert -1 <= label.top <= label.bottom <= drawing.height + 1
    for one, other in combinations(drawing.labels, 2):
        assert not one.overlaps(other), (one, other)
    text = " / ".join(label.text for label in drawing.labels)
    assert "today" in text
    assert "chosen" in text
    ElementTree.fromstring(str(drawing.markup()))


@pytest.mark.parametrize(
    ("terms", "badge", "headline"),
    [
        ({}, "decided, not run yet", "One data host ("),
        ({"accelerator_step_seconds": 0.19}, "kept as it is", "stoker does not help here"),
    ],
)
def test_report_of_a_decision_alone_is_no_broken_run(tmp_path, terms, badge, headline):
    decision = starved(**terms)
    page = page_of_decision(tmp_path, decision)
    assert 'class="plans-wide"' in page
    assert "ended in" not in page
    assert badge in page
    assert f'<span class="said">{headline}' in page
    # Only a promise is a figure in large letters.
    assert ('class="hero"' in page) == (decision.action != "keep") == (not terms)


def text_of(page):
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_first_screen_without_prices_has_time_busy_accelerators_and_added_hosts(tmp_path):
    page = page_of_decision(tmp_path, gpu_profiles.here(gpu_profiles.H100), gpu_profiles.H100)
    first, _, rest = text_of(page).partition("Why this plan")
    assert "3.34 times as fast, predicted" in first
    assert "First, at no cost: 16 loader workers per host on local.c16" in first
    assert "Accelerator busy 94" in first
    assert "today 28" in first
    assert "hosts added: 3 x local.c4" in first
    assert "$" not in first
    assert "+3 local.c4, 94" in page
    assert "takes less CPU time" in rest or "takes less CPU time" in first


@pytest.mark.parametrize(
    ("follow", "hosts", "said"),
    [
        ("probable", "Hosts added: 1 x local.c2", "The plan was a try"),
        ("sure", "No host was added", "To make sure: stoker train --group dnn=local.c4:1"),
    ],
)
def test_run_with_a_probable_plan_says_whether_it_was_tried(tmp_path, follow, hosts, said):
    loading = {"loader_cpu_seconds": 0.56, "num_workers": 4}
    steps = {"step_seconds": 0.16, "accelerator_step_seconds": 0.12}
    profile = gpu_profiles.changed(gpu_profiles.H100, **steps, **loading)
    decision = gpu_profiles.here(profile, follow=follow)
    training = sample_records.training()
    measured = changed(training.measured, step_seconds=0.15)
    training = changed(training, measured=measured, groups=decision.plan.groups)
    records = {"profile": profile, "decision": decision, "training": training}
    text = text_of(sample_records.write_page(tmp_path, **records, evaluation=None))
    assert "The accelerators compute for 80" in text
    assert hosts in text
    assert said in text
    assert "CPU-seconds: cores times the step" not in text


def test_probable_plan_heads_the_page_with_how_to_make_sure(tmp_path):
    there = TakeAs(instance_type="ml.g6e.xlarge", accelerator_step_seconds=0.1)
    decision = decisions.decided(gpu_profiles.H100, take_as=there, objective="time")
    page = page_of_decision(tmp_path, decision)
    text = text_of(page)
    assert "probable: make sure" in text
    assert "1.60 times as fast, probably" in text
    assert "To make sure: stoker profile" in text
    assert "8 min, $0.37" in text
    assert "help here" not in text
    assert "1 g6e.2xlarge, probable" in page
    assert "\N{WHITE DIAMOND} probable" in text


def test_wait_that_is_not_known_is_not_drawn_as_none(tmp_path):
    profile = sample_records.profile()
    assert "strips-wide" in page_of_decision(tmp_path, starved(), profile)
    unknown = changed(profile, step=changed(profile.step, wait_seconds=None))
    assert "strips-wide" not in page_of_decision(tmp_path, starved(), unknown)


def run(rate, *, hosts=1, processes=1, data=0, usd=0.1, **changes):
    groups = [builders.group("dnn", "ml.g5.xlarge", hosts, processes_per_host=processes)]
    groups += [builders.group("data", "ml.c7i.8xlarge", data)] if data else []
    training = sample_records.training()
    measured = changed(
        training.measured,
        samples_per_second=rate,
        step_seconds=32 * hosts * processes / rate,
        usd_per_1000_steps=usd,
    )
    return changed(training, groups=tuple(groups), measured=measured, **changes)


MORE_RANKS = {"a": run(100, processes=1), "b": run(190, processes=2), "c": run(300, processes=4)}
MORE_DATA = {"0": run(50), "1": run(100, data=1), "2": run(150, data=2)}
REPEATED = {"a": run(90), "b": run(110), "c": run(100), "d": run(180, hosts=2)}


@pytest.mark.parametrize(
    ("runs", "what", "sizes", "efficiencies"),
    [
        (MORE_RANKS, "trainer processes", [1, 2, 4], [1, 0.95, 0.75]),
        # There is no ideal at no data host.
        (MORE_DATA, "data hosts", [0, 1, 2], [None, 1.0, 0.75]),
        # Runs of one size are one point, with their median.
        (REPEATED, "trainer processes", [1, 2], [1, 0.9]),
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


def test_dollars_by_an_estimated_price_are_marked_in_the_table_of_sizes():
    runs = {"a": run(100), "b": run(190, hosts=2, is_estimate=True), "c": run(195, hosts=2)}
    _, listed, estimated, note = scaling_of_runs(runs).table()
    assert "~" not in listed
    assert " ~" in estimated
    assert note == "~ is by an estimated price."
    # Of what is not known there is no estimate.
    unknown = {"a": run(100), "b": run(190, hosts=2, usd=None, is_estimate=True)}
    assert "~" not in "".join(scaling_of_runs(unknown).table())


def test_what_makes_runs_hard_to_compare_is_said():
    runs = {"a": run(100, workload_sha256="0" * 64), "b": run(190, hosts=2, data=1)}
    scaling = scaling_of_runs(runs)
    text = " ".join(scaling.notes)
    assert "different workloads" in text
    assert "number of data hosts" in text


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"a": run(100)}, "same size: nothing to compare"),
        ({"a": run(100), "b": run(120)}, "same size: nothing to compare"),
        (
            {"a": run(100), "b": changed(run(1, hosts=2), measured=None, status="failed")},
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
