"""The retraining pipeline on SageMaker: profile, decide, train, evaluate, gate.

    NeedsProfile ── ReuseProfile unset ────► Profile ─► Decide ─► Train ═► Evaluate ─► Gate
                └── it names a folder ────────────────► Decide ─► Train ═► Evaluate ─► Gate
                                                        Gate ── passed ──► Register
                                                             └── not ────► Refuse

═► is taken whatever became of the training. Branches cannot meet again: a step cannot wait for a
condition, and to wait for a step of each branch is to wait for both, of which one never runs. So
each branch of "is there a profile to re-use?" has a tail of its own; the second one's steps are
called DecideAgain, TrainAgain and so on.

With `--train-step handover` a run ends with the hand-over to a second run of the same pipeline,
whose parameters are the groups that were decided on:

    Decides ── yes ─► NeedsProfile ... Decide ─► HandOver
            └─ no ──► TrainsAlone ── no ──► MakeToken ─► Train ═► Evaluate ─► Gate
                                  └─ yes ─► the same, called MakeTokenAlone, TrainAlone ...

Edit it: `stoker compile sagemaker WORKLOAD --out F` reads it from the folder it is run in.
"""

import dataclasses

from components.decide.sagemaker import decide_step, hand_over_step
from components.evaluate.sagemaker import evaluate_step, gate_step
from components.profile.sagemaker import profile_step, profile_uri
from components.sagemaker_run import (
    Run,
    only_run_step,
    run_of,
)
from components.sagemaker_steps import (
    ConditionEquals,
    ConditionIn,
    ConditionStep,
    RequestStep,
    Step,
    Text,
    definition,
)
from components.train.sagemaker import (
    launched_model_uri,
    launched_train_step,
    native_model_uri,
    native_outputs_uri,
    native_train_step,
    token_step,
    token_uri,
)

from stoker.orchestrators.sagemaker.compile import PipelineRequest, no_profile


def build(request: PipelineRequest) -> str:
    """The pipeline's definition."""
    run = run_of(request)
    steps = measured(run, request)
    if request.alone is not None:
        # Runs of two kinds: one that decides, and hands over to one that trains.
        parent = run.parameters["parent_run"]
        decides = ConditionStep(
            name="Decides",
            display_name="Does this run decide?",
            conditions=[ConditionEquals(left=parent, right="")],
            if_steps=steps,
            else_steps=trained(dataclasses.replace(run, execution_id=parent), request),
        )
        steps = [decides]
    return definition(run.workload.name, parameters=list(run.parameters.values()), steps=steps)


def measured(run: Run, request: PipelineRequest) -> list[Step]:
    """The profile, or one that is re-used, and all that follows it."""
    assert run.workload.sagemaker
    guard = [only_run_step(run)] if run.workload.sagemaker.overlap == "refuse" else []
    reuse = run.parameters["reuse_profile"]
    profile = profile_step(run, request.profile)
    first = tail(run, request, profile_uri=profile_uri(run), profile=profile)
    again = tail(run, request, profile_uri=reuse, suffix="Again")
    needs_profile = ConditionStep(
        name="NeedsProfile",
        depends_on=[*guard],
        display_name="Is there no profile to re-use?",
        conditions=[ConditionIn(value=reuse, in_values=["", no_profile(run.workload)])],
        if_steps=[profile, *first],
        else_steps=again,
    )
    return [*guard, needs_profile]


def trained(run: Run, request: PipelineRequest) -> list[Step]:
    """What a run does that another one has decided for: its groups are parameters."""
    assert request.train
    assert request.alone
    profile = run.parameters["reuse_profile"]
    make_token = token_step(run)
    with_data = native_train_step(run, request.train, depends_on=[make_token])
    make_alone = token_step(run, name="MakeTokenAlone")
    alone = native_train_step(run, request.alone, depends_on=[make_alone], name="TrainAlone")
    outputs = native_outputs_uri(run)
    trains_alone = ConditionStep(
        name="TrainsAlone",
        display_name="Is there no data group?",
        conditions=[ConditionEquals(left=run.parameters["data_instance_count"], right=0)],
        if_steps=[
            make_alone,
            alone,
            *judged(run, train=alone, profile_uri=profile, outputs=outputs, suffix="Alone"),
        ],
        else_steps=[
            make_token,
            with_data,
            *judged(run, train=with_data, profile_uri=profile, outputs=outputs),
        ],
    )
    return [trains_alone]


def judged(
    run: Run,
    *,
    train: RequestStep,
    profile_uri: Text,
    outputs: Text,
    suffix: str = "",
) -> list[Step]:
    """What follows a training of the service's own."""
    evaluate = evaluate_step(
        run,
        profile_uri=profile_uri,
        train=train,
        outputs_uri=outputs,
        token_uri=token_uri(run),
        name=f"Evaluate{suffix}",
    )
    gate = gate_step(run, evaluate=evaluate, model_uri=native_model_uri(train), suffix=suffix)
    return [evaluate, gate]


def tail(
    run: Run,
    request: PipelineRequest,
    *,
    profile_uri: Text,
    profile: Step | None = None,
    suffix: str = "",
) -> list[Step]:
    """What follows a profile: decide, train, evaluate, gate."""
    decide = decide_step(
        run,
        profile_uri=profile_uri,
        depends_on=[profile] if profile else [],
        name=f"Decide{suffix}",
    )
    if request.alone is not None:
        hand_over = hand_over_step(
            run, profile_uri=profile_uri, depends_on=[decide], name=f"HandOver{suffix}"
        )
        return [decide, hand_over]
    if request.train is None:
        train = launched_train_step(run, depends_on=[decide], name=f"Train{suffix}")
        evaluate = evaluate_step(
            run, profile_uri=profile_uri, train=train, name=f"Evaluate{suffix}"
        )
        model = launched_model_uri(run)
        gate = gate_step(run, evaluate=evaluate, model_uri=model, suffix=suffix)
        return [decide, train, evaluate, gate]
    make_token = token_step(run, depends_on=[decide], name=f"MakeToken{suffix}")
    train = native_train_step(run, request.train, depends_on=[make_token], name=f"Train{suffix}")
    outputs = native_outputs_uri(run)
    after = judged(run, train=train, profile_uri=profile_uri, outputs=outputs, suffix=suffix)
    return [decide, make_token, train, *after]
