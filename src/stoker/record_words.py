"""Texts about a run's records, for the terminal and for the page of the report.

A page's figures have spaces that do not break and one unit of time; see `stoker.units`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from stoker.logs import shown
from stoker.records import (
    Band,
    Bottleneck,
    Decision,
    EpochTimes,
    Evaluation,
    FeedSettings,
    Fix,
    GateResult,
    GpuLoad,
    Group,
    HostMemory,
    Measured,
    Performance,
    Plan,
    Predicted,
    Profile,
    ProfiledLoader,
    StepCost,
    Training,
    Trial,
    groups_in_words,
    plan_in_words,
)
from stoker.records.gpu import GpuFigure, busy_share, used_gpus
from stoker.records.outcome import outcome_of, outcome_of_gates
from stoker.records.platforms import PLATFORM_INFOS
from stoker.records.training import BUSY, NOT_COMPARABLE, UNHELPED
from stoker.units import (
    ESTIMATE,
    Style,
    TimeUnit,
    as_fast,
    capital,
    cost_change_words,
    count,
    figure,
    is_whole_longer,
    metric,
    ms,
    numbered,
    percentage,
    size,
    step_words,
    than_predicted,
    usd,
)

# A free plan is named if a step takes less than this share of today's.
_HELPS = 0.95
# A loader that gave more of all batches stands for the run without a word.
_DOMINATES = 0.75
# Plans this close are as good.
_AS_GOOD = 1.03
# Share of the time with lowered clocks that is worth a word.
_SEEN_LOWERED = 0.01
# Two runs of a minute on the same quiet hosts differ by less.
_SAME_HOSTS = 0.1
# Of a step: less is in no line.
_WORTH_A_WORD = 0.01
# Between what was felt of short memory and a fix.
PROFILE_SAYS = "; the profile says: "
# Of the memory in use: then other programs are the cause.
_MOST_OF_IT = 0.5
_LIMITS: dict[Bottleneck, str] = {
    "cpu": "the CPUs that load the data are the limit",
    "workers": "too few loader workers are the limit",
    "latency": "what each loader worker waits for is the limit",
    "accelerator": "the accelerator is the limit, not the data",
    "launch": "the script's own thread, which launches the GPU's work, is the limit, not the data",
    "network": "the network is the limit",
    "storage": "the storage is the limit",
    "none": "nothing waits long enough to be worth a change",
    "unexplained": "the measured parts do not explain the step",
}


def profile_words(record: Profile) -> str:
    step = record.timed_step
    check = record.check
    if step.wait_seconds is None:
        return f"a step takes {ms(step.step_seconds)}"
    whole_wait = None
    if record.epochs:
        whole_wait = record.epochs.whole_wait_seconds(step.wait_seconds)
    took = step_words(
        step_seconds=step.step_seconds,
        wait_seconds=step.wait_seconds,
        whole_step_seconds=whole_step_of(record),
        whole_wait_seconds=whole_wait,
    )
    if record.observed and (busy := busy_words(record.observed.gpus)):
        took += f", {busy}"
    if check is None or check.explained:
        return f"a step takes {took}"
    if check.state:
        return f"a step takes {took}, in the state {check.state}"
    return f"a step takes {took}, unexplained"


def unfed_words(loader: ProfiledLoader | None, feed: FeedSettings | None = None) -> str:
    """Returns why data hosts cannot make a loader's batches; empty: they can, or unknown."""
    words = unreached_words(loader, feed)
    if words or loader is None:
        return words
    why = ""
    if loader.shippable is not None and not loader.shippable.ok:
        why = loader.shippable.why
    elif loader.fails_in_workers:
        why = f"it fails in a worker ({loader.fails_in_workers})"
    if not why:
        return ""
    return f"{loader.class_name} gets no help from data hosts: {why}"


def unreached_words(loader: ProfiledLoader | None, feed: FeedSettings | None = None) -> str:
    """Returns why a training run under a data group would not be fed; empty: it would, or unknown.

    Of a loader that cannot be sent `unfed_words` tells: its training needs no data group.
    """
    if loader is None:
        return ""
    feed = feed or FeedSettings()
    if loader.reach == "own":
        return f"{loader.class_name} makes batches in its own way, so that data hosts cannot help"
    if loader.reach == "left" and feed.replace_dataloader == "auto":
        return (
            f"the script imports stoker's DataLoader and reads {loader.class_name}, for which data "
            "hosts make no batches (read stoker's class, or use --replace-dataloader true)"
        )
    if loader.reach != "stoker" and feed.replace_dataloader is False:
        return (
            "feed.replace_dataloader is false, so that data hosts make no batches for "
            f"{loader.class_name}"
        )
    if loader.in_step:
        return f"{loader.class_name} gets no help from data hosts: {loader.in_step}"
    if loader.made_here and feed.shared_memory == "auto":
        return f"{loader.class_name} gets no help from data hosts: {loader.made_here}"
    return ""


def loader_words(loader: ProfiledLoader) -> str:
    """Returns which loader was read, and how far data hosts can make its batches."""
    unfed = unfed_words(loader)
    if unfed:
        return f"loader: {unfed}"
    name = loader.class_name
    if not loader.iterable and loader.reach == "stoker":
        return f"loader: {name}; data hosts can make its batches"
    if not loader.iterable:
        return f"loader: {name}; data hosts can make its batches, without a change of the script"
    shards = loader.shards or 1
    if shards == 1:
        shards_in_words = "one shard, which one worker makes, wherever it runs"
    else:
        shards_in_words = f"{shards} shards, which {shards} workers make at most, wherever they run"
    text = f"loader: {name} over a stream of {shards_in_words}"
    if loader.divides:
        return f"{text}; num_workers is the number of shards of a rank"
    if loader.divides is False:
        return (
            f"{text}; the stream does not ask get_worker_info(), so that more workers would only "
            "repeat its samples"
        )
    return text


def decision_words(record: Decision) -> str:
    plan = record.plan
    probable = record.probable
    if record.kind == "probable" and probable:
        what = "tried" if plan.action != "keep" else "not tried: constraints.follow is not probable"
        return f"probably {_plan_and_speed(probable)}, within the error band; {what}"
    if record.action == "keep" or record.is_noisy:
        words = f"{plan_in_words(plan)}: {plan.reason or 'no other cluster pays'}"
        # A plan that is held says so in its reason.
        is_held = record.previous is not None and record.previous.is_held
        if is_held:
            return words
        return words + _previous_words(record)
    return f"{_plan_and_speed(plan)}{_previous_words(record)}"


def _plan_and_speed(plan: Plan) -> str:
    if plan.predicted is None:
        return plan_in_words(plan)
    return f"{plan_in_words(plan)}, {as_fast(plan.predicted.speedup)}"


def _previous_words(record: Decision) -> str:
    """Returns what the last run's plan was to this one; empty: nothing to tell."""
    previous = record.previous
    if previous is None:
        return ""
    if previous.is_changed:
        return f"; changed since {previous.words}: it had {groups_in_words(previous.groups)}"
    return f"; as in {previous.words}"


def plan_reason(decision: Decision) -> str:
    return decision.plan.reason or _LIMITS[decision.bottleneck]


def kept_words(decision: Decision, style: Style = "terminal") -> str:
    """Returns why today's cluster is kept; it may be unknown whether stoker would help."""
    is_known = decision.kind == "none"
    reason = plan_reason(decision)
    begin = "stoker does not help here"
    if any(advice.id == "elsewhere" for advice in decision.advice):
        begin = "This machine has nothing left for it"
    if style == "terminal" and is_known:
        return f"{begin}: keep today's cluster. {capital(reason)}."
    if style == "terminal":
        return f"Keep today's cluster for now. {capital(reason)}."
    if decision.is_noisy:
        # The page's table of plans has the whole reason.
        return "Other programs kept the machine busy, so today's cluster is kept for now."
    if is_known:
        return f"{begin}: {reason}."
    return f"Kept as it is for now: {reason}."


def probable_words(decision: Decision, *, has_run: bool = False) -> str:
    """Returns the plan that probably gains, how to make sure, and whether it is followed."""
    plan = decision.probable
    if plan is None:
        return ""
    if has_run and decision.action != "keep":
        return "The plan was a try: its gain was probable, not sure."
    is_sure_before = decision.kind == "sure"
    begin = "Then probably" if is_sure_before else "Probably worth it"
    text = f"{begin}: {plan_in_words(plan)}. {capital(plan.reason)}."
    if decision.trial:
        text += f" {trial_words(decision.trial)}"
    if is_sure_before:
        return text
    return f"{text} {followed_words(decision)}"


def estimate_words(estimated: Mapping[str, str] | None) -> str:
    """Returns how prices were estimated: `~ estimated: ml.c8i.8xlarge: EC2's $1.5 x 1.20.`"""
    if not estimated:
        return ""
    return f"{ESTIMATE} estimated: {estimates_in_words(estimated)}."


def estimates_in_words(estimated: Mapping[str, str]) -> str:
    """Returns the types with how their prices were estimated, those alike together."""
    types: dict[str, list[str]] = {}
    for name, how in sorted(estimated.items()):
        types.setdefault(how, []).append(name)
    return "; ".join(f"{', '.join(names)}: {how}" for how, names in types.items())


def trial_words(trial: Trial) -> str:
    """Returns how to make sure of a plan: `To make sure: stoker profile ... (8 min, $0.37).`"""
    cost = f"about {trial.minutes:.0f} min"
    dollars = usd(trial.usd, is_estimate=trial.is_estimate)
    if trial.usd is not None:
        cost += f", {dollars}"
    how = trial.command
    if trial.condition:
        how += f", {trial.condition}"
    return f"To make sure: {how} ({cost})."


def followed_words(decision: Decision) -> str:
    """Returns whether a probable plan is followed, and the key that changes it."""
    if decision.action == "keep":
        return (
            "Until then today's cluster is kept (constraints.follow: probable would follow the "
            "plan)."
        )
    if decision.constraints.follow == "probable":
        return "It is followed, as constraints.follow says."
    return "A try costs nothing here, so it is followed (constraints.follow: sure would not)."


def free_first(decision: Decision) -> Plan | None:
    """Returns the best plan that needs no further host, where the chosen one adds hosts.

    On this machine these are more loader workers, and more of its cores for the training host.
    """
    chosen = decision.plan.action
    if decision.prices.is_billed or chosen not in ("heterogeneous", "scale_up"):
        return None
    actions = {"tune"}
    if decision.prices.is_nominal and chosen == "heterogeneous":
        # A larger training host is the same machine, with cores that data hosts would take.
        actions.add("scale_up")
    able = [
        (plan.predicted.counted_seconds, plan)
        for plan in decision.plans
        if plan.action in actions and plan.feasible and plan.predicted
    ]
    seconds, best = min(able, key=lambda each: each[0], default=(math.inf, None))
    today = decision.today
    if best is None or today is None or today.predicted is None:
        return None
    if seconds > _HELPS * today.predicted.counted_seconds:
        return None
    # Fewer cores where they are about as good.
    near = [plan for step, plan in able if step <= seconds * _AS_GOOD]
    return min(near, key=lambda plan: (plan.action != "tune", _cpu_seconds(plan)))


def free_words(decision: Decision) -> str:
    """Returns the free plan that comes before the chosen one; empty: there is none."""
    plan = free_first(decision)
    if plan is None or plan.predicted is None:
        return ""
    dnn = plan.groups[0]
    outcome = plan.predicted
    workers = dnn.workers_per_host or 0
    text = f"First, at no cost: {numbered(workers, 'loader worker')} per host"
    if plan.action == "scale_up":
        text += f" on {dnn.instance_type}, whose cores are idle"
    text += f", {ms(outcome.counted_seconds)} per step, {as_fast(outcome.speedup)}"
    if outcome.accelerator_seconds:
        busy = percentage(outcome.accelerator_utilization)
        text += f", accelerators busy {busy}{busy_scope(outcome)}"
    return f"{text}."


def busy_scope(outcome: Predicted) -> str:
    """Returns where a plan's accelerators are that busy, where its time is of whole epochs."""
    if is_whole_longer(outcome.step_seconds, outcome.counted_seconds):
        return " within epochs"
    return ""


def added_hosts_words(groups: Iterable[Group]) -> str:
    """Returns the hosts that a cluster has for batches alone: `3 x local.c4`; empty: none."""
    return ", ".join(f"{g.count} x {g.instance_type}" for g in groups if g.role == "data")


def group_arguments(groups: Iterable[Group]) -> list[str]:
    """Returns groups as arguments of `stoker train`: `--group dnn=TYPE:HOSTS[:WORKERS]`."""
    words = []
    for group in groups:
        hosts = f"{group.role}={group.instance_type}:{group.count}"
        if group.workers_per_host is not None:
            hosts += f":{group.workers_per_host}"
        words += ["--group", hosts]
    return words


def _cpu_seconds(plan: Plan) -> float:
    if plan.predicted:
        return plan.predicted.cpu_seconds or 0.0
    return math.inf


def todays_group(decision: Decision) -> Group | None:
    if decision.today is None:
        return None
    return decision.today.groups[0]


def plan_name(plan: Plan, *, today: Group | None = None) -> str:
    """Names a plan in a few words, with its dnn hosts where they are not `today`'s."""
    dnn = plan.groups[0]
    tuned = "today's cluster, tuned"
    if plan.num_workers is not None:
        tuned = f"today's cluster + num_workers={plan.num_workers}"
    named = {
        "keep": "today's cluster",
        "tune": tuned,
        "scale_up": f"a larger type ({dnn.instance_type})",
        "offload_gpu": "decoding on the accelerator",
    }
    if plan.action in named:
        return named[plan.action]
    groups = plan.groups
    hosts = [(group.instance_type, group.count) for group in (dnn, today or dnn)]
    # Where the trainer's hosts change as well, data hosts alone would hide the larger part.
    if len(groups) > 1 and hosts[0] == hosts[1]:
        groups = groups[1:]
    return " and ".join(f"{count(g.count, f'{g.role} host')} ({g.instance_type})" for g in groups)


def _notes_on(training: Training) -> list[str]:
    """Returns what a reader of a good run's figures has to know beside them."""
    notes = []
    if training.bad_samples:
        notes.append(f"{numbered(training.bad_samples, 'bad sample')}, listed in bad_samples.csv")
    if balance := balance_words(training):
        notes.append(balance)
    if memory := memory_cause(training):
        notes.append(f"memory was short: {memory}")
    # The platform says why: hosts share cores, or cores count as hosts of a cloud.
    kinds = (NOT_COMPARABLE, UNHELPED)
    notes += [event.what for event in training.events if event.what.startswith(kinds)]
    notes += [group.made_words for group in training.useless_groups]
    if training.busy:
        notes.append(f"{BUSY} ({training.busy})")
    return notes


def balance_words(training: Training) -> str:
    """Returns what `feed.balance` has changed, or why nothing; empty: it was not asked for."""
    loaders = training.balance
    if not loaders:
        return ""
    loader = max(loaders, key=lambda loader: loader.steps)
    if not loader.steps:
        return f"ranks were not balanced: {loader.why_not}"
    words = (
        f"ranks were balanced: in {numbered(loader.steps, 'step')} the one with the most had "
        f"{percentage(loader.drawn_excess, places=1)} more bytes than the mean as drawn, "
        f"{percentage(loader.dealt_excess, places=1)} as dealt"
    )
    if loader.too_long_steps:
        words += f" (one sample alone was more in {loader.too_long_steps} of them)"
    if loader.why_not:
        words += f"; not in all epochs: {loader.why_not}"
    return words


def memory_cause(
    training: Training,
    profile: Profile | None = None,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Returns which host's memory was short, what was felt of it, and why; empty: none was.

    Args:
        training: The run's record.
        profile: What a profile saw of the same script, which names what takes the memory.
        names: Shown names of hosts; others have their own.
    """
    short = [host for host in training.memory if host.is_short]
    if not short:
        return ""
    host = max(short, key=lambda host: (host.kills, host.share))
    whose = "its limit" if host.limited_by == "cgroup" else "the machine's memory"
    name = names.get(host.host, host.host)
    words = f"{size(host.peak_bytes)} of {size(host.limit_bytes)}, {whose}, in use on {name}"
    others = _others_bytes(training, host)
    if others > _MOST_OF_IT * host.peak_bytes:
        whose = "by other programs, or by files in /dev/shm"
        return f"{words}, {size(others)} of them {whose}{_felt(host)}"
    fixes: Sequence[Fix] = ()
    if profile:
        fixes = profile.memory_fixes
    why = "".join(f"{PROFILE_SAYS}{fix.text}" for fix in fixes[:1])
    return f"{words}{_felt(host)}{why}"


def _felt(host: HostMemory) -> str:
    """Returns what came of short memory, as the end of a sentence; empty: nothing."""
    swapped_bytes = 0
    if host.is_swapping:
        swapped_bytes = host.swapped_bytes
    return short_memory_words(
        least_share=host.least_share, swapped_bytes=swapped_bytes, kills=host.kills
    )


def short_memory_words(*, least_share: float, kills: int, swapped_bytes: int = 0) -> str:
    """Returns what came of a host's short memory, as the end of a sentence; empty: nothing.

    Args:
        least_share: The share of `feed.max_bytes` that may, or could, wait.
        kills: Processes that the kernel killed for memory.
        swapped_bytes: What of the run's processes was swapped out.
    """
    words = ""
    if least_share < 1:
        words += f"; batches that wait were lowered to {percentage(least_share)} of feed.max_bytes"
    if swapped_bytes:
        words += f"; {size(swapped_bytes)} were swapped out"
    if kills:
        words += f"; the kernel killed {count(kills, 'process', 'processes')} for memory"
    return words


def _others_bytes(training: Training, host: HostMemory) -> int:
    """Returns what others than the run held of the machine that a host is, or is a part of."""
    of_this_machine = [name for name, info in PLATFORM_INFOS.items() if info.is_this_machine]
    if training.job.platform not in of_this_machine or host.ours_bytes is None:
        return host.others_bytes
    # All hosts are processes of it.
    ours = sum(member.ours_bytes or 0 for member in training.memory)
    return max(0, host.peak_bytes - ours)


def training_words(training: Training) -> str:
    """Returns what a run did, and whether its times can be compared with other runs."""
    outcome = outcome_of(training)
    measured = training.measured
    if not outcome.is_good:
        return outcome.words.removeprefix("the ")
    more = "".join(
        f", {shown(name)} {figure(value, figures=4)}" for name, value in training.metrics.items()
    )
    if training.spent_usd is not None:
        more += f", {usd(training.spent_usd, is_estimate=training.is_estimate)} for the run"
        if training.predicted_usd is not None:
            predicted = usd(training.predicted_usd, is_estimate=training.is_estimate)
            more += f" (predicted {predicted})"
    more += "".join(f"; {note}" for note in _notes_on(training))
    if measured is None:
        done = "training succeeded"
        if training.steps:
            done += f", {numbered(training.steps, 'step')}"
        return f"{done}; no step was timed{more}"
    took = step_words(
        step_seconds=measured.step_seconds,
        wait_seconds=measured.wait_seconds,
        least_wait_share=measured.least_wait_share,
        rank=measured.rank,
        whole_step_seconds=measured.whole_step_seconds,
        whole_wait_seconds=measured.whole_wait_seconds,
    )
    if busy := busy_words(training.gpus):
        took += f", {busy}"
    return f"{numbered(measured.steps, 'step')} of {took}{counted_words(measured)}{more}"


def counted_words(measured: Measured) -> str:
    """Returns whose steps the figures are, where that is not one loader's that dominates."""
    loaders = measured.loaders
    if loaders is None or loaders.all < 2:
        return ""
    words = ""
    if loaders.measured > 1:
        words = f"; steps of all {loaders.all} loaders"
    elif loaders.share < _DOMINATES:
        share = percentage(loaders.share)
        words = f"; steps of 1 of {loaders.all} loaders, which gave {share} of the batches"
    if loaders.made_here:
        words += f"; {numbered(loaders.made_here, 'loader')} lived too short for a data host"
    return words


def busy_words(gpus: Sequence[GpuLoad]) -> str:
    """Returns `GPU 28% busy`, with how many are in use if not all are; empty: not known."""
    share = busy_share(gpus)
    if share is None:
        return ""
    used = len(used_gpus(gpus))
    words = f"{gpu_noun(used)} {percentage(share)} busy"
    if used == len(gpus):
        return words
    return f"{words} ({used} of {len(gpus)} in use)"


def gpu_noun(number: int | None) -> str:
    return "GPU" if number == 1 else "GPUs"


def gpu_words(gpu: GpuLoad) -> str:
    """Returns the load of one GPU in a line, with the figures that are known."""
    parts = []
    if busy := gpu.utilization:
        middle = f"{percentage(busy.low)} to {percentage(busy.high)} half of the time"
        parts.append(f"{percentage(busy.mean)} busy, pauses included ({middle})")
    parts += gpu_figures(
        memory_bytes=_mean(gpu.memory_bytes),
        memory_total_bytes=gpu.memory_total_bytes,
        power_watts=_mean(gpu.power_watts),
        sm_clock_mhz=_mean(gpu.sm_clock_mhz),
        pcie_received_bytes_per_second=_mean(gpu.pcie_received_bytes_per_second),
    )
    lowered = {reason: share for reason, share in gpu.throttled.items() if share >= _SEEN_LOWERED}
    for reason, share in lowered.items():
        parts.append(f"clocks lowered {percentage(share)} of the time ({reason})")
    name = f"GPU {gpu.number}"
    if gpu.model:
        name += f" ({gpu.model})"
    return f"{name}: {', '.join(parts)}"


def _mean(figure: GpuFigure | None) -> float | None:
    if figure:
        return figure.mean
    return None


def gpu_figures(
    *,
    utilization: float | None = None,
    memory_bytes: float | None,
    memory_total_bytes: float | None = None,
    power_watts: float | None,
    sm_clock_mhz: float | None,
    pcie_received_bytes_per_second: float | None,
) -> list[str]:
    """Returns a GPU's figures in words, those that are known.

    Args:
        utilization: Busy share, 0 to 1.
        memory_bytes: Memory in use.
        memory_total_bytes: Memory of the GPU or of its slice.
        power_watts: Power that it draws.
        sm_clock_mhz: Clock of the multiprocessors.
        pcie_received_bytes_per_second: Data received over PCIe.
    """
    parts = []
    if utilization is not None:
        parts.append(f"{percentage(utilization)} busy")
    if memory_bytes is not None and memory_total_bytes:
        parts.append(f"{size(memory_bytes)} of {size(memory_total_bytes)}")
    elif memory_bytes is not None:
        parts.append(size(memory_bytes))
    if power_watts is not None:
        parts.append(f"{power_watts:.0f} W")
    if sm_clock_mhz is not None:
        parts.append(f"{sm_clock_mhz:.0f} MHz")
    if pcie_received_bytes_per_second is not None:
        parts.append(f"{size(pcie_received_bytes_per_second)}/s received")
    return parts


def gate_words(gate: GateResult, style: Style = "terminal") -> str:
    """Puts a gate into words: `accuracy 0.967 passed`; with its bounds on a page."""
    if style == "terminal":
        value = "not reported" if gate.value is None else figure(gate.value, figures=4)
        return f"{gate.metric} {value} passed"
    value = "was not reported" if gate.value is None else metric(gate.value)
    bounds = " and ".join(_bounds(gate)) or "nothing"
    return f"{gate.metric} {value}, {bounds} asked"


def _bounds(gate: GateResult) -> list[str]:
    bounds = (("at least", gate.min), ("at most", gate.max))
    return [f"{words} {metric(bound)}" for words, bound in bounds if bound is not None]


def evaluation_words(record: Evaluation) -> str:
    verdict = record.reason or ", ".join(map(gate_words, record.gates)) or "no gate"
    return "; ".join([verdict, *record.warnings, *_performance_words(record.performance)])


def evaluation_table(evaluation: Evaluation) -> str:
    """Returns the verdict first, then gates and performance."""
    lines = [evaluation.reason or outcome_of_gates(evaluation.gates).words]
    lines += [f"  warning: {words}" for words in evaluation.warnings]
    for gate in evaluation.gates:
        lines += _gate_lines(gate)
    if evaluation.performance is not None:
        lines += _performance_lines(evaluation.performance)
    return "\n".join(lines)


def _gate_lines(gate: GateResult) -> list[str]:
    value = "not reported" if gate.value is None else figure(gate.value)
    mark = "ok  " if gate.passed else "FAIL"
    bounds = ", ".join(_bounds(gate))
    lines = [f"  {mark} {gate.metric[:36]:<36} {value:>12}  {bounds}".rstrip()]
    if gate.champion is not None:
        lines.append(f"       {'of the model in use':<36} {gate.champion:>12.6g}")
    elif gate.needs_champion and gate.passed:
        lines.append("       no model is in use yet to compare it with")
    elif gate.needs_champion and gate.is_inside:
        lines.append("       the model in use has not reported it")
    return lines


def _performance_lines(performance: Performance) -> list[str]:
    rows = [("baseline", performance.baseline)]
    if performance.predicted:
        rows.append(("predicted", performance.predicted))
    rows.append(("measured", performance.measured))
    is_billed = any(row.usd_per_1000_steps is not None for _, row in rows)
    has_accelerators = not is_billed and any(row.accelerator_seconds for _, row in rows)
    lines = _cost_table(rows, is_billed=is_billed, has_accelerators=has_accelerators)
    speedup, *promise = _performance_words(performance)
    is_change = performance.action != "keep" and not performance.busy
    # CPU time does not measure accelerators that wait: the table has both.
    if performance.cost_change is not None and is_change and not has_accelerators:
        speedup += f", {cost_change_words(performance.cost_change, is_billed=is_billed)}"
    lines += [speedup, *promise, *_gpu_change(performance)]
    return [f"  {line}" for line in lines]


def _cost_table(
    rows: Sequence[tuple[str, StepCost]], *, is_billed: bool, has_accelerators: bool
) -> list[str]:
    has_whole = any(is_whole_longer(row.step_seconds, row.counted_seconds) for _, row in rows)
    cost_head = "$ per 1,000 steps" if is_billed else "CPU-s per step"
    table = [["", "whole epochs", "step", cost_head, "accelerator-s"]]
    for name, row in rows:
        cost = _figure(row.cpu_seconds)
        if is_billed:
            cost = _figure(row.usd_per_1000_steps)
        if row.is_estimate:
            cost = f"{ESTIMATE}{cost}"
        seconds = (ms(row.counted_seconds), ms(row.step_seconds))
        table.append([name, *seconds, cost, _figure(row.accelerator_seconds)])
    lines = []
    for name, whole, step, cost, accelerator in table:
        line = f"{name:<10}"
        if has_whole:
            line += f"{whole:>13}"
        line += f" {step:>11} {cost:>16}"
        if has_accelerators:
            line += f" {accelerator:>14}"
        lines.append(line)
    return lines


def _performance_words(performance: Performance | None) -> list[str]:
    if performance is None:
        return []
    if performance.busy:
        return [f"{BUSY} ({performance.busy})"]
    speedup = as_fast(performance.speedup)
    if performance.action == "keep":
        is_same = abs(performance.speedup - 1) <= _SAME_HOSTS
        why = "no gain by stoker" if is_same else "the machine's load or speed changed in between"
        speedup += f" as in the profile on the same hosts: {why}"
    elif performance.is_helped is False:
        speedup += ", which is no effect of its data hosts"
    if performance.prediction_error is None:
        return [speedup]
    prediction = prediction_words(
        performance.prediction_error, band=performance.band, is_inside=performance.is_inside_band
    )
    what = "whole epochs are" if has_whole_epochs(performance) else "the step is"
    return [speedup, f"{what} {prediction}"]


def has_whole_epochs(performance: Performance) -> bool:
    """Returns whether a run was compared by whole epochs, and they are slower than their steps."""
    measured = performance.measured
    return is_whole_longer(measured.step_seconds, measured.counted_seconds)


def _gpu_change(performance: Performance) -> list[str]:
    before = performance.baseline.gpu_utilization
    now = performance.measured.gpu_utilization
    if now is None:
        return []
    words = f"the GPUs were {percentage(now)} busy"
    if before is None:
        return [words]
    return [f"{words}, {percentage(before)} in the profile"]


def prediction_words(
    error: float, *, band: Band | None, is_inside: bool | None, unit: TimeUnit | None = None
) -> str:
    """Compares the measured step with the predicted one and its band; unit: a page's."""
    if unit:
        words = than_predicted(error, "page")
        if band is None:
            # Evaluations of early versions have no band.
            return words
        inside = "inside" if is_inside else "outside"
        low = unit.brief(band.low_seconds)
        high = unit.brief(band.high_seconds)
        return f"{words}, {inside} the band of {low} to {high}"
    words = than_predicted(error)
    if band is None:
        return f"{words}; the band of that is not known"
    # Capitals stand out on a terminal.
    inside = "inside" if is_inside else "OUTSIDE"
    return f"{words}, {inside} the band of {ms(band.low_seconds)} to {ms(band.high_seconds)}"


def _figure(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}"


def whole_step_of(profile: Profile) -> float | None:
    """Returns today's seconds of whole epochs over their steps; None: not known."""
    times = profile.epochs
    if profile.step is None or times is None or not times.steps:
        return None
    return times.whole_step_seconds(profile.step.step_seconds)


def epoch_words(
    times: EpochTimes, *, step_seconds: float, is_first_shared: bool = False
) -> list[str]:
    """Returns what whole epochs have beyond their steps, one thing a line.

    Args:
        step_seconds: Of a step within epochs.
        is_first_shared: Whether all workers of a data host make an epoch's first batch.
    """
    lines = []
    shortest = _WORTH_A_WORD * step_seconds
    start = times.start
    between = times.between
    inside = times.inside_seconds
    steps = times.steps or 0.0
    if start and start.seconds >= shortest * steps and steps:
        seen = f"{start.count} seen" if start.count else "as one worker takes for a batch alone"
        makers = "one worker makes"
        if is_first_shared:
            makers = "the workers of a data host make"
        lines.append(
            f"an epoch of {numbered(round(steps), 'step')} begins with {_seconds(start.seconds)} "
            f"of waiting ({seen}): {makers} its first batch"
        )
    if between and between.seconds >= shortest:
        lines.append(
            f"{_seconds(between.seconds)} lie between two epochs ({between.count} seen): "
            "validation, checkpoints, logging"
        )
    if inside and inside >= shortest:
        lines.append(
            f"{ms(inside)} of a mean step are in no usual one: validation or checkpoints in "
            "mid-epoch, or steps that are slow themselves"
        )
    if steps and between is None:
        lines.append("what lies between epochs is not known: no two epochs were seen")
    return lines


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds:.0f} s"
