"""Calibration: earlier runs on the same kind of hosts correct the model's constants.

A run with a data group is replayed from its profile, cluster and measured step. It gives the factor
on the data hosts' efficiency (or, where the step does not depend on that, on the cost of receiving)
with which the model gives the measured step. The median of at least three runs corrects the
constant, within bounds. Records that do not fit together, or are of other hosts, are ignored.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from stoker.catalog import Catalog
from stoker.decide.candidates import SearchSpace, named
from stoker.decide.model import ClusterShape, StepWork, estimate
from stoker.decide.step_work import corrected, data_hosts_of, measure, today_of
from stoker.errors import UsageError
from stoker.records import Calibration, Decision, FeedSettings, Group, Profile, Training, bare_type

Constant = Literal["efficiency", "receive"]

# One or two runs may be outliers.
LEAST_RUNS = 3
# Three blocks of 20 steps.
_LEAST_STEPS = 60
# Beyond these factors the run was disturbed or the profile is wrong, not the constant.
BOUNDS: dict[Constant, tuple[float, float]] = {"efficiency": (0.6, 1.15), "receive": (0.5, 3.0)}
# Beyond this factor from the prediction something else was wrong.
_BELIEVED = 2.0
# The step must change at least by this factor from one bound of a constant to the other.
_ANSWERS = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """The records of one run."""

    profile: Profile
    decision: Decision
    training: Training


def calibrate(runs: Iterable[EarlierRun], *, like: Profile, catalog: Catalog) -> Calibration:
    """Returns the constants, corrected by the earlier runs that match the profile `like`."""
    factors_of: dict[Constant, list[float]] = {"efficiency": [], "receive": []}
    for run in runs:
        factor = _factor(run, like=like, catalog=catalog)
        if factor is not None:
            factors_of[factor[0]].append(factor[1])
    enough = {name: factors for name, factors in factors_of.items() if len(factors) >= LEAST_RUNS}
    return Calibration(
        runs=sum(map(len, enough.values())),
        efficiency=_median(enough.get("efficiency", ())),
        receive=_median(enough.get("receive", ())),
        spread=max(map(_spread, enough.values()), default=0.0),
    )


def _factor(run: EarlierRun, *, like: Profile, catalog: Catalog) -> tuple[Constant, float] | None:
    """Returns the constant that the run determines, and its factor; None: it determines none."""
    if not _is_one_run(run) or not _is_like(run, like, catalog):
        return None
    try:
        work, shape = _replayed(run, catalog)
    except UsageError:
        # A type that the catalog no longer has, or numbers out of range.
        return None
    measured = run.training.measured
    if work.unexplained or measured is None:
        return None
    expected = estimate(work, shape).step_seconds
    if not 1 / _BELIEVED <= measured.step_seconds / expected <= _BELIEVED:
        return None

    def step_with(name: Constant, factor: float) -> float:
        changed = replace(work, efficiency=factor)
        if name == "receive":
            changed = replace(work, receive_cpu_seconds=work.receive_cpu_seconds * factor)
        return estimate(corrected(changed), shape).step_seconds

    # One measured step determines one unknown: efficiency first, which matters most.
    for name, (low, high) in BOUNDS.items():
        ends = sorted((step_with(name, low), step_with(name, high)))
        if ends[1] >= _ANSWERS * ends[0]:
            step_of = partial(step_with, name)
            return name, _solved(step_of, measured.step_seconds, low=low, high=high)
    return None


def _is_one_run(run: EarlierRun) -> bool:
    """Whether the records belong together, to a whole run with a data group."""
    records = (run.profile, run.decision, run.training)
    digests = {record.workload_sha256 for record in records}
    measured = run.training.measured
    training = run.training
    return (
        len(digests) == 1
        and None not in digests
        and training.status == "succeeded"
        and measured is not None
        and measured.steps >= _LEAST_STEPS
        and measured.step_seconds > 0
        and _hosts(training.groups) == _hosts(run.decision.plan.groups)
        and any(group.role == "data" for group in training.groups)
        # With a host lost, the step was measured on a smaller cluster than planned.
        and not any("lost" in event.what for event in training.events)
    )


def _is_like(run: EarlierRun, like: Profile, catalog: Catalog) -> bool:
    host = run.profile.host
    other = like.host
    return (
        run.training.job.platform == catalog.platform
        and bare_type(host.instance_type) == bare_type(other.instance_type)
        # An unknown capacity is no difference.
        and (host.capacity or other.capacity) == (other.capacity or host.capacity)
    )


def _replayed(run: EarlierRun, catalog: Catalog) -> tuple[StepWork, ClusterShape]:
    groups = run.training.groups
    today = today_of(run.profile, catalog.get(run.profile.host.instance_type))
    processes = groups[0].processes_per_host or max(1, today.accelerators)
    work = measure(
        run.profile,
        today=today,
        processes=processes,
        data=data_hosts_of(run.profile, catalog),
        storage=run.decision.constraints.storage or "unknown",
    )
    space = SearchSpace(
        work=work, catalog=catalog, today=today, processes=processes, feed=FeedSettings()
    )
    return work, named(space, groups).shape


def _solved(step_of: Callable[[float], float], seconds: float, *, low: float, high: float) -> float:
    """Returns the factor within the bounds that comes closest to the measured step."""
    # Bisection, as the step is monotonic in a constant. 40 halvings are exact to 1e-12.
    is_rising = step_of(high) > step_of(low)
    for _ in range(40):
        middle = (low + high) / 2
        if (step_of(middle) < seconds) == is_rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _hosts(groups: Sequence[Group]) -> list[tuple[str, str, int]]:
    return [(group.role, group.instance_type, group.count) for group in groups]


def _median(factors: Sequence[float]) -> float:
    if not factors:
        return 1.0
    return statistics.median(factors)


def _spread(factors: Sequence[float]) -> float:
    # Quartiles: one bad run of three would make a standard deviation useless.
    lower, middle, upper = statistics.quantiles(factors, n=4, method="inclusive")
    return (upper - lower) / 2 / middle
