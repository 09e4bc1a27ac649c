"""Batches that are waited for: when they are reported, given up, or time out.

A batch's time begins when a worker that is ready has it. A trainer knows when it asked a host for a
batch, which is never later; so only where that is too long ago, which is rare, it asks the host who
makes the batch (`protocol.Inquire`), and since when. Imports, unpickling, worker_init_fn, a worker
that replaces a dead one, a dataset on its way and other ranks' batches are no batch's time. While
no ready worker has it, `feed.start_deadline_seconds` counts.
"""

import math
from collections.abc import Mapping

from stoker.environment import ProcessSettings
from stoker.errors import FeedLostError
from stoker.feed.trainer.links import AgentLink
from stoker.feed.trainer.local_workers import LocalWorkers
from stoker.feed.trainer.scheduler import Peer
from stoker.feed.trainer.session import LOCAL, FeedSession, HeadMaker, Inquiry, SharedState
from stoker.feed.wire import protocol
from stoker.feed.workers.stacks import words_of
from stoker.logs import EventName

# A batch that is waited for is reported after the first of these, or half of
# feed.sample_timeout_seconds if that is less; again after the others, and each last one.
_HANG_SECONDS = (60.0, 300.0, 1800.0)
# And not before it takes this many times as long as others.
_HANG_FACTOR = 4.0
# An answer is good for so long; a host that does not answer is asked again.
_FRESH_SECONDS = 1.0
# A host that has not answered by then is reported as silent, and has no part in a timeout.
_SILENT_SECONDS = 5.0
# From one look at unanswered inquiries to the next.
_AGAIN_SECONDS = 0.5


class LateBatches:
    """Checks of the batch that a session waits for; callers hold the lock, in the I/O thread."""

    def __init__(
        self, shared: SharedState, settings: ProcessSettings, links: Mapping[str, AgentLink]
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._feed = settings.feed
        self._links = links

    def check(self, session: FeedSession, now: float) -> None:
        """Reports the batch, gives it up or lets it time out, where that is due.

        Sets the session's `check_at`, when it has to be checked again.
        """
        session.check_at = math.inf
        if session.waits_since is None:
            return
        asked_at = session.schedule.makers(session.schedule.head)
        if not asked_at:
            self._check_start(session, session.waits_since, now)
            return
        session.check_at = self._check_at(session, asked_at)
        if now < session.check_at:
            return
        makers = self._makers(session, asked_at, now)
        if len(makers) < len(asked_at):
            session.check_at = now + _AGAIN_SECONDS
            return
        self._act(session, makers, now=now)
        if not any(maker.begun_at for maker in makers.values()):
            waited = now - max(session.waits_since, min(asked_at.values()))
            if waited >= self._feed.start_deadline_seconds:
                session.mark_failed(self._never_begun(session, makers, waited))
        session.check_at = self._check_at(session, asked_at)

    def _check_start(self, session: FeedSession, waits_since: float, now: float) -> None:
        """Says what hosts do that have no worker ready for long; `HostWatch` ends the wait."""
        num_told = session.num_starts_told
        if num_told == len(_HANG_SECONDS):
            return
        due_at = waits_since + _HANG_SECONDS[num_told]
        if now < due_at:
            session.check_at = due_at
            return
        links = [
            link for link in self._links.values() if link.is_up and session.name in link.opened
        ]
        hosts: dict[Peer, float] = {link.member.host: now for link in links}
        answers = self._makers(session, hosts, now)
        if len(answers) < len(hosts):
            session.check_at = now + _AGAIN_SECONDS
            return
        session.num_starts_told += 1
        text = f"rank {session.rank} waits for a worker that is ready for {now - waits_since:.0f} s"
        starts = self._starts_words(session, answers)
        if starts:
            text += f": {starts}"
        self._shared.log.event(EventName.WORKERS_STARTING, text=text)

    def _starts_words(self, session: FeedSession, answers: Mapping[Peer, HeadMaker]) -> str:
        """Returns what the workers do that are not ready yet; empty: unknown."""
        doing = {str(host): words_of(answer.stacks) for host, answer in answers.items()}
        if session.local is not None:
            local = f"{self._settings.host}, local"
            doing[local] = words_of(session.local.starting_stacks())
        return "; ".join(f"{host} is {words}" for host, words in doing.items() if words)

    def _check_at(self, session: FeedSession, asked: Mapping[Peer, float]) -> float:
        """Returns the earliest time at which something may be due, by what is known."""
        waits_since = session.waits_since or 0.0
        answers = [session.makers.get(peer) for peer in asked]
        is_begun = any(answer is not None and answer.begun_at for answer in answers)
        # What is made again since its host was lost begins again.
        earliest = min(
            asked_at if answer is None else answer.earliest(asked_at)
            for asked_at, answer in zip(asked.values(), answers, strict=True)
        )
        limit = self._feed.sample_timeout_seconds or math.inf
        due_at = max(waits_since, earliest) + min(self._hang_due(session), limit)
        if session.timeout_seconds:
            due_at = min(due_at, max(session.called_at, earliest) + session.timeout_seconds)
        if not is_begun:
            start_by = max(waits_since, min(asked.values())) + self._feed.start_deadline_seconds
            due_at = min(due_at, start_by)
        return due_at

    def _act(self, session: FeedSession, makers: Mapping[Peer, HeadMaker], *, now: float) -> None:
        """Does what is due for a batch that a worker has, or a host that does not answer."""
        starts = [maker.begun_at for maker in makers.values() if maker.begun_at is not None]
        if not starts:
            return
        seconds = now - max(session.waits_since or 0.0, min(starts))
        # Where bad samples are left out, the worker of one that takes too long is killed.
        limit = self._feed.sample_timeout_seconds if self._feed.on_error == "raise" else None
        hosts = " and ".join(
            self._maker_words(session, peer, maker) for peer, maker in makers.items()
        )
        batch = session.batch_words(session.schedule.head)
        text = f"{batch} is being made for {seconds:.0f} s, on {hosts}"
        if limit is not None and seconds >= limit:
            session.mark_failed(self._over_limit(session, text, limit))
            return
        has_timed_out = _has_timed_out(session, makers, now)
        if has_timed_out or seconds >= self._hang_due(session):
            # A timeout is raised in the script: it uses up no report.
            session.num_hangs_told += not has_timed_out
            text += f"; rank {session.rank} waits for it"
            self._shared.log.event(EventName.BATCH_HANGS, text=text)
            if LOCAL in makers and makers[LOCAL].stacks:
                # Whole; those of other hosts are in their logs.
                self._shared.log.write(f"{makers[LOCAL].stacks}\n")
        if has_timed_out:
            session.time_out()

    def _over_limit(self, session: FeedSession, text: str, limit: float) -> FeedLostError:
        return FeedLostError(
            f"{text}: more than feed.sample_timeout_seconds ({limit:g})",
            where=f"rank {session.rank}, host {self._settings.host}",
            fix="look at the sample that takes so long, or raise feed.sample_timeout_seconds; "
            "feed.on_error: skip leaves such a sample out",
        )

    def _hang_due(self, session: FeedSession) -> float:
        """Returns after how many seconds of a batch its next report is due."""
        num_told = session.num_hangs_told
        last = len(_HANG_SECONDS) - 1
        if num_told <= last:
            due = _HANG_SECONDS[num_told]
        else:
            # Behind the last one: after each multiple of it.
            due = _HANG_SECONDS[last] * (num_told - last + 1)
        # Where batches usually take long, all reports come later by the same factor.
        p95 = max(state.p95_seconds or 0.0 for state in session.schedule.peers.values())
        due *= max(1.0, _HANG_FACTOR * p95 / _HANG_SECONDS[0])
        limit = self._feed.sample_timeout_seconds
        if num_told == 0 and limit is not None:
            # The first one comes before the batch is given up.
            return min(due, limit / 2)
        return due

    def _makers(
        self, session: FeedSession, asked: Mapping[Peer, float], now: float
    ) -> dict[Peer, HeadMaker]:
        """Returns those that are known to make the head batch or not, now; asks the others."""
        makers: dict[Peer, HeadMaker] = {}
        for peer, asked_at in asked.items():
            maker = self._maker(session, peer, asked_at=asked_at, now=now)
            if maker is not None:
                makers[peer] = session.makers[peer] = maker
        return makers

    def _maker(
        self, session: FeedSession, peer: Peer, *, asked_at: float, now: float
    ) -> HeadMaker | None:
        batch_number = session.schedule.head
        if peer == LOCAL and session.local is not None:
            return _local_maker(session.local, batch_number, session.epoch_id, now=now)
        heard = session.makers.get(peer)
        if heard is not None and now - heard.heard_at < _FRESH_SECONDS:
            return heard
        inquiry = session.inquiries.setdefault(peer, Inquiry(first_at=now))
        if now - inquiry.first_at >= _SILENT_SECONDS:
            return HeadMaker(heard_at=now, begun_at=asked_at, is_silent=True)
        link = self._links.get(str(peer))
        if link is not None and now - inquiry.last_at >= _FRESH_SECONDS:
            inquiry.last_at = now
            name = session.name
            epoch_id = session.epoch_id
            link.send(protocol.Inquire(session=name, epoch_id=epoch_id, batch_number=batch_number))
        return None

    def _maker_words(self, session: FeedSession, peer: Peer, maker: HeadMaker) -> str:
        host = str(peer)
        if peer == LOCAL:
            host = f"{self._settings.host}, local"
        if maker.is_silent:
            return f"{host}, which does not answer"
        workers = ", ".join(map(str, maker.workers))
        parts = [f"worker {workers}"] if workers else []
        if maker.sample is not None:
            parts.append(session.sample_words(session.schedule.head, maker.sample))
        words = words_of(maker.stacks)
        parts += [words] if words else []
        return f"{host} ({': '.join(parts)})" if parts else host

    def _never_begun(
        self, session: FeedSession, makers: Mapping[Peer, HeadMaker], waited: float
    ) -> FeedLostError:
        hosts = " and ".join(
            self._maker_words(session, peer, maker) for peer, maker in makers.items()
        )
        return FeedLostError(
            f"no worker was ready for {session.batch_words(session.schedule.head)} within "
            f"{waited:.0f} s (feed.start_deadline_seconds), on {hosts}",
            where=f"rank {session.rank}, host {self._settings.host}",
            fix="see the logs of the data hosts: their workers do not start, or die over and over",
        )


def _local_maker(local: LocalWorkers, batch_number: int, epoch_id: int, *, now: float) -> HeadMaker:
    makers = local.makers(batch_number, epoch_id)
    if not makers:
        return HeadMaker(heard_at=now, stacks=local.starting_stacks())
    return HeadMaker(
        heard_at=now,
        begun_at=now - makers[0].seconds,
        workers=tuple(maker.number for maker in makers),
        stacks=makers[0].stacks,
        sample=makers[0].sample,
    )


def _has_timed_out(session: FeedSession, makers: Mapping[Peer, HeadMaker], now: float) -> bool:
    """Whether a worker has had the batch for the loader's `timeout`, in this call of `next`."""
    # Not a host that does not answer: nobody knows what it does.
    starts = [maker.begun_at for maker in makers.values() if maker.begun_at and not maker.is_silent]
    if not (session.timeout_seconds and starts):
        return False
    return now - max(session.called_at, min(starts)) >= session.timeout_seconds
