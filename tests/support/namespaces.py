"""Hosts of a training job as SageMaker lays them out, without an engine for containers.

Each host is a process tree in separate namespaces: its own /opt/ml, /etc/hosts and process
numbers, in which its command is the first process. Hosts share one network: names are addresses of
the loopback interface, and ports differ.
"""

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from stoker.host.processes import free_ports
from support.container_words import Container, bound
from support.opt_ml import lay_out_ml, resource_config
from support.processes import started, until
from support.run_file import document, in_run
from support.tokens import new_token

WAIT_SECONDS = 150


class Hosts:
    def __init__(self, folder, groups, *, hyperparameters=None, channels=None, are_named=True):
        if os.geteuid():
            pytest.skip("namespaces are made by root")
        self.folder = folder
        self.groups = groups
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.names = [host for hosts in groups.values() for host in hosts]
        self.leader = next(h[0] for name, h in groups.items() if not name.startswith("data"))
        self._hosts_file = folder / "etc-hosts"
        self._hosts_file.write_text("127.0.0.1 localhost\n")
        if are_named:
            self.name_hosts()
        taken: set[int] = set()
        self._ports = {host: free_ports(taken) for host in self.names}
        token = new_token()
        for group, hosts in groups.items():
            for host in hosts:
                data = {"stoker_token": None, **(channels or {})}
                mine = [name for name, to in data.items() if to is None or group in to]
                config = resource_config(host, groups)
                lay_out_ml(self.ml(host), config, channels=mine, hyperparameters=hyperparameters)
                for name in mine:
                    (self.ml(host) / "input" / "data" / name).mkdir(parents=True)
                    (self.ml(host) / "input" / "data" / name / "origin").write_text(name)
                (self.ml(host) / "input" / "data" / "stoker_token" / "token").write_text(token)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started.values():
            # With its first process all others of a host are gone.
            process.kill()
            process.wait()

    def ml(self, host: str) -> Path:
        return self.folder / host / "ml"

    def name_hosts(self) -> None:
        lines = [f"127.0.2.{number} {host}\n" for number, host in enumerate(self.names, start=1)]
        with self._hosts_file.open("a") as file:
            file.write("".join(lines))

    def start(self, host: str, *command: str, **environ: str) -> None:
        variables = {
            "PATH": os.environ["PATH"],
            "TRAINING_JOB_NAME": "job-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OMP_NUM_THREADS": "1",
            "RUN_TOKEN": "/opt/ml/input/data/stoker_token/token",
            "RUN_WORKERS": '{"data": 1}',
            # Nobody is lost by its lease, however long a busy machine stands still: the port of
            # who is killed refuses connections, as its network is there.
            "RUN_FEED": '{"lease_seconds": 60, "start_deadline_seconds": 60}',
            # The hosts share one network; on SageMaker all of them use the same port.
            "STOKER_PORT": str(self._ports[host]),
            "STOKER_COORDINATOR": f"{self.leader}:{self._ports[self.leader]}",
        }
        mounts = "mount -t tmpfs none /opt\nmkdir /opt/ml\n" + bound(self.ml(host), "/opt/ml")
        mounts += bound(self._hosts_file, "/etc/hosts")
        words = Container(mounts=mounts, folder="/").words(command)
        log = self.folder / f"{host}.log"
        self.started[host] = started(words, log, env=self._in_run(host, variables | environ))

    def _in_run(self, host: str, environ: dict[str, str]) -> dict[str, str]:
        """Writes run.json beside the host's token, as the host sees it."""
        token = Path(environ.get("RUN_TOKEN") or "")
        if not token.name:
            return in_run({k: v for k, v in environ.items() if k != "RUN_TOKEN"})
        here = self.ml(host) / token.relative_to("/opt/ml")
        folder, seen = here.parent, token.parent
        if here.name != "token":
            folder, seen = folder / "other-run", seen / "other-run"
            folder.mkdir(exist_ok=True)
            (folder / "token").write_text(here.read_text())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(document(environ)))
        others = {name: text for name, text in environ.items() if not name.startswith("RUN_")}
        return others | {"STOKER_RUN": str(seen / "run.json")}

    def code(self, host: str) -> int:
        return self.started[host].wait(WAIT_SECONDS)

    def codes(self) -> dict[str, int]:
        return {host: self.code(host) for host in self.started}

    def first_process(self, host: str) -> psutil.Process:
        return psutil.Process(self.started[host].pid).children()[0]

    def log(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text(errors="replace")

    def wait_for_log(self, host: str, words: str) -> None:
        until(lambda: words in self.log(host), what=f"{host} logs {words}")
