"""Puts answers that moto cannot give between boto3 and moto's server; the rest is real."""

import io
import tarfile
from collections.abc import Callable, Mapping

from botocore.awsrequest import AWSResponse

from stoker.platforms.aws import Aws, split_uri

Answer = Mapping[str, object]


def archive(**files: bytes) -> bytes:
    return tar(*((tarfile.TarInfo(name), content) for name, content in files.items()))


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as output:
        for info, content in members:
            info.size = len(content)
            output.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def has_object(aws: Aws, uri: str) -> bool:
    bucket, key = split_uri(uri)
    return aws.find("s3", "HeadObject", Bucket=bucket, Key=key) is not None


class Clock:
    """A clock on which time passes only during sleeps; `on_sleep` gets the time after each."""

    def __init__(self, on_sleep: Callable[[float], None] | None = None) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.on_sleep = on_sleep

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        if self.on_sleep:
            self.on_sleep(self.now)

    def __call__(self) -> float:
        return self.now


class Answers:
    """Overrides what a service answers, call by call, and counts the calls."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self.calls: list[tuple[str, Answer]] = []
        self._listening: set[str] = set()
        self._queued: dict[str, list[Answer]] = {}
        self._always: dict[str, Answer] = {}

    def count(self, operation: str) -> int:
        """Counts the calls of an operation since it was first overridden or watched."""
        return sum(name == operation for name, _ in self.calls)

    def watch(self, service: str, operation: str) -> None:
        self._listen(service, operation)

    def refuse(self, service, operation, code, message="no", *, times=1):
        error = {"Error": {"Code": code, "Message": message}}
        self._listen(service, operation)
        self._queued.setdefault(operation, []).extend([error] * times)

    def always_refuse(self, service: str, operation: str, code: str, message: str = "no") -> None:
        self._listen(service, operation)
        self._always[operation] = {"Error": {"Code": code, "Message": message}}

    def answer(self, service: str, operation: str, *answers: Answer) -> None:
        self._listen(service, operation)
        self._queued.setdefault(operation, []).extend(answers)

    def change(self, service, operation, change):
        def after(parsed: dict[str, object], **_: object) -> None:
            if "Error" not in parsed:
                change(parsed)

        events = self._aws.client(service).meta.events
        events.register(f"after-call.{_event_name(service)}.{operation}", after)

    def _listen(self, service: str, operation: str) -> None:
        if operation in self._listening:
            return
        self._listening.add(operation)
        events = self._aws.client(service).meta.events

        def before(params: dict[str, object], **_: object) -> tuple[AWSResponse, object] | None:
            self.calls.append((operation, params))
            queued = self._queued.get(operation)
            found = queued.pop(0) if queued else self._always.get(operation)
            if found is None:
                return None
            return AWSResponse("", 400 if "Error" in found else 200, {}, None), found

        events.register(f"before-call.{_event_name(service)}.{operation}", before)


def _event_name(service: str) -> str:
    return {"logs": "cloudwatch-logs"}.get(service, service)
