"""AWS Batch's service jobs, which moto lacks: states advance only when a test says so.

From botocore's model and Batch's user guide (service jobs). It refuses what they say is refused: an
unknown or disabled queue, one of containers, a share that the queue's policy lacks or wants, a
request that the model does not allow, and a second submission of a token, whatever it contains.
Names need not be unique; lists are by name without regard to capitals, in pages of two, and of
running jobs alone where nothing is asked for. The payload is not looked at before SageMaker gets
it, as in the service. Training jobs are those of `SageMakerService`.

Left out: fair shares and quotas (jobs start in their order), timeouts of attempts, retries other
than those for capacity and preemption, permissions but for `denied`, updates of priorities.
"""

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from botocore import xform_name
from botocore.validate import ParamValidator

from stoker.platforms.sagemaker.submit import FINAL
from stoker.platforms.service_limits import input_shape, over_limits
from support.http_server import Handler, http_server
from support.moto_server import ACCOUNT, REGION
from support.sagemaker_service import SageMakerService

_OPERATIONS = (
    *("SubmitServiceJob", "DescribeServiceJob", "ListServiceJobs", "TerminateServiceJob"),
    *("GetJobQueueSnapshot", "DescribeJobQueues", "DescribeServiceEnvironments"),
)
_PATHS = {f"/v1/{name.lower()}": name for name in _OPERATIONS}
_NEXT = {
    "SUBMITTED": "RUNNABLE",
    "RUNNABLE": "SCHEDULED",
    "SCHEDULED": "STARTING",
    "STARTING": "RUNNING",
    "RUNNING": "SUCCEEDED",
}
# What SageMaker says of the training job meanwhile.
_SECONDARY = {"SCHEDULED": "Pending", "STARTING": "Downloading", "RUNNING": "Training"}
_PAGE = 2
# A name of SageMaker has 63 characters: AWSBatch, the job's, an attempt's 32 digits.
_KEPT_OF_NAME = 23
NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Unable to provision requested compute resources"
)


class Refused(Exception):
    """A ClientException of the service."""


@dataclass(kw_only=True)
class Queue:
    """A job queue. `policy`: none, fair (share identifiers), or quota (quota shares)."""

    name: str
    kind: str = "SAGEMAKER_TRAINING"
    state: str = "ENABLED"
    policy: str = "none"
    capacity: int = 4
    jobs: list[str] = field(default_factory=list)

    @property
    def arn(self) -> str:
        return f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/{self.name}"


class BatchService:
    """Queues by name, service jobs by id, and the calls in order."""

    def __init__(self, sagemaker: SageMakerService) -> None:
        self.sagemaker = sagemaker
        self.queues: dict[str, Queue] = {}
        self.jobs: dict[str, dict[str, object]] = {}
        self.calls: list[str] = []
        self.denied: set[str] = set()
        # Answers that are lost after the service did what was asked.
        self.lost_answers: list[str] = []
        # Lists that do not show new jobs yet.
        self.stale_lists = 0
        self.url = ""
        self._tokens: set[str] = set()
        self._lock = threading.RLock()

    def add_queue(self, name: str, **about: object) -> Queue:
        self.queues[name] = Queue(name=name, **about)
        return self.queues[name]

    def only_job(self) -> dict[str, object]:
        (job,) = self.jobs.values()
        return job

    # ---- what the service does by itself

    def advance(self, job: dict[str, object], *, to: str) -> None:
        """Moves a job state by state, as the service would."""
        with self._lock:
            while job["status"] != to:
                self._step(job)

    def _step(self, job: dict[str, object]) -> None:
        status = _NEXT[str(job["status"])]
        if status == "SCHEDULED":
            self._dispatch(job)
            if job["status"] == "FAILED":
                return
        job["status"] = status
        if status in _SECONDARY:
            self._tell(job, _SECONDARY[status])
        if status == "SUCCEEDED":
            self.sagemaker.end(_training_job(job), "Completed")
            self._end_attempt(job, "Received status from SageMaker: Training job completed")

    def _dispatch(self, job: dict[str, object]) -> None:
        payload = json.loads(str(job["serviceRequestPayload"]))
        shape = input_shape("sagemaker", "CreateTrainingJob")
        if wrong := ParamValidator().validate(payload, shape).generate_report():
            self.fail(job, f"Received status from SageMaker: ValidationException: {wrong}")
            return
        name = f"AWSBatch{payload['TrainingJobName'][:_KEPT_OF_NAME]}{uuid.uuid4().hex}"
        tags = [{"Key": "aws:batch:job", "Value": str(job["jobId"])}]
        asked = {**payload, "TrainingJobName": name, "Tags": tags}
        status, answer = self.sagemaker.answer("CreateTrainingJob", asked)
        assert status == 200, answer
        resource = {"name": "TrainingJobArn", "value": answer["TrainingJobArn"]}
        job["latestAttempt"] = {"serviceResourceId": resource}
        job["attempts"].append({"serviceResourceId": resource})

    def _tell(self, job: dict[str, object], secondary: str) -> None:
        training = self.sagemaker.jobs[_training_job(job)]
        told = training["SecondaryStatusTransitions"]
        if training["SecondaryStatus"] == "Training" and len(told) == 1 and secondary == "Pending":
            told.clear()
        told.append(
            {
                "Status": secondary,
                "StartTime": 1.7e9 + len(told),
                "StatusMessage": f"{secondary} it",
            }
        )
        training["SecondaryStatus"] = secondary

    def lacks_capacity(self, job: dict[str, object]) -> None:
        """The training job gets no hosts: the service job waits again."""
        assert job["status"] == "SCHEDULED"
        reason = "CapacityError: Unable to provision requested ML compute capacity."
        self.sagemaker.end(_training_job(job), "Failed", reason=reason)
        self._requeue(job, NO_CAPACITY)

    def preempt(self, job: dict[str, object]) -> None:
        """The job makes room for another one, and waits again if it may."""
        assert job["status"] == "RUNNING"
        assert "quotaShareName" in job
        self.sagemaker.end(_training_job(job), "Stopped")
        told = job["preemptionConfiguration"]["preemptionRetriesBeforeTermination"]
        done = sum("preemption" in str(each.get("statusReason")) for each in job["attempts"])
        reason = "Cross-share preemption triggered to reclaim borrowed capacity"
        self._end_attempt(job, reason)
        if done >= told:
            job.update(status="FAILED", statusReason=reason)
        else:
            self._requeue(job, "")

    def _requeue(self, job: dict[str, object], reason: str) -> None:
        job.update(status="RUNNABLE", statusReason=reason)

    def fail(self, job: dict[str, object], reason: str) -> None:
        """The job fails, for a reason of SageMaker's or of the queue."""
        job.update(status="FAILED", statusReason=reason)
        self._end_attempt(job, reason)

    def fail_training(self, job: dict[str, object], reason: str) -> None:
        assert job["status"] in ("STARTING", "RUNNING")
        self.sagemaker.end(_training_job(job), "Failed", reason=reason)
        self.fail(job, f"Received status from SageMaker: {reason}")

    def _end_attempt(self, job: dict[str, object], reason: str) -> None:
        if job["attempts"]:
            job["attempts"][-1]["statusReason"] = reason

    # ---- calls

    def answer(self, operation: str, asked: dict[str, object]) -> tuple[int, dict[str, object]]:
        with self._lock:
            self.calls.append(operation)
            if operation in self.denied:
                words = f"User: me is not authorized to perform: batch:{operation}"
                return 403, {"__type": "AccessDeniedException", "message": words}
            try:
                _check(operation, asked)
                answered = getattr(self, f"_{xform_name(operation)}")(asked)
            except Refused as err:
                return 400, {"__type": "ClientException", "message": str(err)}
            if operation in self.lost_answers:
                self.lost_answers.remove(operation)
                return 500, {"__type": "ServerException", "message": "lost"}
            return 200, answered

    def _queue(self, name: object) -> Queue:
        found = self.queues.get(str(name).rpartition("/")[2])
        if found is None:
            raise Refused(f"JobQueue {name} does not exist")
        return found

    def _job(self, job_id: object) -> dict[str, object]:
        found = self.jobs.get(str(job_id).rpartition("/")[2])
        if found is None:
            raise Refused(f"Service job {job_id} does not exist")
        return found

    def _submit_service_job(self, asked: dict[str, object]) -> dict[str, object]:
        queue = self._queue(asked["jobQueue"])
        _check_submission(queue, asked)
        token = str(asked.get("clientToken") or uuid.uuid4())
        if token in self._tokens:
            raise Refused("A request with this clientToken was already received")
        self._tokens.add(token)
        job_id = str(uuid.uuid4())
        job = {key: value for key, value in asked.items() if key != "clientToken"}
        job |= {
            "jobId": job_id,
            "jobArn": f"arn:aws:batch:{REGION}:{ACCOUNT}:service-job/{job_id}",
            "jobQueue": queue.arn,
            "status": "SUBMITTED",
            "createdAt": 1_700_000_000_000 + len(self.jobs),
            "startedAt": 0,
            "attempts": [],
        }
        self.jobs[job_id] = job
        queue.jobs.append(job_id)
        return {key: job[key] for key in ("jobArn", "jobName", "jobId")}

    def _describe_service_job(self, asked: dict[str, object]) -> dict[str, object]:
        job = self._job(asked["jobId"])
        if job.get("isTerminated") and job["status"] != "FAILED":
            _, training = self.sagemaker.answer(
                "DescribeTrainingJob", {"TrainingJobName": _training_job(job)}
            )
            if training["TrainingJobStatus"] in FINAL:
                job.update(status="FAILED", statusReason=job["terminationReason"])
        return {key: value for key, value in job.items() if key != "terminationReason"}

    def _list_service_jobs(self, asked: dict[str, object]) -> dict[str, object]:
        queue = self._queue(asked["jobQueue"])
        if self.stale_lists:
            self.stale_lists -= 1
            return {"jobSummaryList": []}
        jobs = [self.jobs[each] for each in reversed(queue.jobs)]
        filters = asked.get("filters") or []
        if len(filters) > 1:
            raise Refused("Only one filter can be used at a time")
        if filters:
            (wanted,) = filters[0]["values"]
            jobs = [job for job in jobs if _is_named(str(job["jobName"]), wanted)]
        else:
            status = asked.get("jobStatus") or "RUNNING"
            jobs = [job for job in jobs if job["status"] == status]
        first = int(str(asked.get("nextToken") or 0))
        shown = ("jobId", "jobArn", "jobName", "createdAt", "status", "serviceJobType")
        page = [{key: job[key] for key in shown} for job in jobs[first : first + _PAGE]]
        more = {"nextToken": str(first + _PAGE)} if jobs[first + _PAGE :] else {}
        return {"jobSummaryList": page, **more}

    def _terminate_service_job(self, asked: dict[str, object]) -> dict[str, object]:
        job = self._job(asked["jobId"])
        if job["status"] in ("SUCCEEDED", "FAILED"):
            return {}
        job |= {"isTerminated": True, "terminationReason": asked["reason"]}
        if job["status"] in ("SUBMITTED", "PENDING", "RUNNABLE"):
            job.update(status="FAILED", statusReason=asked["reason"])
        else:
            name = {"TrainingJobName": _training_job(job)}
            self.sagemaker.answer("StopTrainingJob", name)
        return {}

    def _get_job_queue_snapshot(self, asked: dict[str, object]) -> dict[str, object]:
        queue = self._queue(asked["jobQueue"])
        waiting = [self.jobs[each] for each in queue.jobs]
        first = [{"jobArn": job["jobArn"]} for job in waiting if job["status"] == "RUNNABLE"]
        return {"frontOfQueue": {"jobs": first[:100], "lastUpdatedAt": 0}}

    def _describe_job_queues(self, asked: dict[str, object]) -> dict[str, object]:
        names = [str(name).rpartition("/")[2] for name in asked.get("jobQueues", [])]
        found = [queue for name, queue in self.queues.items() if name in names]
        policy = f"arn:aws:batch:{REGION}:{ACCOUNT}:scheduling-policy/p"
        return {
            "jobQueues": [
                {
                    "jobQueueName": queue.name,
                    "jobQueueArn": queue.arn,
                    "state": queue.state,
                    "status": "VALID",
                    "priority": 1,
                    "jobQueueType": queue.kind,
                    "serviceEnvironmentOrder": [
                        {"order": 1, "serviceEnvironment": f"{queue.name}-environment"}
                    ],
                    **({} if queue.policy == "none" else {"schedulingPolicyArn": policy}),
                }
                for queue in found
            ]
        }

    def _describe_service_environments(self, asked: dict[str, object]) -> dict[str, object]:
        names = [str(name).rpartition("/")[2] for name in asked.get("serviceEnvironments", [])]
        found = [queue for queue in self.queues.values() if f"{queue.name}-environment" in names]
        return {
            "serviceEnvironments": [
                {
                    "serviceEnvironmentName": f"{queue.name}-environment",
                    "serviceEnvironmentArn": f"{queue.arn}-environment",
                    "serviceEnvironmentType": "SAGEMAKER_TRAINING",
                    "state": "ENABLED",
                    "status": "VALID",
                    "capacityLimits": [
                        {"maxCapacity": queue.capacity, "capacityUnit": "NUM_INSTANCES"}
                    ],
                }
                for queue in found
            ]
        }


def _training_job(job: Mapping[str, object]) -> str:
    return str(job["latestAttempt"]["serviceResourceId"]["value"]).rpartition("/")[2]


def _is_named(name: str, wanted: str) -> bool:
    name, wanted = name.lower(), wanted.lower()
    return name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted


def _check(operation: str, asked: Mapping[str, object]) -> None:
    shape = input_shape("batch", operation)
    if wrong := ParamValidator().validate(asked, shape).generate_report():
        raise Refused(f"Error executing request, Exception : {wrong}")
    if over := [f"{each.place} {each.what}" for each in over_limits(asked, shape)]:
        raise Refused(f"Error executing request, Exception : {over}")


def _check_submission(queue: Queue, asked: Mapping[str, object]) -> None:
    if queue.kind != asked["serviceJobType"]:
        raise Refused(f"JobQueue {queue.name} is of the type {queue.kind}")
    if queue.state != "ENABLED":
        raise Refused(f"JobQueue {queue.name} is disabled")
    if (queue.policy == "fair") != ("shareIdentifier" in asked):
        raise Refused("shareIdentifier and a fair-share policy need each other")
    if (queue.policy == "quota") != ("quotaShareName" in asked):
        raise Refused("quotaShareName and a quota-share policy need each other")
    name = str(asked["jobName"])
    if len(name) > 128 or not name.replace("-", "").replace("_", "").isalnum():
        raise Refused(f"jobName {name} should match valid pattern")
    if not 0 <= int(asked.get("schedulingPriority", 0)) <= 9999:
        raise Refused("schedulingPriority must be between 0 and 9999")
    if not 1 <= int(asked.get("retryStrategy", {"attempts": 1})["attempts"]) <= 10:
        raise Refused("attempts must be between 1 and 10")
    try:
        payload = json.loads(str(asked["serviceRequestPayload"]))
    except ValueError:
        payload = None
    if not isinstance(payload, dict):
        raise Refused("serviceRequestPayload is not a JSON object")


@contextlib.contextmanager
def batch_service(sagemaker: SageMakerService) -> Iterator[BatchService]:
    """Serves while the block runs; a process finds it by AWS_ENDPOINT_URL_BATCH."""
    service = BatchService(sagemaker)

    class Answering(Handler):
        wbufsize = 1 << 16

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            status, body = service.answer(_PATHS[self.path], asked)
            self.reply(status, json.dumps(body).encode())

    with http_server(Answering) as service.url:
        yield service
