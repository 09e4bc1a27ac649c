"""Makes one job for each platform, with the same things for a test to do with it.

Each job has a platform and a `spec` that it can plan, and `hosts`: name to group, the leader first,
known once they run. `kept` is what anybody may read of a job while it runs, `started` an identity
of each job that was started, `left` what must be gone after a stop, `wrong_uri` a channel's that
the platform cannot read, and `gone` the end of a job that vanished, with words of it ("error" where
it cannot be followed). `fail` ends the trainer with EXIT_CODE, for REASON; `deny` makes starting
impossible, and returns words of the reason.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.environment import RunSettings
from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobEnd, JobSpec, LogLine, Run
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.local import LocalPlatform
from stoker.platforms.sagemaker import SageMakerPlatform
from support import kubernetes_jobs, sagemaker_job
from support.aws_answers import Clock, has_object
from support.builders import clusters
from support.cloudwatch import put_lines
from support.kubernetes_api import KubernetesApi, kube_config, kubernetes_api
from support.local_job import PATIENT, is_running, launchers, marked_processes, until
from support.moto_server import REGION, AwsServer
from support.sagemaker_service import sagemaker_service

# A local run's hosts end with the process that started them: a later attempt finds none to adopt.
LOCAL_JOBS = ("local",)
SERVICE_JOBS = ("sagemaker", "jobset", "trainer")

NAME = "mnist-1"
EXIT_CODE = 7
REASON = "ValueError: no such layer"


class Followed:
    """A followed run, whose lines a separate thread reads, as `train` does."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lines: list[LogLine] = []
        self._end: JobEnd | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="reader")
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self.run.lines():
                self.lines.append(line)
            self._end = self.run.wait()
        except BaseException as err:
            self.error = err

    def texts(self, host: str) -> list[str]:
        return [line.text for line in list(self.lines) if line.host == host]

    @property
    def status(self) -> str:
        return "\n".join(self.texts("status"))

    def ended(self) -> JobEnd:
        self._thread.join(30.0)
        assert not self._thread.is_alive(), "it did not end"
        if self.error:
            raise self.error
        return self._end

    def failed(self) -> PlatformError:
        with pytest.raises(PlatformError) as caught:
            self.ended()
        return caught.value


def follower() -> Iterator[Any]:
    """Follows runs, and stops those that still run at the end: the body of a fixture."""
    begun: list[Followed] = []

    def make(run: Run) -> Followed:
        begun.append(Followed(run))
        return begun[-1]

    yield make
    for followed in begun:
        followed.run.stop()
        with contextlib.suppress(Exception):
            followed.ended()


# The leader's script does what the test's file says; a data host runs no script.
ORDERS = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["STOKER_TEST_DIR"])
def stopped(*_):
    with (folder / "stops").open("a") as stops:
        stops.write("stop\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, stopped)
(folder / "began").touch()
done = 0
while True:
    orders = (folder / "orders").read_text().split("\\n")[:-1]
    for order in orders[done:]:
        what, _, text = order.partition(" ")
        if what == "end":
            sys.exit(0)
        if what == "fail":
            print(text, file=sys.stderr, flush=True)
            sys.exit(CODE)
        print(text, flush=True)
    done = len(orders)
    time.sleep(0.01)
""".replace("CODE", str(EXIT_CODE))


class LocalPlatformJob:
    wrong_uri = "s3://bucket/mnist"
    gone = ("failed", "ended with signal 9")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None
        (folder / "script.py").write_text(ORDERS)
        (folder / "orders").touch()
        self.platform = LocalPlatform()
        self.spec = JobSpec(
            name=NAME,
            command=("python", str(folder / "script.py")),
            groups=clusters("local.c1", "local.c1"),
            run_dir=folder / "run",
            environment={"STOKER_TEST_DIR": str(folder)},
            settings=RunSettings(feed=PATIENT),
        )
        self.hosts = {"algo-2": "dnn", "algo-1": "data"}

    def calls(self) -> Sequence[str]:
        return [str(path) for path in self.spec.run_dir.rglob("*")]

    def kept(self) -> Sequence[str]:
        files = [path for path in self.spec.run_dir.rglob("*") if path.is_file()]
        return [path.read_text(errors="replace") for path in files if path.name != "token"]

    def started(self) -> Sequence[str]:
        marked = marked_processes(self.spec.run_dir.absolute())
        found = []
        for pid in marked:
            with contextlib.suppress(psutil.Error):
                # Launchers have no parent in the run.
                if psutil.Process(pid).ppid() not in marked:
                    found.append(str(pid))
        return sorted(found)

    def stops(self) -> int:
        stops = self._folder / "stops"
        return len(stops.read_text().splitlines()) if stops.exists() else 0

    def left(self) -> Sequence[str]:
        token = [str(path) for path in self.spec.run_dir.glob("token")]
        return [*map(str, marked_processes(self.spec.run_dir.absolute())), *token]

    def token(self, run: Run) -> str:
        return (self.spec.run_dir / "token").read_text()

    def run_hosts(self, run: Run) -> None:
        self._run = run
        until((self._folder / "began").exists, what="the script runs")
        log = self.spec.run_dir / "logs" / "data-algo-1.log"
        until(lambda: "run_joined" in log.read_text(), what="the data host is there")

    def say(self, *texts: str) -> None:
        self._order(*(f"say {text}" for text in texts))

    def succeed(self) -> None:
        self._order("end")

    def fail(self) -> None:
        self._order(f"fail {REASON}")

    def vanish(self) -> None:
        for pid in launchers(self._run).values():
            psutil.Process(pid).kill()
        until(lambda: not any(map(is_running, launchers(self._run).values())), what="they are gone")

    def deny(self) -> str:
        self.spec.run_dir.mkdir()
        (self.spec.run_dir / "logs").write_text("a file where the folder of logs would be")
        return "File exists"

    def _order(self, *orders: str) -> None:
        with (self._folder / "orders").open("a") as file:
            file.write("".join(f"{order}\n" for order in orders))


class SageMakerJob:
    """Jobs are those of a service with SageMaker's protocol; S3 and logs are moto's."""

    wrong_uri = "file:///data/mnist"
    gone = ("error", "sagemaker:DescribeTrainingJob")

    def __init__(self, folder: Path, server: AwsServer, service: Any) -> None:
        self._service = service
        server.make_bucket("stoker-test")
        clock = Clock(on_sleep=lambda _: time.sleep(0.01))
        self.platform = SageMakerPlatform(aws=Aws(region=REGION, sleep=clock.sleep, clock=clock))
        self._aws = Aws(region=REGION)
        settings = sagemaker_job.settings(output_uri="s3://stoker-test/out", source=None)
        self.spec = sagemaker_job.job(run_dir=folder / "run", sagemaker=settings)
        self.hosts = {"algo-2": "dnn", "algo-1": "data", "algo-3": "data"}
        self._at = 0
        self._job = NAME

    def calls(self) -> Sequence[str]:
        listed = self._aws.call("s3", "ListObjectsV2", Bucket="stoker-test").get("Contents")
        return [*self._service.calls, *map(str, listed if isinstance(listed, list) else ())]

    def kept(self) -> Sequence[str]:
        return [json.dumps(job) for job in self._service.jobs.values()]

    def started(self) -> Sequence[str]:
        assert self._service.calls.count("CreateTrainingJob") == len(self._service.jobs)
        return list(self._service.jobs)

    def stops(self) -> int:
        return int(self._service.calls.count("StopTrainingJob"))

    def left(self) -> Sequence[str]:
        running = [
            name
            for name, job in self._service.jobs.items()
            if job["TrainingJobStatus"] in ("InProgress", "Stopping")
        ]
        tokens = [
            uri
            for uri in map(token_uri, self._service.jobs or [NAME])
            if has_object(self._aws, uri)
        ]
        return [*running, *tokens]

    def token(self, run: Run) -> str:
        return self._aws.read_object(token_uri(run.name)).decode()

    def run_hosts(self, run: Run) -> None:
        # One that has been stopped keeps its name: the next one has another.
        self._job = run.name
        for host, group in self.hosts.items():
            role = f"group={group} role={group} type=x leader=algo-2"
            said = f"stoker 2026-11-01T12:00:00.000Z run={run.name} host={host} host_role {role}"
            put_lines(self._aws, host, said, job=self._job)

    def say(self, *texts: str) -> None:
        leader, *others = self.hosts
        for text in texts:
            self._at += 1
            put_lines(self._aws, leader, (self._at, text), job=self._job)
        for host in others:
            put_lines(self._aws, host, f"{host} serves", job=self._job)

    def succeed(self) -> None:
        self._service.end(self._job, "Completed")

    def fail(self) -> None:
        reason = f"AlgorithmError: {REASON}, exit code: {EXIT_CODE}"
        self._service.end(self._job, "Failed", reason=reason)

    def vanish(self) -> None:
        del self._service.jobs[self._job]

    def deny(self) -> str:
        self._service.denied.add("CreateTrainingJob")
        return "permission sagemaker:CreateTrainingJob is missing"


def token_uri(job: str) -> str:
    return f"s3://stoker-test/out/{job}/stoker_token/token"


class KubernetesJob:
    """Runs a JobSet or a TrainJob at an API server's double."""

    wrong_uri = "file:///data/mnist"
    gone = ("stopped", "the job was deleted")

    def __init__(self, folder: Path, api: KubernetesApi, *, api_name: str) -> None:
        self._api = api
        self._plural = {"jobset": "jobsets", "trainer": "trainjobs"}[api_name]
        cluster = ClusterApi(sleep=lambda seconds: time.sleep(min(seconds, 0.05)))
        self.platform = KubernetesPlatform(cluster=cluster)
        spec = kubernetes_jobs.job(name=NAME, settings={"api": api_name})
        self.spec = dataclasses.replace(spec, run_dir=folder / "run")
        leader = f"{NAME}-{ {'jobset': 'dnn', 'trainer': 'node'}[api_name] }-0-0"
        self.hosts = {leader: "dnn", f"{NAME}-data-0-0": "data", f"{NAME}-data-0-1": "data"}

    def calls(self) -> Sequence[str]:
        return list(self._api.calls)

    def kept(self) -> Sequence[str]:
        plurals = (self._plural, "configmaps", "pods", "trainingruntimes", "events")
        found = [self._api.get(p, name) for p in plurals for name in self._api.names(p)]
        return [*self._api.calls, *map(json.dumps, found)]

    def started(self) -> Sequence[str]:
        names = self._api.names(self._plural)
        return [self._api.get(self._plural, name)["metadata"]["uid"] for name in names]

    def stops(self) -> int:
        return self._api.count("DELETE")

    def left(self) -> Sequence[str]:
        plurals = (self._plural, "secrets", "configmaps", "pods", "trainingruntimes")
        return [name for plural in plurals for name in self._api.names(plural)]

    def token(self, run: Run) -> str:
        return self._api.token(run.name)

    def run_hosts(self, run: Run) -> None:
        self._api.run_pods(NAME)

    def say(self, *texts: str) -> None:
        leader, *others = self.hosts
        self._api.say(self._pod(leader), *texts)
        for host in others:
            self._api.say(self._pod(host), f"{host} serves")

    def succeed(self) -> None:
        self._api.end_pod(self._pod(next(iter(self.hosts))))
        self._api.end_job(NAME)

    def fail(self) -> None:
        self._api.end_pod(self._pod(next(iter(self.hosts))), EXIT_CODE, message=REASON)
        self._api.end_job(NAME, "Failed", message="jobset failed due to one or more job failures")

    def vanish(self) -> None:
        self._api.remove(self._plural, NAME)

    def deny(self) -> str:
        self._api.denied.add(("create", self._plural))
        return f"create {self._plural}"

    def _pod(self, host: str) -> str:
        (found,) = [name for name in self._api.names("pods") if name.startswith(f"{host}-")]
        return found


def use_kube_config(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The client reads KUBECONFIG when it is imported."""
    location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(location, str(path), raising=True)
    for name in ("POD_NAME", "POD_UID", "POD_RUN_ID", "KFP_POD_NAME", "KFP_POD_UID"):
        monkeypatch.delenv(name, raising=False)
    # The cluster is near, and nothing is claimed of how long a back-off or a tick is.
    monkeypatch.setattr("stoker.platforms.kubernetes.pod_log.DELAY_SECONDS", 0.02)
    monkeypatch.setattr("stoker.platforms.kubernetes.run.POLL_SECONDS", 0.1)
    monkeypatch.setattr("stoker.platforms.kubernetes.run.TICK_SECONDS", 0.05)


@contextlib.contextmanager
def platform_job(name, folder, request, monkeypatch):
    if name == "local":
        yield LocalPlatformJob(folder)
    elif name == "sagemaker":
        server: AwsServer = request.getfixturevalue("aws_server")
        with sagemaker_service() as service:
            monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", service.url)
            yield SageMakerJob(folder, server, service)
    else:
        with kubernetes_api() as api:
            use_kube_config(monkeypatch, kube_config(folder, api.url))
            yield KubernetesJob(folder, api, api_name=name)
