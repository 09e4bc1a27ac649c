"""The report says what the records say, whole or not, and nothing that is not in them."""

import csv
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed.bad_samples import COLUMNS
from stoker.feed.timeline import MeasuredStep
from stoker.record_words import kept_words
from stoker.records import (
    Advice,
    Check,
    Evaluation,
    Event,
    Fix,
    GateResult,
    OtherPrograms,
    Performance,
    ProfileState,
    StepCost,
    TakenElsewhere,
    TransformCost,
    write_json,
)
from stoker.records.base import sha256_of
from stoker.records.training import BalancedLoader, GroupSpending, Lineage
from stoker.report.step_times import StepTimes, Strip, draw_strips, read_steps
from stoker.report.verdict import transform_rows
from stoker.run.reports import report_of_run
from stoker.units import time_unit as choose_time_unit
from support import builders, sample_records
from support.feed_rows import write_feed
from support.property_tests import examples

replace = msgspec.structs.replace
VOID = {"meta", "link", "br", "img", "hr", "input"}


def changed(record):
    return lambda **changes: replace(record(), **changes)


decision = changed(sample_records.decision)
training = changed(sample_records.training)
evaluation = changed(sample_records.evaluation)


class Page(HTMLParser):
    """Reads the report as people get it: its text by element, and what its attributes point to."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.tags = []
        self.attributes = []
        self.headline = ""
        self.cells = []
        self._open = []
        self._text = []
        self.feed(source)
        self.close()
        self.text = " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if "style" in self._open:
            return
        self._text.append(data)
        if "h1" in self._open:
            self.headline += plain(data)
        if {"td", "th"} & set(self._open):
            self.cells[-1][-1] += plain(data)

    def row(self, start):
        return next(cells for cells in self.cells if cells and cells[0].startswith(start))


def plain(text):
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")


@pytest.fixture
def report(tmp_path):
    return lambda **changes: Page(sample_records.write_page(tmp_path, **changes))


def test_page_says_gain_wait_prediction_cost_and_gate(report):
    page = report()
    said = "1.72 times as fast With one data host a step takes 36 ms instead of 62 ms."
    assert page.headline == said
    text = plain(page.text)
    assert "The trainer waited 65% of every step for data; now 32%." in text
    assert (
        "Predicted: 34 ms, 1.82 times as fast; the step is 5.9% longer than predicted, inside the"
        " band of 31 ms to 37 ms."
    ) in text
    assert "A step costs 16% more than before (0.0720 CPU-seconds: cores times the step)" in text
    assert "Gate passed: accuracy 0.967, at least 0.94 asked." in text
    figures = re.findall(r'<dt>([^<]*)</dt>\s*<dd class="value">([^<]*)</dd>', plain(page.source))
    # The fourth, the gate, is a mark and a word.
    assert dict(figures) == {
        "A step takes": "36.0 ms",
        "Of it waiting for data": "32%",
        "Against the prediction": "5.9% longer",
    }


def test_one_run_has_one_step_and_one_wait_on_the_whole_page(report, tmp_path):
    before, after = sample_records.write_timelines(tmp_path)
    page = report(before_timeline=before, after_timeline=after, feed_file=write_feed(tmp_path))
    text = plain(page.text)
    # The record's, although the steps that are drawn wait for another share of their time.
    assert set(re.findall(r"(\d+)% (?:waiting|of a step|of every step)", text)) == {"65", "32"}
    assert set(re.findall(r"(\d+) ms per step, \d+% waiting", text)) == {"62", "36"}


def test_a_gain_that_is_less_than_promised_is_no_plain_good_news(report):
    performance = evaluation().performance
    measured = replace(performance.measured, step_seconds=0.041)
    less = replace(performance, measured=measured, speedup=62 / 41, prediction_error=41 / 34 - 1)
    page = report(evaluation=evaluation(performance=less))
    assert "faster, by less than predicted" in page.text
    assert 'class="badge mixed"' in page.source
    slow = training(measured=replace(training().measured, step_seconds=0.09))
    assert 'class="badge mixed"' in report(profile=None, evaluation=None, training=slow).source


def test_loading_by_the_trainer_itself_is_said_to_be_in_its_wait(report):
    profile = sample_records.profile()
    alone = replace(profile, step=replace(profile.step, num_workers=0))
    text = plain(report(profile=alone).text)
    assert "waited 65% of every step for data, which it loads itself; now 32%." in text


@pytest.mark.parametrize(
    ("measured", "words"),
    [(0.061, "61 ms instead of 62 ms"), (0.124, "124 ms instead of 62 ms: 2.00 times as long.")],
)
def test_a_run_without_gain_says_that_first(report, measured, words):
    baseline = sample_records.BASELINE_SECONDS
    performance = Performance(
        baseline=StepCost(step_seconds=baseline),
        measured=StepCost(step_seconds=measured),
        speedup=baseline / measured,
    )
    page = report(evaluation=Evaluation(passed=True, performance=performance))
    assert page.headline.startswith(f"stoker did not help. With one data host a step takes {words}")
    assert "fast" not in page.headline or measured < 0.062
    assert "is outside the predicted band, longer" in page.text


def test_keep_says_first_that_stoker_does_not_help(report):
    (keep,) = (plan for plan in decision().plans if plan.action == "keep")
    kept = decision(action="keep", plan=keep, bottleneck="accelerator")
    assert report(decision=kept).headline.startswith(
        "stoker does not help here: the accelerator is the limit, not the data."
    )
    unknown = report(decision=replace(kept, bottleneck="unexplained"))
    assert unknown.headline.startswith("Kept as it is for now: ")


def test_figures_of_a_busy_machine_are_no_gain(report):
    page = report(decision=decision(is_noisy=True))
    assert page.headline == "The machine was busy with other programs: the figures do not count."
    assert '<span class="hero">' not in page.source
    reason = "other programs were using 0.9 of the 2 vCPUs"
    (keep,) = (plan for plan in decision().plans if plan.action == "keep")
    keep = replace(keep, reason=reason)
    kept = decision(
        action="keep", plan=keep, plans=(keep,), bottleneck="unexplained", is_noisy=True
    )
    page = report(decision=kept)
    assert page.headline.startswith("Other programs kept the machine busy, so today's cluster")
    assert page.text.count(reason) == 1


def test_figures_that_do_not_count_are_not_in_a_kept_clusters_headline(report):
    (keep,) = (plan for plan in decision().plans if plan.action == "keep")
    kept = decision(action="keep", plan=keep, plans=(keep,), is_noisy=True)
    programs = OtherPrograms(host="d1", vcpus=1.0, others_vcpus=0.8)
    page = report(decision=kept, training=replace(training(), others=(programs,)))
    assert page.headline == kept_words(kept, "page")
    assert "The trainer waited" in page.text


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("step", [0.03, 0.036, 0.144])
def test_programs_that_come_while_it_trains_are_not_stokers_doing(report, step, is_alone):
    programs = OtherPrograms(host="d1", vcpus=1.0, others_vcpus=0.8)
    measured = replace(training().measured, step_seconds=step)
    disturbed = replace(training(), measured=measured, others=(programs,))
    alone = {"profile": None, "evaluation": None} if is_alone else {}
    page = report(training=disturbed, **alone)
    assert page.headline == "The machine was busy with other programs: the figures do not count."
    assert "did not help" not in page.text
    assert "Other programs were using 0.8 of the 1 vCPU of d1." in page.text
    assert '<span class="hero">' not in page.source


def test_a_gate_that_failed_on_a_busy_machine_says_both(report):
    gate = GateResult(metric="f1", min=0.9, passed=False)
    programs = OtherPrograms(host="d1", vcpus=1.0, others_vcpus=0.8)
    failed = evaluation(passed=False, gates=(gate,))
    page = report(training=replace(training(), others=(programs,)), evaluation=failed)
    assert "f1 was not reported" in page.headline
    assert "the figures do not count (other programs were using 0.8" in page.text


def fed(batches, *, of=1240, usd=3.1, **changes):
    group = GroupSpending(group="data", usd=usd, batches=batches, all_batches=of)
    return replace(training(), spending=(group,), **changes)


@pytest.mark.parametrize("batches", [0, 3, 61])
@pytest.mark.parametrize("is_alone", [False, True])
def test_no_report_credits_a_data_group_that_made_nothing(report, batches, is_alone):
    alone = {"profile": None, "evaluation": None} if is_alone else {}
    page = report(training=fed(batches), **alone)
    assert page.headline.startswith(f"The data group made {batches} of 1,240 batches, $3.10: ")
    assert page.headline.endswith("data hosts did not help.")
    assert "With one data host a step takes" not in page.text
    assert '<span class="hero">' not in page.source
    assert 'class="badge mixed"' in page.source


def test_a_run_that_failed_unfed_says_what_its_hosts_cost(report):
    unfed = fed(0, status="failed", exit_code=0, is_unfed=True, failure="no batch came: a lock")
    page = report(training=unfed, evaluation=None)
    words = "no batch came: a lock; the data group made 0 of 1,240 batches, $3.10"
    assert words in page.headline
    assert "With one data host a step takes" not in page.text


def test_a_gate_that_failed_credits_nobody(report):
    gate = GateResult(metric="f1", min=0.9, passed=False)
    page = report(training=fed(0), evaluation=evaluation(passed=False, gates=(gate,)))
    assert "f1 was not reported" in page.headline
    assert "The data group made 0 of 1,240 batches, $3.10." in page.text
    assert "With one data host a step takes" not in page.text


def test_a_group_that_did_its_part_is_credited(report):
    assert "With one data host a step takes" in report(training=fed(62)).headline
    other = GroupSpending(group="cheap", batches=0, all_batches=1240)
    both = fed(900)
    page = report(training=replace(both, spending=(*both.spending, other)))
    assert "With one data host a step takes" in page.headline
    assert "The data group cheap made 0 of 1,240 batches." in page.text


def test_a_self_check_on_a_busy_machine_tells_nothing(report):
    quiet, noisy = report(), report(decision=decision(is_noisy=True))
    assert "explained." in quiet.text
    assert "of no use, as other programs kept the machine busy." in noisy.text
    assert "explained." not in noisy.text


def test_no_accelerator_sets_a_pace_where_there_is_none(report):
    assert {plan.predicted.accelerator_seconds for plan in decision().plans} == {0.0}
    assert {plan.predicted.second_limit for plan in decision().plans} & {"accelerator"}
    (plans,) = re.findall(r'(?s)<table class="plans">.*?</table>', report().source)[:1]
    assert "computing" in plans
    assert "accelerator" not in plans


def test_failed_gate_comes_before_the_gain(report):
    gate = GateResult(metric="f1", min=0.9, passed=False)
    page = report(evaluation=evaluation(passed=False, gates=(gate,)))
    assert "f1 was not reported, at least 0.9 asked" in page.headline
    assert "1.72 times as fast" in plain(page.text)
    assert (page.row("f1")[1], page.row("f1")[-1]) == ("not reported", "✗ failed")


def test_failed_training_names_its_error_and_keeps_its_traceback(report):
    trace = 'Traceback (most recent call last):\n  File "train.py"\nValueError: sample 17'
    failed = training(status="failed", exit_code=3, measured=None, failure=trace)
    page = report(training=failed, evaluation=None)
    assert page.headline == "The training failed (exit code 3): ValueError: sample 17."
    assert 'File "train.py"' in page.text


@pytest.mark.parametrize(
    ("num_known", "step"), list(enumerate(["profile", "decide", "train", "evaluate"]))
)
def test_run_that_ended_early_names_the_step_and_the_error(report, num_known, step):
    missing = ("profile", "decision", "training", "evaluation")[num_known:]
    # With codes for a terminal's colours, and half a character.
    failure = "\x1b[31merror: no such type: local.c9\x1b[0m\x07\nwhere: mnist.yaml:4\udc80"
    page = report(**dict.fromkeys(missing), failure=failure)
    assert page.headline == f"The run ended in {step}: no such type: local.c9."
    assert "where: mnist.yaml:4" in page.text
    assert not {"\x1b", "\x07"} & set(page.source)


def test_a_training_alone_says_its_step_and_what_is_not_known(report):
    page = report(profile=None, decision=None, evaluation=None)
    assert re.fullmatch(r"A step takes 36 ms, \d+% of it waiting for data\.", page.headline)
    assert "it has no profile and no decision" in page.text
    decided = report(profile=None, evaluation=None)
    assert "a step takes 36 ms instead of 62 ms" in decided.headline
    assert "no gate was checked" in decided.text


def test_a_profile_taken_elsewhere_is_not_the_step_before(report, tmp_path):
    before, _ = sample_records.write_timelines(tmp_path)
    profile = sample_records.profile()
    names = {"profiled_on": "local.c1", "taken_as": "ml.g5.2xlarge"}
    sources = {"cpu_speed_source": "given", "accelerator_step_source": "given"}
    taken = TakenElsewhere(cpu_speed=1.8, **names, **sources)
    page = report(
        profile=replace(profile, step=replace(profile.step, step_seconds=0.110, num_workers=0)),
        decision=decision(taken_elsewhere=taken),
        evaluation=None,
        before_timeline=before,
        failure="the gate broke",
    )
    # The 62 ms are those of the decision's plan of today.
    assert page.row("Before, scaled")[1].startswith("62")
    text = plain(page.text)
    assert "before: 62.0 ms" in text
    assert "The profile was taken on local.c1" in text
    for absent in ("Before, measured", "Steps, before and after", "which it loads itself"):
        assert absent not in text


def test_a_training_is_not_held_against_the_decision_of_an_earlier_one(tmp_path):
    for name in ("workload", "profile", "decision", "evaluation"):
        write_json(tmp_path / f"{name}.json", getattr(sample_records, name)())
    for digest, is_its_own in ((None, False), (sha256_of(decision())[:12], True)):
        write_json(tmp_path / "training.json", training(decision_id=digest))
        text = report_of_run(tmp_path).read_text(encoding="utf-8")
        assert ("it has no profile and no decision" in text) is not is_its_own
        assert ("Why this plan" in text) is is_its_own


def test_every_set_of_records_gives_a_page_without_holes(report, tmp_path):
    names = ("profile", "decision", "training", "evaluation")
    files = sample_records.write_timelines(tmp_path)
    sets = [missing for size in range(5) for missing in combinations(names, size)]
    for missing, (before, after) in product(sets, ((None, None), files)):
        page = report(**dict.fromkeys(missing), before_timeline=before, after_timeline=after)
        assert re.findall(r"\b(?:nan|inf|None|undefined)\b", page.text) == [], (missing, before)
        assert page.headline


def test_plan_table_shows_each_plan_as_predicted_and_one_as_chosen(report):
    *others, last = decision().plans
    reason = "no price is known for c9"
    blank = replace(last, predicted=None, feasible=False, reason=reason)
    page = report(decision=decision(plans=(*others, blank)))
    (chosen,) = (cells for cells in page.cells if cells and "chosen" in cells[0])
    assert chosen == page.row("one data host (local.c1)")
    assert [" ".join(cell.split()) for cell in chosen[1:]] == [
        "34.030.6\N{EN DASH}37.4",
        "",
        "1.82",
        "0.0680 s+9.7%",
        "CPUcomputing, at 22.0 ms",
        "63%",
    ]
    assert "71% of batches made on data hosts" in chosen[0]
    assert page.row("today's cluster, tuned")[1].startswith("60.9")
    assert "✗ not feasible: needs 3 cores, this machine has 2" in page.row("two data hosts")[0]
    row = page.row("four data hosts")
    assert (reason in row[0], row[1]) == (True, "not known")


def test_many_plans_are_folded_and_todays_cluster_is_in_sight(report):
    better = [
        replace(decision().plan, remote_share=number / 100, reason=f"share {number}")
        for number in range(30)
    ]
    page = report(decision=decision(plans=(*better, *decision().plans)))
    in_sight, _ = page.source.split("<details>")
    assert "one data host" in in_sight
    assert re.search(r'<th scope="row">today&#39;s cluster\s*</th>', in_sight)
    assert all(plan.reason in page.text for plan in better)


def test_path_hosts_events_commands_and_advice_are_shown(report):
    arn = "arn:aws:sagemaker:r:1:training-job/mnist"
    page = report(training=training(lineage=Lineage(image_digest="sha256:ab", job_id=arn)))
    for words in (
        *(answer.question for answer in decision().path),
        *(answer.because for answer in decision().path),
        "training host: algo-1 (rank 0)",
        "data host 1: algo-2",
        "data host registered",
        "38.0 s",
        "kornia",
        "uint8",
        "data hosts gone 0.4 s after the training's end",
        "stoker run configs/mnist.yaml",
        "stoker train --platform local --group dnn=local.c1:1:1 --group data=local.c1:1:1"
        " -- python examples/mnist/train.py --epochs 3",
    ):
        assert words in page.text
    assert page.row("image digest")[-1] == "sha256:ab"
    assert page.row("job id")[-1] == arn


def test_predicted_spent_and_idle_dollars_stand_side_by_side(report):
    spending = (
        GroupSpending(group="gpus", usd=8.0, idle_share=0.25, idle_usd=2.0),
        GroupSpending(group="cpus", usd=1.5),
    )
    page = report(training=training(predicted_usd=7.25, spent_usd=9.5, spending=spending))
    assert "The run: $7.25 predicted, $9.50 spent" in page.text
    assert page.row("gpus")[1:] == ["$8.00", "25%", "$2.00"]
    assert page.row("cpus")[1:] == ["$1.50", "\N{EN DASH}", "not known"]


def test_where_nobody_is_billed_no_dollar_is_shown(report):
    page = report(decision=decision(warnings=()))
    assert "$" not in page.text.replace(decision().prices.source, "")
    assert "Idle cores of this machine cost nothing" in page.text
    assert page.row("Plan, measured")[-1] == "0.0720 s"


def test_real_prices_carry_date_region_and_purchase(report):
    aws = {"purchase": "on-demand", "source": "AWS table", "region": "us-east-1", "stale": True}
    page = report(
        decision=decision(prices=replace(decision().prices, **aws)),
        workload=replace(sample_records.workload(), platform="sagemaker"),
    )
    dated = "on-demand, AWS table, us-east-1, of 2026-11-20 (stale: older than 90 days)."
    assert f"Prices: {dated}" in page.text
    assert "Idle cores of this machine cost nothing" not in page.text
    assert "$0.000756" in page.text


COSTS = (
    TransformCost(name="getitem", cpu_seconds=0.006, share=0.75, samples=36),
    TransformCost(name="Crop<b>", within="getitem", cpu_seconds=0.004, share=0.5, samples=36),
    TransformCost(name="Flip", within="getitem", cpu_seconds=1e-6, share=0.001, samples=36),
    TransformCost(name="collate", cpu_seconds=0.002, share=0.25, samples=9),
)


@pytest.fixture
def report_of(report):
    none = dict.fromkeys(("decision", "training", "evaluation"))
    return lambda **parts: report(profile=builders.profile(step_seconds=0.1, **parts), **none)


def test_parts_that_cost_something_stand_in_the_report_and_names_are_text(report_of):
    rows = transform_rows(COSTS)
    assert [(row.name, row.within is not None) for row in rows] == [
        ("getitem", False),
        ("Crop<b>", True),
        ("collate", False),
    ]
    page = report_of(transforms=COSTS, read_bytes=4e6, storage_bytes_per_second=2e8)
    assert "Parts of loading" in page.source
    assert "Crop&lt;b&gt;" in page.source
    assert "Crop<b>" not in page.source
    words = "A step reads 4.00 MB from storage, which gives each host 200 MB per second"
    assert words in page.source
    without = report_of(storage_bytes_per_second=2e8)
    assert "Parts of loading" not in without.source
    assert "from storage" not in without.source
    assert "<h3>States</h3>" not in without.source


def test_states_stand_in_the_report_with_their_shares(report_of):
    page = report_of(
        check=Check(predicted_step_seconds=0.05, error=-0.5, explained=False, state="straggler"),
        states=(
            ProfileState(id="straggler", text="one slow rank: <8 ms", share=0.62),
            ProfileState(id="gil", text="held"),
        ),
    )
    assert "not explained by the parts but by the state straggler" in page.text
    assert "one slow rank: &lt;8 ms" in page.source
    assert "62%" in plain(page.text)
    assert page.source.index("one slow rank") < page.source.index("held")


def test_hostile_names_are_shown_and_not_run(report):
    evil = "</title></svg><script>alert('1')</script>&\"<img src=x onerror=alert(2)>"
    plan, path = decision().plan, decision().path
    page = report(
        run_id=evil,
        workload=replace(sample_records.workload(), command=("python", evil)),
        profile=replace(sample_records.profile(), fixes=(Fix(id="x", text=evil),)),
        decision=decision(
            plan=replace(
                plan, groups=tuple(replace(group, instance_type=evil) for group in plan.groups)
            ),
            warnings=(evil,),
            advice=(Advice(id="x", text=evil, when=evil),),
            path=tuple(replace(step, question=evil, because=evil) for step in path),
            prices=replace(decision().prices, source=evil),
        ),
        training=training(
            metrics={evil: 1.0},
            events=(Event(when=evil, what=evil, host=evil),),
            hosts=tuple(replace(host, host=evil) for host in training().hosts),
        ),
        environment={evil: evil, "command": evil},
        log_files=[Path("logs") / "<b>.log"],
        failure=evil,
    )
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("alert(2)") >= 12
    assert not any(name.startswith("on") for _, name, _ in page.attributes)


def test_nothing_points_outside_the_file(report, tmp_path):
    log = tmp_path / "logs" / "dnn algo#1.log"
    page = report(log_files=[log, Path("/elsewhere/data.log")])
    targets = {
        value
        for _, name, value in page.attributes
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    }
    assert targets == {"data:,", "./logs/dnn%20algo%231.log"}
    assert re.findall(r"url\((?!#)[^)]*\)|@import|@font-face", page.source) == []
    assert "script" not in page.tags
    assert set(re.findall(r"https?://[^\s\"'<]*", page.source)) == {"http://www.w3.org/2000/svg"}


def test_pictures_and_tables_are_well_formed_and_named(report, tmp_path):
    before, after = sample_records.write_timelines(tmp_path)
    source = report(before_timeline=before, after_timeline=after).source
    pictures = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    named = [picture for picture in pictures if 'role="img"' in picture]
    assert len(named) == 4
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert set(re.findall(r"url\(#([^)]*)\)", picture)) <= set(ids)
        assert set(root.get("aria-labelledby", "").split()) <= set(ids)
    every = re.findall(r'\bid="([^"]*)"', source)
    assert len(every) == len(set(every))
    page = Page(source)
    assert page.tags.count("caption") == page.tags.count("table")
    scopes = [1 for tag, name, _ in page.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == page.tags.count("th")


def test_text_stands_out_from_its_ground_in_light_and_dark(report):
    schemes = re.findall(r":root \{(.*?)\}", report().source, flags=re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        for text in ("text", "quiet", "wait-text", "compute-text", "good", "mixed", "bad"):
            for ground in ("page", "card"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for tone in ("good", "mixed", "bad"):
            assert contrast(colours[tone], colours[f"{tone}-ground"]) >= 4.5, tone
        for mark in ("wait", "compute"):
            assert contrast(colours[mark], colours["page"]) >= 3, mark


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


HEADER = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps,weight\n"


@pytest.fixture
def steps_in(tmp_path):
    def read(text):
        (tmp_path / "t.csv").write_text(text)
        return read_steps(tmp_path / "t.csv")

    return read


@pytest.mark.parametrize(
    "broken",
    ["1,0,1,0.5,0.", "1,0,1,x,0,0,8,1,1", "1,0,1,0,nan,0,8,1,1", "1,0,1,0,-1,0,8,1,1", "", "1,0"],
)
def test_whole_rows_of_the_main_loader_are_the_steps(steps_in, broken):
    rows = ["0,0,0,0,1,1,8,1,1", "1,0,0,2.0,0.1,0.2,8,1,1", "1,0,5,2.3,0.1,0.2,8,1,1"]
    steps = steps_in(HEADER + "\n".join([*rows, broken])).steps
    assert [(step.loader, step.batch) for step in steps] == [(1, 0), (1, 5)]


@pytest.mark.parametrize("text", ["", HEADER, "what,ever\n1,2\n"])
def test_file_without_a_step_is_no_timeline(steps_in, tmp_path, text):
    assert steps_in(text) is None
    assert read_steps(tmp_path / "missing.csv") is None


def test_strip_names_the_steps_it_shows_or_says_that_they_are_medians(report, tmp_path):
    _, after = sample_records.write_timelines(tmp_path)
    text = report(before_timeline=tmp_path / "missing.csv", after_timeline=after).text
    assert "Before: no timeline was kept, so the strip repeats the median step." in text
    assert re.search(r"After: steps \d+ to \d+ of 750, from the middle of the run", text)


def test_a_long_run_is_a_window_of_one_epoch_in_a_small_report(report, tmp_path):
    times = {"wait_seconds": 0.01, "compute_seconds": 0.02, "epochs": 2}
    path = sample_records.write_timeline(tmp_path / "t.csv", steps=10_000, **times)
    assert len({step.epoch for step in read_steps(path).window(0.9)}) == 1
    assert len(report(before_timeline=path, after_timeline=path).source) < 150_000


seconds = st.floats(min_value=1e-5, max_value=100)


@st.composite
def timelines(draw):
    waits = draw(st.lists(st.floats(min_value=0, max_value=10), min_size=1, max_size=60))
    compute = draw(seconds)
    steps = [
        MeasuredStep(
            loader=0,
            epoch=batch // 20,
            batch=batch,
            start_seconds=sum(waits[:batch]) + batch * compute,
            wait_seconds=wait,
            compute_seconds=compute,
            samples=1,
        )
        for batch, wait in enumerate(waits)
    ]
    return StepTimes(tuple(steps))


@settings(max_examples=examples(60))
@given(timeline=timelines(), length=seconds)
def test_window_is_consecutive_and_not_longer_than_asked(timeline, length):
    window = timeline.window(length)
    first = window[0].batch
    assert [step.batch for step in window] == list(range(first, first + len(window)))
    assert window[-1].start_seconds - window[0].start_seconds <= length


widths = st.sampled_from([360.0, 960.0])
names = st.sampled_from(["today's cluster", "two data hosts (ml.c5.18xlarge) and " * 3])


@settings(max_examples=examples(60))
@given(before=timelines(), after=timelines(), what=names, width=widths)
def test_labels_of_strips_never_clash(before, after, what, width):
    strips = [Strip("Before", what, before), Strip("After", what, after)]
    unit = choose_time_unit([strip.step_seconds for strip in strips])
    drawing = draw_strips(strips, unit=unit, width=width, name="a")
    for label in drawing.labels:
        assert -0.01 <= label.left <= label.right <= drawing.width + 0.01, label
        assert 0 <= label.top <= label.bottom <= drawing.height, label
    for one, other in combinations(drawing.labels, 2):
        assert not one.overlaps(other), (one, other)
    ElementTree.fromstring(drawing.markup())


DEALT = BalancedLoader(
    loader="train.py:12",
    steps=1250,
    drawn_excess=0.114,
    dealt_excess=0.0008,
    too_long_steps=3,
)


def bad_samples_csv(folder, indices, *, text="damaged"):
    file = folder / "bad_samples.csv"
    with file.open("w", newline="", encoding="utf-8") as rows:
        written = csv.writer(rows)
        written.writerow(COLUMNS)
        for place, index in enumerate(indices):
            where = (place // 4, place, 0, 0, 0)
            written.writerow((*where, index, "ValueError", text, "", "algo-2", 1))
    return file


def test_bad_samples_are_counted_and_the_first_ones_shown(report, tmp_path):
    file = bad_samples_csv(tmp_path, [7, 8, 7, *range(20, 40)])
    page = report(training=training(bad_samples=23, steps=1000), bad_samples_file=file)
    text = plain(page.text)
    assert re.search(r"23 times a sample could not be made, [\d.]+% of all: 22 different", text)
    assert page.row("7")[1] == "ValueErrordamaged"
    assert sum(cells[0] in map(str, range(20, 40)) for cells in page.cells if cells) == 6
    links = [value for _, name, value in page.attributes if name == "href"]
    assert "./bad_samples.csv" in links


@pytest.mark.parametrize(
    ("loaders", "words"),
    [
        (
            [BalancedLoader(loader="a:1", why_not="it reads in order"), DEALT],
            "Ranks were balanced: in 1,250 steps the one with the most had 11.4% more bytes than "
            "the mean as drawn, 0.1% as dealt (one sample alone was more in 3 of them).",
        ),
        (
            [msgspec.structs.replace(DEALT, too_long_steps=0, why_not="the ranks differ")],
            "0.1% as dealt; not in all epochs: the ranks differ.",
        ),
        (
            [BalancedLoader(loader="a:1", why_not="it has no workers (num_workers=0)")],
            "Ranks were not balanced: it has no workers (num_workers=0).",
        ),
    ],
    ids=["dealt", "some epochs", "refused"],
)
def test_a_report_says_whether_ranks_were_balanced(report, loaders, words):
    page = report(training=training(balance=tuple(loaders)))
    assert words in plain(page.text)
    assert "anks were" not in plain(report(training=training()).text)


def test_a_report_without_their_list_says_how_many_bad_samples_there_were(report):
    page = report(training=training(bad_samples=1))
    assert "Once a sample could not be made" in plain(page.text)
    assert "is not here" in page.text


def test_a_hostile_or_cut_list_of_bad_samples_is_shown_as_text(report, tmp_path):
    evil = "<script>alert(1)</script>" * 40
    file = bad_samples_csv(tmp_path, [3], text=evil)
    file.write_text(file.read_text() + "0,1,0,")
    page = report(training=training(bad_samples=2), bad_samples_file=file)
    assert "script" not in page.tags
    assert len(page.row("3")[1]) < 200


def test_a_report_without_bad_samples_has_no_word_on_them(report):
    assert "Bad samples" not in report().text
