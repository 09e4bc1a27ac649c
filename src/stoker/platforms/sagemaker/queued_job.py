"""A job in a queue of AWS Batch, followed to its end: its place, then its training jobs."""

from stoker.errors import NoCapacityError, PlatformError, ServiceError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobEnd
from stoker.platforms.sagemaker.batch_queue import (
    ServiceJob,
    describe,
    place_in_queue,
    terminate,
    terminate_command,
)
from stoker.platforms.sagemaker.job import SageMakerRun
from stoker.platforms.sagemaker.lineage import lineage_in
from stoker.platforms.sagemaker.logs import JobLogs
from stoker.platforms.sagemaker.queued_submit import queue_of
from stoker.platforms.sagemaker.request import SageMakerRequest
from stoker.platforms.sagemaker.submit import (
    TrainingJobState,
    await_found,
    find_job,
    job_state,
    lacks_capacity,
    no_capacity,
    no_quota,
)
from stoker.records.base import Document
from stoker.records.training import Lineage


class QueuedRun(SageMakerRun):
    """A submitted service job. Batch may give it several training jobs, one after the other."""

    def __init__(
        self, aws: Aws, *, request: SageMakerRequest, asked_name: str, service_job: ServiceJob
    ) -> None:
        super().__init__(aws, request=request, asked_name=asked_name)
        self._way_to_stop = terminate_command(service_job.id)
        self._queue = queue_of(request)
        self._entry = service_job
        self._said_of_queue = ""
        self._training_name = ""
        # When it began to wait without hosts.
        self._waiting_since = aws.clock()
        self._had_hosts = False
        # Whether the right to see the queue is missing, which is asked for once.
        self._is_queue_hidden = False

    @property
    def _has_ended(self) -> bool:
        # The training job may be stopping after the service job has ended.
        return self._entry.is_final and (self._state is None or self._state.is_final)

    @property
    def _logged_job(self) -> str:
        return self._training_name

    def _ask_to_stop(self) -> None:
        try:
            terminate(self._aws, self._entry.id)
        except ServiceError as err:
            if err.kind in ("denied", "stale", "away"):
                raise
            # It may have ended by now.
            if not describe(self._aws, self._entry.id).is_final:
                raise

    def _observe(self) -> bool:
        """Looks at the service job and its latest training job; returns whether there is news."""
        job = describe(self._aws, self._entry.id)
        has_news = self._say_place(job)
        if job.training_job != self._training_name:
            self._take_attempt(job.training_job)
        is_over = self._state is not None and self._state.is_final
        if job.training_job and not is_over:
            answer = self._described(job)
            if answer is not None:
                has_news = self._take(job_state(answer)) or has_news
        self._entry = job
        return has_news

    def _described(self, job: ServiceJob) -> Document | None:
        """Returns what SageMaker says of the latest training job.

        Batch deletes those that got no hosts, so that one may be missing; not one that succeeded.
        """
        if job.status == "SUCCEEDED":
            return await_found(self._aws, job.training_job)
        return find_job(self._aws, job.training_job)

    def _take_attempt(self, training_job: str) -> None:
        """Follows the log of another training job, after the rest of the former one's."""
        if self._training_name:
            self._look_at_logs()
        self._training_name = training_job
        self._state = None
        num_hosts = sum(group.count for group in self._job.groups)
        self._logs = JobLogs(self._aws, job_name=training_job, num_hosts=num_hosts)
        self._say(f"training job {training_job}")

    def _say_place(self, job: ServiceJob) -> bool:
        """Reports what is new of a service job's place; returns whether anything is."""
        words = f"queue {self._queue.name}: {job.status}"
        if job.status == "RUNNABLE":
            words += self._place_words(job)
        if job.reason:
            words += f": {job.reason}"
        if words == self._said_of_queue:
            return False
        self._said_of_queue = words
        self._say(words)
        return True

    def _place_words(self, job: ServiceJob) -> str:
        if self._is_queue_hidden:
            return ""
        try:
            place = place_in_queue(self._aws, self._queue, job)
        except ServiceError as err:
            # It waits all the same.
            self._is_queue_hidden = err.kind == "denied"
            return ""
        if place is None:
            return ", behind 100 others or more"
        return f", number {place} in the queue"

    def _look_at_state(self) -> bool:
        has_news = super()._look_at_state()
        if not self._has_ended:
            self._check_wait()
        return has_news

    def _check_wait(self) -> None:
        """Raises NoCapacityError for a job that will not start, or has waited for too long."""
        now = self._aws.clock()
        if self._entry.has_hosts:
            self._had_hosts = True
            self._waiting_since = now
            return
        queue = self._queue.name
        minutes = self._queue.wait_minutes
        if self._entry.can_never_start:
            raise self._without_hosts(f"the queue {queue} cannot start it: {self._entry.reason}")
        if now >= self._waiting_since + 60 * minutes:
            reason = self._entry.reason or self._entry.status
            what = f"no hosts after {minutes} min (sagemaker.queue.wait_minutes): {reason}"
            raise self._without_hosts(f"the queue {queue} gave it {what}")

    def _without_hosts(self, what: str) -> NoCapacityError:
        best = f"or take the next best plan: {self._job.next_best}"
        fix = "look at the queue's service environment: stoker doctor --aws WORKLOAD"
        error = NoCapacityError(
            what,
            where=f"service job {self.name} ({self._entry.id})",
            fix=f"{fix}, {best}" if self._job.next_best else fix,
        )
        # The queue has waited in stoker's place.
        error.may_pass = False
        error.had_hosts = self._had_hosts
        return error

    def _look_at_logs(self) -> bool:
        if self._training_name:
            return super()._look_at_logs()
        return False

    def _lineage(self, state: TrainingJobState) -> Lineage:
        return lineage_in(self._entry.tags, job_id=state.arn)

    def _conclude(self) -> JobEnd:
        job = self._entry
        spec = self._job
        is_failed = job.status == "FAILED"
        if is_failed and "ResourceLimitExceeded" in job.reason:
            self._delete_token()
            error = no_quota(
                job.reason, spec.groups, where=f"service job {job.id}", next_best=spec.next_best
            )
            raise self._final(error)
        if is_failed and (lacks_capacity(job.reason) or job.can_never_start):
            self._delete_token()
            error = no_capacity(
                job.reason, spec.groups, job_name=job.name, next_best=spec.next_best
            )
            raise self._final(error)
        if self._state is None:
            return self._without_training()
        # No step registers its model, which would be copied for that.
        self._asked_name = self._state.name
        try:
            return super()._conclude()
        except NoCapacityError as err:
            raise self._final(err) from err

    def _final(self, error: NoCapacityError) -> NoCapacityError:
        error.may_pass = False
        error.had_hosts = self._had_hosts
        return error

    def _without_training(self) -> JobEnd:
        """Returns the end of a service job that got no training job, or whose is gone."""
        self._delete_token()
        job = self._entry
        if job.is_terminated:
            return JobEnd(status="stopped", failure=job.reason or None)
        reason = job.reason or "AWS Batch gave no reason"
        return JobEnd(status="failed", failure=f"the queue {self._queue.name}: {reason}")

    def remaining(self) -> PlatformError | None:
        error = super().remaining()
        if error is not None:
            error.where = f"service job {self._entry.id}"
        return error
