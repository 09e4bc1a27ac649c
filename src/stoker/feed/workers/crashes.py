"""Samples that end or block the process that makes them, found in a batch one after the other.

A worker that dies leaves behind which sample it was making (`progress`). It may have died of
something else: the kernel's out-of-memory killer chooses among all processes. So that sample is
made alone, and only if a process dies of it again it is to blame. Where one call makes all samples
of a batch, the call is repeated; if it ends its process again, they are made one by one. So are
those of a worker that finds itself unfit when it has made its batch: its channel is closed, or its
limits are too low. Where processes end at other samples than the one to blame, as a thread or a
timer of it ends them, the first half of the batch is made and waited for, then more or less of it.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from stoker.feed.doubts import ErrorTrust
from stoker.feed.lost_samples import ALL_SAMPLES, LostSample
from stoker.feed.sample_index import index_at, indices_of
from stoker.feed.wire.protocol import BadSample
from stoker.feed.workers import pipe
from stoker.feed.workers.jobs import WorkerJob
from stoker.feed.workers.progress import SamplePlace
from stoker.feed.workers.splitting import plain_index
from stoker.records import FeedSettings

# Anyone may have sent these, twice by chance as well: such a sample has to end two lone processes.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# Deaths of one batch's workers that no sample is to blame for, after which it is lost.
MAX_TRIES = 2
# That samples are waited for, one of which ends its process later.
_MAX_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """What is done with samples that end or block their worker.

    Attributes:
        on_error: As in FeedSettings.
        timeout_seconds: Seconds that a sample may take; None: any. With `raise` the trainer's limit
            ends the run, and no worker.
        trust: What earlier pools have found out of the dataset's errors; None: nothing.
    """

    on_error: Literal["raise", "skip", "replace"] = "raise"
    timeout_seconds: float | None = None
    trust: ErrorTrust | None = None

    @classmethod
    def of(cls, feed: FeedSettings, *, trust: ErrorTrust | None = None) -> "LossRules":
        """Returns the rules of a run's settings."""
        timeout = feed.sample_timeout_seconds
        return cls(on_error=feed.on_error, timeout_seconds=timeout, trust=trust)

    def trust_of_pool(self) -> ErrorTrust:
        """Returns what a pool begins with: what earlier ones have found out, if there were any."""
        return self.trust or ErrorTrust()

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
        is_nonsense: It was killed for bytes that are no message: it may be behind the sample that
            wrote them.
        failed: Bad samples of the batch that it was making.
        changed: What they had left in its process, as which it ended.
        seconds: For which it had worked on its job.
    """

    at: SamplePlace | None
    words: str
    status: int | None = None
    is_hanging: bool = False
    is_nonsense: bool = False
    failed: tuple[LostSample, ...] = ()
    changed: pipe.LeftChanged | None = None
    seconds: float = 0.0

    @property
    def is_from_outside(self) -> bool:
        """Whether another process may have ended it."""
        return not self.is_hanging and self.status in _FROM_OUTSIDE

    @property
    def is_samples(self) -> bool:
        """Whether a sample may be to blame."""
        return self.at is not None or self.is_unfit or self.is_nonsense

    @property
    def is_on_purpose(self) -> bool:
        """Whether it ended for another process to go on without what bad samples have left."""
        return self.changed is not None

    @property
    def is_unfit(self) -> bool:
        """Whether a sample had left it unable to go on; at no sample: it was seen too late."""
        return self.status in (pipe.DISCONNECTED, pipe.LIMITED)


class LossSearch:
    """The search for samples of one batch that end or block their worker.

    Attributes:
        verdict: Why the batch cannot be made; empty: it is not known yet.
    """

    def __init__(self, job: WorkerJob, rules: LossRules, trust: ErrorTrust | None = None) -> None:
        self._job = job
        self._rules = rules
        self._trust = trust or ErrorTrust()
        # Places of samples that failed in a process where others had failed before.
        self._doubted: set[int] = set()
        self._lost: list[LostSample] = []
        self._is_one_by_one = False
        self._has_made_each = False
        self._num_calls = 0
        self._num_alone = 0
        self._num_tries = 0
        # Places that end no process, and those behind: among these is one that ends it later.
        self._among: tuple[int, int] | None = None
        # What a worker had worked until it died, at most, and whether others may have ended one.
        self._wait_seconds = 0.0
        self._is_doubtful = False
        self._last_words = ""
        self.verdict = ""

    def died(self, job: WorkerJob, death: WorkerDeath) -> WorkerJob | None:
        """Returns what has to be made next; None: the batch is lost, see `verdict`.

        Args:
            job: For this batch, or a part of it, that the worker had begun.
            death: Of the worker.
        """
        at = None if self._is_late(death) else death.at
        self._wait_seconds = min(max(self._wait_seconds, death.seconds), _MAX_WAIT_SECONDS)
        self._is_doubtful = self._is_doubtful or death.is_from_outside
        if death.changed is not None:
            return self._without_changing(job, death.changed)
        self._last_words = death.words
        if death.failed:
            # They may have made it so: a lock that one has not released.
            self._note_failed({sample.place for sample in death.failed})
            return self._without(death.failed)
        if self._among is not None:
            return self._died_later(job, death)
        if at is None and death.is_unfit and not self._has_made_each:
            self._has_made_each = True
            return self._each_alone()
        if at is None:
            return self._try_again()
        if death.is_unfit:
            # Nobody else can have made it so, and it was fit before this sample.
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

    def _is_late(self, death: WorkerDeath) -> bool:
        """Returns whether its process may have gone on behind the sample that is searched for.

        Where the order of samples is not known, it is taken to have been at that one.
        """
        return death.is_nonsense and plain_index(self._job.order) is not None

    def survived(self, job: WorkerJob) -> WorkerJob | None:
        """Returns what has to be made next, as a worker survived a sample, or all one by one."""
        assert isinstance(job.again, pipe.MakeAlone)
        if self._among is not None:
            return self._lived_on(job.again)
        # Made one by one they end no process: the call for all of them does.
        if self._is_one_by_one and not self._rules.is_tolerant:
            return self._search_later()
        return self._try_again()

    def made(self, bad: Iterable[BadSample]) -> None:
        """Ends the search: the batch is made, with these bad samples."""
        self._note_failed({sample.place for sample in bad})
        if self._doubted:
            self._trust.refute()

    def _note_failed(self, places: set[int]) -> None:
        """Counts errors that were doubted, and came again in a fresh process."""
        again = self._doubted & places
        self._doubted -= again
        self._trust.confirm(len(again))

    def _died_later(self, job: WorkerJob, death: WorkerDeath) -> WorkerJob | None:
        """Goes on in the first samples, one of which has ended their process, perhaps later."""
        assert self._among is not None
        first, _ = self._among
        order = job.again
        if not isinstance(order, pipe.MakeAlone) or death.is_from_outside:
            return self._gives_up()
        if order.last == first + 1:
            return self._found(SamplePlace(first, 0, begun_at=0.0), death)
        self._among = first, order.last
        return self._halve()

    def _lived_on(self, order: pipe.MakeAlone) -> WorkerJob | None:
        """Goes on in the samples behind those that end no process."""
        assert self._among is not None
        _, last = self._among
        if order.last >= last:
            return self._gives_up()
        self._among = order.last, last
        return self._halve()

    def _halve(self) -> WorkerJob:
        """Returns the order for half of the samples that may be to blame, and those before them."""
        assert self._among is not None
        first, last = self._among
        middle = max(first + 1, (first + last) // 2)
        alone = pipe.MakeAlone(
            self._job.order, 0, middle, lost=[*self._lost], wait_seconds=self._wait_seconds
        )
        return self._asked(alone)

    def _gives_up(self) -> WorkerJob | None:
        """Says that no sample could be found; returns no order."""
        what = "no sample ends its process alone, its batch does"
        if self._is_one_by_one:
            what = "the call for all of its samples ends its process"
        self.verdict = f"{what}: {self._last_words}"
        return None

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
        return self._without([LostSample(at.place, at.attempt, error, death.words)])

    def _without_changing(self, job: WorkerJob, changed: pipe.LeftChanged) -> WorkerJob:
        """Returns what is made next where bad samples have left their process changed."""
        doubted = changed.doubted
        if doubted is None and not changed.samples:
            # It has not been done.
            return job
        self._note_failed({sample.place for sample in changed.samples})
        # A call for all samples is no sample; nor is what would replace one listed as bad.
        if doubted is not None and doubted.place != ALL_SAMPLES and not doubted.attempt:
            self._doubted.add(doubted.place)
        return self._without(changed.samples)

    def _without(self, samples: Iterable[LostSample]) -> WorkerJob:
        """Returns the order for the batch without some samples, and forgets what they have done."""
        for sample in samples:
            if sample.place == ALL_SAMPLES:
                self._is_one_by_one = True
            else:
                self._lost.append(sample)
        self._among = None
        self._has_made_each = False
        self._num_tries = self._num_alone = 0
        return self._again()

    def _call_again(self, death: WorkerDeath) -> WorkerJob | None:
        self._num_calls += 1
        # The same call first: the process may have died of something else.
        if self._num_calls <= self._num_needed(death):
            return self._again()
        self._is_one_by_one = True
        if self._rules.is_tolerant:
            return self._again()
        return self._each_alone()

    def _try_again(self) -> WorkerJob | None:
        self._num_tries += 1
        if self._num_tries < MAX_TRIES:
            return self._again()
        # Whoever kills workers would condemn any sample.
        return None if self._is_doubtful else self._search_later()

    def _search_later(self) -> WorkerJob | None:
        """Begins to look for a sample that ends its process later, while others are made."""
        index = plain_index(self._job.order)
        if index is None or self._is_doubtful:
            return self._gives_up()
        self._among = 0, len(indices_of(index))
        return self._halve()

    def _again(self) -> WorkerJob:
        """Returns the job for the batch, without the samples that are to blame.

        One worker makes all of it: in parts a sample would not be known as bad to whoever dies of
        what it has left broken.
        """
        if not (self._rules.is_tolerant or self._lost or self._is_one_by_one):
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
