"""What the pump asks for: sessions are opened at agents, batches asked for, the end is judged."""

import platform
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from stoker.errors import FeedLostError
from stoker.feed import messages as m
from stoker.feed.links import AgentLink
from stoker.feed.local import LocalWorkers
from stoker.feed.local_streams import LocalStreams
from stoker.feed.memory import allowance
from stoker.feed.session import LOCAL, Session
from stoker.feed.shared import Shared
from stoker.feed.shipping import PackedSpec
from stoker.feed.stream_answers import in_result, lose
from stoker.feed.stream_pool import stream_job
from stoker.feed.streams import Streams
from stoker.settings import ProcessSettings

# Beyond the lease: the coordinator's word and the re-dialling take a moment.
LOST_GRACE_SECONDS = 3.0
# Where the coordinator says that every data host has left or is lost, no lease is waited for.
ALL_GONE_SECONDS = 10.0

_VERSIONS = {
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "numpy": np.__version__,
}


class Asking:
    """The pump's mouth; every method is called under the lock.

    Args:
        links: Host to link; the pump's own, which changes.

    Attributes:
        expected: Data hosts of the run; None: the coordinator has not said yet.
        lost: Those that the coordinator gave up.
    """

    def __init__(
        self, shared: Shared, settings: ProcessSettings, links: Mapping[str, AgentLink]
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._feed = settings.feed
        self._links = links
        self.expected: int | None = None
        self.lost: dict[str, m.Member] = {}
        self._awaited: tuple[str, ...] = ()
        self._listed: tuple[str, ...] = ()
        self._heard_at: dict[str, float] = {}

    def tell_news(self, session: Session) -> None:
        """Tells every agent of a new pass, or of a new spec."""
        session.has_news = False
        if session.spec is None:
            return
        before = session.pass_number if session.is_busy else session.pass_number + 1
        if session.local is not None:
            session.local.forget(before_pass=before)
        for link in self._links.values():
            if not link.is_up or not link.may_open(session.name, pass_number=session.pass_number):
                continue
            if link.opened.get(session.name) != session.spec.digest:
                link.opened[session.name] = session.spec.digest
                link.ready.discard(session.name)
                link.attach()
                link.send(
                    m.Open(
                        protocol=m.PROTOCOL_VERSION,
                        session=session.name,
                        rank=self._settings.rank,
                        spec=session.spec.digest,
                        spec_bytes=len(session.spec.data),
                        seeding=session.seeding,
                        base_seed=session.base_seed,
                        first_worker=self._first_worker(session.spec) + link.member.place,
                        worker_step=max(1, self.expected or 1),
                        versions=_VERSIONS,
                        host=link.member.host,
                    )
                )
            link.send(m.Forget(session=session.name, before_pass=before))

    def _first_worker(self, spec: PackedSpec) -> int:
        """The lowest id that no local worker of any rank has."""
        settings = self._settings
        decided = settings.workers.get("dnn")
        if decided is None and settings.feed.local_workers != "auto":
            decided = settings.feed.local_workers
        return max(spec.num_workers, decided or 0)

    def ask(self, session: Session, now: float) -> None:
        """Asks for the batches whose turn it is."""
        schedule = session.schedule
        sessions = self._shared.sessions
        schedule.max_bytes = session.max_bytes
        if len(sessions) > 1:
            others = [
                other.schedule
                for other in sessions.values()
                if other is not session and other.is_busy
            ]
            schedule.max_bytes = allowance(session.max_bytes, others=others)
        for number in schedule.overdue(now):
            self._shared.log.event("batch_overdue", epoch=session.epoch, batch=number)
        if isinstance(schedule, Streams):
            self._ask_streams(session, schedule, now)
            return
        for peer, number in schedule.assign(now):
            asked = session.asked[number]
            if peer == LOCAL and isinstance(session.local, LocalWorkers):
                session.local.ask(
                    pass_number=session.pass_number,
                    number=number,
                    index=asked.index,
                    seed=asked.seed,
                )
            elif isinstance(peer, str) and peer in self._links:
                self._links[peer].has_asked = True
                self._links[peer].send(
                    m.Make(
                        session=session.name,
                        pass_number=session.pass_number,
                        number=number,
                        index=asked.index,
                        seed=asked.seed,
                    )
                )
        if isinstance(session.local, LocalWorkers):
            for _ in session.local.hurry():
                self._shared.log.event("local_batch_overdue", epoch=session.epoch)
            session.local.flush()

    def _ask_streams(self, session: Session, streams: Streams, now: float) -> None:
        is_complete = self.expected is not None and (
            sum(
                session.name in link.ready or link.has_failed(session.name)
                for link in self._links.values()
            )
            >= self.expected - len(self.lost)
        )
        if is_complete:
            streams.settle()
        source = session.source
        if source is None:
            # The first pass is about to begin.
            return
        for peer, number in streams.assign(now):
            start = streams.start_of(number)
            make = m.Make(
                session=session.name,
                pass_number=session.pass_number,
                number=number,
                index=source.index,
                seed=(source.base_seed,),
                stream=m.Stream(
                    shard=start.shard,
                    num_shards=start.num_shards,
                    generation=start.generation,
                    made=start.made,
                    digest=start.digest,
                    shared_seed=source.shared_seed,
                    persists=start.persists,
                    state=start.state,
                    earlier=start.earlier,
                ),
            )
            if peer == LOCAL and isinstance(session.local, LocalStreams):
                key = (session.pass_number, number, start.generation)
                assert make.stream is not None
                lost = session.local.ask(*stream_job(make, make.stream, source.index, key))
                for result in lost:
                    lose(session, streams, LOCAL, in_result(result, 0))
            elif isinstance(peer, str) and peer in self._links:
                self._links[peer].has_asked = True
                self._links[peer].send(make)
        if session.local is not None:
            session.local.flush()

    def judge(self, session: Session, now: float) -> None:
        """Ends a session that nobody works for any more."""
        if session.schedule.peers():
            if session.is_waiting:
                waited = round(now - session.alone_since, 1)
                self._shared.log.event("training_goes_on", waited_seconds=waited)
            session.alone_since, session.is_waiting = now, False
            return
        error = self._failure_of_all(session)
        if error is not None:
            session.fail(error)
            return
        alone = now - session.alone_since
        opening = any(link.is_up and session.name in link.opened for link in self._links.values())
        is_starting = opening or not session.had_peers
        patience = self._feed.lease_seconds + LOST_GRACE_SECONDS
        if self.expected is not None and not self._listed and not self._awaited:
            patience = min(patience, ALL_GONE_SECONDS)
        # What was preempted may have to wait for a new node, as at the start.
        may_come = is_starting or self._settings.comes_back
        limit = self._feed.start_deadline_seconds if may_come else patience
        if alone > limit:
            session.fail(self._lost_error(session, now))
        elif alone > patience and not session.is_waiting:
            session.is_waiting = True
            self._shared.log.event(
                "training_waits_for_data",
                epoch=session.epoch,
                batch=session.schedule.head,
                expected=self.expected,
            )

    def tell_alone(self) -> None:
        """Says what happens now that no data host is connected, if a loader is at work."""
        busy = [session for session in self._shared.sessions.values() if session.is_busy]
        if not busy:
            return
        if all(session.local is not None for session in busy):
            text = "local workers make all batches"
        elif self._settings.comes_back:
            text = "the training waits until one is back"
        else:
            longest = self._feed.lease_seconds + LOST_GRACE_SECONDS
            text = (
                "no local workers either: the training ends with exit code 5 within "
                f"{longest:.0f} s unless one is back"
            )
        self._shared.log.event("no_data_host_left", text=text)

    def _failure_of_all(self, session: Session) -> BaseException | None:
        """What the first host said, where none of the run can make its batches."""
        failures = [
            link.failed[session.name].error
            for link in self._links.values()
            if link.is_up and link.has_failed(session.name)
        ]
        if self.expected is None or (self.lost and self._settings.comes_back):
            return None
        is_all = len(failures) + len(self.lost) >= self.expected
        return failures[0] if failures and is_all else None

    def take_roster(self, roster: m.Roster, now: float) -> None:
        """What the coordinator says of the hosts."""
        self.expected = roster.expected
        self.lost = {member.host: member for member in roster.lost}
        self._awaited = roster.awaited
        self._listed = tuple(member.host for member in roster.agents)
        for member in (*roster.agents, *roster.lost):
            self._heard_at[member.host] = now - member.silent_seconds

    def _fates(self, session: Session, now: float) -> Iterator[str]:
        """What became of each data host, and when it was last heard."""
        for host, link in self._links.items():
            if link.is_up and session.name in link.failed:
                yield f"{host} ({link.failed[session.name].reason})"
            elif link.is_up:
                yield f"{host} (connected, not ready)"
            elif host not in self.lost:
                yield f"{host} (no connection for {now - link.down_since:.1f} s)"
        for host, heard_at in self._heard_at.items():
            if host in self.lost:
                yield f"{host} (lost, last heard {now - heard_at:.1f} s ago)"
            elif host not in self._links:
                yield f"{host} (left, last heard {now - heard_at:.1f} s ago)"
        for host in self._awaited:
            yield f"{host} (never came)"

    def _lost_error(self, session: Session, now: float) -> FeedLostError:
        seen = ", ".join(self._fates(session, now)) or "none seen"
        expected = "?" if self.expected is None else self.expected
        if self.expected is None:
            seen = f"the coordinator at {self._settings.coordinator} did not answer"
        local = f"; local workers: {session.local.last_death}" if session.local else ""
        if session.had_peers:
            what = f"no data worker is left after {now - session.alone_since:.0f} s"
        else:
            what = f"no data worker came within {now - session.alone_since:.0f} s"
        return FeedLostError(
            f"{what}: {expected} data hosts expected, {seen}{local}",
            where=f"rank {self._settings.rank}, host {self._settings.host}, "
            f"epoch {session.epoch}, batch {session.schedule.head}",
            fix="see the logs of the data hosts; with local workers (feed.local_workers) the "
            "training would go on",
        )
