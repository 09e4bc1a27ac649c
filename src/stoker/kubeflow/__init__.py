"""stoker's components for pipelines of your own on Kubeflow, and the pods that their steps need.

    from kfp import dsl
    from stoker.kubeflow import PipelineRun, control_step, decide, on_todays_host, profile
    from stoker.settings import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))

    @dsl.pipeline(name="mine")
    def mine() -> None:
        measured = on_todays_host(profile(**run.inputs(profile)), run, name="Profile")
        found = decide(profile=measured.outputs["profile"], **run.inputs(decide))
        control_step(found, run, name="Decide")

Needs `pip install stoker[kubeflow]`. The components alone take texts and numbers: nothing of a
workload file is needed to use `profile(image=..., workload=...)` in a pipeline.
"""

from stoker.kubeflow.components import decide, evaluate, finish, gate, period, profile, train
from stoker.kubeflow.steps import (
    RUN_ID,
    PipelineRun,
    Task,
    compiled,
    control_step,
    follower,
    on_todays_host,
    pipeline,
)

__all__ = [
    "RUN_ID",
    "PipelineRun",
    "Task",
    "compiled",
    "control_step",
    "decide",
    "evaluate",
    "finish",
    "follower",
    "gate",
    "on_todays_host",
    "period",
    "pipeline",
    "profile",
    "train",
]
