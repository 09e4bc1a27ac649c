"""What looks after a training run on its host while its command runs: one `tick` for all of it."""

import contextlib
import time
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.environment import RELEASED_FILE, unfed_file
from stoker.feed.rank_reports import Unfed
from stoker.figures.feed_intervals import FeedLog, ProgressByRank
from stoker.figures.gpu_log import GpuLines, GpuLog
from stoker.figures.memory_lines import HostMemoryNow, MemoryLines
from stoker.figures.step_progress import ProgressLog
from stoker.host.gpus import GpuState
from stoker.launch.coordinator import Coordinator
from stoker.launch.finish import RunOutcome
from stoker.launch.follower_lease import FollowerLease
from stoker.launch.host_memory import HostMemoryWatch, MemoryLog, memory_shares
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.other_programs import OthersLog, OthersWatch
from stoker.launch.spending import Spending, earlier_seconds
from stoker.launch.supervise import Decided, Ending
from stoker.launch.watchdog import RankStacks, Watchdog
from stoker.logs import EventName, Log

_POLL_SECONDS = 1.0


class Release:
    """Whether this host's ranks train without asking for a batch.

    If all do, they will make their own batches until the end. A follower reports it to the leader,
    which releases the data hosts once all ranks of the run do.
    """

    def __init__(
        self,
        output: Path,
        run: Coordinator | Membership,
        *,
        ranks: int,
        all_ranks: int,
        log: Log,
    ) -> None:
        self._log = log
        self._has_logged = False
        self._output = output
        self._run = run
        self._ranks = ranks
        self._all_ranks = all_ranks
        self._look_at = 0.0
        self._message: Unfed | None = None
        self._settles_at: float | None = None
        self._is_done = False
        # Of an earlier attempt in the same folder.
        for file in (*output.glob(unfed_file("*")), output / RELEASED_FILE):
            file.unlink(missing_ok=True)

    def tick(self) -> None:
        now = time.monotonic()
        if self._is_done or now < self._look_at:
            return
        self._look_at = now + _POLL_SECONDS
        self._message = self._message or self._agreed()
        if self._message is None:
            return
        self._log_once(self._message)
        if isinstance(self._run, Membership):
            self._run.tell_unfed(self._ranks)
            self._is_done = True
        elif self._ranks + self._run.unfed_ranks >= self._all_ranks:
            self._run.release_agents(self._message.words)
            self._is_done = True

    def close(self) -> None:
        """Logs a message that came after the last look: a script may end sooner than the next."""
        for message in self._messages()[:1]:
            self._log_once(message)

    def _log_once(self, message: Unfed) -> None:
        # A Python without stoker writes no log line; others have.
        if not message.text and not self._has_logged:
            self._has_logged = True
            self._log.event(EventName.FEED_UNUSED, text=message.words)

    def _agreed(self) -> Unfed | None:
        """Returns a rank's message, once all ranks have sent one and none can withdraw it."""
        messages = self._messages()
        if len(messages) < self._ranks:
            # One is missing, or was withdrawn: the time begins again.
            self._settles_at = None
            return None
        if not self._is_settled(max(message.settle_seconds for message in messages)):
            return None
        # File first, then a second check: a rank that does request a batch withdraws its message
        # and then checks this file, so one of both sees the other.
        released = self._output / RELEASED_FILE
        released.touch()
        messages = self._messages()
        if len(messages) < self._ranks:
            # One withdrew its message, and may not have seen the file.
            released.unlink()
            return None
        return messages[0]

    def _is_settled(self, seconds: float) -> bool:
        """Whether all ranks have sent one for so long."""
        now = time.monotonic()
        if self._settles_at is None:
            self._settles_at = now
        return now >= self._settles_at + seconds

    def _messages(self) -> list[Unfed]:
        messages = []
        for file in self._output.glob(unfed_file("*")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                messages.append(msgspec.json.decode(file.read_bytes(), type=Unfed))
        return messages


class RunLog(Protocol):
    """Figures of a run that a host writes while it trains."""

    def tick(self) -> None: ...

    def close(self) -> None: ...


class RunGuards:
    """What looks after a training run on a host while its command runs.

    Its logs are written, and data hosts that no rank needs are released. This is all of a host that
    knows no other; `LeaderGuards` and `FollowerGuards` add what their part of a run needs.

    Args:
        gpus: The load of this host's GPUs, which the training starts and closes.
        connection: To the other hosts of the run; None: there is none.
    """

    def __init__(
        self, run: HostRun, *, gpus: GpuLog, connection: Coordinator | Membership | None = None
    ) -> None:
        self.gpus = gpus
        self._run = run
        self._connection = connection
        self._logs: list[RunLog] = []
        self._release: Release | None = None

    def begin(self, *, num_ranks: int) -> None:
        """Begins the logs and the release, when the command is about to start.

        Args:
            num_ranks: Ranks of this host.
        """
        self._logs = self._new_logs()
        if self._connection:
            self._release = Release(
                self._run.output,
                self._connection,
                ranks=num_ranks,
                all_ranks=num_ranks * len(self._run.topology.dnn_hosts),
                log=self._run.log,
            )

    def tick(self) -> None:
        """Looks at everything that is due; called about twice a second."""
        for log in self._logs:
            log.tick()
        self._look_at_ranks()
        if self._release:
            self._release.tick()

    def command_ended(self) -> None:
        """Takes a last look, as the command has ended."""

    def close(self) -> None:
        """Writes last lines, also of what came after the last look."""
        # An error of one of them does not cost the others' last lines.
        with contextlib.ExitStack() as closing:
            for log in self._logs:
                closing.callback(log.close)
            if self._release:
                closing.callback(self._release.close)

    def _new_logs(self) -> list[RunLog]:
        return []

    def _look_at_ranks(self) -> None:
        """Looks at what only a part of the hosts looks at."""


class FollowerGuards(RunGuards):
    """A follower's: its ranks' stacks, when the leader asks for them."""

    def __init__(self, run: HostRun, *, gpus: GpuLog, membership: Membership) -> None:
        super().__init__(run, gpus=gpus, connection=membership)
        self._membership = membership
        self._stacks = RankStacks(run.log)
        self._num_asked = 0

    def _look_at_ranks(self) -> None:
        if self._membership.stacks > self._num_asked:
            self._num_asked = self._membership.stacks
            self._stacks.begin()
        self._stacks.tick()


class LeaderGuards(RunGuards):
    """The leader's, which also end the run: if it is abandoned, hangs, or costs too much.

    Attributes:
        lease: Whether the run is still followed.
        watchdog: The time since the run's last step.
        spending: Its dollars and its time, against their limits.
        others: What other programs use of the run's hosts.
        memory: The highest use of their memory.
    """

    def __init__(self, run: HostRun, *, gpus: GpuLog, coordinator: Coordinator | None) -> None:
        super().__init__(run, gpus=gpus, connection=coordinator)
        self._coordinator = coordinator
        self._others_watch: OthersWatch | None = None
        self._memory_watch: HostMemoryWatch | None = None
        self._num_ranks = 1
        self.others = coordinator.others if coordinator else OthersLog()
        self.memory = coordinator.memory if coordinator else MemoryLog()
        self.lease = FollowerLease(run.settings.follower_lease)
        self.watchdog = self._new_watchdog()
        groups = [group for group in run.topology.groups if group.hosts]
        self.spending = Spending(
            run.settings.budget,
            hosts={group.name: len(group.hosts) for group in groups},
            log=run.log,
            earlier_seconds=earlier_seconds(
                run.output, restarts=run.settings.restarts, now=time.time()
            ),
            max_seconds=run.settings.max_run_seconds,
        )

    def begin(self, *, num_ranks: int) -> None:
        super().begin(num_ranks=num_ranks)
        self._num_ranks = num_ranks
        self._others_watch = OthersWatch()
        self._memory_watch = HostMemoryWatch()

    def tick(self) -> None:
        super().tick()
        if self.lease.tick():
            self._run.log.event(EventName.RUN_ABANDONED, reason=self.lease.failure)
            self._end_run()
        if self.spending.tick():
            self._end_run()

    def command_ended(self) -> None:
        self._count_others(is_last=True)
        self._look_at_memory()

    def outcome_of(self, ending: Ending) -> RunOutcome | None:
        """Returns the outcome of a run that was ended here, with the hosts' exit code.

        None: it ended otherwise.
        """
        failure = self.watchdog.failure
        code = self.watchdog.exit_code
        # It may have seen a hang while the command ended for another reason.
        if not failure or ending.decided != failure:
            # All hosts end with 0, which no platform restarts; the record says that it failed.
            failure = self.lease.failure or self.spending.failure
            code = 0
        if failure:
            return RunOutcome(status="failed", exit_code=code, failure=failure)
        return None

    def gpus_of_all(self) -> dict[str, tuple[GpuState, ...]]:
        """Returns the latest sample of each dnn host's GPUs."""
        states = {self._run.topology.host: self.gpus.states}
        if self._coordinator:
            states |= self._coordinator.gpu_states
        return states

    def memory_of_all(self) -> tuple[HostMemoryNow, ...]:
        """Returns what the memory of each host has in use now."""
        shares = memory_shares(
            self._run.topology, self._progress(), self._num_ranks, of="memory_share"
        )
        return self.memory.now(shares)

    def _progress(self) -> ProgressByRank:
        """Returns what the ranks have reported, which they do where there is a coordinator."""
        if self._coordinator is None:
            return {}
        return self._coordinator.progress

    def _new_logs(self) -> list[RunLog]:
        run = self._run
        progress = ProgressLog(
            run.output,
            run.log,
            progress=self._progress,
            spent_usd=lambda: self.spending.usd,
            is_estimate=self.spending.is_estimate,
        )
        logs: list[RunLog] = [progress]
        logs.append(GpuLines(run.log, hosts=self.gpus_of_all))
        logs.append(MemoryLines(run.log, hosts=self.memory_of_all))
        if self._coordinator:
            file = run.output / "feed.csv"
            # An earlier attempt's rows are not this one's.
            file.unlink(missing_ok=True)
            logs.append(FeedLog(file, run.log, progress=self._progress))
        return logs

    def _look_at_ranks(self) -> None:
        self._count_others()
        if self._memory_watch and self._memory_watch.look():
            self._look_at_memory()
        self.watchdog.tick()

    def _count_others(self, *, is_last: bool = False) -> None:
        # A follower's go to the leader with its heartbeats.
        if self._others_watch:
            self.others.add(self._run.topology.host, self._others_watch.look(is_last=is_last))

    def _look_at_memory(self) -> None:
        if self._memory_watch:
            self.memory.add(self._run.topology.host, self._memory_watch.peak())

    def _new_watchdog(self) -> Watchdog:
        run = self._run
        settings = self._run.settings
        return Watchdog(
            settings.watchdog,
            output=run.output,
            saved=(settings.base_dir / "checkpoints", settings.base_dir / "model"),
            log=run.log,
            start_seconds=settings.feed.start_deadline_seconds,
            expects_steps=is_fed(run),
            end=lambda reason: run.inbox.put(Decided(reason)),
            told=self._progress,
            ask_others=self._ask_others_for_stacks,
        )

    def _ask_others_for_stacks(self) -> None:
        if self._coordinator:
            self._coordinator.ask_for_stacks()

    def _end_run(self) -> None:
        if self._coordinator:
            self._coordinator.announce("ending")
        self._run.tell_ranks_to_save()


def is_fed(run: HostRun) -> bool:
    is_planned = run.settings.engine.name == "feed" and bool(run.topology.data_hosts)
    return is_planned and run.settings.profile is None
