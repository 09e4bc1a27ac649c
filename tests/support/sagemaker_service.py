"""SageMaker's training jobs, which moto lacks: they run until a test ends them.

It speaks the service's JSON protocol; a process finds it by AWS_ENDPOINT_URL_SAGEMAKER.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping

from support.http_server import Handler, http_server
from support.moto_server import ACCOUNT, REGION

FINAL = ("Completed", "Failed", "Stopped")
# A creation that is held is let go after this: the client has given up by then.
HOLD_SECONDS = 30.0
# Looks that see a job as Stopping.
STOPPING_LOOKS = 2


class SageMakerService:
    """The jobs by name, and the calls in order; while creations are held, none is answered."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.jobs: dict[str, dict[str, object]] = {}
        self.is_creation_held = False
        self.denied: set[str] = set()
        self.url = ""
        self._stopping: dict[str, int] = {}
        self._let_go = threading.Event()
        self._lock = threading.Lock()

    def end(self, name: str, status: str, *, reason: str = "") -> None:
        self.jobs[name].update(TrainingJobStatus=status, SecondaryStatus=status)
        if reason:
            self.jobs[name]["FailureReason"] = reason

    def let_go(self) -> None:
        self._let_go.set()

    def answer(self, operation: str, asked: dict[str, object]) -> tuple[int, dict[str, object]]:
        name = str(asked.get("TrainingJobName", ""))
        with self._lock:
            self.calls.append(operation)
            if operation in self.denied:
                words = f"User: me is not authorized to perform: sagemaker:{operation} on {name}"
                return 400, _error("AccessDeniedException", words)
            if operation == "ListTags":
                name = str(asked["ResourceArn"]).rpartition("/")[2]
                return 200, {"Tags": self.jobs[name]["Tags"]}
            if operation != "CreateTrainingJob":
                if name not in self.jobs:
                    return 400, _error("ValidationException", "Requested resource not found.")
                is_stop = operation == "StopTrainingJob"
                return self._stop(name) if is_stop else (200, self._look(name))
            if name in self.jobs:
                return 400, _error("ResourceInUse", "Training job names must be unique")
            arn = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{name}"
            self.jobs[name] = {
                **asked,
                "TrainingJobArn": arn,
                "TrainingJobStatus": "InProgress",
                "SecondaryStatus": "Training",
                "ModelArtifacts": {"S3ModelArtifacts": "s3://none/model.tar.gz"},
                "CreationTime": 1.7e9,
                "SecondaryStatusTransitions": [
                    {"Status": "Training", "StartTime": 1.7e9, "StatusMessage": "it runs"}
                ],
            }
        if self.is_creation_held:
            self._let_go.wait(HOLD_SECONDS)
        return 200, {"TrainingJobArn": arn}

    def _look(self, name: str) -> dict[str, object]:
        job = self.jobs[name]
        if name in self._stopping:
            self._stopping[name] -= 1
            if self._stopping[name] < 0:
                job.update(TrainingJobStatus="Stopped", SecondaryStatus="Stopped")
        return job

    def _stop(self, name: str) -> tuple[int, dict[str, object]]:
        status = self.jobs[name]["TrainingJobStatus"]
        if status in FINAL:
            words = f"The request was rejected because the training job is in status {status}."
            return 400, _error("ValidationException", words)
        self._stopping.setdefault(name, STOPPING_LOOKS)
        self.jobs[name].update(TrainingJobStatus="Stopping", SecondaryStatus="Stopping")
        return 200, {}


def _error(code: str, message: str) -> dict[str, object]:
    return {"__type": code, "message": message}


Asked = Callable[[str, bytes, Mapping[str, str]], tuple[int, Mapping[str, object]]]


@contextlib.contextmanager
def served(answer: Asked) -> Iterator[str]:
    """Answers calls by an operation, its body and headers while the block runs; yields the URL."""

    class Answering(Handler):
        # Head and body in one packet: else each answer waits 40 ms for an acknowledgement.
        wbufsize = 1 << 16

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]
            status, body = answer(operation, content, dict(self.headers))
            self.reply(status, json.dumps(body).encode(), "application/x-amz-json-1.1")

    with http_server(Answering) as url:
        yield url


@contextlib.contextmanager
def sagemaker_service() -> Iterator[SageMakerService]:
    service = SageMakerService()
    with served(lambda call, body, _: service.answer(call, json.loads(body))) as service.url:
        try:
            yield service
        finally:
            service.let_go()
