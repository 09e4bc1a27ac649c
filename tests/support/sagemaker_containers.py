"""Runs the jobs of SageMaker's requests as real processes: containers without an engine.

A host is a process tree with its own /opt/ml, process numbers and network; what the request names
in S3 is downloaded before and uploaded afterwards, as the service does it. Where the service would
refuse or fail, so do these; what they have no answer for fails the test.
"""

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import psutil

from support.cloudwatch import put_lines
from support.container_words import Container, bound
from support.documents import Json
from support.moto_server import ACCOUNT, REGION, AwsServer
from support.opt_ml import lay_out_ml, resource_config
from support.pod_network import PodNetwork, Sandbox
from support.processes import started

# Of one job, its image's start included: what hangs is a failure of the test.
JOB_SECONDS = 100.0
# After a host has failed, for what the others still have to say.
GRACE_SECONDS = 20.0
PROCESSING = PurePosixPath("/opt/ml/processing")
# A training's script may wait for it, see `Containers.lets_go`.
GO = "/opt/ml/go"

Body = Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended; `kind` is an exception for retry policies, none of the script itself."""

    status: str
    reason: str = ""
    kind: str = ""
    model_uri: str | None = None


class Containers:
    """Runs processing and training jobs.

    `read` has the keys that each job read from S3, by input, channel or `checkpoints`. Once
    `lets_go` is true, the file GO is made on the hosts of trainings.
    """

    def __init__(self, folder: Path, server: AwsServer) -> None:
        self._folder = folder
        self._s3 = server.client("s3")
        self._server = server
        self.environ: Mapping[str, str] = {}
        self.read: dict[str, dict[str, list[str]]] = {}
        self.lets_go: Callable[[], bool] = lambda: True

    def log(self, job: str) -> str:
        """Returns what the hosts of a job wrote, or of all jobs whose names match a pattern."""
        return "".join(file.read_text() for file in sorted(self._folder.glob(f"{job}/*.log")))

    def process(self, request: Body, *, name: str, lose_when: Callable[[], bool] | None) -> Ended:
        """Runs a processing job; where `lose_when` comes true first, its host is lost."""
        read = self.read.setdefault(name, {})
        ml = _made(self._folder / name / "algo-1")
        for item in as_list(request.get("ProcessingInputs")):
            source = item["S3Input"]
            assert source["S3InputMode"] == "File", "only files are known here"
            place = ml / PurePosixPath(source["LocalPath"]).relative_to("/opt/ml")
            assert PurePosixPath(source["LocalPath"]).is_relative_to(PROCESSING)
            try:
                keys = self._download(source["S3Uri"], place)
            except NoObjectsError as err:
                return Ended(status="Failed", reason=f"ClientError: {err}")
            read[item["InputName"]] = keys
        outputs = as_list(request.get("ProcessingOutputConfig").get("Outputs"))
        for item in outputs:
            _made(ml / _below_ml(item["S3Output"]["LocalPath"]))
        app = request["AppSpecification"]
        network = request.get("NetworkConfig") or {}
        process = self._start(
            ml,
            [*app["ContainerEntrypoint"], *app.get("ContainerArguments", ())],
            log=self._folder / name / "algo-1.log",
            environ={
                # The service tells the region, but not in the variable that boto3 reads.
                **{k: v for k, v in self._server.env.items() if k != "AWS_DEFAULT_REGION"},
                **self.environ,
                "STOKER_POLL_SECONDS": "0.5",
                **{k: str(v) for k, v in (request.get("Environment") or {}).items()},
            },
            head=["unshare", "--net"] if network.get("EnableNetworkIsolation") else [],
        )
        code = _ended(process, lose_when=lose_when)
        for item in outputs:
            target = item["S3Output"]
            if target["S3UploadMode"] == "Continuous" or code == 0:
                self._upload(ml / _below_ml(target["LocalPath"]), target["S3Uri"])
        if code is None:
            kind = "SageMaker.JOB_INTERNAL_ERROR"
            return Ended(status="Failed", reason="InternalServerError: try again", kind=kind)
        words = f"AlgorithmError: , exit code: {code}"
        return Ended(status="Completed") if code == 0 else Ended(status="Failed", reason=words)

    def train(self, request: Body, *, is_stopped: Callable[[], bool]) -> Ended:
        name = request["TrainingJobName"]
        with PodNetwork(domain="sagemaker") as network:
            try:
                hosts = self._lay_out(request, network)
            except NoObjectsError as err:
                return Ended(status="Failed", reason=f"ClientError: {err}")
            ended = self._run(request, hosts, is_stopped=is_stopped)
        for host in hosts:
            log = (self._folder / name / f"{host.name}.log").read_text(errors="replace")
            put_lines(self._server, host.name, *log.splitlines(), job=name)
        return ended

    def _lay_out(self, request: Body, network: PodNetwork) -> list["_Host"]:
        name = request["TrainingJobName"]
        read = self.read.setdefault(name, {})
        resources = request["ResourceConfig"]
        whole = {"InstanceGroupName": "homogeneousCluster", **resources}
        hosts, members, kinds = [], {}, {}
        for group in as_list(resources.get("InstanceGroups")) or [whole]:
            group_name = group["InstanceGroupName"]
            kinds[group_name] = group["InstanceType"]
            for _ in range(group["InstanceCount"]):
                host = f"algo-{len(hosts) + 1}"
                members.setdefault(group_name, []).append(host)
                ml = _made(self._folder / name / host)
                hosts.append(_Host(host, group_name, ml, network.sandbox(host)))
        lines = ["127.0.0.1 localhost\n", *(f"{h.sandbox.address} {h.name}\n" for h in hosts)]
        (self._folder / name / "etc-hosts").write_text("".join(lines))
        for host in hosts:
            mine = []
            for channel in as_list(request.get("InputDataConfig")):
                source = channel["DataSource"]["S3DataSource"]
                only = source.get("InstanceGroupNames")
                if only and host.group not in only:
                    continue
                assert str(channel.get("InputMode") or "File") == "File", "only files are known"
                assert source.get("S3DataDistributionType") == "FullyReplicated"
                called = channel["ChannelName"]
                mine.append(called)
                place = host.ml / "input" / "data" / called
                read[called] = self._download(source["S3Uri"], place)
            config = resource_config(host.name, members, interface="eth0", kinds=kinds)
            parameters = request.get("HyperParameters")
            lay_out_ml(host.ml, config, channels=mine, hyperparameters=parameters)
            kept = request.get("CheckpointConfig") or {}
            if kept:
                place = _made(host.ml / _below_ml(kept.get("LocalPath", "/opt/ml/checkpoints")))
                with contextlib.suppress(NoObjectsError):
                    read["checkpoints"] = self._download(kept["S3Uri"], place)
                host.found = {f: f.read_bytes() for f in place.rglob("*") if f.is_file()}
        return hosts

    def _run(self, request, hosts, *, is_stopped) -> Ended:
        name = request["TrainingJobName"]
        algorithm = request["AlgorithmSpecification"]
        command = [*algorithm["ContainerEntrypoint"], *algorithm.get("ContainerArguments", ())]
        environ = {
            **self.environ,
            "TRAINING_JOB_NAME": name,
            "TRAINING_JOB_ARN": job_arn(name),
            **{k: str(v) for k, v in (request.get("Environment") or {}).items()},
        }
        for host in hosts:
            host.process = self._start(
                host.ml,
                command,
                log=self._folder / name / f"{host.name}.log",
                environ=environ,
                head=host.sandbox.enter,
                etc_hosts=self._folder / name / "etc-hosts",
            )
        was_stopped = _all_ended(hosts, is_stopped=is_stopped, lets_go=self.lets_go)
        kept = request.get("CheckpointConfig") or {}
        output = f"{str(request['OutputDataConfig']['S3OutputPath']).rstrip('/')}/{name}"
        for host in hosts:
            if kept:
                place = host.ml / _below_ml(kept.get("LocalPath", "/opt/ml/checkpoints"))
                # What a host only got is not sent back, over what another one has saved meanwhile.
                self._upload(place, kept["S3Uri"], unless=host.found)
        self._pack([h.ml / "output" / "data" for h in hosts], f"{output}/output/output.tar.gz")
        failed = next((h for h in hosts if h.code), None)
        if failed and not was_stopped:
            file = failed.ml / "output" / "failure"
            words = file.read_text()[:1024] if file.exists() else ""
            reason = f"AlgorithmError: {words}, exit code: {failed.code}"
            return Ended(status="Failed", reason=reason)
        model = f"{output}/output/model.tar.gz"
        self._pack([h.ml / "model" for h in hosts], model)
        return Ended(status="Stopped" if was_stopped else "Completed", model_uri=model)

    def _start(self, ml, command, *, log, environ, head, etc_hosts=None):
        mounts = "mount -t tmpfs none /opt\nmkdir /opt/ml /opt/work\n" + bound(ml, "/opt/ml")
        if etc_hosts is not None:
            mounts += bound(etc_hosts, "/etc/hosts")
        container = Container(network=head, mounts=mounts, folder="/opt/work")
        variables = {
            # The image's: its programs, and a home that can be written.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": "/opt/work",
            "OMP_NUM_THREADS": "1",
            "AWS_REGION": REGION,
        }
        return started(container.words(command), log, env={**variables, **environ})

    def _download(self, uri: str, folder: Path) -> list[str]:
        """Copies what a prefix matches: an object to its name, a folder to what is below it."""
        bucket, key = split_uri(uri)
        answer = self._s3.list_objects_v2(Bucket=bucket, Prefix=key)
        assert not answer.get("IsTruncated")
        keys = [item["Key"] for item in answer.get("Contents", [])]
        if not keys:
            raise NoObjectsError(f"Data download failed: no S3 objects found under {uri}")
        if key in keys:
            assert keys == [key], f"the prefix {uri} matches other objects, too: {keys}"
            base = key.rpartition("/")[0]
        else:
            base = key.rstrip("/")
            strangers = [each for each in keys if not each.startswith(base + "/")]
            assert not strangers, f"the prefix {uri} matches other objects, too: {strangers}"
        for each in keys:
            target = folder / each.removeprefix(base).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            content = self._s3.get_object(Bucket=bucket, Key=each)["Body"].read()
            target.write_bytes(content)
        return keys

    def _upload(self, folder, uri, *, unless=None) -> None:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            if file.read_bytes() == (unless or {}).get(file):
                continue
            target = f"{uri.rstrip('/')}/{file.relative_to(folder)}"
            self._write(target, file.read_bytes())

    def _pack(self, folders: Sequence[Path], uri: str) -> None:
        """Packs the hosts' folders into one archive; none where all are empty."""
        content = io.BytesIO()
        names: set[str] = set()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for folder in folders:
                for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                    name = str(file.relative_to(folder))
                    assert name not in names, f"two hosts left {name}"
                    names.add(name)
                    archive.add(file, arcname=name)
        if names:
            self._write(uri, content.getvalue())

    def _write(self, uri: str, content: bytes) -> None:
        bucket, key = split_uri(uri)
        self._s3.put_object(Bucket=bucket, Key=key, Body=content)


class NoObjectsError(Exception):
    """A request's input without objects."""


@dataclass
class _Host:
    name: str
    group: str
    ml: Path
    sandbox: Sandbox
    process: "subprocess.Popen[bytes] | None" = None
    found: dict[Path, bytes] = field(default_factory=dict)

    @property
    def code(self) -> int | None:
        return self.process.poll()


def split_uri(uri: str) -> tuple[str, str]:
    """Returns bucket and key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def job_arn(name: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{name}"


def _all_ended(hosts, *, is_stopped, lets_go) -> bool:
    """Waits for all hosts, ends what still runs after a failure; returns whether it was stopped."""
    deadline = time.monotonic() + JOB_SECONDS
    was_stopped = is_failing = has_gone = False
    while any(host.code is None for host in hosts):
        if not has_gone and lets_go():
            has_gone = True
            for host in hosts:
                (host.ml / _below_ml(GO)).touch()
        if is_stopped() and not was_stopped:
            was_stopped = True
            for host in hosts:
                # The first process, below what makes its namespaces.
                with contextlib.suppress(psutil.Error, IndexError):
                    psutil.Process(host.process.pid).children()[0].terminate()
        if not is_failing and any(host.code for host in hosts):
            is_failing = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for host in hosts:
                host.process.kill()
                host.process.wait()
            assert is_failing or was_stopped, f"{hosts[0].ml.parent.name} did not end"
        time.sleep(0.05)
    return was_stopped


def _ended(process, *, lose_when) -> int | None:
    """Waits for a processing container's exit code; None: its host was lost."""
    deadline = time.monotonic() + 3 * JOB_SECONDS
    while process.poll() is None:
        is_lost = lose_when and lose_when()
        if is_lost or time.monotonic() > deadline:
            process.kill()
            process.wait()
            assert is_lost, "a processing job did not end"
            return None
        time.sleep(0.05)
    return process.returncode


def _below_ml(path: Json) -> PurePosixPath:
    return PurePosixPath(str(path)).relative_to("/opt/ml")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def as_list(value: Json) -> list[Json]:
    assert value is None or isinstance(value, list)
    return value or []
