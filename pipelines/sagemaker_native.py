"""The retraining pipeline on SageMaker trains here in a training step of the service's own.

    NeedsProfile ── ReuseProfile unset ────► Profile ─► Decide ─► MakeToken ─► Train ═► ...
                └── it names a folder ────────────────► Decide ─► MakeToken ─► Train ═► ...

and then as in sagemaker.py. It trains on the groups that the parameters name; what decide says is
in the report. Edit it:
`stoker compile sagemaker WORKLOAD --train-step native --decision D --out F` reads it.
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
    native_train_step,
    pipeline,
    profile_or_reuse,
    register_step,
    token_step,
)


def build(request: PipelineRequest) -> str:
    """Returns the pipeline's definition."""
    return pipeline(request, steps)


def steps(run: PipelineRun) -> list[Step]:
    """Returns the steps of a run."""
    return profile_or_reuse(run, after)


def after(run: PipelineRun, profile: RequestStep | Text) -> list[Step]:
    """Returns the steps that follow a profile, new or re-used."""
    decided = decide_step(run, profile=profile)
    token = token_step(run, depends_on=[decided])
    trained = native_train_step(run, token=token)
    judged = evaluate_step(run, profile=profile, training=trained)
    registered = register_step(run, training=trained, evaluation=judged)
    return [decided, token, trained, judged, gate_step(run, evaluation=judged, passed=[registered])]
