"""Runs pods of a Kubernetes plan as processes: own network, name, mounts and process numbers.

Each finds what the plan gives its container: entry point, command, variables, token, configuration.
What the cluster would do (starting, restarting, moving pods, naming them) is the test's to say.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stoker.host import spawn
from stoker.logs import LogEvent, parse_line
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.pods import JOB_FOLDER, TOKEN_FOLDER, TOKEN_KEY
from stoker.records import Group, Training, read_json
from support.cluster import SUPPORT, Line
from support.container_words import Container
from support.kubernetes_jobs import CPU, GPU, job
from support.local_job import until
from support.pod_network import NAMESERVER, PodNetwork, Sandbox
from support.processes import started
from support.tokens import new_token

RUN = "mnist-1"
NAMESPACE = "team-a.svc.cluster.local"
# As a kubelet writes it.
RESOLV_CONF = (
    f"search {NAMESPACE} svc.cluster.local cluster.local\n"
    f"nameserver {NAMESERVER}\noptions ndots:5\n"
)
# `folder` is a pod's on this machine.
_MOUNTS = f"""
mount --bind "$folder/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$folder/hosts" /etc/hosts
real=$(readlink -f /etc/resolv.conf)
mount -t tmpfs none /run
mkdir -p "${{real%/*}}" {TOKEN_FOLDER}
[ -e "$real" ] || touch "$real"
mount --bind "$folder/resolv.conf" "$real"
mount --bind "$folder/token" {TOKEN_FOLDER}
mount -t tmpfs none /dev/shm
mount -t tmpfs none /opt
mkdir {JOB_FOLDER}
mount --bind "$folder/ml" {JOB_FOLDER}
"""
WAIT_SECONDS = 150.0


@dataclass(eq=False)
class Pod:
    """One pod until it is gone: the next of that name is another. `host` is its name in the DNS."""

    host: str
    folder: Path
    sandbox: Sandbox
    process: "subprocess.Popen[bytes]"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def events(self, name: str, **values: str) -> list[LogEvent]:
        parsed = (parse_line(line) for line in self.log.splitlines())
        return [
            event
            for event in parsed
            if event and event.event == name and values.items() <= event.values.items()
        ]

    def wait_for(self, name: str, *, count: int = 1, **values: str) -> LogEvent:
        """Waits until it has logged such an event that often, and returns the last of them."""
        until(
            lambda: len(self.events(name, **values)) >= count,
            what=f"{self.host} logs {name} {values} {count} times",
        )
        return self.events(name, **values)[count - 1]

    def lines(self) -> list[Line]:
        said = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in said if "pause" not in line]

    def wait_for_batch(self, number: int) -> None:
        """Waits until the script has taken that many batches and one more."""
        self._comes_to(lambda: len(self.lines()) > number, f"takes batch {number}")

    def wait_for_pause(self, number: int) -> None:
        words = json.dumps({"pause": number})
        self._comes_to(lambda: words in self.log, f"pauses at {number}")

    def _comes_to(self, is_there: Callable[[], bool], what: str) -> None:
        until(lambda: is_there() or self.process.poll() is not None, f"{self.host} {what}")
        assert is_there(), self.log[-3000:]

    def container(self) -> str | None:
        """Returns the name of the container's process numbers; None: it has ended."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{self.process.pid}/ns/pid_for_children")
        return None

    def code(self) -> int:
        """Waits for its container's exit code, negative for a signal that it did not catch."""
        return self.process.wait(WAIT_SECONDS)

    def terminate(self) -> None:
        """Sends SIGTERM, as a kubelet does first when a pod is preempted or evicted."""
        psutil.Process(self.process.pid).children()[0].send_signal(signal.SIGTERM)

    def lose_node(self) -> None:
        """Its node is gone: no packet gets out any more, and every process is killed."""
        self.sandbox.close()
        psutil.Process(self.process.pid).children()[0].kill()
        self.process.wait(WAIT_SECONDS)


class Pods:
    def __init__(self, folder, *, dnn=1, data=2, feed, given=None, code="", **keys):
        self.folder = folder
        self.gates = folder / "gates"
        self.gates.mkdir()
        script = json.dumps({**(given or {}), "gates": str(self.gates)})
        words = ["-c", code, str(self.gates)] if code else [str(SUPPORT / "feed_script.py"), script]
        groups = [
            Group(name="dnn", role="dnn", instance_type=GPU, count=dnn, workers_per_host=0),
            Group(name="data", role="data", instance_type=CPU, count=data, workers_per_host=1),
        ]
        nothing: dict[str, Any] = {"channels": {}, "hyperparameters": {}}
        self._request = KubernetesPlatform().plan(
            job(*groups, name=RUN, command=["python", *words], feed=dict(feed), **nothing, **keys)
        )
        self._token = new_token()
        self._network = PodNetwork(domain=NAMESPACE)
        self.pods: list[Pod] = []

    def __enter__(self) -> "Pods":
        self._network.__enter__()
        self.names = self._network.names
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        containers = {pod.container() for pod in self.pods} - {None}
        for pod in self.pods:
            pod.process.kill()
            pod.process.wait(WAIT_SECONDS)
        self._network.__exit__()
        until(lambda: not containers & _all_containers(), what="no process of the pods is left")
        if kind is not None:
            for pod in self.pods:
                print(f"--- {pod.folder.name}\n{pod.log[-4000:]}")

    def start(self, group, index, *, named_after_seconds=0.0, address=None):
        hostname = f"{RUN}-{group}-0-{index}"
        sandbox = self._network.sandbox(hostname, address=address)
        folder = self.folder / f"{group}-{index}.{len(self.pods)}"
        container = self._container(group)
        self._write(folder, group, sandbox, hostname)
        command = [_kubelets(word) for word in (*container["command"], *container["args"])]
        mounts = f"folder={shlex.quote(str(folder))}{_MOUNTS}"
        inside = Container(network=sandbox.enter, mounts=mounts, folder="/")
        words = spawn.wrapped(inside.words(command), signal_number=signal.SIGKILL)
        process = started(words, folder / "log", env=self._environ(container, index))
        pod = Pod(f"{hostname}.{RUN}", folder, sandbox, process)
        self.pods.append(pod)
        if named_after_seconds is not None:
            self.publish(pod, after_seconds=named_after_seconds)
        return pod

    def publish(self, *pods: Pod, after_seconds: float = 0.0) -> None:
        """The pods' name (one) is answered with their addresses from then on."""
        (name,) = {pod.host for pod in pods}
        addresses = [pod.sandbox.address for pod in pods]
        self.names.publish(name, *addresses, after_seconds=after_seconds)

    def go_on(self, number: int) -> None:
        """Ends the script's pause before that batch, or has none there."""
        (self.gates / str(number)).touch()

    def record(self, leader: Pod) -> Training:
        return read_json(self.output(leader) / "training.json", Training)

    def output(self, dnn: Pod) -> Path:
        return dnn.folder / "ml" / "output" / "data" / "stoker"

    def _container(self, group: str) -> dict[str, Any]:
        main: Any = self._request.main
        (found,) = [
            replicated["template"]["spec"]["template"]["spec"]["containers"]
            for replicated in main["spec"]["replicatedJobs"]
            if replicated["name"] == group
        ]
        return found[0]

    def _environ(self, container: Mapping[str, Any], index: int) -> dict[str, str]:
        variables = {
            v["name"]: _kubelets(v["value"]) if "value" in v else RUN for v in container["env"]
        }
        return {
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "JOB_COMPLETION_INDEX": str(index),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }

    def _write(self, folder: Path, group: str, sandbox: Sandbox, hostname: str) -> None:
        config = folder / "ml" / "input" / "config"
        config.mkdir(parents=True)
        data: Any = self._request.config["data"]
        (config / "hyperparameters.json").write_text(data["hyperparameters.json"])
        (config / "inputdataconfig.json").write_text(data[f"inputdataconfig.{group}.json"])
        (folder / "token").mkdir()
        (folder / "token" / TOKEN_KEY).write_text(self._token)
        secret: Any = self._request.secret["stringData"]
        (folder / "token" / "run.json").write_text(secret["run.json"])
        (folder / "resolv.conf").write_text(RESOLV_CONF)
        (folder / "nsswitch.conf").write_text("hosts: files dns\n")
        full = f"{hostname}.{RUN}.{NAMESPACE}"
        (folder / "hosts").write_text(
            f"127.0.0.1\tlocalhost\n{sandbox.address}\t{full}\t{hostname}\n"
        )


def _all_containers() -> set[str]:
    """Returns the names of the process numbers that any process of this machine has."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return found - {os.readlink("/proc/self/ns/pid")}


def _kubelets(text: str) -> str:
    """Reads the text of a container's command or variable as a kubelet does."""
    return text.replace("$$", "$")
