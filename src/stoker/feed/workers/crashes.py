"""Samples that end or block the process that makes them, found in a batch one after the other.

A worker that dies leaves behind which sample it was making (`progress`). It may have died of
something else: the kernel's out-of-memory killer chooses among all processes. So that sample is
made alone, and only if a process dies of it again it is to blame. Where one call makes all samples
of a batch, the call is repeated; if it ends its process again, they are made one by one. So are
those of a worker that finds its channel closed when it has made its batch.
"""

import signal
from dataclasses import dataclass, replace
from typing import Literal

from stoker.feed.lost_samples import LostSample
from stoker.feed.sample_index import index_at
from stoker.feed.workers import pipe
from stoker.feed.workers.jobs import WorkerJob
from stoker.feed.workers.progress import SamplePlace
from stoker.feed.workers.splitting import plain_index
from stoker.records import FeedSettings

# Anyone may have sent these, twice by chance as well: such a sample has to end two lone processes.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# Deaths of one batch's workers that no sample is to blame for, after which it is lost.
MAX_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """What is done with samples that end or block their worker.

    Attributes:
        on_error: As in FeedSettings.
        timeout_seconds: Seconds that a sample may take; None: any. With `raise` the trainer's limit
            ends the run, and no worker.
    """

    on_error: Literal["raise", "skip", "replace"] = "raise"
    timeout_seconds: float | None = None

    @classmethod
    def of(cls, feed: FeedSettings) -> "LossRules":
        """Returns the rules of a run's settings."""
        return cls(on_error=feed.on_error, timeout_seconds=feed.sample_timeout_seconds)

    @property
    def is_tolerant(self) -> bool:
        """Whether such samples are left out."""
        return self.on_error != "raise"

    @property
    def limits_samples(self) -> bool:
        """Whether workers are killed whose sample takes too long."""
        return self.is_tolerant and self.timeout_seconds is not None

    def is_hanging(self, at: SamplePlace, now: float) -> bool:
        """Returns whether a sample takes so long that its worker is to be killed."""
        limit = self.timeout_seconds
        return self.is_tolerant and limit is not None and now - at.begun_at > limit


RAISING = LossRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """The end of a worker.

    Attributes:
        at: What it was making; None: no sample.
        words: How it ended, for use after "its process".
        status: Its exit code; negative: by that signal.
        is_hanging: It was killed, as `at` took too long.
    """

    at: SamplePlace | None
    words: str
    status: int | None = None
    is_hanging: bool = False

    @property
    def is_from_outside(self) -> bool:
        """Whether another process may have ended it."""
        return not self.is_hanging and self.status in _FROM_OUTSIDE

    @property
    def is_disconnected(self) -> bool:
        """Whether the user's code had closed its channel; at no sample: it was seen too late."""
        return self.status == pipe.DISCONNECTED


class LossSearch:
    """The search for samples of one batch that end or block their worker.

    Attributes:
        verdict: Why the batch cannot be made; empty: it is not known yet.
    """

    def __init__(self, job: WorkerJob, rules: LossRules) -> None:
        self._job = job
        self._rules = rules
        self._lost: list[LostSample] = []
        self._is_one_by_one = False
        self._has_made_each = False
        self._num_calls = 0
        self._num_alone = 0
        self._num_tries = 0
        self._last_words = ""
        self.verdict = ""

    def died(self, job: WorkerJob, death: WorkerDeath) -> WorkerJob | None:
        """Returns what has to be made next; None: the batch is lost, see `verdict`.

        Args:
            job: For this batch, or a part of it, that the worker had begun.
            death: Of the worker.
        """
        at = death.at
        if at is None and death.is_disconnected and not self._has_made_each:
            self._has_made_each = True
            return self._each_alone()
        if at is None:
            return self._try_again()
        if death.is_disconnected:
            # Nobody else can have closed it, and it was open before this sample.
            return self._found(at, death)
        if at.is_whole_call:
            return self._call_again(death)
        if not _is_made_alone(job, at):
            # Perhaps another sample than before: its deaths are counted from the first.
            self._num_alone = 0
            return self._alone(at)
        self._num_alone += 1
        if self._num_alone < self._num_needed(death):
            return self._alone(at)
        return self._found(at, death)

    def survived(self, job: WorkerJob) -> WorkerJob | None:
        """Returns what has to be made next, as a worker survived a sample, or all one by one."""
        assert isinstance(job.again, pipe.MakeAlone)
        # Made one by one they end no process: the call for all of them does.
        if self._is_one_by_one and not self._rules.is_tolerant:
            self.verdict = f"the call for all of its samples ends its process: {self._last_words}"
            return None
        return self._try_again()

    def _num_needed(self, death: WorkerDeath) -> int:
        is_doubtful = death.is_from_outside and self._rules.is_tolerant
        return 2 if is_doubtful else 1

    def _found(self, at: SamplePlace, death: WorkerDeath) -> WorkerJob | None:
        """Returns the order for the batch without that sample, which is to blame."""
        if not self._rules.is_tolerant:
            sample = self._sample_words(at)
            self.verdict = f"{sample} ends its process, also alone: {death.words}"
            return None
        error = "SampleTimeoutError" if death.is_hanging else "ProcessDiedError"
        self._lost.append(LostSample(at.place, at.attempt, error, death.words))
        return self._again()

    def _call_again(self, death: WorkerDeath) -> WorkerJob | None:
        self._num_calls += 1
        # The same call first: the process may have died of something else.
        if self._num_calls <= self._num_needed(death):
            return self._again()
        self._last_words = death.words
        self._is_one_by_one = True
        if self._rules.is_tolerant:
            return self._again()
        return self._each_alone()

    def _try_again(self) -> WorkerJob | None:
        self._num_tries += 1
        return self._again() if self._num_tries < MAX_TRIES else None

    def _again(self) -> WorkerJob:
        """Returns the job for the batch, without the samples that are to blame."""
        if not self._lost and not self._is_one_by_one:
            return self._job
        order = self._job.order
        return self._asked(pipe.MakeAgain(order, list(self._lost), self._is_one_by_one))

    def _alone(self, at: SamplePlace) -> WorkerJob:
        order = self._job.order
        lost = list(self._lost)
        return self._asked(pipe.MakeAlone(order, at.place, at.place + 1, at.attempt, lost))

    def _each_alone(self) -> WorkerJob:
        return self._asked(pipe.MakeAlone(self._job.order, 0, 0, lost=list(self._lost)))

    def _asked(self, again: pipe.MakeAgain | pipe.MakeAlone) -> WorkerJob:
        return replace(self._job, again=again)

    def _sample_words(self, at: SamplePlace) -> str:
        index = plain_index(self._job.order)
        if index is None:
            return f"the sample at place {at.place}"
        return f"sample {index_at(index, at.place, is_lone=at.is_lone)!r}"


def _is_made_alone(job: WorkerJob, at: SamplePlace) -> bool:
    """Returns whether a worker was to make that sample alone."""
    order = job.again
    # MakeAlone of several samples is the search in a call for all of them.
    if not isinstance(order, pipe.MakeAlone) or order.last != order.first + 1:
        return False
    # Else it died of one before it in its stretch, which is made as well.
    return order.first == at.place
