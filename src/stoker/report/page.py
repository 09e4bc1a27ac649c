"""The report of a run: one HTML file that opens offline, without a script, in light and dark.

The page is a list of sections, each of blocks: tables, lists, texts and pictures. The template
knows how blocks look, and nothing of runs.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from stoker.decide.explain import (
    advice_words,
    headline,
    plan_cells,
    plan_heads,
    plan_name,
    shown_plans,
    table_notes,
)
from stoker.decide.model import limit_words
from stoker.evaluate import cost_table, performance_words
from stoker.feed.timeline import typical_step
from stoker.figures.intervals import joined, read_intervals
from stoker.figures.limit import feed_limit_of
from stoker.profile.explain import explain as explain_profile
from stoker.record_words import busy_words, gpu_words, group_arguments, notes_on
from stoker.records import Decision, Predicted, Training, write_text
from stoker.report.charts import read_steps, shown_seconds, sparkline, strip
from stoker.report.verdict import ReportedRun, judge, key_figures
from stoker.units import capital, digits, figure, ms, numbered, percent, percentage, usd

# Of plans that may not be used, the first: the user's own ones come first.
_MOST_RULED_OUT = 3
# More rows of hosts or GPUs are in the records.
_MOST_HOSTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a section; of its kinds one is there.

    Attributes:
        title: Heading; empty: none.
        heads: Heads of a table's columns.
        rows: Its rows: name, then cells. A row whose name is marked is the chosen one.
        items: Texts of a list.
        text: Text as it is printed on a terminal.
        pictures: A picture with the words at its left and at its right.
        note: What stands above it.
    """

    title: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str | Markup]] = ()
    items: Sequence[str | Markup] = ()
    text: str = ""
    pictures: Sequence[tuple[str, Markup, str]] = ()
    note: str = ""

    @property
    def has_content(self) -> bool:
        return bool(self.rows or self.items or self.text or self.pictures)


def write_report(path: Path, run: ReportedRun) -> None:
    """Writes the report of a run.

    Raises:
        UsageError: If the file cannot be written.
    """
    # A wrong name in a template is an error in a test, not a blank in a user's report.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stoker.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = []
    for title, blocks in _sections(run):
        if kept := [block for block in blocks if block.has_content]:
            sections.append({"title": title, "blocks": kept})
    page = environment.get_template("report.html.jinja").render(
        run_id=run.run_id,
        workload=run.workload,
        verdict=judge(run),
        keys=key_figures(run),
        sections=sections,
    )
    # A name from a broken log may hold a surrogate, which UTF-8 cannot encode.
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


def _sections(run: ReportedRun) -> Iterator[tuple[str, Iterable[Block]]]:
    decision = run.decision
    training = run.training
    yield "Steps", [_steps(run)]
    if decision:
        yield "Plans", [_plans(decision)]
        path = [
            Markup("{} <b>{}</b>: {}").format(step.question, step.answer, step.because)
            for step in decision.path
        ]
        # Where nothing was run, the page's verdict says only that.
        yield "Why this plan", [Block(items=path, note="" if training else headline(decision))]
    if performance := run.performance:
        note = f"{capital('; '.join(performance_words(performance)))}."
        heads, rows = cost_table(performance)
        yield "Predicted against measured", [Block(heads=heads, rows=rows, note=note)]
    yield "Quality", [_quality(run)]
    if training:
        events = [[event.when, event.host or "", event.what] for event in training.events]
        table = Block(title="Events", heads=("when", "host", "what"), rows=events)
        yield "Hosts", [_hosts(training), _gpus(run), _feed(run.intervals), table]
    if run.profile:
        yield "What a step is made of", [Block(text=explain_profile(run.profile))]
    warnings = [*(run.evaluation.warnings if run.evaluation else ())]
    warnings += decision.warnings if decision else ()
    warnings += notes_on(training) if training else ()
    # Fixes to the script are part of a decision's advice.
    advice = [fix.text for fix in (run.profile.fixes if run.profile else ())]
    if decision:
        advice = advice_words(decision)
    yield (
        "Advice and warnings",
        [
            Block(title="Warnings", items=[*dict.fromkeys(warnings)]),
            Block(title="Worth doing", items=advice),
        ],
    )
    yield "Commands and environment", _environment(run)


def _steps(run: ReportedRun) -> Block:
    """Returns the strips of steps before and after, on one scale of time."""
    # A timeline of another machine is not today's.
    before = run.before_timeline if run.profiled else None
    strips = {}
    for name, file in (("Before", before), ("This run", run.after_timeline)):
        if file and (steps := read_steps(file)):
            strips[name] = steps
    if not strips:
        return Block()
    typical = {name: typical_step(steps) for name, steps in strips.items()}
    seconds = shown_seconds([step for step, _ in typical.values()])
    pictures = []
    for name, steps in strips.items():
        step, wait = typical[name]
        right = f"{ms(step)} per step, {percentage(wait / step)} waiting"
        pictures.append((name, strip(steps, seconds=seconds, label=f"{name}: {right}"), right))
    note = (
        f"Each mark is a step of a rank, over {ms(seconds)} in the middle of a run: low while it "
        "waits for its batch, high while it computes."
    )
    return Block(pictures=pictures, note=note)


def _plans(decision: Decision) -> Block:
    """Returns the table of the plans, each with a bar of its step."""
    heads = plan_heads(decision)
    outcomes = [plan.predicted for plan in decision.plans if plan.predicted]
    longest = max((outcome.counted_high for outcome in outcomes), default=1.0)
    rows = []
    ruled_out = [("", plan) for plan in decision.plans if not plan.feasible][:_MOST_RULED_OUT]
    for mark, plan in [*shown_plans(decision), *ruled_out]:
        words = f"{mark} {plan_name(plan, decision.today)}".strip()
        reason = plan.reason if plan.feasible else f"not feasible: {plan.reason}"
        name = Markup("{} <small>{}</small>").format(words, reason)
        rows.append([name, _bar(plan.predicted, longest), *plan_cells(plan, heads)])
    notes = [f"The limit today: {limit_words(decision.bottleneck)}.", *table_notes(decision)]
    if more := len(decision.plans) - len(rows):
        notes.append(f"{numbered(more, 'more plan')}: see decision.json.")
    return Block(heads=("plan", "longer is slower", *heads), rows=rows, note=" ".join(notes))


def _bar(outcome: Predicted | None, longest: float) -> Markup:
    """Draws a band from low to high, and the step in front of it."""
    if outcome is None:
        return Markup()
    bounds = (outcome.counted_low, outcome.counted_seconds, outcome.counted_high)
    low, step, high = (f"{100 * seconds / longest:.1f}%" for seconds in bounds)
    return Markup(
        '<span class="bar"><i class="band" style="left:{0};width:calc({2} - {0})"></i>'
        '<i style="width:{1}"></i></span>'
    ).format(low, step, high)


def _quality(run: ReportedRun) -> Block:
    metrics = dict(run.training.metrics if run.training else {})
    rows = []
    for gate in run.evaluation.gates if run.evaluation else ():
        metrics.pop(gate.metric, None)
        value = "not reported" if gate.value is None else figure(gate.value)
        low, high = ("" if bound is None else figure(bound) for bound in (gate.min, gate.max))
        rows.append([gate.metric, value, low, high, "passed" if gate.passed else "failed"])
    rows += [[name, figure(value), "", "", ""] for name, value in metrics.items()]
    return Block(heads=("metric", "value", "at least", "at most", "gate"), rows=rows)


def _hosts(training: Training) -> Block:
    rows = []
    for group in training.groups:
        names = [host.host for host in training.hosts if host.group == group.name]
        what = f"{group.count} x {group.instance_type}"
        workers = "" if group.workers_per_host is None else str(group.workers_per_host)
        rows.append([f"{group.name} ({group.role})", what, workers, ", ".join(names)])
    note = f"Job {training.job.name} on {training.job.platform}: {training.status}"
    if training.spent_usd is not None:
        note += f"; {usd(training.spent_usd)} spent"
    return Block(heads=("group", "hosts", "workers per host", "names"), rows=rows, note=f"{note}.")


def _gpus(run: ReportedRun) -> Block:
    """Returns the load of the GPUs over the run, and before and after in words."""
    observed = run.profiled.observed if run.profiled else None
    loads = run.training.gpus if run.training else ()
    steps = [row for row in read_intervals(run.intervals) if row.steps]
    rows = [(row.seconds, row.gpu_utilization) for row in steps]
    points = [(seconds, share) for seconds, share in rows if share is not None]
    pictures = []
    if points and (words := busy_words(loads)):
        if before := busy_words(observed.gpus if observed else ()):
            words += f"; before: {before}"
        pictures.append(_spark("A kernel runs", words, points))
    items = [f"{gpu.host}, {gpu_words(gpu)}" for gpu in loads[:_MOST_HOSTS]]
    return Block(title="GPUs", pictures=pictures, items=items)


def _feed(file: Path | None) -> Block:
    """Returns who fed the trainer: what limits it, its wait, and the rate of each host."""
    intervals = [each for each in read_intervals(file) if each.ranks]
    if not intervals:
        return Block()
    whole = joined(intervals)
    limit = feed_limit_of(whole)
    waits = [(each.seconds, each.wait_share or 0.0) for each in intervals]
    words = f"{percent(whole.wait_share)} of the time, top 100%"
    pictures = [_spark("Waiting for data", words, waits, css="wait")]
    hosts = whole.hosts[:_MOST_HOSTS]
    rates = defaultdict[str, list[tuple[float, float]]](list)
    for interval in intervals:
        made = {host.name: host.batches_per_second for host in interval.hosts}
        for host in hosts:
            rates[host.name].append((interval.seconds, made.get(host.name, 0.0)))
    # One scale for all hosts: a slow one must look slow.
    top = max((rate for points in rates.values() for _, rate in points), default=1.0)
    for host in hosts:
        words = f"{digits(host.batches_per_second, 3)} batches/s of {digits(top, 3)}, "
        words += f"{numbered(host.workers, 'worker')} {percent(host.busy_share)} busy"
        pictures.append(_spark(host.name, words, rates[host.name], top=top))
    note = f"What limits the run: {limit.words}. To gain more: {limit.advice}."
    return Block(title="Who fed the trainer", pictures=pictures, note=note)


def _spark(
    name: str,
    words: str,
    points: Sequence[tuple[float, float]],
    *,
    top: float = 1.0,
    css: str = "compute",
) -> tuple[str, Markup, str]:
    return name, sparkline(points, top=top, css=css, label=f"{name}: {words}"), words


def _environment(run: ReportedRun) -> Iterator[Block]:
    facts = dict(run.environment)
    commands = [facts.pop("command", "")]
    if run.decision:
        # The command, as the workload's file may not be where the report is read.
        words = ["stoker", "train", "--platform", run.workload.platform]
        words += [*group_arguments(run.decision.plan.groups), "--", *run.workload.command]
        commands.append(shlex.join(words))
    yield Block(title="Commands", text="\n".join(filter(None, commands)))
    facts["training command"] = shlex.join(run.workload.command)
    if run.training:
        facts |= run.training.lineage
    rows = [[name.replace("_", " "), text] for name, text in facts.items()]
    yield Block(heads=("what", "value"), rows=rows, title="Environment")
