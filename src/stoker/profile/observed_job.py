"""A profile of a job that has run, from its load and its log."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.logs import EventName, parse_line
from stoker.platforms.sagemaker.cloudwatch import ObservedJob, group_loads
from stoker.record_words import gpu_noun, gpu_words
from stoker.records import Observed, Profile, ProfiledHost, Spread, StepTerms
from stoker.records.base import mapping
from stoker.records.gpu import used_gpus
from stoker.units import percentage, wrapped

MIN_SAMPLES = 20
# Longer or shorter ones are no steps of a training.
_SHORTEST, _LONGEST = 1e-6, 1e5
# Below it a training's start weighs much in its means.
_FEW_MINUTES = 10.0
# All are in the record.
_GPUS_SHOWN = 8
_SUSPECTS = {
    "cpu": "the CPUs are busy and the GPUs are not: probably CPU-bound",
    "accelerator": "the GPUs are busy: probably the accelerator sets the pace",
    "neither": "neither CPUs nor GPUs are busy: steps probably wait for storage or a service, "
    "for too few loader workers, or for one thread",
    "unknown": "that does not show the limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSteps:
    """Median of a step, its wait (None where lines lack it), and its quartiles, from log lines."""

    step_seconds: float
    wait_seconds: float | None
    low_seconds: float
    high_seconds: float
    samples: int


def steps_in(lines: Iterable[str], *, source: str = "--logs") -> LoggedSteps:
    """Returns the median step of a log, from stoker's progress lines; `source` names the log.

    Raises:
        UsageError: If fewer than MIN_SAMPLES lines have a step's time.
    """
    steps: list[float] = []
    waits: list[float] = []
    for line in lines:
        # A log may have millions of lines: most of them need no parser.
        event = parse_line(line) if "progress" in line else None
        if event is None or event.event != EventName.PROGRESS:
            continue
        step, wait = _number(event.values, "step_seconds"), _number(event.values, "wait_seconds")
        if step is not None and _SHORTEST <= step <= _LONGEST:
            steps.append(step)
            if wait is not None and wait >= 0:
                waits.append(min(wait, step))
    if len(steps) < MIN_SAMPLES:
        raise UsageError(
            f"the log does not show a step's time: {len(steps)} of the {MIN_SAMPLES} lines needed, "
            "as stoker writes them (progress steps=... step_seconds=...)",
            where=source,
            fix="leave --logs out: the hosts' load is read without it; stoker profile times steps",
        )
    # A median: the lines hold first epochs and checkpoints, whose steps are long.
    low, median, high = statistics.quantiles(steps, n=4, method="inclusive")
    return LoggedSteps(
        step_seconds=median,
        # Of all lines or none: a median of some waits is no part of the median of all steps.
        wait_seconds=min(statistics.median(waits), median) if len(waits) == len(steps) else None,
        low_seconds=low,
        high_seconds=high,
        samples=len(steps),
    )


def _number(values: Mapping[str, str], name: str) -> float | None:
    try:
        return float(values[name])
    except (KeyError, ValueError):
        return None


def observed_profile(
    job: ObservedJob, *, sizes: Mapping[str, tuple[int, int]], steps: LoggedSteps | None = None
) -> Profile:
    """Returns the profile of a job whose load was read; `sizes` are types' vCPUs and GPUs. Pure."""
    kind, count = job.groups[job.dnn]
    loads = {load.group: load for load in group_loads(job.loads, types=job.types)}
    dnn = loads[job.dnn]
    step = None
    spread = None
    notes = _notes(job)
    if steps:
        notes.append(
            f"a step's time is the median of {steps.samples} lines that stoker wrote to the log, "
            "including the first epoch"
        )
        step = StepTerms(step_seconds=steps.step_seconds, wait_seconds=steps.wait_seconds)
        low, high = steps.low_seconds, steps.high_seconds
        spread = {"step_seconds": Spread(low=low, high=high, samples=steps.samples)}
    vcpus, accelerators = sizes[kind]
    return Profile(
        host=ProfiledHost(instance_type=kind, count=count, vcpus=vcpus, accelerators=accelerators),
        step=step,
        spread=spread,
        observed=Observed(
            cpu_utilization=dnn.cpu,
            gpu_utilization=dnn.gpu,
            hosts=sum(own.group == job.dnn and own.cpu is not None for own in job.loads) or None,
        ),
        what={
            "source": "cloudwatch",
            "training_job": job.name,
            "when": job.began_at,
            "minutes": round(job.minutes, 1),
            "point_seconds": job.point_seconds,
            "is_running": job.is_running,
            "groups": {name: f"{hosts} x {one}" for name, (one, hosts) in job.groups.items()},
            "group_cpu": {name: _rounded(load.cpu) for name, load in loads.items()},
            "group_gpu": {name: _rounded(load.gpu) for name, load in loads.items()},
            "host_group": {load.host: load.group for load in job.loads},
            "host_cpu": {load.host: _rounded(load.cpu) for load in job.loads},
            "host_gpu": {load.host: _rounded(load.gpu) for load in job.loads},
            "notes": [*notes],
        },
    )


def explain_observed(profile: Profile) -> str:
    notes = profile.what.get("notes")
    lines = observed_words(profile)
    lines += wrapped(
        "No step was timed, so nothing can be predicted for another cluster. Profile the training "
        "before money is spent on it: stoker profile."
    )
    for note in notes if isinstance(notes, list) else ():
        lines += wrapped(f"note: {note}")
    return "\n".join(lines)


def observed_words(profile: Profile) -> list[str]:
    observed = profile.observed
    assert observed is not None
    what = profile.what
    hosts = f"{profile.host.count} x {profile.host.instance_type}"
    # What other programs used as well is another line's.
    whose = " with this training" if observed.others_vcpus else ""
    said = [f"{_busy('vCPUs', observed.cpu_utilization)}{whose}"]
    if observed.gpu_utilization is not None or _may_have_gpus(profile):
        count = len(used_gpus(observed.gpus)) if observed.gpus else None
        said.append(_busy(gpu_noun(count), observed.gpu_utilization))
    # Where steps were seen to wait or not, a guess from the load is no news.
    is_seen = profile.step is not None and profile.step.wait_seconds is not None
    guess = "" if is_seen else f"; {_SUSPECTS[observed.suspect]}"
    lines = wrapped(f"{hosts}: {', '.join(said)}{guess}.")
    for seen in observed.gpus[:_GPUS_SHOWN]:
        lines += wrapped(gpu_words(seen), indent="  ")
    groups, members = mapping(what.get("groups")), mapping(what.get("host_group"))
    cpu, gpu = mapping(what.get("host_cpu")), mapping(what.get("host_gpu"))
    if not members:
        return lines
    group_cpu, group_gpu = mapping(what.get("group_cpu")), mapping(what.get("group_gpu"))
    lines += ["", f"{'mean of ' + str(what.get('minutes')) + ' min':<44}{'CPU':>6}{'GPU':>7}"]
    for group, words in groups.items():
        title = f"{group or 'all hosts'}  {words}"
        loads = (group_cpu.get(group), group_gpu.get(group))
        lines.append(f"{title[:43]:<44}{_load(loads[0]):>6}{_load(loads[1]):>7}")
        for host in (name for name, own in members.items() if own == group):
            load = f"{_load(cpu.get(host)):>6}{_load(gpu.get(host)):>7}"
            lines.append(f"  {host:<42}{load}")
    return [*lines, ""]


def _may_have_gpus(profile: Profile) -> bool:
    """Whether GPUs would be worth a word although their load is not known."""
    accelerators = profile.host.accelerators
    if accelerators is None and not profile.host.instance_type.startswith("local."):
        return True
    # On this machine the inventory would have found them.
    return bool(accelerators or (profile.observed and profile.observed.gpus))


def _busy(name: str, load: float | None) -> str:
    return f"{name}: load not known" if load is None else f"{name} {_load(load)} busy"


def _notes(job: ObservedJob) -> list[str]:
    notes = list(job.notes)
    others = [name for name in job.groups if name != job.dnn]
    if others:
        notes.append(
            f"the job also has the group{'s' if len(others) > 1 else ''} {', '.join(others)}: the "
            f"figures are for {job.dnn} only, today's cost is for all groups"
        )
    if job.is_running:
        notes.append("the job is still running: these are the means until now")
    if job.minutes < _FEW_MINUTES:
        notes.append(
            f"over {job.minutes:.0f} minutes only: the start-up is a large part of these means"
        )
    # CloudWatch keeps points of a minute for 15 days, then means of longer times.
    if job.point_seconds > 60:
        notes.append(
            f"a point is the mean of {job.point_seconds // 60} minutes: the job is long or old"
        )
    unseen = [load.host for load in job.loads if load.cpu is None]
    if unseen:
        notes.append(f"CloudWatch has no figures of {', '.join(unseen)}")
    return notes


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _load(value: object) -> str:
    return percentage(value) if isinstance(value, int | float) else "n/a"
