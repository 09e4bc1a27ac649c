"""What the leader looks after while the training runs: figures in its log, and the run's limits.

A run is ended if it has no step for `watchdog_minutes`, has spent `constraints.max_usd`, or takes
longer than its platform allows for all attempts.
"""

import contextlib
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from stoker.feed.engine.run_messages import MemoryPeak
from stoker.feed.rank_reports import batches_by_host, read_loadings
from stoker.feed.timeline import FILE as TIMELINE_FILE
from stoker.figures.gpus import GpuLog
from stoker.figures.intervals import FILE, IntervalLog, read_intervals
from stoker.figures.measured import gpu_loads
from stoker.figures.progress import BASELINE_TIMELINE, ProgressByRank, RunSteps
from stoker.host.gpus import GpuState
from stoker.host.processes import descendants, signal_all
from stoker.launch.host_client import HostRun, MemoryWatch
from stoker.launch.process import SAVE, Decided
from stoker.launch.run_server import RunServer
from stoker.logs import EventName
from stoker.records.profile import GpuLoads
from stoker.records.training import Budget, GroupSpending
from stoker.repeat import Clock
from stoker.units import usd

# In the leader's output folder: time of the run's first start, in seconds since 1970.
FIRST_START_FILE = "first-start"
# Ignored by default: it kills no process without the handler. Torch, NCCL, MPI do not use it.
STACKS_SIGNAL = signal.SIGURG
# For the stack of each process.
STACKS_SECONDS = 0.1


class Limits:
    """The leader's figures and limits.

    Args:
        gpus: The load of this host's GPUs.
        server: Of the other hosts.

    Attributes:
        failure: Why the run was ended here; empty: it was not.
    """

    def __init__(self, run: HostRun, *, gpus: GpuLog, server: RunServer) -> None:
        self._run = run
        self._server = server
        self._gpus = gpus
        self._memory = MemoryWatch()
        self.failure = ""
        settings = run.settings
        self.spending = Spending(
            settings.budget,
            hosts={group.name: len(group.hosts) for group in run.topology.groups if group.hosts},
            earlier_seconds=earlier_seconds(run.output, settings.restarts, now=time.time()),
            max_seconds=settings.max_run_seconds,
        )
        minutes = settings.watchdog_minutes
        self._watchdog = Watchdog(minutes, output=run.output) if minutes else None
        # In a profile the steps as they are, not those of its later phases.
        timeline = TIMELINE_FILE if settings.profile is None else BASELINE_TIMELINE
        self._intervals = IntervalLog(
            path=run.output / FILE,
            log=run.log,
            steps=RunSteps(run.output, file=timeline),
            progress=lambda: server.progress,
            gpu_means=self._gpu_means,
            memory=self.peaks,
            spent_usd=lambda: self.spending.usd,
        )

    def gpu_loads(self) -> GpuLoads:
        """Returns the loads of all dnn hosts' GPUs, from the rows of the run."""
        return gpu_loads(read_intervals(self._intervals.path))

    def peaks(self) -> dict[str, MemoryPeak]:
        """Returns the highest use of each host's memory, and the use now."""
        peaks = {name: state.memory for name, state in self._server.hosts.states.items()}
        peaks[self._run.topology.host] = self._memory.look()
        return {name: peak for name, peak in sorted(peaks.items()) if peak}

    def _gpu_means(self) -> dict[str, tuple[GpuState, ...]]:
        hosts = self._server.hosts
        others = {name: hosts.states[name].gpus for name in hosts.names("joined")}
        return {self._run.topology.host: self._gpus.take(), **others}

    def tick(self) -> None:
        """Looks at everything that is due; called about twice a second."""
        # First what ends a run: a fault in a figure skips what comes behind it.
        if not self.failure:
            self._end_if_due()
        self._memory.look()
        self._intervals.tick()

    def _end_if_due(self) -> None:
        log = self._run.log
        if reason := self.spending.excess():
            log.event(EventName.BUDGET_SPENT, reason=reason)
            self._server.tell(stage="ending")
            self._run.inbox.put(SAVE)
        elif self._watchdog and (reason := self._watchdog.excess()):
            _write_stacks()
            log.event(EventName.NO_PROGRESS, text=reason)
            self._run.inbox.put(Decided(reason))
        self.failure = reason

    def close(self) -> None:
        """Writes the last row, of what came after the last look."""
        self._intervals.close()


class Watchdog:
    """The time since a run's last step.

    A step is a batch of any loader that stoker sees (`feed.timeline`), or a step of torch's
    optimizers (`feed.rank_reports`), on the first host. Before the first step nothing is ended.

    Args:
        minutes: Minutes without a step after which the run is ended.
        output: Folder of the leader's ranks.
    """

    def __init__(self, minutes: float, *, output: Path, clock: Clock = time.monotonic) -> None:
        self._seconds = 60 * minutes
        self._output = output
        self._clock = clock
        self._counted = self._count()
        # Of the last step; none yet.
        self._step_at = math.inf

    def excess(self) -> str:
        """Returns why the run is to be ended; empty: it is not."""
        now = self._clock()
        counted = self._count()
        if counted != self._counted:
            self._counted = counted
            self._step_at = now
        silent = now - self._step_at
        if silent < self._seconds:
            return ""
        return (
            f"no step for {silent / 60:.1f} min (watchdog_minutes); the stacks of the first "
            "host's ranks are in its log"
        )

    def _count(self) -> object:
        """Returns what changes with each step."""
        files = self._output.glob(TIMELINE_FILE.format(rank="*"))
        sizes = {path.name: path.stat().st_size for path in files}
        return sizes, [loading.optimizer_steps for loading in read_loadings(self._output)]


def _write_stacks() -> None:
    """Has the ranks write their stacks; blocks for some seconds."""
    # Those without a handler ignore the signal. One by one, as lines of two would be mixed.
    for process in descendants():
        signal_all([process], STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)


def earlier_seconds(output: Path, restarts: int, *, now: float) -> float:
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
    """Dollars and time of the run so far: hosts x price x time.

    The leader lives as long as the job, and counts all hosts from its own start, or from the run's
    first start. The record has the platform's own times instead, where it reports them.

    Args:
        hosts: Number of hosts by group.
        earlier_seconds: From the run's first start to this one.
    """

    def __init__(
        self,
        budget: Budget | None,
        *,
        hosts: Mapping[str, int],
        earlier_seconds: float = 0.0,
        max_seconds: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._budget = budget or Budget()
        prices = self._budget.usd_per_hour
        if len(hosts) == 1 == len(prices):
            # SageMaker has another name for the only group of a job.
            prices = dict(zip(hosts, prices.values(), strict=True))
        self._prices = prices
        self._hosts = hosts
        self._clock = clock
        self._began = clock()
        self._earlier_seconds = earlier_seconds
        self._max_seconds = max_seconds or math.inf

    @property
    def usd(self) -> float | None:
        """Dollars of all groups; None if a price is not known, or nothing is billed."""
        dollars = self._by_group()
        return sum(dollars.values()) if len(dollars) == len(self._hosts) else None

    def _by_group(self) -> dict[str, float]:
        hours = self._seconds() / 3600
        priced = [name for name in self._hosts if name in self._prices]
        return {name: self._prices[name] * self._hosts[name] * hours for name in priced}

    def _seconds(self) -> float:
        return self._earlier_seconds + self._clock() - self._began

    def excess(self) -> str:
        """Returns why the run is to be ended; empty: it is not."""
        spent = self.usd or 0.0
        most = self._budget.max_usd or math.inf
        if self._seconds() >= self._max_seconds:
            return f"all attempts together ran longer than {self._max_seconds:g} s"
        if spent >= most:
            return f"max_usd reached: {usd(spent)} spent, constraints.max_usd is {usd(most)}"
        return ""

    def of_groups(
        self,
        progress: ProgressByRank,
        *,
        data_hosts: Mapping[str, Sequence[str]],
        all_batches: int = 0,
    ) -> tuple[GroupSpending, ...]:
        """Returns what each group cost; of data groups, what they made, and their idle time.

        Args:
            data_hosts: Hosts of the data groups whose batches the feed counts.
            all_batches: Batches that the training took; 0: not counted.
        """
        made = batches_by_host(progress)
        dollars = self._by_group()
        spending = []
        for name in self._hosts:
            spent = GroupSpending(group=name, usd=dollars.get(name))
            hosts = data_hosts.get(name)
            if hosts and all_batches:
                spent = replace(
                    spent,
                    idle_share=_idle_share(progress, self._clock() - self._began, hosts),
                    batches=sum(made.get(host, 0) for host in hosts),
                    all_batches=all_batches,
                )
            spending.append(spent)
        return tuple(spending)


def _idle_share(progress: ProgressByRank, seconds: float, hosts: Sequence[str]) -> float:
    """Returns the share of these hosts' time in which their workers made nothing."""
    busy = 0.0
    workers = dict[str, int]()
    for report in progress.values():
        for host in report.feed.hosts if report.feed else ():
            if host.host in hosts:
                busy += host.busy_seconds
                # One host serves all ranks, which report the same workers.
                workers[host.host] = max(workers.get(host.host, 0), host.num_workers)
    total = sum(workers.values()) * seconds
    return max(0.0, 1 - busy / total) if total else 1.0
