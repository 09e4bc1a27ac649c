"""The script's own steps: its loader's own batches, with all that is seen beside them."""

import time
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from stoker.feed.timeline import Steps, Timeline
from stoker.profile import batches
from stoker.profile.cache import Beside, Cache
from stoker.profile.clocks import children_cpu_seconds, machine_cpu_seconds
from stoker.profile.evidence import Evidence
from stoker.profile.facts import length_of
from stoker.profile.first_words import FirstWords, SoFar
from stoker.profile.steps import AsIsSteps
from stoker.profile.watch import Watch

# Of slow steps fewer are left out: by this share of the budget the warm-up is over.
_WARM_UP_SHARE = 0.08


class Reading:
    """Reads the main loader as the script would, and keeps batches to be replayed.

    Args:
        budget_seconds: Of the whole profile.
        say: Told early what is known, in a thread of its own.

    Attributes:
        steps: Of the main loader; None before its first batch.
        cache: Its first batches.
        beside: Loaders that are read within its steps.
    """

    def __init__(self, *, budget_seconds: float, say: Callable[[SoFar], None]) -> None:
        self.steps: AsIsSteps | None = None
        self.cache = Cache()
        self.beside = Beside()
        self._budget = budget_seconds
        self._first_words = FirstWords(say)
        self._watch = Watch()
        self._rows: Steps | None = None
        self._epochs = 0
        self._seen_before = 0
        self._began = 0.0

    @property
    def elapsed_seconds(self) -> float:
        """Since the first batch of the main loader was asked for."""
        return time.monotonic() - self._began if self.steps else 0.0

    def begin(self, loader: "DataLoader[object]", *, ranks: int) -> AsIsSteps:
        """The main loader is read from now on, by so many ranks in step."""
        self.steps = AsIsSteps(
            workers=loader.num_workers,
            children_cpu=children_cpu_seconds,
            machine_cpu=machine_cpu_seconds,
            batches=self._seen_before,
            epoch_batches=length_of(loader),
            warm_up_seconds=_WARM_UP_SHARE * self._budget,
            clock_batches=min(2, ranks),
        )
        self._began = time.monotonic()
        return self.steps

    def begin_anew(self, *, delivered: int) -> None:
        """Another loader is the main one, which delivered so many batches in this pass."""
        self.end_pass()
        self.steps = None
        self.cache = Cache()
        self.beside = Beside()
        self._watch = Watch()
        self._seen_before = max(0, delivered)

    def next_batch(
        self, inner: Iterator[object], steps: AsIsSteps, *, timeline: Timeline
    ) -> object:
        """The main loader's next batch; call `goes_on` before the script has it.

        Raises:
            StopIteration: As `inner`.
        """
        if self._rows is None:
            self._rows = timeline.epoch(loader=0, epoch=self._epochs)
            self._epochs += 1
        self._rows.ask()
        self._watch.asked()
        asked = time.monotonic()
        self._first_words.asked(now=asked)
        thread_before = time.thread_time()
        batch = next(inner)
        receive = time.thread_time() - thread_before
        now = time.monotonic()
        wait = now - asked + self.beside.take_waited()
        self._first_words.got(now=now, wait=wait)
        self._rows.got(batches.num_samples(batch))
        steps.got(now=now, cpu=time.process_time(), wait=wait, receive=receive)
        self._watch.got(now=now, wait=wait, receive=receive, is_counted=steps.count > 0)
        self.cache.add(batch)
        return batch

    def goes_on(self) -> None:
        """The script has its batch: what was looked at and kept meanwhile is none of its step."""
        if self.steps is not None:
            self.steps.goes_on(now=time.monotonic(), cpu=time.process_time())

    def pause(self) -> None:
        """Workers may be forked now: nobody watches."""
        self._watch.pause()

    def end_pass(self) -> None:
        """The pass is over, or was given up; may be called twice."""
        # What follows takes time, too, and must not count.
        if self.steps is not None:
            self.steps.epoch_ended()
        self._watch.pass_ended()
        self._first_words.pass_ended()
        self.beside.take_waited()
        if self._rows is not None:
            self._rows.end()
            self._rows = None

    def evidence(self) -> Evidence:
        """What was seen beside the steps, once the last pass has ended."""
        return self._watch.result()

    def has_better_words(self) -> None:
        """Nothing is to be said early any more; may be called twice."""
        self._first_words.cancel()
