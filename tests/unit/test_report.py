"""The report says what the records say, whole or not, and nothing that is not in them."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import combinations, product

import msgspec
import pytest

from stoker.errors import UsageError
from stoker.records import (
    Advice,
    Evaluation,
    Event,
    Fix,
    GateResult,
    Performance,
    StepCost,
)
from stoker.report import rows_of_runs, table_of_runs
from support import builders, sample_records
from support.feed_rows import write_feed

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
            self.headline += data
        if {"td", "th"} & set(self._open):
            self.cells[-1][-1] += data

    def row(self, start):
        return next(cells for cells in self.cells if cells and cells[0].startswith(start))


@pytest.fixture
def report(tmp_path):
    return lambda **changes: Page(sample_records.write_page(tmp_path, **changes))


def test_page_says_gain_wait_prediction_cost_and_gate(report):
    page = report()
    said = "With 1 data host a step takes 36.0 ms instead of 62.0 ms: 1.72 times as fast."
    assert page.headline == said
    assert page.text.count(said) == 1
    for words in (
        "before: 65%",
        "the step is 5.9% longer than predicted",
        "16% more CPU-seconds per step.",
        "accuracy 0.967 (at least 0.94)",
    ):
        assert words in page.text
    figures = re.findall(r'<dt>([^<]*)</dt><dd class="value">([^<]*)</dd>', page.source)
    assert dict(figures) == {
        "A step takes": "36.0 ms",
        "Of it waiting for data": "32%",
        "Speed-up": "1.72x",
        "Quality gate": "passed",
    }
    assert len(page.source) < 300_000


@pytest.mark.parametrize(
    ("measured", "words"),
    [(0.061, "61.0 ms instead of 62.0 ms"), (0.124, "124 ms instead of 62.0 ms: 2.00 times as l")],
)
def test_a_run_without_gain_says_that_first(report, measured, words):
    baseline = sample_records.BASELINE_SECONDS
    performance = Performance(
        baseline=StepCost(step_seconds=baseline),
        measured=StepCost(step_seconds=measured),
        speedup=baseline / measured,
    )
    page = report(evaluation=Evaluation(passed=True, performance=performance))
    assert page.headline.startswith(f"stoker did not help. With 1 data host a step takes {words}")


def test_failed_gate_comes_before_the_gain(report):
    gate = GateResult(metric="f1", min=0.9, passed=False)
    page = report(evaluation=evaluation(passed=False, gates=(gate,)))
    assert "f1 not reported (at least 0.9)" in page.headline
    assert "1.72 times as fast" in page.text
    assert (page.row("f1")[1], page.row("f1")[-1]) == ("not reported", "failed")


def test_failed_training_names_its_error_and_keeps_its_traceback(report):
    trace = 'Traceback (most recent call last):\n  File "train.py"\nValueError: sample 17'
    failed = training(status="failed", exit_code=3, measured=None, failure=trace)
    page = report(training=failed, evaluation=None)
    assert page.headline == "The training failed (exit code 3): ValueError: sample 17."
    assert 'File "train.py"' in page.text


def test_a_training_alone_says_its_step(report):
    page = report(profile=None, decision=None, evaluation=None)
    assert re.fullmatch(r"A step takes 36.0 ms, \d+% of it waiting for data\.", page.headline)
    assert page.text.count(page.headline) == 1
    decided = report(profile=None, evaluation=None)
    assert "a step takes 36.0 ms instead of 62.0 ms" in decided.headline


def test_every_set_of_records_gives_a_page_without_holes(report, tmp_path):
    names = ("profile", "decision", "training", "evaluation")
    files = sample_records.write_timelines(tmp_path)
    sets = [missing for size in (0, 1, 4) for missing in combinations(names, size)]
    for missing, (before, after) in product(sets, ((None, None), files)):
        page = report(**dict.fromkeys(missing), before_timeline=before, after_timeline=after)
        assert re.findall(r"\b(?:nan|inf|None|undefined)\b", page.text) == [], (missing, before)
        assert page.headline


def test_plan_table_shows_each_plan_as_predicted_and_one_as_chosen(report):
    *others, last = decision().plans
    reason = "no price is known for c9"
    blank = replace(last, predicted=None, feasible=False, reason=reason)
    page = report(decision=decision(plans=(*others, blank)))
    (chosen,) = (cells for cells in page.cells if cells and cells[0].startswith("*"))
    figures = ["", "34.0 ms", "1.82x", "63%", "2", "cpu"]
    assert chosen == ["* today + 1 local.c1 ", *figures]
    assert page.row("today + 2 local.c1")[0].endswith("needs 3 cores, this machine has 2")
    row = page.row("today + 4 local.c1")
    assert (reason in row[0], row[2]) == (True, "not known")


def test_path_hosts_events_commands_and_advice_are_shown(report):
    arn = "arn:aws:sagemaker:r:1:training-job/mnist"
    page = report(training=training(lineage={"image_digest": "sha256:ab", "job_id": arn}))
    for words in (
        *(answer.question for answer in decision().path),
        *(answer.because for answer in decision().path),
        "data host registered",
        "kornia",
        "uint8",
        "stoker run configs/mnist.yaml",
        "stoker train --platform local --group dnn=local.c1:1:1 --group data=local.c1:1:1"
        " -- python examples/mnist/train.py --epochs 3",
    ):
        assert words in page.text
    assert page.row("image digest")[-1] == "sha256:ab"
    assert page.row("job id")[-1] == arn


def test_hostile_names_are_shown_and_not_run(report, tmp_path):
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
        failure=evil,
    )
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("alert(2)") >= 12
    assert not any(name.startswith("on") for _, name, _ in page.attributes)


def test_nothing_points_outside_the_file(report):
    page = report()
    targets = {
        value
        for _, name, value in page.attributes
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    }
    assert targets == {"data:,"}
    assert re.findall(r"url\([^)]*\)|@import|@font-face|https?://", page.source) == []
    assert "script" not in page.tags


def test_pictures_and_tables_are_well_formed_and_named(report, tmp_path):
    before, after = sample_records.write_timelines(tmp_path)
    gpus = sample_records.with_gpus(tmp_path)
    source = report(before_timeline=before, after_timeline=after, **gpus).source
    pictures = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    roots = [*map(ElementTree.fromstring, pictures)]
    assert [root.get("class") for root in roots] == ["strip"] * 2 + ["spark"]
    assert all(root.get("aria-label") for root in roots)
    page = Page(source)
    assert page.tags.count("caption") == page.tags.count("table")
    scopes = [1 for tag, name, _ in page.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == page.tags.count("th")


def test_who_fed_the_trainer_is_drawn_by_host_with_what_limits_it(report, tmp_path):
    page = report(intervals=write_feed(tmp_path, hosts=2, intervals=60))
    for name in ("Waiting for data", "data-1", "data-2", "What limits the run"):
        assert name in page.text
    paths = re.findall(r'<path class="compute" d="([^"]*)"', page.source)
    floor = " 28.0"
    # Lost from the 26th to the 40th of 60 intervals.
    assert [path.count(floor) > 10 for path in paths] == [True, False, False]


def test_bad_samples_are_counted(report):
    page = report(training=training(bad_samples=23, steps=1000))
    assert "23 bad samples, listed in bad_samples.csv" in page.text


def run(rate, *, hosts=1, processes=1, data=0, **changes):
    groups = [builders.group("dnn", "ml.g5.xlarge", hosts, processes_per_host=processes)]
    groups += [builders.group("data", "ml.c7i.8xlarge", data)] if data else []
    measured = replace(training().measured, samples_per_second=rate, usd_per_1000_steps=0.1)
    return training(groups=tuple(groups), **{"measured": measured, **changes})


def test_runs_are_one_table_against_the_smallest():
    rows = rows_of_runs({"c": run(300, processes=4), "a": run(100), "b": run(190, processes=2)})
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert [row["efficiency"] for row in rows] == pytest.approx([1, 0.95, 0.75])
    more = rows_of_runs({"one": run(100, data=1), "none": run(50)})
    assert [(row["data_hosts"], row["efficiency"]) for row in more] == [(0, 1.0), (1, 2.0)]
    assert max(map(len, table_of_runs(rows).splitlines())) <= 88
    with pytest.raises(UsageError, match="run b has no throughput: it failed"):
        rows_of_runs({"a": run(100), "b": run(1, measured=None, status="failed")})
