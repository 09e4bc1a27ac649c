"""A separate Docker engine: it builds images, and starts hosts as SageMaker does.

The engine changes nothing on the machine: no bridge, no firewall rules, no forwarding. Where
another one has closed the firewall for what is forwarded, our hosts' bridges are let through.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.host import spawn
from stoker.logs import LogEvent, parse_line
from support.opt_ml import lay_out_ml, resource_config
from support.processes import end, named_by_commands, ran, until
from support.registry import registry
from support.run_file import document
from support.tokens import new_token

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "docker"
# The client of the distribution, whose BuildKit needs no plugin.
DOCKER = next(
    (p for p in ("/usr/bin/docker", shutil.which("docker")) if p and Path(p).exists()), ""
)
# Names of the hosts' bridges begin like this.
BRIDGE = "stk"
# What the base has: Python with pip.
DEBIAN = "python3,python3-pip,python3-venv,ca-certificates"
NEEDED = ("dockerd", "debootstrap", "iptables")


def missing() -> str:
    if os.geteuid() != 0:
        return "needs root"
    lacking = [*(() if DOCKER else ("docker",)), *(n for n in NEEDED if not shutil.which(n))]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


class Engine:
    """Runs dockerd in temporary folders; ends it with all that it started when the context ends."""

    def __init__(self) -> None:
        # Short: the path of a unix socket has 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="stk-"))
        self.environ = {**os.environ, "DOCKER_HOST": f"unix://{self.folder}/sock"}

    def __enter__(self) -> "Engine":
        self._links = _links()
        self._is_let_through = _forward_is_closed() and not _rule("-I")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            with contextlib.suppress(subprocess.SubprocessError):
                if names := self.run("ps", "-aq").split():
                    self.run("rm", "-f", *names)
                self.run("network", "prune", "-f")
            end(process, 30)
        for mount in sorted(_mounts(self.folder), reverse=True):
            subprocess.run(["umount", "-l", mount])
        if self._is_let_through:
            _rule("-D")
        shutil.rmtree(self.folder, ignore_errors=True)

    def leftovers(self) -> list[str]:
        left = [f"mount {mount}" for mount in _mounts(self.folder)]
        left += [f"network {link}" for link in sorted(_links() - self._links)]
        left += [str(self.folder)] if self.folder.exists() else []
        return left + [f"process {pid}" for pid in named_by_commands(self.folder)]

    def run(self, *words: str, timeout: float = 60) -> str:
        done = self.attempt(*words, timeout=timeout)
        assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def attempt(self, *words: str, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
        return ran([DOCKER, *words], env=self.environ, timeout=timeout)

    def build(self, dockerfile: str, context: Path, tag: str) -> None:
        words = [DOCKER, "build", "-q", "--network=none", "-t", tag, "-f", "-", str(context)]
        environ = {**self.environ, "DOCKER_BUILDKIT": "1"}
        done = ran(words, env=environ, input=dockerfile, timeout=300)
        assert done.returncode == 0, done.stderr

    def make_image(self, target: str, *, name: str = "", **args: str) -> None:
        """Builds a target of the Dockerfile as `name`, with build arguments, from `wheels`."""
        given = {"BASE_IMAGE": self.base, "WHEELS": "wheels", "PIP_NO_INDEX": "1", **args}
        words = [DOCKER, "build", "-q", "--network=none", "--target", target, "-t"]
        words += [name or f"stoker-{target}", "-f", "containers/launcher/Dockerfile"]
        for key, value in given.items():
            words += ["--build-arg", f"{key}={value}"]
        environ = {**self.environ, "DOCKER_BUILDKIT": "1"}
        done = ran([*words, str(ROOT)], env=environ, cwd=ROOT, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr

    def import_base(self) -> None:
        """Makes Debian with Python and pip alone, and as `base`; keeps it in .cache."""
        archive = CACHE / "base.tar"
        if not archive.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            root = self.folder / "rootfs"
            words = ["debootstrap", "--variant=minbase", f"--include={DEBIAN}"]
            subprocess.run(
                [*words, "bookworm", str(root)], check=True, capture_output=True, timeout=300
            )
            made = self.folder / "base.tar"
            words = ["tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*.deb"]
            words += ["--exclude=./var/lib/apt/lists/*", "-cf", str(made), "."]
            subprocess.run(words, check=True)
            shutil.rmtree(root)
            shutil.move(made, archive.with_suffix(".part"))
            archive.with_suffix(".part").rename(archive)
        architecture = self.run("version", "--format={{.Server.Arch}}")
        with registry(archive, architecture=architecture) as host:
            self.base = f"{host}/base:bookworm"
            self.run("pull", "-q", self.base, timeout=120)
        self.run("tag", self.base, "base")

    def _start(self) -> None:
        log = (self.folder / "dockerd.log").open("wb")
        flags = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        self._process = subprocess.Popen(
            # Ends when this process does, however that ends.
            spawn.wrapped(
                [
                    *("dockerd", f"--host=unix://{self.folder}/sock", "--bridge=none"),
                    *("--iptables=false", "--ip6tables=false"),
                    *("--ip-forward=false", "--ip-masq=false"),
                    *("--default-address-pool", "base=10.213.0.0/16,size=24"),
                    *(f"--{flag}={self.folder / name}" for flag, name in flags.items()),
                ],
                signal_number=signal.SIGTERM,
            ),
            stdout=log,
            stderr=log,
        )
        log.close()

        def answers() -> bool:
            words = (self.folder / "dockerd.log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, f"dockerd ended: {words}"
            return self.attempt("info").returncode == 0

        until(answers, what="dockerd answers")


# Four containers that import torch at once, on few cores.
CONTAINER_SECONDS = 180.0


class Cluster:
    """A job's hosts on a network, each with /opt/ml; `channels`: name to (folder, groups)."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        image: str,
        images: Mapping[str, str] | None = None,
        groups: Mapping[str, Sequence[str]],
        channels: Mapping[str, tuple[Path, Sequence[str]]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.folder = folder
        self.hosts = [host for hosts in groups.values() for host in hosts]
        number = os.urandom(3).hex()
        self.job = f"job-{number}"
        self._bridge = f"{BRIDGE}-{number}"
        self._images = {
            host: (images or {}).get(group, image)
            for group, hosts in groups.items()
            for host in hosts
        }
        token = folder / "stoker_token"
        token.mkdir()
        (token / "token").write_text(new_token())
        (token / "run.json").write_text(json.dumps(document(environment or {})))
        environment = {
            "TRAINING_JOB_NAME": self.job,
            "TRAINING_JOB_ARN": f"arn:aws:sagemaker:eu-west-1:000000000000:training-job/{self.job}",
            "STOKER_RUN": "/opt/ml/input/data/stoker_token/run.json",
            **{k: v for k, v in (environment or {}).items() if not k.startswith("RUN_")},
        }
        self._environment = [f"--env={name}={value}" for name, value in environment.items()]
        all_channels = {**(channels or {}), "stoker_token": (token, tuple(groups))}
        for group, hosts in groups.items():
            theirs = {n: source for n, (source, to) in all_channels.items() if group in to}
            for host in hosts:
                self._lay_out(host, groups, theirs)

    def __enter__(self) -> "Cluster":
        name = f"com.docker.network.bridge.name={self._bridge}"
        self.engine.run("network", "create", "--opt", name, self.job)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.attempt("rm", "-f", *map(self._name, self.hosts))
        self.engine.run("network", "rm", self.job)

    def start(self, *command: str) -> None:
        for host in self.hosts:
            self.engine.run(
                *("run", "--detach", "--name", self._name(host), "--hostname", host),
                *("--network", self.job, "--network-alias", host, *self._environment),
                # A name that does not exist yet is looked up elsewhere, without an answer here.
                *("--dns-option=timeout:1", "--dns-option=attempts:1"),
                *("--volume", f"{self.base_dir(host)}:/opt/ml"),
                *("--entrypoint", "stoker", self._images[host], "launch", "--", *command),
            )

    def wait(self, *, seconds: float) -> dict[str, int]:
        deadline = time.monotonic() + seconds
        while any(state["Running"] for state in self._states().values()):
            assert time.monotonic() < deadline, f"still running:\n{self.logs()}"
            time.sleep(0.1)
        return {host: int(state["ExitCode"]) for host, state in self._states().items()}

    def docker(self, verb: str, host: str, *words: str) -> str:
        return self.engine.run(verb, *words, self._name(host))

    def log(self, host: str) -> str:
        done = self.engine.attempt("logs", self._name(host))
        return done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(f"== {host}\n{self.log(host)[-3000:]}" for host in self.hosts)

    def event(self, host: str, name: str) -> LogEvent:
        events = map(parse_line, self.log(host).splitlines())
        found = next((event for event in events if event and event.event == name), None)
        assert found is not None, f"{host} logged no {name}:\n{self.log(host)[-3000:]}"
        return found

    def wait_for_log(self, host: str, words: str) -> None:
        until(
            lambda: re.search(words, self.log(host)) is not None,
            what=f"{host} logs {words}",
            seconds=CONTAINER_SECONDS,
        )

    def base_dir(self, host: str) -> Path:
        """Returns the folder that the container sees as /opt/ml."""
        return self.folder / host

    def record(self, host: str) -> dict[str, Any]:
        text = (self.base_dir(host) / "output" / "data" / "stoker" / "training.json").read_text()
        record: dict[str, Any] = json.loads(text)
        return record

    def _name(self, host: str) -> str:
        return f"{self.job}-{host}"

    def _states(self) -> dict[str, dict[str, Any]]:
        found = json.loads(self.engine.run("inspect", *map(self._name, self.hosts)))
        return {host: each["State"] for host, each in zip(self.hosts, found, strict=True)}

    def _lay_out(self, host, groups, channels) -> None:
        base = self.base_dir(host)
        lay_out_ml(base, resource_config(host, groups, interface="eth0"), channels=channels)
        (base / "checkpoints").mkdir()
        for name, source in channels.items():
            shutil.copytree(source, base / "input" / "data" / name)


def _mounts(folder: Path) -> Iterator[str]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if (mount := line.split()[1]).startswith(f"{folder}/"):
            yield mount


def _forward_is_closed() -> bool:
    done = subprocess.run(["iptables", "-S", "FORWARD"], capture_output=True, text=True, check=True)
    return "-P FORWARD DROP" in done.stdout


def _rule(verb: str) -> int:
    """Adds (-I) or deletes (-D) the rule that lets our bridges through; iptables' exit code."""
    match = ["-i", f"{BRIDGE}+", "-o", f"{BRIDGE}+", "-j", "ACCEPT"]
    return subprocess.run(["iptables", verb, "FORWARD", *match]).returncode


def _links() -> set[str]:
    return set(os.listdir("/sys/class/net"))
