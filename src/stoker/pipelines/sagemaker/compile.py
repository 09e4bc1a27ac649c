"""The compiler of a workload's pipeline on SageMaker: parameters, requests, the definition."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.catalog import with_short_prices
from stoker.errors import UsageError
from stoker.parameters import Parameter, main_channel, parameters_of
from stoker.pipelines.base import (
    CODE,
    Compiled,
    Inputs,
    check_complete,
    check_decidable,
    pack_inputs,
    project_pipeline,
    sagemaker_of,
)
from stoker.pipelines.sagemaker.limits import check_definition
from stoker.pipelines.schedules import check_own
from stoker.platforms.aws import tag_list
from stoker.platforms.base import JobSpec
from stoker.platforms.imported import CODE_DIGITS, code_digest, files_of
from stoker.platforms.packing import SourcePackage
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.platforms.sagemaker.job_checks import file_system
from stoker.platforms.sagemaker.lineage import is_in_ecr
from stoker.platforms.sagemaker.places import check_places
from stoker.records import Channel, Group, SageMakerSettings, Workload
from stoker.records.base import Document
from stoker.records.hyperparameters import values_of
from stoker.records.profile_key import profile_key, same_cost_names
from stoker.records.step_cost import split_command

# Limits of the service's model: a description, and an argument of a processing job, which is how
# the steps get the parameters.
MAX_DESCRIPTION = 3072
MAX_ARGUMENT = 256

# Display name of the step that fails a run while another one is active.
ONLY_RUN = "Only run"
# Display name of the step that compares a run with the last one, and the name of its condition.
COMPARE = "What has changed?"
HAS_CHANGED = "HasChanged"

# Channel and file of hyperparameters that a cached profile does not depend on.
_VALUES = "stoker_values"
_VALUES_FILE = Path("/opt/ml/input/data", _VALUES, "hyperparameters.json")
# The pipeline reads these itself; the others go to every step.
_OF_THE_PIPELINE = ("model_group", "approval", "reuse_profile", "skip_unchanged")
# In the memory, so that it exists before the first run has passed.
_README = "README.txt"
_README_TEXT = """Memory of a pipeline of stoker: a file for each run that passed.

Its next run decides by these. Without this file the service refuses the memory as an input of a
step: stoker upload writes it again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What pipelines/sagemaker.py builds a definition from.

    Attributes:
        workload: Workload as the steps read it.
        inputs_uri: Folder with workload.json.
        passed: Names of the parameters that every step passes to stoker as `--param`.
        hyperparameters: Parameters that set a hyperparameter, of profile and training alone.
        profile: CreateTrainingJob of the profile on today's cluster.
        uploads: Address to content of what the steps read.
        profile_key: Key of a profile that may be used again; empty: `sagemaker.cache_days` is 0.
        same_cost: Hyperparameters whose values a cached profile does not depend on.
        code: The packed code, if there is any.
        code_digest: Digest of the files of it that a step may depend on; empty: there is none.
        package_digest: Digest of the whole packed code; empty: there is none.
    """

    workload: Workload
    inputs_uri: str
    parameters: tuple[Parameter, ...]
    passed: tuple[str, ...]
    hyperparameters: tuple[Parameter, ...]
    profile: Document
    uploads: Mapping[str, bytes] = field(default_factory=dict)
    profile_key: str = ""
    same_cost: tuple[str, ...] = ()
    code: SourcePackage | None = None
    code_digest: str = ""
    package_digest: str = ""

    @property
    def memory_uri(self) -> str:
        """Folder that the runs of the pipeline share, with a slash: a file for each that passed."""
        return memory_uri(self.workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedProfile:
    """What the profile of a pipeline is made from, at addresses that name what it depends on.

    Attributes:
        workload: Without hyperparameters and options of the command that leave a step's cost as it
            is: the service compares the requests of two runs.
        same_cost: Names of these.
        uploads: Address to content of their values, and of the code.
    """

    workload: Workload
    key: str = ""
    same_cost: tuple[str, ...] = ()
    uploads: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def has_values(self) -> bool:
        return bool(self.same_cost)


def compile_pipeline(workload: Workload, *, folder: Path | None = None) -> Compiled:
    """Compiles the workload's pipeline by pipelines/sagemaker.py: reproducible, without network.

    `sagemaker.source` also starts from the project's folder, by default the current one.

    Raises:
        UsageError: If the workload lacks something, or the project's files cannot be used.
    """
    here = folder or Path.cwd()
    request = pipeline_request(workload, folder=here)
    # It hides the account from the SDK, so it imports the SDK before the project does.
    with project_pipeline("sagemaker", folder=here, library="stoker.sagemaker") as module:
        definition = str(module.build(request))
    settings = sagemaker_of(request.workload)
    check_definition(
        {
            "PipelineName": request.workload.name,
            "RoleArn": settings.pipeline_role or settings.role,
            "PipelineDefinition": definition,
            "Tags": tag_list(settings.tags),
        }
    )
    return Compiled(
        name=request.workload.name,
        description=describe(request.workload, request.parameters),
        definition=definition,
        parameters=request.parameters,
        uploads=request.uploads,
        code=request.code,
    )


def _refuse_queue(settings: SageMakerSettings) -> None:
    """Raises UsageError for a queue of AWS Batch: a TrainingStep starts its job at once."""
    if settings.queue is None:
        return
    raise UsageError(
        "the steps of a pipeline start their jobs at once, not through a queue of AWS Batch",
        where="key sagemaker.queue",
        fix="--set sagemaker.queue=null for the pipeline; stoker train and run take the queue",
    )


def pipeline_request(workload: Workload, *, folder: Path | None) -> PipelineRequest:
    """Returns what a pipeline of `workload` is built from; arguments as of `compile_pipeline`."""
    _check_workload(workload)
    # Whatever platform the file names: the pipeline's steps submit to this one.
    inputs = pack_inputs(for_steps(with_short_prices(workload)), folder=folder)
    packed_workload = inputs.workload
    cached = _cached_profile(inputs)
    profile_job = _profile_job(packed_workload, cached)
    parameters = _pipeline_parameters(packed_workload)
    hyperparameters = tuple(p for p in parameters if p.hyperparameter)
    passed = [p.name for p in parameters if not p.hyperparameter and p.name not in _OF_THE_PIPELINE]
    return PipelineRequest(
        workload=packed_workload,
        inputs_uri=inputs.uri,
        parameters=parameters,
        passed=tuple(passed),
        hyperparameters=hyperparameters,
        profile=SageMakerPlatform().plan(profile_job).body,
        uploads=_uploads(inputs, cached),
        profile_key=cached.key,
        same_cost=cached.same_cost,
        code=inputs.code,
        code_digest=_code_digest(inputs)[:CODE_DIGITS],
        package_digest=_package_digest(inputs),
    )


def _check_workload(workload: Workload) -> None:
    """Raises UsageError if no pipeline can be made of a workload."""
    _refuse_queue(sagemaker_of(workload))
    check_own(workload, target="sagemaker")
    check_complete(
        workload,
        image="ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:TAG",
        instance_type="ml.g5.xlarge",
    )
    check_comparable(workload)
    check_decidable(workload, platform="sagemaker")


def _profile_job(workload: Workload, cached: _CachedProfile) -> JobSpec:
    """Returns the job that is profiled, on today's cluster.

    Raises:
        UsageError: If keys of the workload name several accounts or regions.
    """
    cluster = workload.cluster
    assert cluster
    # Nothing is written to the run's folder: only the request of the plan is taken.
    job = JobSpec.of(
        cached.workload,
        groups=[Group.of_today(cluster.dnn)],
        run_dir=Path("runs"),
        name=workload.name,
        profile=workload.profile,
    )
    others = {}
    if workload.notify:
        others["notify.secret_arn"] = workload.notify.secret_arn
    check_places(job, sagemaker_of(workload), others=others)
    if not cached.has_values:
        return job
    settings = dataclasses.replace(job.settings, more_hyperparameters=_VALUES_FILE)
    return dataclasses.replace(job, settings=settings)


def _pipeline_parameters(workload: Workload) -> tuple[Parameter, ...]:
    """Returns the parameters of a run, with their defaults as the service spells them."""
    parameters = [_of_service(p) for p in parameters_of(workload)]
    main = main_channel(workload)
    if main and file_system(workload.channels[main].uri):
        # It has an id and a folder, and no address that one value could replace.
        parameters = [p for p in parameters if p.name != "input_data"]
    return tuple(parameters)


def _uploads(inputs: Inputs, cached: _CachedProfile) -> dict[str, bytes]:
    """Returns what the steps read, by its address."""
    return {
        **{f"{inputs.uri}/{name}": content for name, content in inputs.files.items()},
        **cached.uploads,
        # The service refuses an input that does not exist, as before the first run.
        f"{memory_uri(inputs.workload)}{_README}": _README_TEXT.encode(),
    }


def for_steps(workload: Workload) -> Workload:
    """Returns the workload as steps read it: another schedule does not make another pipeline."""
    settings = msgspec.structs.replace(sagemaker_of(workload), schedule=None)
    return msgspec.structs.replace(workload, platform="sagemaker", sagemaker=settings)


def memory_uri(workload: Workload) -> str:
    """Returns the folder that the runs of a workload's pipeline share, with a slash at its end."""
    return f"{sagemaker_of(workload).output_uri.rstrip('/')}/stoker/memory/{workload.name}/"


def check_comparable(workload: Workload) -> None:
    """Refuses `skip_unchanged` where a step could never tell that nothing has changed."""
    if not workload.skip_unchanged:
        return
    where = f"workload {workload.name}, key"
    if not workload.channels:
        raise UsageError(
            "skip_unchanged compares the files of channels, and the workload names none",
            where=f"{where} channels",
            fix="name them, or leave it out",
        )
    for name, channel in workload.channels.items():
        if not channel.uri.startswith("s3://") or channel.data_type != "S3Prefix":
            raise UsageError(
                f"no step can tell whether the files of channel {name} are the same",
                where=f"{where} channels.{name}",
                fix="a folder in S3 (data_type: S3Prefix), or leave skip_unchanged out",
            )
    image = workload.image or ""
    if "@sha256:" not in image and not is_in_ecr(image):
        raise UsageError(
            f"no step can tell whether the image {image} is the same",
            where=f"{where} image",
            fix="name it by its digest, or leave skip_unchanged out",
        )


def _package_digest(inputs: Inputs) -> str:
    packed = inputs.files.get(CODE)
    if packed is None:
        return ""
    return f"sha256:{hashlib.sha256(packed).hexdigest()[:CODE_DIGITS]}"


def _code_digest(inputs: Inputs) -> str:
    packed = inputs.files.get(CODE)
    if packed is None:
        return ""
    return code_digest(files_of(packed), inputs.workload.command)


def _cached_profile(inputs: Inputs) -> _CachedProfile:
    """Returns the profile's own inputs; without `sagemaker.cache_days` those of all steps."""
    workload = inputs.workload
    settings = sagemaker_of(inputs.workload)
    if not settings.cache_days:
        return _CachedProfile(workload=workload)
    packed = inputs.files.get(CODE)
    key = profile_key(workload, code=_code_digest(inputs))
    folder = f"{settings.output_uri.rstrip('/')}/stoker/inputs/profile-{key}"
    command, options = split_command(workload.command, workload.profile.free_names)
    free = same_cost_names(workload)
    values = values_of(workload.hyperparameters)
    same = {**options, **{name: values[name] for name in free}}
    uploads = {}
    channels = dict(workload.channels)
    if same:
        uploads[f"{folder}/values/{_VALUES_FILE.name}"] = json.dumps(same).encode()
        channels[_VALUES] = Channel(uri=f"{folder}/values/")
    if packed is not None:
        # Another run's code may differ in what the script does not import: the first one's stays.
        settings = msgspec.structs.replace(settings, source=f"{folder}/{CODE}")
        uploads[f"{folder}/{CODE}"] = packed
    own = {name: each for name, each in workload.hyperparameters.items() if name not in free}
    made = msgspec.structs.replace(
        workload, command=command, hyperparameters=own, channels=channels, sagemaker=settings
    )
    return _CachedProfile(workload=made, key=key, same_cost=tuple(same), uploads=uploads)


def describe(workload: Workload, parameters: Sequence[Parameter]) -> str:
    """Returns the pipeline's description: one line, for the service refuses line breaks in it."""
    texts = " ".join(f"{p.name}: {p.text}" for p in parameters)
    whole = f"stoker: profile, decide, train, evaluate {workload.name}. Parameters: {texts}"
    # Cut, and not refused: it only explains.
    if len(whole) <= MAX_DESCRIPTION:
        return whole
    return whole[: MAX_DESCRIPTION - 3] + "..."


def _of_service(parameter: Parameter) -> Parameter:
    """Spells defaults as the service does: requests hold the parameters as they are."""
    if parameter.name == "reuse_profile":
        # Not empty: the service may check the addresses of the branch that is not taken, too.
        return dataclasses.replace(
            parameter,
            text="Folder with a profile.json, in place of a new profile; as it is: a new profile.",
            default=no_profile,
        )
    if parameter.name != "instance_type":
        return parameter

    def with_prefix(workload: Workload) -> str:
        return f"ml.{str(parameter.default(workload)).removeprefix('ml.')}"

    return dataclasses.replace(parameter, default=with_prefix)


def no_profile(workload: Workload) -> str:
    """Returns the value of `reuse_profile` that means none: a folder that is never made."""
    assert workload.sagemaker
    return f"{workload.sagemaker.output_uri.rstrip('/')}/stoker/no-profile"


def argument_of(parameter: Parameter, value: str | int | float) -> str:
    """Returns the word in which a step hands a parameter's value on to stoker."""
    word = f"{parameter.name}={value}"
    # There may be many hyperparameters, and a step takes 100 words: theirs is one word, not two.
    if parameter.hyperparameter:
        return f"--param={word}"
    return word
