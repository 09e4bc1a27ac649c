"""A workload says where the figures of its runs are kept, and who is told how they ended."""

from typing import Annotated, Literal

import msgspec

from stoker.records.base import Name, PositiveFloat, Record

_MANAGED = r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:mlflow-[a-zA-Z-]*/.*"


class TrackingSettings(Record, frozen=True, kw_only=True):
    """Names the services that keep the figures of runs, to compare them with others'.

    Attributes:
        mlflow: Address of MLflow: https://HOST of a tracking server, file:FOLDER or sqlite:FILE on
            this machine, or the ARN of SageMaker's managed MLflow. It must hold no password: MLflow
            reads MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD. Absent: runs are kept in their
            own folders only, and MLflow need not be installed.
        experiment: Experiment of the runs; absent: one named as the workload.
        secret: Kubernetes: Secret with MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
            MLFLOW_TRACKING_PASSWORD, for the steps of a pipeline; absent: the server asks for none.
        timeout_seconds: MLflow may take so long each time, before and after a training; then the
            run goes on without it. 60: importing MLflow takes up to 15 s on a cold disk, the rest
            is for some files over a slow network.
        tensorboard: Whether the script is told a folder for TensorBoard, in STOKER_TENSORBOARD,
            that is kept: runs/ID/tensorboard, the folder of `kubernetes.output`, or S3. Off, as
            only a script that writes there has a use for it.
    """

    mlflow: (
        Annotated[str, msgspec.Meta(pattern=rf"^(https?://[^/]+|file:.|sqlite:.|{_MANAGED}$)")]
        | None
    ) = None
    experiment: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    secret: Name | None = None
    timeout_seconds: PositiveFloat = 60.0
    tensorboard: bool = False

    @property
    def is_managed(self) -> bool:
        """Tells whether it is SageMaker's own MLflow, which a training job can name."""
        return bool(self.mlflow) and str(self.mlflow).startswith("arn:")

    @property
    def is_local(self) -> bool:
        """Tells whether only this machine reaches it."""
        return bool(self.mlflow) and str(self.mlflow).startswith(("file:", "sqlite:"))


class NotifySettings(Record, frozen=True, kw_only=True):
    """Says which webhook is told how a run ended. Its address is a secret, and is in no file.

    Attributes:
        on: failure: only of runs that failed, a model below its gate among them; always: of all.
        format: text: `text` and `stoker` with the facts, as Slack and most receivers take it;
            teams: a card, which the workflows of Microsoft Teams ask for.
        variable: Variable with the webhook's address.
        secret: Kubernetes: Secret whose key `url` is the address; the last step of a pipeline on
            Kubeflow gets it. Absent: such a pipeline tells nobody.
        secret_arn: SageMaker: ARN of a secret of Secrets Manager that is the address; the small
            steps of a pipeline read it. Absent: such a pipeline tells nobody.
        timeout_seconds: The webhook may take so long; then the run ends without it. Slack answers
            within a second.
    """

    on: Literal["failure", "always"] = "failure"
    format: Literal["text", "teams"] = "text"
    variable: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = (
        "STOKER_WEBHOOK_URL"
    )
    secret: Name | None = None
    secret_arn: (
        Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:secretsmanager:[^:]+:[0-9]{12}:")]
        | None
    ) = None
    timeout_seconds: PositiveFloat = 10.0


__all__ = ["NotifySettings", "TrackingSettings"]
