"""The retraining pipeline on SageMaker: profile, decide, train, evaluate, gate.

    Profile ─► Decide ─► Train ═► Evaluate ─► Gate ── passed ──► Register
                                                   └── not ────► Refuse

Profile alone gets the parameters of a run. It writes the workload with their values, which all
later steps read, and a profile: a given one, a kept one, or that of a job that it starts and
follows. ═► is taken even if the training fails. Every step is a small processing job; its outputs
lie in the run's folder. `stoker compile sagemaker WORKLOAD --out F` reads this file from the
current folder; add your own steps before, between and after these.
"""

from stoker.sagemaker import (
    INPUT,
    OUTPUT,
    WORKLOAD,
    ConditionEquals,
    ConditionStep,
    FailStep,
    Pipeline,
    PipelineRun,
    StepDependency,
    TriggerCondition,
    text,
    value_in,
)


def build(run: PipelineRun) -> Pipeline:
    """Returns the SDK's pipeline."""
    profile = run.step(
        "Profile",
        f"stoker step profile {WORKLOAD} --resolved {OUTPUT}/workload/workload.json "
        f"--out {OUTPUT}/profile/profile.json --name",
        run.job_name,
        *run.params(),
        inputs={"workload": run.workload_uri},
        outputs=["workload", "profile"],
        follows_job=True,
    )
    workload = profile.outputs["workload"]
    decide = run.step(
        "Decide",
        f"stoker decide {INPUT}/profile/profile.json --workload {WORKLOAD} "
        f"--out {OUTPUT}/decision/decision.json",
        inputs={"workload": workload, "profile": profile.outputs["profile"]},
        outputs=["decision"],
        depends_on=[profile],
    )
    train = run.step(
        "Train",
        f"stoker step train {WORKLOAD} --decision {INPUT}/decision/decision.json "
        f"--out {OUTPUT}/training/training.json --name",
        run.job_name,
        inputs={"workload": workload, "decision": decide.outputs["decision"]},
        outputs=["training"],
        values={"Training": f"{OUTPUT}/training/training.json"},
        depends_on=[decide],
        follows_job=True,
    )
    # It reads the run's whole folder: the service refuses an input that does not exist.
    evaluate = run.step(
        "Evaluate",
        f"stoker step evaluate {INPUT}/run/workload/workload.json "
        f"--profile {INPUT}/run/profile/profile.json --decision {INPUT}/run/decision/decision.json "
        f"--training {INPUT}/run/training/training.json "
        f"--out {OUTPUT}/evaluation/evaluation.json --report {OUTPUT}/evaluation/report.html",
        inputs={"run": run.uri()},
        outputs=["evaluation"],
        values={
            "Evaluation": f"{OUTPUT}/evaluation/evaluation.json",
            "Metadata": f"{OUTPUT}/evaluation/model-metadata.json",
        },
        depends_on=[StepDependency(train, TriggerCondition.ANY)],
    )
    report = text("; report: ", evaluate.outputs["evaluation"], "/report.html")
    reason = text(f"{run.name}: ", value_in(evaluate, "reason"), report)
    register = run.register("Register", model=value_in(train, "model_uri"), evaluation=evaluate)
    gate = ConditionStep(
        name="Gate",
        conditions=[ConditionEquals(left=value_in(evaluate, "passed"), right=True)],
        if_steps=[register],
        else_steps=[FailStep(name="Refuse", error_message=reason)],
        depends_on=[evaluate],
    )
    return Pipeline(
        name=run.name,
        parameters=[*run.parameters.values()],
        steps=[profile, decide, train, evaluate, gate],
        sagemaker_session=run.session,
        pipeline_experiment_config=None,
    )
