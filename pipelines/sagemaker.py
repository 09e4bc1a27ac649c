"""The retraining pipeline on SageMaker: profile, decide, train, evaluate, gate.

    NeedsProfile ── ReuseProfile unset ────► Profile ─► Decide ─► Train ═► Evaluate ─► Gate
                └── it names a folder ────────────────► Decide ─► Train ═► Evaluate ─► Gate
                                                        Gate ── passed ──► Register
                                                             └── not ────► Refuse

═► is taken whatever became of the training. Branches cannot meet again: a step cannot wait for a
condition, and to wait for a step of each branch is to wait for both, of which one never runs. So
each branch of "is there a profile to re-use?" has a tail of its own; the second one's steps are
called DecideAgain, TrainAgain and so on.

Edit it: `stoker compile sagemaker WORKLOAD --out F` reads it from the folder it is run in.
"""

from components.decide.sagemaker import decide_step
from components.evaluate.sagemaker import evaluate_step, gate_step
from components.profile.sagemaker import profile_step, profile_uri
from components.sagemaker_run import (
    Run,
    run_of,
)
from components.sagemaker_steps import (
    ConditionIn,
    ConditionStep,
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
    reuse = run.parameters["reuse_profile"]
    profile = profile_step(run, request.profile)
    first = tail(run, request, profile_uri=profile_uri(run), profile=profile)
    again = tail(run, request, profile_uri=reuse, suffix="Again")
    start = ConditionStep(
        name="NeedsProfile",
        display_name="Is there no profile to re-use?",
        conditions=[ConditionIn(value=reuse, in_values=["", no_profile(run.workload)])],
        if_steps=[profile, *first],
        else_steps=again,
    )
    return definition(run.workload.name, parameters=list(run.parameters.values()), steps=[start])


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
    if request.train is None:
        train = launched_train_step(run, depends_on=[decide], name=f"Train{suffix}")
        before, outputs, token, model_uri = [decide], None, None, launched_model_uri(run)
    else:
        make_token = token_step(run, depends_on=[decide], name=f"MakeToken{suffix}")
        train = native_train_step(
            run, request.train, depends_on=[make_token], name=f"Train{suffix}"
        )
        before, model_uri = [decide, make_token], native_model_uri(train)
        outputs, token = native_outputs_uri(run), token_uri(run)
    evaluate = evaluate_step(
        run,
        profile_uri=profile_uri,
        train=train,
        outputs_uri=outputs,
        token_uri=token,
        name=f"Evaluate{suffix}",
    )
    gate = gate_step(run, evaluate=evaluate, model_uri=model_uri, suffix=suffix)
    return [*before, train, evaluate, gate]
