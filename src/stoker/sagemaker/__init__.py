"""Steps of stoker for pipelines on SageMaker.

    from sagemaker.mlops.workflow.pipeline import Pipeline
    from stoker.sagemaker import PipelineRun, decide_step, profile_step, upload_inputs
    from stoker.workload_file import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-sagemaker.yaml"))
    measured = profile_step(run)
    decided = decide_step(run, profile=measured)
    role = run.settings.pipeline_role or run.settings.role
    Pipeline(name="mine", steps=[measured, decided]).upsert(role_arn=role)
    upload_inputs(run)

Needs the extra `sagemaker`. Each step is a step of the SDK, with `properties` and `depends_on`. Its
`outputs` map names to addresses. Functions take `name` (the branch's suffix is added), `depends_on`
(steps to wait for) and, if the step runs a container, `image` (default: the run's image; for
control steps the control image). `run.given(...)` returns the run with other parameter values,
`run.branch(...)` the run for another branch.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.evaluate import metadata_names
from stoker.parameters import Parameter, main_channel
from stoker.pipelines.base import CODE
from stoker.pipelines.sagemaker.compile import (
    COMPARE,
    HAS_CHANGED,
    ONLY_RUN,
    PipelineRequest,
    no_profile,
)
from stoker.platforms.sagemaker.job import MARGIN_SECONDS
from stoker.platforms.sagemaker.job_checks import TOKEN_CHANNEL
from stoker.platforms.sagemaker.training_job import PROFILE_FOLDER
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings
from stoker.sagemaker.steps import (
    EXECUTION_ARN,
    EXECUTION_ID,
    INPUT,
    OUTPUT,
    WORKLOAD,
    ConditionEquals,
    ConditionIn,
    ConditionStep,
    FailStep,
    PipelineVariable,
    RequestStep,
    Step,
    StepDependency,
    StepRequest,
    Text,
    TriggerCondition,
    control_step,
    pipeline,
    text,
    upload_inputs,
    value_in,
)

# The name is stoker.kubeflow's, too; inside stoker each class name occurs once.
from stoker.sagemaker.steps import SageMakerPipelineRun as PipelineRun
from stoker.train import MAX_PLANS
from stoker.units import duration

Waits = Sequence[Step | StepDependency | str]
# Makes the steps that need a profile, of its step or of a folder.
_After = Callable[[PipelineRun, RequestStep | Text], Sequence[Step]]

# The longest processing job: by an account's default quota, and with a raised one.
_STEP_SECONDS = 5 * 86400
_MAX_STEP_SECONDS = 9 * 86400
# Characters of an address, and bytes of a key in S3.
_MAX_URI = 1024
# Variables that differ from job to job.
_OF_ONE_PROFILE = ("STOKER_TOKEN_FILE", "STOKER_WORKLOAD_SHA256")


def profile_step(
    run: PipelineRun,
    *,
    image: Text | None = None,
    depends_on: Waits = (),
    name: str = "Profile",
) -> RequestStep:
    """Makes a step that measures, on today's cluster, what a training step waits for.

    It is a training job, because processing jobs cannot have the large GPU types. The profile is
    uploaded as a checkpoint, from a folder that the script does not use.

    Returns:
        The step, with the output `profile`: the folder of profile.json.
    """
    return _profile_step(
        run,
        folder=_profile_uri(run, image=image or run.image),
        cache_days=run.settings.cache_days,
        image=image,
        depends_on=depends_on,
        name=name,
    )


def _profile_step(
    run: PipelineRun,
    *,
    folder: Text,
    cache_days: int,
    image: Text | None = None,
    depends_on: Waits = (),
    name: str = "Profile",
) -> RequestStep:
    request = run.request.profile
    instance_type = run.value("instance_type")
    instance_count = run.value("instance_count")
    hyperparameters = _hyperparameters(run, request)
    variables = {
        **_without(request["Environment"], _OF_ONE_PROFILE),
        "STOKER_PROFILE_FILE": f"{PROFILE_FOLDER}/profile.json",
        **_literals(run, hyperparameters),
        # With these a later run compares what it has.
        "STOKER_IMAGE": run.image if image is None else image,
    }
    if run.request.code_digest:
        variables["STOKER_CODE_DIGEST"] = run.request.code_digest
    if cache_days:
        # For the cache: the service does not compare the instance types of an earlier run.
        variables["STOKER_PROFILED_CLUSTER"] = text(instance_count, " x ", instance_type)
    return RequestStep(
        f"{name}{run.suffix}",
        "Training",
        {
            **_job_request(run, request, image=image),
            "ResourceConfig": {
                **mapping(request["ResourceConfig"]),
                "InstanceType": instance_type,
                "InstanceCount": instance_count,
            },
            "CheckpointConfig": {"S3Uri": folder, "LocalPath": PROFILE_FOLDER},
            "HyperParameters": hyperparameters or None,
            # Without the token: a profile has no data group, and tokens differ from run to run.
            "InputDataConfig": _channels(run, request) or None,
            "Environment": variables,
            "OutputDataConfig": {
                **mapping(request["OutputDataConfig"]),
                "S3OutputPath": f"{run.output_uri}/stoker/jobs/{run.workload.name}",
            },
        },
        display_name=name,
        description="What a training step waits for, measured on today's cluster.",
        outputs={"profile": folder},
        depends_on=depends_on,
        cache_days=cache_days,
        capacity_minutes=run.workload.on_no_capacity.wait_minutes,
    )


def profile_or_reuse(
    run: PipelineRun,
    after: _After,
    *,
    depends_on: Waits = (),
) -> list[Step]:
    """Makes a profile step, unless `reuse_profile` names a profile, and the steps after it.

    Branches of a SageMaker pipeline cannot join, so `after` is called twice. In the second branch,
    without a profile step, step names end in `Again`. With `sagemaker.cache_days` a small step
    looks for a kept profile, and the steps after that one have names that end in `Kept`. With
    `sagemaker.overlap: refuse` the first step is `only_run_step`; with `skip_unchanged` the next
    one is `compare_step`, and a condition runs all others only if something has changed.

    Args:
        after: Makes the steps that follow, from the run and the profile (a step or an address).
    """
    guard: list[RequestStep] = []
    if run.settings.overlap == "refuse":
        guard = [only_run_step(run, depends_on=depends_on)]
    if run.workload.skip_unchanged:
        return [*guard, *_unless_unchanged(run, after, depends_on=[*guard, *depends_on])]
    return [*guard, _profile_or_reuse(run, after, depends_on=[*guard, *depends_on])]


def _profile_or_reuse(
    run: PipelineRun,
    after: _After,
    *,
    depends_on: Waits,
) -> Step:
    reuse = run.reused_profile
    return ConditionStep(
        name=f"NeedsProfile{run.suffix}",
        depends_on=list(depends_on),
        display_name="Is there no profile to reuse?",
        conditions=[ConditionIn(value=reuse, in_values=["", no_profile(run.workload)])],
        if_steps=_kept_or_measured(run, after),
        else_steps=[*after(run.alternative("Again"), reuse)],
    )


def _unless_unchanged(
    run: PipelineRun,
    after: _After,
    *,
    depends_on: Waits,
) -> list[Step]:
    """Makes the comparison, and the condition that runs all other steps if something has changed.

    Without a change no further step runs, and the run has succeeded.
    """
    comparison = compare_step(run, depends_on=depends_on)
    condition = ConditionStep(
        name=f"{HAS_CHANGED}{run.suffix}",
        display_name="Has anything changed?",
        depends_on=[comparison],
        conditions=[ConditionEquals(left=value_in(comparison, "has_changed"), right=True)],
        if_steps=[_profile_or_reuse(run, after, depends_on=())],
        else_steps=[],
    )
    return [comparison, condition]


def compare_step(
    run: PipelineRun, *, image: Text | None = None, depends_on: Waits = (), name: str = "Compare"
) -> RequestStep:
    """Makes a step that compares what the run would train with the last run that passed.

    It lists the channels in S3, and asks ECR for the image's digest and the service how that run
    ended. What it may not read counts as changed.

    Returns:
        The step, with the output `comparison`; `value_in(step, "has_changed")` reads
        comparison.json, and so do "words" and "since".

    Raises:
        UsageError: If the workload does not say `skip_unchanged`: then nothing is compared.
    """
    if not run.workload.skip_unchanged:
        raise UsageError(
            "the workload does not ask for runs to be compared",
            where=f"step {name}",
            fix="write skip_unchanged: true into the workload, or leave this step out",
        )
    code = run.request.package_digest
    return control_step(
        run,
        name=name,
        command=[
            *("stoker", "compare", WORKLOAD),
            *("--memory", f"{INPUT}/memory"),
            *_branch_words(run),
            *(("--code", code) if code else ()),
            *("--out", f"{OUTPUT}/comparison/comparison.json"),
            *run.words("skip_unchanged", has_hyperparameters=True),
        ],
        image=image,
        inputs={"memory": run.request.memory_uri},
        outputs={"comparison": run.uri("comparison")},
        owned=[run.uri("comparison")],
        property_files={"Comparison": "comparison/comparison.json"},
        environment=run.told_run,
        depends_on=depends_on,
        display_name=COMPARE,
        description="What has changed since the last run that passed.",
    )


def _branch_words(run: PipelineRun) -> tuple[str, ...]:
    """Returns the option that tells a branch's runs from those of the pipeline's others."""
    if run.variant:
        return ("--branch", run.variant.removeprefix("-"))
    return ()


def _kept_or_measured(run: PipelineRun, after: _After) -> list[Step]:
    if not run.settings.cache_days:
        today = profile_step(run)
        return [today, *after(run, today)]
    # Not the service's own cache: it compares addresses of data, dates included.
    finding = _find_profile_step(run)
    today = _profile_step(run, folder=_own_profile_uri(run), cache_days=0)
    is_kept = ConditionStep(
        name=f"IsProfileKept{run.suffix}",
        depends_on=[finding],
        display_name="Is there a profile of the same cost?",
        conditions=[ConditionEquals(left=value_in(finding, "found"), right="yes")],
        if_steps=[*after(run.alternative("Kept"), finding.outputs["profile"])],
        else_steps=[today, *after(run, today)],
    )
    return [finding, is_kept]


def _find_profile_step(run: PipelineRun) -> RequestStep:
    """Makes a small step that looks for a profile of the last `sagemaker.cache_days` days.

    It finds one whose step costs the same, also over data of another date, and whose data are about
    as much. If there is none, it notes that this run measures.

    Returns:
        The step, with the output `profile`: a folder with profile.json, if one was found;
        `value_in(step, "found")` is yes or no.
    """
    return control_step(
        run,
        name="FindProfile",
        command=[
            *("stoker", "profile", WORKLOAD),
            *("--find", run.branch_id),
            *_package_words(run),
            *("--out", f"{OUTPUT}/profile/profile.json"),
            *run.words(has_hyperparameters=True),
        ],
        inputs=_package(run),
        outputs={"profile": run.uri("profile")},
        owned=[run.uri("profile")],
        property_files={"Found": "profile/found.json"},
        display_name="Find a profile",
        description="Looks for a kept profile whose step costs the same.",
    )


def only_run_step(
    run: PipelineRun, *, depends_on: Waits = (), name: str = "OnlyRun"
) -> RequestStep:
    """Makes a step that fails while an earlier run of the pipeline is active.

    A later run counts, too, if it has passed this step: then this run is a retry.
    """
    return control_step(
        run,
        name=name,
        command=[
            *("stoker", "step", "alone", "sagemaker"),
            *(run.workload.name, "--besides", EXECUTION_ID),
        ],
        depends_on=depends_on,
        display_name=ONLY_RUN,
        description="Fails while an earlier run of this pipeline is active.",
    )


def decide_step(
    run: PipelineRun,
    *,
    profile: RequestStep | Text,
    image: Text | None = None,
    depends_on: Waits = (),
    name: str = "Decide",
) -> RequestStep:
    """Makes a step that ranks the possible clusters, and writes the run's decision.json.

    It is never cached: it is cheap, and prices change. The plan of the pipeline's last run stays
    unless another one is clearly better.

    Args:
        profile: The profile step, or a folder with profile.json.

    Returns:
        The step, with the output `decision`; `value_in(step, "action")` reads decision.json, and
        so does "verdict": sure, probable, none or unknown.
    """
    return control_step(
        run,
        name=name,
        command=[
            *("stoker", "decide", f"{INPUT}/profile/profile.json"),
            *("--workload", WORKLOAD),
            *_package_words(run),
            *("--memory", f"{INPUT}/memory"),
            *_branch_words(run),
            *("--out", f"{OUTPUT}/decision/decision.json"),
            *run.words(),
        ],
        image=image,
        inputs={
            "profile": _profile_in(profile),
            "memory": run.request.memory_uri,
            **_package(run),
        },
        outputs={"decision": run.uri("decision")},
        owned=[run.uri("decision")],
        property_files={"Decision": "decision/decision.json"},
        depends_on=[*([profile] if isinstance(profile, RequestStep) else []), *depends_on],
        description="Which cluster pays, in time and money.",
        is_isolated=True,
    )


def train_step(
    run: PipelineRun,
    *,
    decision: RequestStep,
    image: Text | None = None,
    depends_on: Waits = (),
    name: str = "Train",
) -> RequestStep:
    """Makes a step that starts the decision's training job, or adopts it, and follows it.

    The service's own training step cannot take the number of groups from an earlier step.

    Returns:
        The step, with the outputs `training`, the folder of training.json, and `model`, the address
        of model.tar.gz.
    """
    # The step itself runs in the control image; the training job has this one.
    of = run if image is None else run.given(image=image)
    step = control_step(
        run,
        name=name,
        command=[
            *("stoker", "step", "train", WORKLOAD),
            *("--decision", f"{INPUT}/decision/decision.json"),
            *("--name", run.job_name),
            *("--out", f"{OUTPUT}/training/training.json"),
            "--yes",
            *of.words(has_hyperparameters=True),
        ],
        inputs={"decision": run.uri("decision")},
        outputs={"training": run.uri("training")},
        owned=[run.uri("training")],
        environment={**run.told_run, "STOKER_PIPELINE_EXECUTION": EXECUTION_ARN},
        depends_on=[decision, *depends_on],
        description="Trains on the cluster that was decided on, and waits for it.",
        max_run_seconds=_longest_training(run),
    )
    # Known in advance, as the job's name is.
    step.outputs["model"] = text(f"{run.output_uri}/", run.job_name, "/output/model.tar.gz")
    return step


def evaluate_step(
    run: PipelineRun,
    *,
    profile: RequestStep | Text,
    training: RequestStep,
    refused_expires: bool = False,
    image: Text | None = None,
    depends_on: Waits = (),
    name: str = "Evaluate",
) -> RequestStep:
    """Makes a step that evaluates the run, and writes evaluation.json and report.html.

    It runs after any outcome of the training, so that a failed training run has a report, too. Its
    input is the run's whole folder, because the service refuses an input that does not exist.

    Args:
        profile: The profile step, or a folder with profile.json.
        refused_expires: Whether a model that this evaluation refuses is tagged, so that the
            bucket's rule deletes it. Not where another step decides what is registered.

    Returns:
        The step, with the outputs `evaluation` (a folder), `report` and `model_quality`;
        `value_in(step, "passed")` reads evaluation.json. A run that passed is added to the
        pipeline's memory.
    """
    step = control_step(
        run,
        name=name,
        command=_evaluate_command(run, refused_expires=refused_expires),
        image=image,
        inputs={"profile": _profile_in(profile), "run": run.uri("")},
        outputs={"evaluation": run.uri("evaluation"), "memory": run.request.memory_uri},
        owned=[run.uri("evaluation")],
        property_files={
            "Evaluation": "evaluation/evaluation.json",
            "Metadata": "evaluation/model-metadata.json",
        },
        environment={
            "STOKER_PIPELINE_RUN": run.job_name,
            "STOKER_PIPELINE_EXECUTION": EXECUTION_ARN,
        },
        depends_on=[StepDependency(training, TriggerCondition.ANY), *depends_on],
        # Never isolated: a run's gate may ask the registry for the champion.
        description="Checks the gates and the prediction; writes the report.",
    )
    folder = step.outputs["evaluation"]
    step.outputs["report"] = text(folder, "/report.html")
    step.outputs["model_quality"] = text(folder, "/model-quality.json")
    return step


def _evaluate_command(run: PipelineRun, *, refused_expires: bool) -> list[Text]:
    comparison = f"{INPUT}/run/comparison/comparison.json"
    return [
        *("stoker", "step", "evaluate", WORKLOAD),
        *("--profile", f"{INPUT}/profile/profile.json"),
        *("--decision", f"{INPUT}/run/decision/decision.json"),
        *("--training", f"{INPUT}/run/training/training.json"),
        *("--out", f"{OUTPUT}/evaluation/evaluation.json"),
        *("--report", f"{OUTPUT}/evaluation/report.html"),
        *("--champion", text("registry:", run.value("model_group"))),
        *("--set", text("sagemaker.model.approval=", run.value("approval"))),
        "--always",
        *(("--expires",) if refused_expires else ()),
        *("--remember", f"{OUTPUT}/memory"),
        *_branch_words(run),
        *(("--comparison", comparison) if run.workload.skip_unchanged else ()),
        *run.words(),
    ]


def gate_step(
    run: PipelineRun,
    *,
    evaluation: RequestStep,
    passed: Sequence[Step] = (),
    name: str = "Gate",
) -> Step:
    """Makes a condition: the steps `passed` if the model passed, else the run fails.

    It compares a JSON boolean, as the SDK's local mode does. AWS documents only numbers and texts.

    Args:
        evaluation: A step, stoker's or yours, whose first property file has `passed` and `reason`.
        passed: Steps for a model that passed, such as its registration.
    """
    report = evaluation.outputs.get("report")
    return ConditionStep(
        name=f"{name}{run.suffix}",
        display_name=name,
        description="Did the evaluation pass?",
        depends_on=[evaluation],
        conditions=[ConditionEquals(left=value_in(evaluation, "passed"), right=True)],
        if_steps=list(passed),
        else_steps=[
            FailStep(
                name=f"Refuse{name.removeprefix('Gate')}{run.suffix}",
                display_name="Refuse",
                description="Ends the run as failed, with the gate's words.",
                error_message=text(
                    f"{run.workload.name}: ",
                    value_in(evaluation, "reason"),
                    *(("; report: ", report) if report else ()),
                ),
            )
        ],
    )


def register_step(
    run: PipelineRun,
    *,
    training: RequestStep,
    evaluation: RequestStep,
    depends_on: Waits = (),
    name: str = "Register",
) -> RequestStep:
    """Makes a step that registers the model in the group of the parameter `model_group`.

    Args:
        training: A train step, or your step with an output `model`, the address of an archive.
        evaluation: The step that evaluated. From stoker's step the model gets metrics and report.
    """
    model = run.settings.model
    left = evaluation.outputs
    judged = None
    if any(file.name == "Metadata" for file in evaluation.property_files):
        judged = {
            "stoker-decision": run.uri("decision/decision.json"),
            "stoker-evaluation": text(left["evaluation"], "/evaluation.json"),
            "stoker-report": left["report"],
            **{
                f"stoker-{key.replace('_', '-')}": value_in(evaluation, key, file="Metadata")
                for key in metadata_names(run.workload)
            },
        }
    quality = {"ContentType": "application/json", "S3Uri": left.get("model_quality")}
    metrics = {"ModelQuality": {"Statistics": quality}} if "model_quality" in left else None
    about = f"Trained by the pipeline {run.workload.name} of stoker."
    if not model.image:
        about += " It names no image to serve it."
    return RequestStep(
        f"{name}{run.suffix}",
        "RegisterModel",
        {
            "ModelPackageGroupName": run.value("model_group"),
            "ModelPackageDescription": about,
            "ModelApprovalStatus": run.value("approval"),
            "InferenceSpecification": {
                # The user's image, if any: the training's image cannot serve.
                "Containers": [
                    {
                        "Image": model.image,
                        "ModelDataUrl": training.outputs["model"],
                        "Environment": model.environment_of() or None,
                    }
                ],
                "SupportedContentTypes": list(model.content_types),
                "SupportedResponseMIMETypes": list(model.response_types),
            },
            "ModelMetrics": metrics,
            # The run that made the model.
            "MetadataProperties": {"GeneratedBy": EXECUTION_ARN},
            "CustomerMetadataProperties": judged,
        },
        display_name=name,
        description="Adds the model to its group in the model registry.",
        depends_on=depends_on,
    )


def _longest_training(run: PipelineRun) -> int:
    """Returns how long the step that follows the training may last, and needs to."""
    settings = run.settings
    policy = run.workload.on_no_capacity
    given = settings.control.max_run_seconds
    longest = settings.may_last_seconds
    num_plans = 1
    # Each plan is waited for as long.
    if policy.then == "next_plan":
        num_plans = MAX_PLANS
    needed = longest + num_plans * 60 * policy.wait_minutes + int(MARGIN_SECONDS)
    training = f"a training run of up to {duration(longest)}"
    where = "key sagemaker.max_run_seconds"
    control = "sagemaker.control.max_run_seconds"
    if longest > _MAX_STEP_SECONDS:
        raise UsageError(
            f"{training} is longer than a step of a pipeline may last, 9 days",
            where=where,
            fix="lower it, and continue from checkpoints in the next run",
        )
    if given is not None and given < longest:
        raise UsageError(
            f"a step of {duration(given)} cannot outlast {training}",
            where=f"key {control}",
            fix=f"leave it out, or set it to {needed} or more",
        )
    if given is None and needed > _STEP_SECONDS:
        raise UsageError(
            f"the step that follows the training may need {duration(needed)}, more than the "
            "account's quota for processing jobs, by default 5 days",
            where=where,
            fix="lower it, or on_no_capacity.wait_minutes; or raise the quota, and set "
            f"{control} to {min(needed, _MAX_STEP_SECONDS)}",
        )
    return given or needed


def _profile_uri(run: PipelineRun, *, image: Text) -> Text:
    """Returns the folder of profile.json: one for each run, or with caching for each profile.

    The service compares the folder when it searches its cache. Its name contains all that a run can
    change, so that a run with another batch size does not overwrite a cached profile. It is outside
    the run's folder, as the training's code may write to it.
    """
    if not run.settings.cache_days:
        return _own_profile_uri(run)
    folder = f"{run.output_uri}/stoker/profiles/{run.workload.name}/"
    key = run.request.profile_key
    usual = PipelineRun(request=run.request)
    length = len(str(_profile_in(text(f"{folder}{key}/", *_profiled(usual, image=usual.image)))))
    if length > _MAX_URI:
        what = f"the address of a cached profile has {length} characters, at most {_MAX_URI}: it "
        what += "contains image, input data and hyperparameters"
        raise UsageError(
            what,
            where="key sagemaker.cache_days",
            fix="sagemaker.cache_days: 0, or shorten hyperparameters",
        )
    return text(f"{folder}{key}/", *_profiled(run, image=image))


def _own_profile_uri(run: PipelineRun) -> Text:
    """Returns the folder of a profile that this run measures."""
    return text(f"{run.output_uri}/stoker/profiles/{run.workload.name}/", run.branch_id)


def _package(run: PipelineRun) -> dict[str, Text]:
    """Returns the step's input with the packed code; {} without any."""
    source = run.settings.source
    if run.request.code_digest and source:
        return {"code": source}
    return {}


def _package_words(run: PipelineRun) -> tuple[str, ...]:
    if _package(run):
        return ("--package", f"{INPUT}/code/{CODE}")
    return ()


def _profiled(run: PipelineRun, *, image: Text) -> Iterator[Text | int | float]:
    """Yields the parts of a folder's name: all that a run can change in its profile."""
    yield from (run.value("instance_type"), "-", run.value("instance_count"))
    if _has_address(run):
        yield from (",input_data=", run.value("input_data"))
    for parameter in _measured(run):
        yield from (f",{parameter.name}=", run.value(parameter.name))
    # Last: an address of data may end with a slash, a folder of a file's name must not.
    yield from (",image=", image)


def _measured(run: PipelineRun) -> list[Parameter]:
    """Returns the hyperparameters that a run may change and a profile is made with."""
    same = run.request.same_cost
    return [each for each in run.request.hyperparameters if each.hyperparameter not in same]


def _profile_in(profile: RequestStep | Text) -> Text:
    folder = profile.outputs["profile"] if isinstance(profile, RequestStep) else profile
    return text(folder, "/profile.json")


def _job_request(run: PipelineRun, request: Document, *, image: Text | None) -> StepRequest:
    """Returns the request with the image parameter, without the name and digests of one job."""
    tags = [t for t in mappings(request, "Tags") if not str(t["Key"]).startswith("stoker:")]
    return {
        **_without(request, ("TrainingJobName",)),
        "AlgorithmSpecification": {
            **mapping(request["AlgorithmSpecification"]),
            "TrainingImage": image or run.image,
        },
        "Tags": tags or None,
    }


def _channels(run: PipelineRun, request: Document) -> list[StepRequest]:
    """Returns the channels with the parameter for input data, without the token of one job."""
    main = main_channel(run.workload)
    has_address = _has_address(run)
    channels = []
    for channel in mappings(request, "InputDataConfig"):
        copied: StepRequest = dict(channel)
        if channel["ChannelName"] == main and has_address:
            source = mapping(channel, "DataSource", "S3DataSource")
            uri = text(run.value("input_data"))
            copied["DataSource"] = {"S3DataSource": {**source, "S3Uri": uri}}
        if channel["ChannelName"] != TOKEN_CHANNEL:
            channels.append(copied)
    return channels


def _has_address(run: PipelineRun) -> bool:
    return any(parameter.name == "input_data" for parameter in run.request.parameters)


def _hyperparameters(run: PipelineRun, request: Document) -> StepRequest:
    """Returns the request's hyperparameters, with parameters for those that a run can change."""
    measured = {p.hyperparameter: _as_json(run, p) for p in _measured(run)}
    return {**mapping(request.get("HyperParameters") or {}), **measured}


def _as_json(run: PipelineRun, parameter: Parameter) -> Text:
    """Returns a hyperparameter's value as the JSON that the service can write."""
    value = run.value(parameter.name)
    if parameter.kind != "string":
        return text("", value)
    if isinstance(value, str | int | float):
        return json.dumps(str(value))
    # The service escapes nothing in a variable: `_literals` tells the launcher.
    return text('"', value, '"')


def _literals(run: PipelineRun, names: Collection[str]) -> dict[str, str]:
    """Returns the variable that names the texts whose quotes are no JSON, by place."""
    texts = {
        p.hyperparameter
        for p in run.request.hyperparameters
        if p.kind == "string" and not isinstance(run.value(p.name), str | int | float)
    }
    places = tuple(place for place, name in enumerate(sorted(names)) if name in texts)
    variables = RunEnvironment(literal_hyperparameters=places)
    if places:
        return variables.to_environ("literal_hyperparameters")
    return {}


def _without(request: Json, keys: Collection[str]) -> StepRequest:
    return {key: value for key, value in mapping(request).items() if key not in keys}


__all__ = [
    "EXECUTION_ARN",
    "EXECUTION_ID",
    "INPUT",
    "OUTPUT",
    "WORKLOAD",
    "ConditionEquals",
    "ConditionIn",
    "ConditionStep",
    "FailStep",
    "PipelineRequest",
    "PipelineRun",
    "PipelineVariable",
    "RequestStep",
    "Step",
    "StepDependency",
    "Text",
    "TriggerCondition",
    "compare_step",
    "control_step",
    "decide_step",
    "evaluate_step",
    "gate_step",
    "only_run_step",
    "pipeline",
    "profile_or_reuse",
    "profile_step",
    "register_step",
    "text",
    "train_step",
    "upload_inputs",
    "value_in",
]
