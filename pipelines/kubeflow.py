"""The retraining pipeline on Kubeflow: profile, decide, train, evaluate, gate.

    Profile ─► Decide ─┬─ one host of today's type ─► Train ──────────┬─► Evaluate ─► Gate
                       └─ any other cluster ────────► Train as a job ─┘
    Finish, when all of it has ended, well or not

There are two branches because their pods differ: a host of today's type is a pod with GPUs that
trains by itself; any other cluster is a JobSet, which a small pod creates and follows. They are
joined on a text, the training's record. A training that fails does not fail its step: it has its
report, too, and then the gate stops the run.

Edit it: `stoker compile kubeflow WORKLOAD --out F` reads it from the folder it is run in.
"""

from collections.abc import Mapping

from components.decide.kubeflow import decide_component, decide_step
from components.evaluate.kubeflow import evaluate_component, evaluate_step, gate_step
from components.kubeflow_run import Run
from components.kubeflow_steps import (
    compiled,
    ending_with,
    one_of,
    otherwise,
    pipeline,
    when,
)
from components.profile.kubeflow import profile_component, profile_step
from components.train.kubeflow import (
    clean_up_step,
    train_as_job_step,
    train_component,
    train_here_step,
)

from stoker.orchestrators.kubeflow.compile import KubeflowRequest


def build(request: KubeflowRequest) -> str:
    """The compiled pipeline."""
    name = request.workload.name
    return pipeline(request, steps, description=f"stoker: profile, decide, train, evaluate {name}.")


def steps(run: Run) -> None:
    """The steps of a run."""
    with ending_with(clean_up_step(run)):
        profile = profile_step(run).outputs["profile"]
        decide = decide_step(run, profile=profile)
        decision = decide.outputs["decision"]
        with when(decide.outputs["where"] == "pod"):
            here = train_here_step(run, decision=decision)
        with otherwise():
            job = train_as_job_step(run, decision=decision)
        training = one_of(here.outputs["training"], job.outputs["training"])
        evaluate = evaluate_step(run, profile=profile, decision=decision, training=training)
        gate_step(run, evaluation=evaluate.outputs["evaluation"])


def component_files(image: str) -> Mapping[str, str]:
    """The components by themselves, to be shared: name to YAML."""
    made = {
        "profile": profile_component,
        "decide": decide_component,
        "train": train_component,
        "evaluate": evaluate_component,
    }
    return {name: compiled(component(image)) for name, component in made.items()}
