"""Variables of the training command: plain ones, and secrets, of which only the place is known.

A secret's value is in no record, request or definition: its host reads it where it is kept
(`launch.secrets`). Values are shown as *** in what a command prints (`parts_to_hide`, by
`launch.trainer`; replaced in `launch.process`), refused
in requests (`check_secrets` of each platform's checks), and not
shown in errors (`records.base`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec

from stoker.errors import UsageError
from stoker.records.base import Name, Place, Record

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME and arn:aws:ssm:REGION:ACCOUNT:parameter/NAME
_ARN = (
    r"arn:aws[a-z-]*:(secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[^ ]+"
    r"|ssm:[a-z0-9-]+:[0-9]{12}:parameter/[^ ]+)"
)
# Only in the schema: a parser's error would show a value that was typed in place of the ARN.
SecretArn = Annotated[str, msgspec.Meta(max_length=400, extra_json_schema={"pattern": f"^{_ARN}$"})]
_OF_SECRETS_MANAGER = ":secretsmanager:"
# Set by stoker, SageMaker, torchrun or the loader of programs.
_TAKEN = re.compile(
    r"(STOKER|SM|SAGEMAKER)_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|NODE_RANK|NNODES|PYTHONPATH|TRAINING_JOB_NAME"
)
# EOS_TOKEN and MAX_TOKENS are no secrets.
_SECRET_NAME = re.compile(
    r".*(API_?KEY|PASSWORD|PASSWD|SECRET|SECRET_KEY|SECRET_ACCESS_KEY|PRIVATE_KEY)"
    r"|.*(ACCESS|AUTH|SESSION|TRACKING|HUB|API|BEARER)_TOKEN|(HF|GITHUB|GITLAB|GH|WANDB)_TOKEN",
    re.IGNORECASE,
)
# Keys of AWS, GitHub, Hugging Face, OpenAI and Slack, and PEM files.
_SECRET_VALUE = re.compile(
    r"(AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
# A shorter text, such as 1, would hide parts of other words.
_MIN_HIDDEN = 6
HIDDEN = "***"

SecretHosts = Literal["dnn", "all"]


class SecretSource(Record, frozen=True, kw_only=True):
    """Where the value of a secret variable is kept; on this machine, the caller's environment.

    Attributes:
        arn: SageMaker: ARN of a secret in Secrets Manager, or of a parameter in SSM.
        json_key: Key of the value where that is a JSON object. None: the whole text.
        secret: Kubernetes: name of a Secret in the job's namespace.
        key: Kubernetes: key of the value in it. None: the variable's name.
        hosts: Hosts that get it. dnn: those that run the training command; all: data hosts, too,
            for datasets that read it.
    """

    arn: SecretArn | None = None
    json_key: Name | None = None
    secret: Name | None = None
    key: Name | None = None
    hosts: SecretHosts = "dnn"

    @property
    def is_in_secrets_manager(self) -> bool:
        return _OF_SECRETS_MANAGER in (self.arn or "")

    @property
    def region(self) -> str:
        """Region of the ARN."""
        return (self.arn or "").split(":")[3]

    def is_for(self, role: str) -> bool:
        """Whether hosts of a role get it."""
        return role == "dnn" or self.hosts == "all"


def source_of(told: str | SecretSource) -> SecretSource:
    """Returns where a secret is kept; a text alone is its ARN."""
    if isinstance(told, str):
        return SecretSource(arn=told)
    return told


def is_secret(name: str, value: str) -> bool:
    """Whether a variable or hyperparameter looks like a secret, by its name or its value."""
    is_named_so = bool(_SECRET_NAME.fullmatch(name)) and value != ""
    return is_named_so or bool(_SECRET_VALUE.fullmatch(value.strip()))


def refuse_secret(name: str, value: str, *, where: str, what: str) -> None:
    """Raises UsageError for a variable that looks like a secret; `what` is plain text, and where.

    The value is never shown.
    """
    if is_secret(name, value):
        raise UsageError(
            f"the variable {name} looks like a secret; {what}",
            where=where,
            fix=f"secrets: {{{name}: ARN}}, or {{secret: NAME}} of Kubernetes",
        )


def check_variables(
    environment: Mapping[str, str], told: Mapping[str, str | SecretSource], place: Place
) -> None:
    """Refuses variables that stoker sets, secrets among plain ones, and secrets without a place.

    Raises:
        UsageError: With the key; a value is never shown.
    """
    for name in (*environment, *told):
        if _TAKEN.fullmatch(name) or not _NAME.fullmatch(name):
            what = f"{name} is no name of a variable, or set by stoker, SageMaker or torchrun"
            key = "secrets" if name in told else "environment"
            raise UsageError(what, where=place.at(f"{key}.{name}"), fix="rename the variable")
    for name, value in environment.items():
        where = place.at(f"environment.{name}")
        if name in told:
            what = f"the variable {name} is also among the secrets"
            raise UsageError(what, where=where, fix="leave it out here")
        what = "environment is plain text in requests, definitions and records"
        refuse_secret(name, value, where=where, what=what)
    for name, each in told.items():
        source = source_of(each)
        if source.arn is None and source.secret:
            continue
        if not re.fullmatch(_ARN, source.arn or ""):
            raise UsageError(
                "this is not the ARN of a secret in Secrets Manager or of a parameter in SSM, and "
                "no secret of Kubernetes; on this machine neither is read",
                where=place.at(f"secrets.{name}"),
                fix="arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME-ABCDEF, arn:aws:ssm:"
                "REGION:ACCOUNT:parameter/NAME, or {secret: NAME}; never the value itself",
            )


def parts_to_hide(values: Iterable[str]) -> list[str]:
    """Returns what must not be shown of secrets, the longest first; too short texts are left out.

    Lines count alone, as logs are copied line by line.
    """
    parts = {part.strip() for value in values for part in (value, *value.splitlines())}
    return sorted((part for part in parts if len(part) >= _MIN_HIDDEN), key=len, reverse=True)
