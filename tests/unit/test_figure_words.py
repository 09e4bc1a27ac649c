"""Figures are written one way, on the page, on the terminal and in what records say."""

import html
import re
from pathlib import Path

import msgspec
import pytest

from stoker.decide.explain import explain as explain_decision
from stoker.profile.explain import explain as explain_profile
from stoker.record_words import evaluation_table, evaluation_words, training_words
from stoker.records import HostMemory
from stoker.records.training import GroupSpending
from stoker.units import as_fast, times, with_article
from support import sample_records

_NOUNS = "batches cores epochs files hosts loaders plans processes ranks samples steps workers"
_SPACE = r"[ \u00a0\u202f]"
RULES = {
    "12% has no space": re.compile(rf"\d{_SPACE}%"),
    "1.8 times as fast": re.compile(r"\dx as fast|\d \u00d7 as fast"),
    "a ratio is 1.80": re.compile(r"(?<![\d.,])\d\.\d(?:x\b| times as )"),
    # Not in a narrow column, behind more than one space.
    "12 ms has one space": re.compile(r"(?<!  )(?<![\d.,])\d[\d.,]*(?:ms|kB|MB|GB|sec)\b"),
    "seconds are s": re.compile(r"\b\d[\d.,]* secs?\b"),
    "a thousand steps are 1,000": re.compile(r"(?<![\d.,\-:])\d{4,} (?!UTC)[a-z]"),
    "not 1 000": re.compile("\\d[\u202f\u2009]\\d"),
    "bytes count by 1,000": re.compile(r"\d [KMGT]iB\b"),
    "one is singular": re.compile(
        rf"(?<![\d.,/\-])1 (?:[a-z-]+ )?(?:{'|'.join(_NOUNS.split())})\b(?! of \d)"
    ),
}
# As a ratio is written without `units.times` and `units.as_fast`: with digits of another number.
_RATIO_BY_HAND = re.compile(r"(?::\.\d[fg]|digits\([^{}]*\))\}(?:x\b| times\b)")
_SOURCES = Path(__file__).resolve().parents[2] / "src"
replace = msgspec.structs.replace


def broken_rules(text: str) -> list[str]:
    """Returns the rules that a text breaks, each with the place."""
    broken = []
    for rule, pattern in RULES.items():
        if found := pattern.search(text):
            broken.append(f"{rule}: {text[max(0, found.start() - 30) : found.end() + 20]}")
    return broken


def page_text(source: str) -> str:
    """Returns what a page says, without its style, one element a line."""
    body = re.sub(r"(?s)<style.*?</style>|<head.*?</head>", "", source)
    return html.unescape(re.sub(r"<[^>]+>", "\n", body))


def memory_of(number: int) -> tuple[HostMemory, ...]:
    """Returns so many hosts whose memory was short, one kill each."""
    return tuple(
        HostMemory(
            host=f"algo-{rank}",
            limit_bytes=1_500_000_000,
            peak_bytes=1_450_000_000,
            limited_by="cgroup",
            least_share=0.0625,
            kills=1,
        )
        for rank in range(number)
    )


def training_of(*, steps: int, hosts: int):
    """Returns a training run with so many steps, bad samples and hosts of short memory."""
    record = sample_records.training_of_epochs()
    assert record.measured is not None
    spending = (GroupSpending(group="gpus", usd=12_345.6, idle_share=0.256, idle_usd=2.0),)
    return replace(
        record,
        steps=steps,
        bad_samples=steps,
        memory=memory_of(hosts),
        spent_usd=12_345.6,
        spending=spending,
        measured=replace(record.measured, steps=steps),
    )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("waits 12 % of it", "12% has no space"),
        ("waits 12\u00a0% of it", "12% has no space"),
        ("1.80x as fast", "1.8 times as fast"),
        ("1.8 times as fast", "a ratio is 1.80"),
        ("a step takes 62 ms (1.8x)", "a ratio is 1.80"),
        ("took 12ms", "12 ms has one space"),
        ("after 3 sec", "seconds are s"),
        ("1250 steps of", "a thousand steps are 1,000"),
        ("1\u202f250 steps of", "not 1 000"),
        ("limit 4.0 GiB", "bytes count by 1,000"),
        ("1 data hosts", "one is singular"),
        ("1 batches", "one is singular"),
    ],
)
def test_each_rule_finds_what_it_forbids(text, rule):
    assert [broken.partition(":")[0] for broken in broken_rules(text)] == [rule]


@pytest.mark.parametrize(("steps", "hosts"), [(1, 1), (12_500, 17)])
def test_a_report_writes_its_figures_one_way(tmp_path, steps, hosts):
    training = training_of(steps=steps, hosts=hosts)
    page = sample_records.write_page(tmp_path, training=training)
    assert broken_rules(page_text(page)) == []


@pytest.mark.parametrize("steps", [1, 12_500])
def test_a_terminal_writes_its_figures_as_a_report_does(steps):
    training = training_of(steps=steps, hosts=1)
    evaluation = sample_records.evaluation()
    decision = sample_records.decision()
    profile = sample_records.profile()
    step = replace(profile.timed_step, global_batch_size=steps)
    unmeasured = replace(training, measured=None)
    texts = [
        training_words(training),
        training_words(unmeasured),
        evaluation_words(evaluation),
        evaluation_table(evaluation),
        explain_decision(decision),
        explain_profile(replace(profile, step=step)),
    ]
    assert broken_rules("\n".join(texts)) == []


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.8, "1.80"),
        (0.98, "0.98"),
        (0.3333, "0.33"),
        (12.345, "12.3"),
        (123.4, "123"),
        (9.996, "10.0"),
    ],
)
def test_a_ratio_has_three_digits_and_two_decimals_at_most(factor, text):
    assert times(factor) == text
    assert as_fast(factor) == f"{text} times as fast"


def test_ratios_are_written_by_one_function_alone():
    by_hand = [
        f"{file.name}: {found.group()}"
        for file in sorted(_SOURCES.rglob("*.py"))
        for found in _RATIO_BY_HAND.finditer(file.read_text())
    ]
    assert by_hand == [], "write units.times(ratio), or units.as_fast(speedup)"


@pytest.mark.parametrize(
    "words",
    ["a Sampler", "an OwnBatches", "an Unordered", "a UniformSampler", "a UserSampler", "an index"],
)
def test_a_noun_has_its_article(words):
    assert with_article(words.partition(" ")[2]) == words
