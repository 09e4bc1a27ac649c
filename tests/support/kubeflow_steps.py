"""Runs the commands of a Kubeflow pipeline's steps: stoker's verbs, over folders for claims.

Profile and training are given: their steps would create jobs on a cluster. So is the last step's
end, which asks the cluster for them.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.host.listing import listing_version
from stoker.records import Decision, Profile, Training, read_json, to_json
from stoker.records.training import InputVersion, Lineage
from stoker.run.outputs import carried
from support.command import Done, stoker
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store
from support.processes import ran

# In the container, of what Kubeflow's launcher makes.
_LAUNCHERS = ("/minio/", "/tmp/kfp/")
_KILLED = """
import os, signal, sys
from stoker.cli.main import run
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run(sys.argv[1:])
"""


@dataclass
class Installation:
    """An object store and claims, which outlive runs.

    Attributes:
        folder: Where they are.
        kills: Task to where signal 9 strikes its process: `write`, before a file gets its name, or
            `end`.
        told: What the steps of the newest run printed, by task.
    """

    folder: Path
    kills: dict[str, str] = field(default_factory=dict)
    told: dict[str, Done] = field(default_factory=dict)
    num_runs: int = 0

    def claim(self, name: str, folder: str = "") -> Path:
        """Returns a claim's folder, which is made."""
        made = self.folder / "claims" / name / folder
        made.mkdir(parents=True, exist_ok=True)
        return made

    def run(
        self,
        definition: str,
        *,
        profile: Profile,
        training: Training,
        parameters: Mapping[str, object] | None = None,
        before: Callable[[Step], None] = lambda step: None,
    ) -> KubeflowRun:
        """Runs a compiled pipeline to its end.

        Args:
            profile: What the profile's job would have measured.
            training: How the training's job would have ended.
            parameters: Parameters of the run.
            before: Called before each step.
        """
        self.num_runs += 1
        self.told = {}

        def execute(step: Step) -> int | str:
            before(step)
            return self._executed(step, profile=profile, training=training)

        run = KubeflowRun(
            Pipeline(definition),
            execute=execute,
            store=Store(self.folder / "store"),
            parameters=parameters,
            run_id=f"{self.num_runs:08x}-0000-4000-8000-00000000abcd",
        )
        run.run()
        return run

    def _executed(self, step: Step, *, profile: Profile, training: Training) -> int | str:
        if not self._mount(step):
            # Its pod waits for the claim until its deadline.
            return "killed"
        if step.task in ("profile", "train", "finish"):
            self._give(step, profile=profile, training=training)
            return 0
        words = [self._here(word, step) for word in step.command]
        if words[0] != "stoker":
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            self.told[step.task] = Done(done.returncode, done.stdout, done.stderr)
            return done.returncode
        folder = step.at("/work")
        folder.mkdir(parents=True, exist_ok=True)
        if self.kills.get(step.task) == "write":
            done = ran([sys.executable, "-c", _KILLED, *words[1:]], cwd=folder)
            assert done.returncode == -signal.SIGKILL, done.stderr
            return "killed"
        done = stoker(*words[1:], cwd=folder)
        self.told[step.task] = done
        return "killed" if step.task in self.kills else done.returncode

    def _mount(self, step: Step) -> bool:
        claims = {each["persistentVolumeClaim"]["claimName"] for each in _claims(step)}
        return all((self.folder / "claims" / name).is_dir() for name in claims)

    def _here(self, word: str, step: Step) -> str:
        """Returns a word of a command with this machine's paths in place of the container's."""
        for folder in _LAUNCHERS:
            word = word.replace(folder, str(step.at(folder)) + "/")
        for mount in step.container["volumeMounts"]:
            if mount["mountPath"].startswith("/mnt/"):
                place = self.claim(mount["name"], mount.get("subPath", ""))
                word = word.replace(mount["mountPath"], str(place))
        return word

    def _give(self, step: Step, *, profile: Profile, training: Training) -> None:
        step.write_outputs()
        if step.task == "profile":
            step.output("profile").write_text(to_json(profile))
        if step.task == "train":
            own = self._trained(step, training)
            step.output("training").write_text(carried(own))
            step.output("status").write_text(training.status)

    def _trained(self, step: Step, training: Training) -> Training:
        """Returns the record of this run: on the decided hosts, a little slower than predicted."""
        (artifact,) = step.executor_input["inputs"]["artifacts"]["decision"]["artifacts"]
        decision = read_json(step.at(artifact["uri"].replace("minio://", "/minio/")), Decision)
        measured = training.measured
        if measured and decision.plan.predicted:
            seconds = 1.2 * decision.plan.predicted.step_seconds
            measured = msgspec.structs.replace(measured, step_seconds=seconds)
        data = self.claim("datasets", "digits")
        seen = {"train": InputVersion(address=str(data), version=listing_version(data))}
        job = msgspec.structs.replace(training.job, name=f"digits-{self.num_runs:08x}")
        return msgspec.structs.replace(
            training,
            job=job,
            groups=decision.plan.groups,
            measured=measured,
            workload_sha256=decision.workload_sha256,
            lineage=Lineage(inputs=seen),
        )


def _claims(step: Step) -> list[dict[str, dict[str, str]]]:
    volumes = step.pod["spec"]["volumes"]
    return [each for each in volumes if "persistentVolumeClaim" in each]


def tasks_of(run: KubeflowRun) -> list[str]:
    """Returns the tasks that ran, in their order."""
    return [step.task for step in run.steps]
