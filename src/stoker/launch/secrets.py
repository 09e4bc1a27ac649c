"""The secrets of a training run on AWS, which a host reads as it starts.

run.json names the place of each; its value is in the environment of the training command only. On
Kubernetes the kubelet sets the variables, on this machine the caller has: they are not read again.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial

from stoker.errors import PlatformError, ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.records import Json, SecretSource
from stoker.records.base import mapping

# Hosts are billed during that time; a service that is away for longer, or out of reach, is
# reported.
FETCH_SECONDS = 120.0
# What gives a job's role the right; a key of one's own also needs kms:Decrypt.
_STACK = "parameter TrainingSecrets of configs/sagemaker/stoker.yaml"


def fetched_secrets(
    sources: Mapping[str, SecretSource],
    *,
    environ: Mapping[str, str],
    role: str,
    account: Callable[[str], Aws] = lambda region: Aws(region=region),
) -> dict[str, str]:
    """Reads the secrets of a host's role; returns their values by variable.

    Blocks for up to FETCH_SECONDS per secret while AWS does not answer.

    Args:
        sources: All secrets of the run.
        environ: Variables of the host: what is there is not read.
        role: Of the host.
        account: Gives access to AWS in a region.

    Raises:
        PlatformError: If AWS refuses one or has none of this name.
        UsageError: If its content is no text, or has no such key.
    """
    return {
        name: value_of(name, source, account(source.region))
        for name, source in sources.items()
        if source.arn and source.is_for(role) and name not in environ
    }


def value_of(name: str, source: SecretSource, aws: Aws) -> str:
    """Returns the value of one secret; raises as `fetched_secrets`."""
    where = f"key secrets.{name}: {source.arn}"
    try:
        content = aws.repeated(partial(_read, source, aws), seconds=FETCH_SECONDS)
    except ServiceError as err:
        fix = f"check the ARN and its region; the job's role needs the right to read it ({_STACK})"
        if err.kind == "away":
            fix = "in a VPC, add an endpoint for secretsmanager or ssm (and kms), or a NAT gateway"
        what = f"the secret {name} cannot be read: {err.what}"
        raise PlatformError(what, where=where, fix=fix) from None
    if not source.json_key:
        return content
    try:
        value: Json = json.loads(content)[source.json_key]
    except (ValueError, KeyError, TypeError):
        what = f"the secret is no JSON object with the key {source.json_key}"
        raise UsageError(what, where=where, fix="correct json_key, or leave it out") from None
    return value if isinstance(value, str) else json.dumps(value)


def _read(source: SecretSource, aws: Aws) -> str:
    """Returns the text of a secret in Secrets Manager, or of a parameter in SSM."""
    arn = str(source.arn)
    if not source.is_in_secrets_manager:
        # Of its account: the name alone, with a slash in front where it has folders.
        name = arn.partition(":parameter/")[2]
        named = f"/{name}" if "/" in name else name
        answer = aws.call("ssm", "GetParameter", Name=named, WithDecryption=True)
        return str(mapping(answer, "Parameter")["Value"])
    answer = aws.call("secretsmanager", "GetSecretValue", SecretId=arn)
    if answer.get("SecretString") is None:
        raise UsageError(f"the secret {arn} is binary", fix="keep it as text, in base64 if need be")
    return str(answer["SecretString"])
