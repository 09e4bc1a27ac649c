"""Dollars of a run, counted by the dnn leader: hosts x price x time.

The leader lives as long as the job, with or without a process that follows it. It counts all hosts
from its own start, or from the run's first start where the job's folder has kept it. The record
has the platform's own times instead, where it reports them.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from stoker.feed.rank_reports import batches_by_host
from stoker.figures.feed_intervals import ProgressByRank
from stoker.logs import EventName, Log
from stoker.records.training import Budget, GroupSpending
from stoker.repeat import Clock
from stoker.units import usd

# In the leader's output folder: time of the run's first start, in seconds since 1970.
FIRST_START_FILE = "first-start"
WARN_SHARE = 0.8
REACHED = "max_usd reached"


def earlier_seconds(output: Path, *, restarts: int, now: float) -> float:
    """Returns the seconds since the run's first start, which its output folder keeps.

    A run that all its hosts begin for the first time has no `restarts`; `now` is this start.
    """
    file = output / FIRST_START_FILE
    # A full disk, or no folder that is kept: this start is all that is known.
    with contextlib.suppress(OSError, ValueError):
        if restarts:
            return max(0.0, now - float(file.read_text(encoding="utf-8")))
        file.write_text(f"{now:.3f}", encoding="utf-8")
    return 0.0


class Spending:
    """Dollars and time of the run so far, and why it is ended for them (`failure`).

    `earlier_seconds` is the time from the run's first start to this one.
    """

    def __init__(
        self,
        budget: Budget | None,
        *,
        hosts: Mapping[str, int],
        log: Log,
        earlier_seconds: float = 0.0,
        max_seconds: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.budget = budget or Budget()
        self._prices = dict(self.budget.usd_per_hour)
        if len(hosts) == 1 == len(self._prices):
            # SageMaker has another name for the only group of a job.
            self._prices = dict(zip(hosts, self._prices.values(), strict=True))
        self._hosts = hosts
        self._log = log
        self._clock = clock
        self._began = clock()
        self._earlier_seconds = earlier_seconds
        self._max_seconds = max_seconds
        self._is_warned = False
        self.failure = ""

    @property
    def usd(self) -> float | None:
        """Dollars of all groups; None if a price is not known, or nothing is billed."""
        dollars = self._by_group()
        if len(dollars) == len(self._hosts):
            return sum(dollars.values())
        return None

    @property
    def is_estimate(self) -> bool:
        """Whether the dollars are counted by an estimated price."""
        return bool(self.budget.estimated)

    def _by_group(self) -> dict[str, float]:
        hours = self._seconds() / 3600
        return {
            name: self._prices[name] * count * hours
            for name, count in self._hosts.items()
            if name in self._prices
        }

    def _seconds(self) -> float:
        return self._earlier_seconds + self._clock() - self._began

    def tick(self) -> bool:
        """Warns once; returns True once, when a limit is reached."""
        if self.failure:
            return False
        if self._max_seconds is not None and self._seconds() >= self._max_seconds:
            self.failure = (
                f"all attempts together ran longer than kubernetes.max_run_seconds, "
                f"{self._max_seconds:g} s"
            )
            self._log.event(EventName.RUN_OUT_OF_TIME, reason=self.failure)
            return True
        spent = self.usd
        most = self.budget.max_usd
        if spent is None or most is None:
            return False
        if spent >= most:
            dollars = usd(spent, is_estimate=self.is_estimate)
            self.failure = f"{REACHED}: {dollars} spent, constraints.max_usd is {usd(most)}"
            self._log.event(EventName.BUDGET_SPENT, usd=spent, max_usd=most, reason=self.failure)
            return True
        if spent >= WARN_SHARE * most and not self._is_warned:
            self._is_warned = True
            dollars = usd(spent, is_estimate=self.is_estimate)
            text = (
                f"{dollars} of {usd(most)} (constraints.max_usd) has been spent; at {usd(most)} "
                "the script is asked to save, and is then ended"
            )
            self._log.event(EventName.BUDGET_NEARLY_SPENT, usd=spent, max_usd=most, text=text)
        return False

    def of_groups(
        self,
        progress: ProgressByRank,
        *,
        dnn: str,
        waited_seconds: float,
        data_hosts: Mapping[str, Sequence[str]] = MappingProxyType({}),
        all_batches: int = 0,
    ) -> tuple[GroupSpending, ...]:
        """Returns what each group cost and made, and the share of its time without work.

        Args:
            dnn: Name of the group that trains.
            waited_seconds: How long a rank waited for data that sent no report.
            data_hosts: Hosts of the data groups whose batches the feed counts.
            all_batches: Batches that the training took; 0: not counted.
        """
        batches_of_hosts = batches_by_host(progress)
        seconds = self._clock() - self._began
        dollars = self._by_group()
        spending = []
        for name in self._hosts:
            if name == dnn:
                waits = [report.wait_seconds for report in progress.values()]
                # All ranks wait for the one that waits longest.
                idle = max(waits, default=waited_seconds) / seconds if seconds > 0 else None
            else:
                idle = _idle_share(progress, seconds=seconds, hosts=data_hosts.get(name))
            batches = None
            if name in data_hosts and all_batches:
                batches = sum(batches_of_hosts.get(host, 0) for host in data_hosts[name])
                # None of its workers was heard of.
                idle = 1.0 if not batches and idle is None else idle
            spending.append(
                GroupSpending(
                    group=name,
                    usd=dollars.get(name),
                    idle_share=None if idle is None else min(1.0, max(0.0, idle)),
                    batches=batches,
                    all_batches=None if batches is None else all_batches,
                )
            )
        return tuple(spending)


def _idle_share(
    progress: ProgressByRank, *, seconds: float, hosts: Sequence[str] | None
) -> float | None:
    """Returns the share of a group's time without work; hosts: None: all but the trainers'."""
    busy = 0.0
    workers = dict[str, int]()
    for report in progress.values():
        for host in report.feed.hosts if report.feed else ():
            if not host.is_local and (hosts is None or host.host in hosts):
                busy += host.busy_seconds
                # One host serves all ranks, which report the same workers.
                workers[host.host] = max(workers.get(host.host, 0), host.num_workers)
    total = sum(workers.values()) * seconds
    if total > 0:
        return 1 - busy / total
    return None
