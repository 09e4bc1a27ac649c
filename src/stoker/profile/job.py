"""A job that ran can be profiled from its load and its log."""

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.errors import UsageError
from stoker.logs import parse_line
from stoker.platforms.sagemaker.usage import HostLoad, ObservedJob, group_loads
from stoker.records import Observed, Profile, ProfiledHost, Spread, StepTerms
from stoker.records.base import Value

MIN_SAMPLES = 20
# Longer or shorter ones are no steps of a training.
_SHORTEST, _LONGEST = 1e-6, 1e5

_NUMBER = r"(?P<value>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_BEFORE = r"(?<![\w.])"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSteps:
    """Steps as a log tells them.

    Attributes:
        step_seconds: Median.
        wait_seconds: Of it, waiting for data, median; None where the lines do not say it.
        low_seconds: Lower quartile of the step.
        high_seconds: Upper quartile.
        samples: Lines behind it.
        form: What the lines look like.
    """

    step_seconds: float
    wait_seconds: float | None
    low_seconds: float
    high_seconds: float
    samples: int
    form: str

    @property
    def words(self) -> str:
        """Says in a line where the time comes from."""
        return (
            f"a step's time is the median of {self.samples} lines of the log ({self.form}), "
            "evaluation and the first epoch among them, each taken as one global step"
        )


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to write a step's time; the pattern has `value`, and may have `unit` and `wait`."""

    name: str
    pattern: re.Pattern[str]
    seconds: Callable[[float], float] = lambda value: value


@dataclass(slots=True)
class _Found:
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


_STOKER = "stoker's own lines: progress steps=... step_seconds=..."
# The first form with enough lines is taken: the more exact ones come first.
_FORMS = (
    _Form(
        "step_time=0.19",
        re.compile(
            r"(?<![A-Za-z0-9])(?:step|iteration|iter|batch)[_ ](?:time|seconds|secs?)"
            r"(?:_(?P<named>ms|s))?[\"']?\s*[=:]\s*"
            + _NUMBER
            # Neither half a number, nor what stands before a separator of thousands.
            + r"(?!,\d{3}\b)\s*(?P<unit>ms|s|secs?|seconds)?(?![\w.])",
            re.IGNORECASE,
        ),
    ),
    _Form(
        "Time  0.190 ( 0.195)  Data  0.1 ( 0.1)",
        re.compile(
            r"\bTime\s+" + _NUMBER + r"\s*\(\s*[\d.]+\s*\)"
            r"(?:.*?\bData\s+(?P<wait>\d+(?:\.\d*)?)\s*\()?"
        ),
    ),
    _Form(
        "time: 0.190  data_time: 0.010",
        re.compile(
            r"\btime:\s*" + _NUMBER + r"(?![\w.:]).*?\bdata_time:\s*(?P<wait>\d+(?:\.\d*)?)"
        ),
    ),
    _Form(
        "time per iteration (ms): 190.0",
        re.compile(
            r"\btime per (?:iteration|step)\s*(?:\((?P<named>ms|s)\))?\s*[=:]\s*"
            + _NUMBER
            + r"\s*(?P<unit>ms|s|secs?|seconds)?(?![\w.])",
            re.IGNORECASE,
        ),
    ),
    _Form(
        "190ms/step or 0.19 s/it",
        re.compile(
            _BEFORE
            + _NUMBER
            + r"\s*(?P<unit>ms|s|secs?|seconds)\s*/\s*(?:it|iter|iteration|step|batch)\b"
        ),
    ),
    _Form(
        "5.2it/s",
        re.compile(
            _BEFORE
            + _NUMBER
            + r"\s*(?:it|iter|iters|iterations|steps?|batch|batches)\s*/\s*s(?:ec)?\b"
        ),
        lambda value: 1 / value if value else 0.0,
    ),
)


def steps_in(lines: Iterable[str], *, source: str = "--logs") -> LoggedSteps:
    """Returns the median step of a log.

    Args:
        lines: Of the log; progress bars may have written over their line.
        source: Where they are from.

    Raises:
        UsageError: If no form has MIN_SAMPLES lines, naming what was looked for and found.
    """
    found: dict[str, _Found] = {_STOKER: _Found(), **{form.name: _Found() for form in _FORMS}}
    for line in lines:
        for part in line.split("\r"):
            if not _take_own(part, found[_STOKER]):
                _take(part, found)
    for name, taken in found.items():
        if len(taken.steps) >= MIN_SAMPLES:
            return _summed_up(name, taken)
    raise UsageError(
        f"no step's time is to be read from the log: {MIN_SAMPLES} lines of one form are needed; "
        + "; ".join(f"{name}: {len(taken.steps)}" for name, taken in found.items()),
        where=source,
        fix="leave --logs out, or print step_time=SECONDS at each step",
    )


def _take_own(line: str, found: _Found) -> bool:
    event = parse_line(line) if "progress" in line else None
    if event is None or event.event != "progress":
        return False
    step, wait = _number(event.values, "step_seconds"), _number(event.values, "wait_seconds")
    if step is not None and _SHORTEST <= step <= _LONGEST:
        found.steps.append(step)
        if wait is not None and wait >= 0:
            found.waits.append(min(wait, step))
    return True


def _take(line: str, found: Mapping[str, _Found]) -> None:
    for form in _FORMS:
        match = form.pattern.search(line)
        if match is None:
            continue
        groups = match.groupdict()
        value = form.seconds(float(groups["value"]))
        if groups.get("unit") == "ms" or (groups.get("named") or "").lower() == "ms":
            value /= 1000
        if not _SHORTEST <= value <= _LONGEST:
            continue
        found[form.name].steps.append(value)
        if groups.get("wait"):
            found[form.name].waits.append(min(float(groups["wait"]), value))


def _summed_up(name: str, found: _Found) -> LoggedSteps:
    low, median, high = statistics.quantiles(found.steps, n=4, method="inclusive")
    has_waits = len(found.waits) == len(found.steps)
    return LoggedSteps(
        step_seconds=median,
        wait_seconds=min(statistics.median(found.waits), median) if has_waits else None,
        low_seconds=low,
        high_seconds=high,
        samples=len(found.steps),
        form=name,
    )


def _number(values: Mapping[str, str], name: str) -> float | None:
    try:
        return float(values[name])
    except (KeyError, ValueError):
        return None


_WIDTH = 88
# Below it a training's start weighs much in its means.
_FEW_MINUTES = 10.0
_SUSPECTS = {
    "cpu": "the CPUs are busy and the GPUs are not: probably CPU-bound",
    "accelerator": "the GPUs are busy: probably the accelerator sets the pace",
    "neither": "neither CPUs nor GPUs are busy: steps probably wait for storage or a service, "
    "for too few loader workers, or for one thread",
    "unknown": "that does not tell what the limit is",
}


def observed_profile(
    job: ObservedJob, *, sizes: Mapping[str, tuple[int, int]], steps: LoggedSteps | None = None
) -> Profile:
    """Returns the profile of a job whose load was read; pure.

    Args:
        job: The job, and the load of each of its hosts.
        sizes: Instance type to its vCPUs and GPUs, as the loads were normalised by.
        steps: Of its log, where one was given.
    """
    kind, count = job.groups[job.dnn]
    loads = {load.group: load for load in group_loads(job.loads, types=job.types)}
    dnn = loads[job.dnn]
    step, spread = _timed(steps)
    vcpus, accelerators = sizes[kind]
    return Profile(
        host=ProfiledHost(instance_type=kind, count=count, vcpus=vcpus, accelerators=accelerators),
        step=step,
        spread=spread,
        observed=Observed(
            cpu_utilization=dnn.cpu, gpu_utilization=dnn.gpu, hosts=_seen(job.loads, job.dnn)
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
            "notes": [*_notes(job), *([steps.words] if steps else [])],
        },
    )


def explain_observed(profile: Profile) -> str:
    """Explains a profile without a step, in words of at most 88 columns."""
    notes = profile.what.get("notes")
    lines = observed_words(profile)
    lines += _wrapped(
        "No step was timed, so nothing can be promised of another cluster. Profile the training "
        "before money is spent on it: stoker profile; --logs FILE adds a step's time."
    )
    for note in notes if isinstance(notes, list) else ():
        lines += _wrapped(f"note: {note}")
    return "\n".join(lines)


def observed_words(profile: Profile) -> list[str]:
    """Says how busy each group and each host was, and what that suggests."""
    observed = profile.observed
    assert observed is not None
    what = profile.what
    hosts = f"{profile.host.count} x {profile.host.instance_type}"
    said = [
        f"{name}s {_percent(load)} busy" if load is not None else f"{name}s: load not known"
        for name, load in (("vCPU", observed.cpu_utilization), ("GPU", observed.gpu_utilization))
        if load is not None or name == "vCPU" or profile.host.accelerators != 0
    ]
    # Where steps were seen to wait or not, a guess from the load is no news.
    is_seen = profile.step is not None and profile.step.wait_seconds is not None
    guess = "" if is_seen else f"; {_SUSPECTS[observed.suspect]}"
    lines = _wrapped(f"{hosts}: {', '.join(said)}{guess}.")
    groups, members = _mapping(what.get("groups")), _mapping(what.get("host_group"))
    cpu, gpu = _mapping(what.get("host_cpu")), _mapping(what.get("host_gpu"))
    if not members:
        return lines
    group_cpu, group_gpu = _mapping(what.get("group_cpu")), _mapping(what.get("group_gpu"))
    lines += ["", f"{'mean of ' + str(what.get('minutes')) + ' min':<44}{'CPU':>6}{'GPU':>7}"]
    for group, words in groups.items():
        title = f"{group or 'all hosts'}  {words}"
        loads = (group_cpu.get(group), group_gpu.get(group))
        lines.append(f"{title[:43]:<44}{_percent(loads[0]):>6}{_percent(loads[1]):>7}")
        for host in (name for name, own in members.items() if own == group):
            load = f"{_percent(cpu.get(host)):>6}{_percent(gpu.get(host)):>7}"
            lines.append(f"  {host:<42}{load}")
    return [*lines, ""]


def _timed(
    steps: LoggedSteps | None,
) -> tuple[StepTerms | None, dict[str, Spread] | None]:
    if steps is None:
        return None, None
    spread = {
        "step_seconds": Spread(
            low=steps.low_seconds, high=steps.high_seconds, samples=steps.samples
        )
    }
    return StepTerms(step_seconds=steps.step_seconds, wait_seconds=steps.wait_seconds), spread


def _notes(job: ObservedJob) -> list[str]:
    notes = list(job.notes)
    others = [name for name in job.groups if name != job.dnn]
    if others:
        notes.append(
            f"the job has the group{'s' if len(others) > 1 else ''} {', '.join(others)} beside "
            f"{job.dnn}: what is observed is {job.dnn}'s, and today's cost is that of all"
        )
    if job.is_running:
        notes.append("the job still runs: these are the means so far")
    if job.minutes < _FEW_MINUTES:
        notes.append(f"of {job.minutes:.0f} minutes only: the start weighs much in the means")
    if job.point_seconds > 60:
        notes.append(
            f"a point is the mean of {job.point_seconds // 60} minutes: the job is long or old"
        )
    unseen = [load.host for load in job.loads if load.cpu is None]
    if unseen:
        notes.append(f"CloudWatch has nothing of {', '.join(unseen)}")
    return notes


def _seen(loads: Sequence[HostLoad], group: str) -> int | None:
    return sum(load.group == group and load.cpu is not None for load in loads) or None


def _mapping(value: Value) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _percent(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else "n/a"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
