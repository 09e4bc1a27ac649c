"""What the pump gets of local workers: batches and errors, to sessions."""

import time
import weakref

from stoker.feed import stream_answers
from stoker.feed.jobs import Result
from stoker.feed.observe import Observer
from stoker.feed.placing import Placing, error_in
from stoker.feed.schedule import Schedule
from stoker.feed.session import LOCAL, Outcome, Session
from stoker.feed.shared import Shared
from stoker.feed.streams import Streams


class LocalAnswers:
    """As `Answers`, for the workers of this process."""

    def __init__(self, shared: Shared, observer: Observer, placing: Placing) -> None:
        self._shared = shared
        self._observer = observer
        self._placing = placing

    def take(self, session: Session, fileno: int) -> None:
        """What came from a local worker."""
        with self._shared.lock:
            local = session.local
            results = [] if local is None else local.handle(fileno)
        for result in results:
            if isinstance(session.schedule, Streams):
                self._settle_local_stream(session, result)
            else:
                self._settle_local(session, session.schedule, result)
        with self._shared.lock:
            if local is not None and local is session.local:
                if local.credits:
                    session.schedule.grant(LOCAL, local.credits)
                else:
                    session.schedule.lost(LOCAL)
                session.stir()

    def _settle_local_stream(self, session: Session, result: Result) -> None:
        payload, result.payload = result.payload, None
        if payload is not None:
            weakref.finalize(payload, result.release).atexit = False
        size = 0 if payload is None else payload.nbytes

        def make(session: Session) -> Outcome:
            if result.error is not None:
                return Outcome(error=error_in(result.error))
            landed = payload
            if landed is not None and session.pins_on is not None:
                landed = self._placing.landed(landed, session.pins_on)
            return self._placing.decoded(result.tree or b"", landed, allow_pickle=True)

        answer = stream_answers.in_result(result, size)
        is_wanted = stream_answers.settle(self._shared, session, LOCAL, answer, make)
        if is_wanted is not None and result.error is None:
            self._observer.came(
                None,
                worker=result.worker,
                frame_bytes=size,
                cpu_seconds=result.cpu_seconds,
                busy_seconds=result.wall_seconds,
                is_wanted=is_wanted,
            )

    def _settle_local(self, session: Session, schedule: Schedule, result: Result) -> None:
        epoch, number = result.job.key
        assert isinstance(epoch, int)
        assert isinstance(number, int)
        payload, result.payload = result.payload, None
        if payload is not None:
            weakref.finalize(payload, result.release).atexit = False
        size = 0 if payload is None else payload.nbytes
        with self._shared.lock:
            if session.epoch != epoch or not session.is_busy:
                return
            if result.is_lost and not schedule.dropped(LOCAL, number):
                return
            is_wanted = schedule.arrived(LOCAL, number, frame_bytes=size, now=time.monotonic())
        if result.error is None:
            self._observer.came(
                None,
                worker=result.worker,
                frame_bytes=size,
                cpu_seconds=result.cpu_seconds,
                busy_seconds=result.wall_seconds,
                is_wanted=is_wanted,
            )
        if not is_wanted:
            return
        if result.error is not None:
            outcome = Outcome(error=error_in(result.error))
        else:
            if payload is not None and session.pins_on is not None:
                payload = self._placing.landed(payload, session.pins_on)
            outcome = self._placing.decoded(result.tree or b"", payload, allow_pickle=True)
        with self._shared.lock:
            if session.epoch == epoch and session.is_busy:
                session.deliver(number, outcome)
