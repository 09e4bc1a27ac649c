"""The retraining pipeline on SageMaker has two runs here: one decides, and hands over to the other.

    Decides ── yes ─► NeedsProfile ... Decide ─► HandOver
            └─ no ──► TrainsAlone ── no ──► MakeToken ─► Train ═► Evaluate ─► Gate
                                  └─ yes ─► the same, called MakeTokenAlone, TrainAlone ...

The second run is of the same pipeline; its parameters are the groups that were decided on. Edit it:
`stoker compile sagemaker WORKLOAD --train-step handover --out F` reads it.
"""

from stoker.sagemaker import (
    ConditionEquals,
    ConditionStep,
    PipelineRequest,
    PipelineRun,
    RequestStep,
    Step,
    Text,
    decide_step,
    evaluate_step,
    gate_step,
    hand_over_step,
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
    """Returns the steps of a run of either kind."""
    decides = ConditionStep(
        name="Decides",
        display_name="Does this run decide?",
        conditions=[ConditionEquals(left=run.value("parent_run"), right="")],
        if_steps=profile_or_reuse(run, handed_over),
        else_steps=trained(run.parent),
    )
    return [decides]


def handed_over(run: PipelineRun, profile: RequestStep | Text) -> list[Step]:
    """Returns the steps that follow a profile, new or re-used."""
    decided = decide_step(run, profile=profile)
    return [decided, hand_over_step(run, profile=profile, decision=decided)]


def trained(run: PipelineRun) -> list[Step]:
    """Returns the steps of a run that another one has decided for."""
    trains_alone = ConditionStep(
        name="TrainsAlone",
        display_name="Is there no data group?",
        conditions=[ConditionEquals(left=run.value("data_instance_count"), right=0)],
        if_steps=on_groups(run.branch("Alone"), has_data_group=False),
        else_steps=on_groups(run, has_data_group=True),
    )
    return [trains_alone]


def on_groups(run: PipelineRun, *, has_data_group: bool) -> list[Step]:
    """Returns the training, and the steps that follow it."""
    token = token_step(run)
    training = native_train_step(run, token=token, has_data_group=has_data_group)
    judged = evaluate_step(run, profile=run.reused_profile, training=training)
    registered = register_step(run, training=training, evaluation=judged)
    return [token, training, judged, gate_step(run, evaluation=judged, passed=[registered])]
