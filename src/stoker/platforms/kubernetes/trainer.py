"""The same run for Kubeflow Trainer: a TrainingRuntime, and a TrainJob that refers to it.

A TrainJob can say little of a second group, so that the runtime holds both groups whole. It may be
there already, applied by those who run the cluster (`stoker render runtime`): it is the same for
all runs of a workload on one plan; what is a run's alone is patched in by the TrainJob.
"""

import hashlib
import json

from stoker.platforms.kubernetes.environment import environment_of_run, verbatim
from stoker.platforms.kubernetes.groups import TRAINER_JOB, Layout, PodGroup
from stoker.platforms.kubernetes.jobset import jobset_spec, metadata
from stoker.platforms.kubernetes.names import REQUEST_ANNOTATION
from stoker.platforms.kubernetes.pods import mounts_of, zone_affinity
from stoker.platforms.kubernetes.volumes import volumes_of_run
from stoker.records import Json

TRAINER_API = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK_LABEL = "trainer.kubeflow.org/framework"
# Who patches: a domain and a path, by Trainer's rule.
MANAGER = "stoker/run"


def training_runtime(layout: Layout, *, name: str) -> dict[str, Json]:
    """The TrainingRuntime of `layout`, without what is a run's alone.

    Raises:
        UsageError: If the groups' pods are none that Kubernetes can run.
    """
    # The trainer's label is what tells Trainer which job a TrainJob's settings go to.
    ancestors = {TRAINER_JOB: {ANCESTOR_LABEL: "trainer"}}
    spec: dict[str, Json] = {
        # Without torch's policy: stoker's launcher starts torchrun itself.
        "mlPolicy": {"numNodes": layout.dnn.group.count},
        "template": {"spec": jobset_spec(layout, of_run=False, job_labels=ancestors)},
    }
    described = metadata(layout, name=name)
    labels = described["labels"]
    assert isinstance(labels, dict)
    described["labels"] = {**labels, FRAMEWORK_LABEL: "torch"}
    described["annotations"] = {REQUEST_ANNOTATION: digest(spec)}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": described,
        "spec": spec,
    }


def train_job(layout: Layout, *, runtime: str) -> dict[str, Json]:
    """The TrainJob that runs `layout` on the TrainingRuntime called `runtime`."""
    dnn = layout.dnn
    trainer: dict[str, Json] = {
        "image": layout.image,
        "command": [verbatim(word) for word in layout.settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "numNodes": dnn.group.count,
        "resourcesPerNode": {"requests": dict(dnn.requests), "limits": dict(dnn.limits)},
        "env": environment_of_run(layout, dnn),
    }
    patches: list[Json] = [_patch(layout, group) for group in layout.groups]
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": metadata(layout, queued=True),
        "spec": {
            "runtimeRef": {
                "apiGroup": TRAINER_API.partition("/")[0],
                "kind": "TrainingRuntime",
                "name": runtime,
            },
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": patches}}},
                }
            ],
        },
    }


def digest(spec: Json) -> str:
    """By which two objects' specs are compared: 64 hexadecimal digits."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _patch(layout: Layout, group: PodGroup) -> dict[str, Json]:
    mounted = volumes_of_run(layout, group)
    container: dict[str, Json] = {"name": group.job, "volumeMounts": mounts_of(mounted)}
    if not group.is_dnn:
        # Trainer takes the variables of its own container from the TrainJob's trainer only.
        container["env"] = environment_of_run(layout, group)
    spec: dict[str, Json] = {
        "containers": [container],
        "volumes": [one.volume for one in mounted],
    }
    affinity = zone_affinity(layout)
    if affinity:
        spec["affinity"] = affinity
    return {"name": group.job, "template": {"spec": {"template": {"spec": spec}}}}
