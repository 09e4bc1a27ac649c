"""What the steps of one run of a SageMaker pipeline share, and the small steps among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from components.sagemaker_steps import (
    EXECUTION_ID,
    PropertyFile,
    Request,
    RequestStep,
    Step,
    StepDependency,
    Text,
    Variable,
    text,
    variable,
)

from stoker.orchestrators.sagemaker.compile import PipelineRequest
from stoker.parameters import main_channel
from stoker.records import Workload

INPUT = "/opt/ml/processing/input"
OUTPUT = "/opt/ml/processing/output"
WORKLOAD = f"{INPUT}/workload/workload.json"

# Of a small step: its job has read and written a few files by then, image pull included.
_SMALL_STEP_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all steps of a run share.

    Attributes:
        workload: With its code's address in place of its folder.
        inputs_uri: Folder with workload.json.
        parameters: The pipeline's, by name in snake case.
        passed: Names of those that the steps hand on to stoker as `--param`.
        execution_id: Of the run whose folder the steps write to: letters and digits.
    """

    workload: Workload
    inputs_uri: str
    parameters: Mapping[str, Variable]
    passed: tuple[str, ...]
    execution_id: Variable = field(default_factory=lambda: EXECUTION_ID)

    def uri(self, path: str) -> Text:
        """An address in the run's own folder, which its execution id names."""
        head = f"{self.output_uri}/pipelines/{self.workload.name}/"
        return text(head, self.execution_id, f"/{path}")

    @property
    def passed_on(self) -> tuple[str, ...]:
        """Names of the parameters that a run hands on to the one that trains for it."""
        return (*self.passed, "model_group", "approval")

    @property
    def output_uri(self) -> str:
        """The prefix of all outputs, with no slash at its end."""
        assert self.workload.sagemaker
        return self.workload.sagemaker.output_uri.rstrip("/")

    @property
    def main_channel(self) -> str | None:
        """The channel whose address is the parameter `input_data`."""
        return main_channel(self.workload)

    @property
    def job_name(self) -> Text:
        """Of the training job that a launched train step starts, and adopts if it is there."""
        return text(f"{self.workload.name}-", self.execution_id)

    def arguments(self) -> list[Text]:
        """`--param NAME=VALUE` of all that the run's owner may change."""
        words: list[Text] = []
        for name in self.passed:
            words += ["--param", text(f"{name}=", self.parameters[name])]
        return words


def run_of(request: PipelineRequest) -> Run:
    """The run that a pipeline's request describes, with a pipeline variable a parameter."""
    return Run(
        workload=request.workload,
        inputs_uri=request.inputs_uri,
        parameters={
            p.name: variable(p, default=p.default(request.workload)) for p in request.parameters
        },
        passed=request.passed,
    )


def control_step(
    run: Run,
    name: str,
    arguments: Sequence[Text],
    *,
    display_name: str,
    description: str,
    inputs: Mapping[str, Text],
    outputs: Mapping[str, Text],
    depends_on: Sequence[Step | StepDependency] = (),
    property_files: Sequence[PropertyFile] = (),
    max_run_seconds: int = _SMALL_STEP_SECONDS,
    is_isolated: bool = False,
) -> RequestStep:
    """A processing step in the control image that runs `stoker ARGUMENTS`.

    Args:
        run: Of the pipeline.
        name: Of the step.
        arguments: Of stoker; a value of 256 characters at most.
        display_name: In the console.
        description: In the console.
        inputs: Name to address; an input lies in `INPUT/NAME`. The workload is always there.
        outputs: Name to address; what is in `OUTPUT/NAME` goes there while it is written, so that
            it survives a step that fails.
        depends_on: Steps to wait for.
        property_files: JSON outputs that conditions may read.
        max_run_seconds: After it the service stops the step.
        is_isolated: It needs no network, and has none where the workload's job has none.
    """
    settings = run.workload.sagemaker
    assert settings
    control = settings.control
    files = {"workload": f"{run.inputs_uri}/workload.json", **inputs}
    request: Request = {
        "AppSpecification": {
            "ImageUri": control.image or run.parameters["image"],
            "ContainerEntrypoint": ["stoker"],
            "ContainerArguments": list(arguments),
        },
        # SageMaker tells a container its region, but not in the variable that boto3 reads.
        "Environment": {"AWS_DEFAULT_REGION": settings.region} if settings.region else None,
        "NetworkConfig": _network(settings.network_isolation and is_isolated, run.workload),
        "ProcessingInputs": [
            {
                "InputName": input_name,
                "S3Input": {
                    "S3Uri": uri,
                    "LocalPath": f"{INPUT}/{input_name}",
                    "S3DataType": "S3Prefix",
                    "S3InputMode": "File",
                },
            }
            for input_name, uri in files.items()
        ],
        "ProcessingOutputConfig": {
            "KmsKeyId": settings.output_kms_key,
            "Outputs": [
                {
                    "OutputName": output_name,
                    "S3Output": {
                        "S3Uri": uri,
                        "LocalPath": f"{OUTPUT}/{output_name}",
                        "S3UploadMode": "Continuous",
                    },
                }
                for output_name, uri in outputs.items()
            ],
        },
        "ProcessingResources": {
            "ClusterConfig": {
                "InstanceCount": 1,
                "InstanceType": control.instance_type,
                "VolumeSizeInGB": control.volume_gb,
                "VolumeKmsKeyId": settings.volume_kms_key,
            }
        },
        "RoleArn": control.role or settings.role,
        "StoppingCondition": {"MaxRuntimeInSeconds": max_run_seconds},
        "Tags": [{"Key": key, "Value": value} for key, value in sorted(settings.tags.items())]
        or None,
    }
    return RequestStep(
        name,
        "Processing",
        request,
        display_name=display_name,
        description=description,
        depends_on=depends_on,
        property_files=property_files,
        # The small hosts are of a type that is rarely short; what waits for a GPU is not this job.
        capacity_minutes=30,
    )


def only_run_step(run: Run, *, name: str = "OnlyRun") -> RequestStep:
    """A processing step that fails while another run of the pipeline is under way."""
    return control_step(
        run,
        name,
        ["status", "sagemaker", run.workload.name, "--besides", EXECUTION_ID],
        display_name="Only run",
        description="Fails while another run of this pipeline is under way.",
        inputs={},
        outputs={},
    )


def _network(is_isolated: bool, workload: Workload) -> Request | None:
    assert workload.sagemaker
    vpc = workload.sagemaker.vpc
    if vpc is None and not is_isolated:
        return None
    return {
        "EnableNetworkIsolation": is_isolated,
        "VpcConfig": {"SecurityGroupIds": list(vpc.security_groups), "Subnets": list(vpc.subnets)}
        if vpc
        else None,
    }
