"""The dispatch decides which of the batches that sessions ask for are made next, and answers them.

At most `workers` batches are being made at a time, over all specs and ranks, in order of batch
number, as far as credits and memory allow.
"""

import time
from collections.abc import Mapping

from stoker.feed import memory
from stoker.feed.agent.dataset_host import PoolKey, Specs
from stoker.feed.agent.queue import AgentSession, CreditPool, Queue, Request
from stoker.feed.agent.sending import Outbox
from stoker.feed.wire import protocol
from stoker.feed.workers.pool import Result, job_of
from stoker.logs import Log
from stoker.records import FeedSettings

# Batches of one shard that may be asked for: far more than any prefetch factor in use.
MAX_OPEN = 256


class Dispatch:
    """Gives requests to the workers, and results to the outbox.

    Args:
        sessions: The open ones, by name, as they come and go.
        workers: Batches made at a time.

    Attributes:
        num_begun: Batches that workers have, to make now or next.
    """

    def __init__(
        self,
        specs: Specs,
        outbox: Outbox,
        *,
        sessions: Mapping[str, AgentSession],
        workers: int,
        feed: FeedSettings,
        log: Log,
    ) -> None:
        self._specs = specs
        self._outbox = outbox
        self._sessions = sessions
        self._workers = workers
        self._log = log
        self._queue = Queue()
        self._credits = CreditPool(workers=workers, per_worker=feed.credits)
        self._max_bytes = memory.max_bytes(feed)
        self.num_begun = 0

    @property
    def num_queued(self) -> int:
        """Requests that no worker has begun."""
        return len(self._queue)

    def work(self) -> None:
        """Sends what was made, and keeps the workers busy."""
        self._outbox.settle()
        results = list(self._specs.results())
        self.num_begun -= sum(result.job.order.stream is None for result in results)
        # Before the batches are sent: their workers may be idle.
        self._give()
        is_dry = self._specs.num_busy() < self._workers
        for result in results:
            self._deliver(result, is_dry=is_dry)

    def tick(self) -> None:
        """Does what is due once a second: gives late jobs out again, and adapts the credits."""
        for job in self._specs.hurry():
            (late,) = job.key
            assert isinstance(late, Request)
            self._log.event("batch_overdue", epoch_id=late.epoch_id, batch=late.number)
        self._credits.adapt()
        self.share_credits()

    def share(self, session: AgentSession) -> int:
        """Returns how many batches a session may ask for now."""
        return self._credits.share(session, self._sessions.values(), time.monotonic())

    def share_credits(self) -> None:
        """Tells the sessions whose share has changed."""
        for session in self._sessions.values():
            share = self.share(session)
            if session.is_ready and share != session.credits:
                session.credits = share
                self._outbox.send(session, protocol.Credits(session=session.name, credits=share))

    def ask(self, identity: bytes, session: AgentSession, message: protocol.Make) -> None:
        """Queues a batch that a session asks for; one of a shard is its worker's at once."""
        stream = message.stream
        generation = 0 if stream is None else stream.generation
        known = session.requests.get((message.epoch_id, message.number))
        if known is not None and known.generation == generation:
            return  # Asked for twice: the answer to the first is that to both.
        refusal = self._refusal(session, message, known)
        if refusal:
            self._outbox.refuse(identity, message, refusal)
            return
        if known is not None:
            known.is_dropped = True
        now = time.monotonic()
        was_active = session.is_active(now)
        session.asked_at = now
        request = session.requests[message.epoch_id, message.number] = Request(
            session, session.spec, session.seeding, message
        )
        if stream is None:
            self._queue.push(request)
        else:
            job = job_of(message, (request,))
            self._specs.assign(session.spec, ("session", session.name), job)
        if not was_active:
            self.share_credits()

    def _refusal(self, session: AgentSession, message: protocol.Make, known: Request | None) -> str:
        """Says why a batch is not made here; empty: it is."""
        limit = session.max_requests
        stream = message.stream
        if stream is not None:
            held = self._specs.find(session.spec)
            if held is None or held.state != "ready":
                return "the dataset failed on this host"
            if known is not None and known.generation > stream.generation:
                return "its shard was begun again"
            limit = max(limit, MAX_OPEN * stream.num_shards)
        if message.epoch_id < session.before_epoch_id:
            return "it is of an epoch that was said to be over"
        return "asked for far more than the credits" if len(session.requests) >= limit else ""

    def drop(self, reason: str, *, spec: str | None = None) -> None:
        """Hands back what is queued, of one spec or of all."""
        for request in [r for r in self._queue if spec is None or r.spec == spec]:
            request.is_dropped = True
            request.session.requests.pop((request.epoch_id, request.number), None)
            self._outbox.drop(request, reason)

    def _give(self) -> None:
        """Gives the first requests to the workers, as far as memory allows.

        So many workers of the host are busy at a time, of whatever spec; a busy one gets one job
        ahead. Nobody overtakes: where the first request has to wait, so do all.
        """
        self._specs.flush()
        while self._has_memory():
            request = self._queue.pop(specs=self._specs.ready())
            if request is None:
                return
            key: PoolKey = ("seeding", request.seeding)
            may_begin = self._specs.num_busy() < self._workers
            if not self._specs.can_take(request.spec, key, may_begin=may_begin):
                self._queue.push(request)
                return
            self.num_begun += 1
            self._specs.assign(request.spec, key, job_of(request.make, (request,)))

    def _has_memory(self) -> bool:
        """Tells whether there is memory for one more batch; always if none is held."""
        sent_bytes = self._outbox.sent_bytes
        batch_bytes = self._outbox.batch_bytes or memory.UNKNOWN_BATCH_BYTES
        waiting = sent_bytes + (self.num_begun + 1) * batch_bytes
        return waiting <= self._max_bytes or not (self.num_begun or sent_bytes)

    def _deliver(self, result: Result, *, is_dry: bool) -> None:
        (request,) = result.job.key
        assert isinstance(request, Request)
        if not request.generation:
            self._credits.count(is_dry=is_dry)
            if result.tree is not None and self._credits.measured(
                result.wall_seconds, worker=result.worker
            ):
                self.share_credits()
        session = request.session
        if session.requests.get((request.epoch_id, request.number)) is request:
            del session.requests[request.epoch_id, request.number]
        if request.is_dropped:
            result.release()
            return
        if result.is_lost:
            self._log.event("batch_lost", number=request.number, reason=result.summary)
        self._outbox.result(request, result)
