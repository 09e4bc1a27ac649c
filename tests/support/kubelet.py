"""Runs pods as containers of a Docker engine: those of a pipeline's steps, and those of jobs.

It plays a kubelet and the controllers that make pods, against the double of the API server: network
with names of the cluster's DNS, in-cluster configuration, volumes, variables, users, logs, exit
codes. What it does not know of a pod it refuses. Left out: what a container may use of the host
(requests and limits), nodes, probes, init containers, and containers that are started again.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.docker_engine import BRIDGE, DOCKER, Engine
from support.kubeflow_backend import Step, field_of
from support.kubernetes_api import NAMESPACE, TOKEN, KubernetesApi, kubernetes_api

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
STEP_SECONDS = 400.0
# As kubelets keep of a log that is a termination message.
MESSAGE_CHARACTERS = 2048
_MOUNT = {"name", "mountPath", "subPath", "subPathExpr", "readOnly"}
_INDEX = "batch.kubernetes.io/job-completion-index"
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_REPLICATED = "jobset.sigs.k8s.io/replicatedjob-name"

Document = dict[str, Any]


class PodError(AssertionError):
    """A pod that this kubelet cannot run as a real one would."""


class _MissingError(PodError):
    """A ConfigMap or a Secret that a pod mounts and that is not there."""


@dataclass
class _Container:
    name: str
    reader: threading.Thread
    live: list[tuple[Document, Path]]


class Kubelet:
    """Runs pods of steps and jobs while its context is open; all end with it.

    `lost` says how the pod of a step that follows a job is lost once the job's pods run: "killed"
    (it ends with 137), or "vanished".
    """

    def __init__(self, engine: Engine, folder: Path, *, claims: Mapping[str, Path]) -> None:
        self._engine = engine
        self._folder = folder
        self._claims = claims
        number = os.urandom(3).hex()
        self._network, self._bridge = f"pods-{number}", f"{BRIDGE}-{number}"
        self._containers: dict[str, _Container] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._broken: list[BaseException] = []
        self.logs: dict[str, list[str]] = {}
        self.lost: dict[str, str] = {}

    def __enter__(self) -> "Kubelet":
        with contextlib.ExitStack() as stack:
            option = f"com.docker.network.bridge.name={self._bridge}"
            self._engine.run("network", "create", "--opt", option, self._network)
            stack.callback(self._engine.attempt, "network", "rm", self._network)
            found = json.loads(self._engine.run("network", "inspect", self._network))
            self._gateway = found[0]["IPAM"]["Config"][0]["Gateway"]
            stack.callback(self._remove_containers)
            self._account = self._folder / "serviceaccount"
            certificate = _certificate(self._folder, self._gateway)
            self.api: KubernetesApi = stack.enter_context(
                kubernetes_api(host=self._gateway, tls=certificate)
            )
            self._write_account(certificate[0])
            thread = threading.Thread(target=self._control, name="kubelet", daemon=True)
            thread.start()
            stack.callback(thread.join, 60)
            stack.callback(self._is_over.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._broken:
            raise self._broken[0]

    # Pods of steps.

    def run_step(self, step: Step) -> int | str:
        document = json.loads(json.dumps(step.pod))
        described = document["metadata"]
        for owner in described["ownerReferences"]:
            owner["uid"] = self.api.get("workflows", owner["name"])["metadata"]["uid"]
        document["spec"]["containers"] = document["spec"]["containers"][:1]
        document["status"] = {"phase": "Pending"}
        self.api.put_pod(document)
        pod = self.api.get("pods", described["name"])
        mounts = self._volumes(pod, launcher=step.files)
        container = {**step.container, "command": step.command[:1], "args": step.command[1:]}
        made = self._start(pod, container, mounts, names=[])
        self.api.start_pod(made.name)
        deadline = time.monotonic() + STEP_SECONDS
        while (code := self._code(made)) is None:
            # It follows its job, whose pods run.
            if step.task in self.lost and "runs on node" in self.log(made.name):
                how = self.lost.pop(step.task)
                self._engine.run("kill", made.name)
                self._remove(made)
                if how == "vanished":
                    self.api.remove("pods", made.name)
                else:
                    self.api.end_pod(made.name, 137)
                return how
            is_late = time.monotonic() > deadline
            assert not is_late, f"{step.task} runs on:\n{self.log(made.name)[-4000:]}"
            self._check()
            self._is_over.wait(0.2)
        made.reader.join(150)
        self.api.end_pod(made.name, 1 if code else 0)
        self._remove(made)
        return code

    def log(self, pod: str) -> str:
        return "\n".join(self.logs.get(pod, []))

    def all_logs(self) -> str:
        return "\n".join(f"== {pod}\n{self.log(pod)[-3000:]}" for pod in self.logs)

    def _check(self) -> None:
        if self._broken:
            raise self._broken[0]

    # Pods of jobs.

    def _control(self) -> None:
        try:
            while not self._is_over.wait(0.2):
                self._reconcile()
        except BaseException as err:  # Reported by the waiting thread.
            self._broken.append(err)

    def _reconcile(self) -> None:
        api = self.api
        for run in api.names("jobsets"):
            with contextlib.suppress(KeyError):
                status = api.get("jobsets", run).get("status", {})
                if not status.get("terminalState"):
                    api.make_pods(run)
        there = {}
        for name in api.names("pods"):
            with contextlib.suppress(KeyError):
                pod = api.get("pods", name)
                if _JOBSET in pod["metadata"]["labels"]:
                    there[name] = pod
        for name, pod in there.items():
            if name not in self._containers and pod["status"]["phase"] == "Pending":
                # MountVolume.SetUp is tried again until the object is there.
                with contextlib.suppress(_MissingError):
                    self._start_of_job(pod)
        for name, container in list(self._containers.items()):
            for volume, folder in container.live:
                # What is deleted meanwhile stays as it was.
                if api.has("configmaps", volume["configMap"]["name"]):
                    self._write_config(volume, folder)
            if name not in there:
                self._remove(container)
            elif (code := self._code(container)) is not None:
                container.reader.join(150)
                self._end_of_job(there[name], code)
                self._remove(container)

    def _start_of_job(self, pod: Document) -> None:
        labels = pod["metadata"]["labels"]
        run, job = labels[_JOBSET], labels[_REPLICATED]
        template = self.api.job_template(run, job)
        spec = template["spec"]
        index = labels[_INDEX]
        attempt = "jobset.sigs.k8s.io/restart-attempt"
        annotations = {**template["metadata"].get("annotations", {}), attempt: labels[attempt]}
        document = {"metadata": {**pod["metadata"], "annotations": annotations}}
        (container,) = spec["containers"]
        own = {"name": "JOB_COMPLETION_INDEX", "value": index}
        container = {**container, "env": [*container["env"], own]}
        document["spec"] = {**spec, "containers": [container]}
        host = f"{run}-{job}-0-{index}"
        full = f"{host}.{run}.{NAMESPACE}.svc.cluster.local"
        mounts = self._volumes(document, launcher=None)
        made = self._start(document, container, mounts, names=[host, f"{host}.{run}", full])
        self._containers[pod["metadata"]["name"]] = made
        with contextlib.suppress(KeyError):
            self.api.start_pod(made.name)

    def _end_of_job(self, pod: Document, code: int) -> None:
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        run = labels[_JOBSET]
        if code:
            if labels[_REPLICATED] != "dnn":
                raise PodError(f"a data pod ended with {code}: {self.log(name)[-3000:]}")
            self.api.fail_pod(name, code, message=self.log(name)[-MESSAGE_CHARACTERS:])
            return
        self.api.end_pod(name, 0)
        if not self.api.pods(run, "dnn"):
            self.api.end_job(run)

    # Containers.

    def _start(self, pod, container, mounts, *, names):
        metadata, spec = pod["metadata"], pod["spec"]
        secured = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        user, group = secured.get("runAsUser"), secured.get("runAsGroup")
        if secured.get("runAsNonRoot") and not user:
            raise PodError(
                f"{metadata['name']}: CreateContainerConfigError: no user that is not root"
            )
        words = ["--detach", "--name", metadata["name"], "--network", self._network, *mounts]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        if user:
            words += ["--user", f"{user}:{group or 0}"]
        if names:
            words += ["--hostname", names[0], *(f"--network-alias={name}" for name in names)]
        words += ["--dns-option=timeout:1", "--dns-option=attempts:1"]
        for name, value in self._environment(pod, container).items():
            words.append(f"--env={name}={value}")
        command = [_read_text(word) for word in (*container["command"], *container.get("args", ()))]
        image = container["image"]
        if self._engine.attempt("image", "inspect", image).returncode:
            raise PodError(f"{metadata['name']}: ErrImagePull {image}")
        self._engine.run("run", *words, "--entrypoint", command[0], image, *command[1:])
        reader = threading.Thread(target=self._read, args=(metadata["name"],), daemon=True)
        self.logs[metadata["name"]] = []
        reader.start()
        live = [
            (volume, self._folder_of(metadata["name"], volume["name"]))
            for volume in spec.get("volumes", ())
            if "configMap" in volume
        ]
        return _Container(metadata["name"], reader, live)

    def _environment(self, pod: Document, container: Document) -> dict[str, str]:
        found = {
            "KUBERNETES_SERVICE_HOST": self._gateway,
            "KUBERNETES_SERVICE_PORT": self.api.url.rpartition(":")[2],
        }
        for variable in container.get("env", ()):
            name, source = variable["name"], variable.get("valueFrom")
            match source:
                case None:
                    found[name] = _read_text(variable.get("value", ""))
                case {"fieldRef": {"fieldPath": path}}:
                    found[name] = field_of(pod, path)
                case {"resourceFieldRef": {"resource": "requests.cpu", **about}}:
                    cores = str(container["resources"]["requests"]["cpu"])
                    found[name] = str(-(-_milli(cores) // _milli(str(about.get("divisor", "1")))))
                case {"secretKeyRef": reference} if reference.get("optional"):
                    continue
                case _:
                    raise PodError(f"variable {variable}")
        return found

    def _volumes(self, pod: Document, *, launcher: Path | None) -> list[str]:
        """Returns Docker's words for a pod's mounts; lays the volumes out before."""
        name, spec = pod["metadata"]["name"], pod["spec"]
        (container, *_) = spec["containers"]
        secured = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        owner = (secured.get("runAsUser", 0), secured.get("fsGroup", secured.get("runAsGroup", 0)))
        words, sources = [], {volume["name"]: volume for volume in spec.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in sources:
                raise PodError(f"{name}: no volume {mount['name']}")
            if left := mount.keys() - _MOUNT:
                raise PodError(f"{name}: mount with {sorted(left)}")
            volume, path = sources[mount["name"]], mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                words.append(f"--tmpfs={path}:mode=1777")
                continue
            if launcher is not None and mount["name"].endswith("-scratch"):
                where = launcher / path.lstrip("/")
            else:
                where = self._root(name, volume) / self._sub_path(pod, container, mount)
            if not where.exists():
                _make_sub_path(where, group=spec.get("securityContext", {}).get("fsGroup"))
            ending = ":ro" if mount.get("readOnly") or "configMap" in volume else ""
            words.append(f"--volume={where}:{path}{ending}")
        if launcher is not None:
            # What the launcher makes in the container's own files, as the container's user.
            outputs = launcher / "tmp" / "kfp"
            outputs.mkdir(parents=True, exist_ok=True)
            words.append(f"--volume={outputs}:/tmp/kfp")
            for path in (launcher, *launcher.rglob("*")):
                os.chown(path, *owner)
        if spec.get("automountServiceAccountToken", True):
            words.append(f"--volume={self._account}:{ACCOUNT}:ro")
        return words

    def _sub_path(self, pod: Document, container: Document, mount: Document) -> str:
        if "subPathExpr" not in mount:
            return str(mount.get("subPath", ""))
        environment = self._environment(pod, container)
        text = mount["subPathExpr"].replace("$$", "\0")
        found = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)
        return found.replace("\0", "$")

    def _root(self, pod: str, volume: Document) -> Path:
        match volume:
            case {"persistentVolumeClaim": {"claimName": claim}}:
                if claim not in self._claims:
                    raise PodError(f'{pod}: persistentvolumeclaim "{claim}" not found')
                return self._claims[claim]
            case {"emptyDir": _}:
                folder = self._folder_of(pod, volume["name"])
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o777)
                return folder
            case {"configMap": _}:
                folder = self._folder_of(pod, volume["name"])
                folder.mkdir(parents=True, exist_ok=True)
                self._write_config(volume, folder)
                return folder
            case {"secret": {"secretName": secret, **about}}:
                return self._write_secret(pod, volume["name"], secret, about)
        raise PodError(f"{pod}: volume {volume}")

    def _write_config(self, volume: Document, folder: Path) -> None:
        """Writes a ConfigMap's keys; kubelets keep them as the object is, in a minute or two."""
        about = volume["configMap"]
        if not self.api.has("configmaps", about["name"]):
            if not about.get("optional"):
                raise _MissingError(f'configmap "{about["name"]}" not found')
            return
        data = self.api.get("configmaps", about["name"]).get("data", {})
        paths = {item["key"]: item["path"] for item in about.get("items", ())}
        for key, text in data.items():
            if paths and key not in paths:
                continue
            file = folder / paths.get(key, key)
            if not file.exists() or file.read_text() != text:
                part = file.with_name(f".{file.name}")
                part.write_text(text)
                part.rename(file)

    def _write_secret(self, pod: str, volume: str, secret: str, about: Document) -> Path:
        folder = self._folder_of(pod, volume)
        if folder.exists():
            return folder
        if not self.api.has("secrets", secret):
            raise _MissingError(f'secret "{secret}" not found')
        folder.mkdir(parents=True)
        data = self.api.get("secrets", secret)["stringData"]
        for item in about.get("items") or [{"key": key, "path": key} for key in data]:
            file = folder / item["path"]
            file.write_text(data[item["key"]])
            # Of the pod's group, which fsGroup names.
            os.chown(file, 0, 1000)
            file.chmod(0o440)
        return folder

    def _write_account(self, certificate: Path) -> None:
        self._account.mkdir()
        (self._account / "token").write_text(TOKEN)
        (self._account / "namespace").write_text(NAMESPACE)
        shutil.copy(certificate, self._account / "ca.crt")
        for file in self._account.iterdir():
            file.chmod(0o444)

    def _folder_of(self, pod: str, volume: str) -> Path:
        return self._folder / "volumes" / pod / volume

    def _read(self, pod: str) -> None:
        words = [DOCKER, "logs", "--follow", pod]
        merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
        with subprocess.Popen(words, env=self._engine.environ, text=True, **merged) as process:
            for line in process.stdout:
                text = line.rstrip("\n")
                self.logs[pod].append(text)
                with contextlib.suppress(KeyError):
                    self.api.say(pod, text)

    def _code(self, container: _Container) -> int | None:
        done = self._engine.attempt(
            "inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", container.name
        )
        if done.returncode:
            raise PodError(f"container {container.name}: {done.stderr}")
        running, code = done.stdout.split()
        return None if running == "true" else int(code)

    def _remove(self, container: _Container) -> None:
        self._containers.pop(container.name, None)
        self._engine.attempt("rm", "-f", container.name)
        container.reader.join(150)

    def _remove_containers(self) -> None:
        if names := self._engine.run("ps", "-aq", "--filter", f"network={self._network}").split():
            self._engine.attempt("rm", "-f", *names)


def _make_sub_path(folder: Path, *, group: int | None) -> None:
    """Makes a folder of a volume as a kubelet does: root's, with the mode of the volume's own."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    above = missing[-1].parent.stat()
    for path in reversed(missing):
        path.mkdir()
        # fsGroup lets the group write, and makes what is made in the volume the group's.
        os.chown(path, 0, above.st_gid if group is None else group)
        path.chmod(above.st_mode & 0o777 | (0 if group is None else 0o2070))


def _milli(cores: str) -> int:
    return int(cores[:-1]) if cores.endswith("m") else int(float(cores) * 1000)


def _read_text(text: str) -> str:
    """Reads the text of a container's command or variable as a kubelet does."""
    left = text.replace("$$", "\0")
    if re.search(r"\$\(\w+\)", left):
        raise PodError(f"a reference to a variable: {text[:200]}")
    return left.replace("\0", "$")


def _certificate(folder: Path, address: str) -> tuple[Path, Path]:
    paths = folder / "ca.crt", folder / "ca.key"
    words = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"]
    words += ["-addext", f"subjectAltName=IP:{address}"]
    words += ["-addext", "keyUsage=critical,keyCertSign,digitalSignature,keyEncipherment"]
    words += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(["openssl", "req", *words], check=True, capture_output=True)
    return paths


def claims_in(folder: Path, **contents: Path | None) -> Iterator[tuple[str, Path]]:
    """Yields claims that every user may write, as those of NFS are; with copies of folders."""
    for name, source in contents.items():
        target = folder / "claims" / name
        target.mkdir(parents=True)
        if source:
            shutil.copytree(source, target, dirs_exist_ok=True)
        target.chmod(0o777)
        yield name, target
