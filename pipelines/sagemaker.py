"""The retraining pipeline on SageMaker: profile, decide, train, evaluate, gate.

    NeedsProfile ── reuse_profile unset ────► Profile ─► Decide ─► Train ═► Evaluate ─► Gate
                └── it names a folder ────────────────► Decide ─► Train ═► Evaluate ─► Gate
                                                        Gate ── passed ──► Register
                                                             └── not ────► Refuse

With `skip_unchanged` in the workload all of it runs only if something has changed:

    Compare ─► HasChanged ── has_changed ──► NeedsProfile and all that follows

═► is taken even if the training fails. Branches cannot join, so the steps after a profile are made
twice; after a reused profile their names are DecideAgain, TrainAgain and so on. With
`sagemaker.cache_days` the step FindProfile comes before Profile: if an earlier run has measured
what a step costs, DecideKept, TrainKept and so on follow in place of Profile and what is after it.

You can add steps before, between and after these. Other arguments of `steps`, with types and
defaults, become parameters of the pipeline (docs/sagemaker.md of stoker's checkout has an example).
`stoker compile sagemaker WORKLOAD --out F` reads this file from the current folder.
"""

from stoker.sagemaker import (
    PipelineRequest,
    PipelineRun,
    RequestStep,
    Step,
    Text,
    decide_step,
    evaluate_step,
    gate_step,
    pipeline,
    profile_or_reuse,
    register_step,
    train_step,
)


def build(request: PipelineRequest) -> str:
    """Returns the pipeline's definition."""
    return pipeline(request, steps)


def steps(run: PipelineRun) -> list[Step]:
    """Returns the steps of a run."""
    return profile_or_reuse(run, after)


def after(run: PipelineRun, profile: RequestStep | Text) -> list[Step]:
    """Returns the steps that follow a profile, new or reused."""
    decided = decide_step(run, profile=profile)
    trained = train_step(run, decision=decided)
    judged = evaluate_step(run, profile=profile, training=trained, refused_expires=True)
    registered = register_step(run, training=trained, evaluation=judged)
    return [decided, trained, judged, gate_step(run, evaluation=judged, passed=[registered])]
