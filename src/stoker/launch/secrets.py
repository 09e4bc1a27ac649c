"""The secrets of a training run on AWS, which a host reads as it starts.

A request names each by a variable STOKER_FETCH_NAME with its place; its value is in the environment
of the training command only. On Kubernetes the kubelet sets the variables, on this machine the
caller has.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial

from stoker.errors import PlatformError, ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.records import Json, SecretSource
from stoker.records.secrets import sources_in

# Hosts are billed during that time; a service that is away for longer, or out of reach, is
# reported.
FETCH_SECONDS = 120.0
# The stack's parameter that gives a job's role the right.
_STACK = "parameter TrainingSecrets of configs/sagemaker/stoker.yaml"
_SHOWN_KEYS = 10


def fetched_secrets(
    environ: Mapping[str, str],
    *,
    role: str,
    account: Callable[[str], Aws] = lambda region: Aws(region=region),
) -> dict[str, str]:
    """Reads the secrets of a host's role; returns their values by variable.

    Blocks for up to FETCH_SECONDS per secret while AWS does not answer.

    Args:
        account: Gives access to AWS in a region.

    Raises:
        PlatformError: If AWS refuses one or has none of this name.
        UsageError: If its content is no text, or has no such key.
    """
    return {
        name: value_of(name, source, account(source.region))
        for name, source in sources_in(environ, role=role).items()
    }


def value_of(name: str, source: SecretSource, aws: Aws) -> str:
    """Returns the value of one secret; raises as `fetched_secrets`."""
    where = f"key secrets.{name}: {source.arn}"
    read = _read_secret if source.is_in_secrets_manager else _read_parameter
    try:
        content = aws.repeated(partial(read, aws, str(source.arn)), seconds=FETCH_SECONDS)
    except ServiceError as err:
        raise _refusal(name, err, where) from None
    if content is None:
        raise UsageError(
            f"the secret {name} is binary, and a variable holds text",
            where=where,
            fix="keep it as text, in base64 if need be",
        )
    value = _of_key(content, source.json_key, where) if source.json_key else content
    if "\0" in value:
        raise UsageError(
            f"the secret {name} contains a zero byte, which a variable cannot hold",
            where=where,
            fix="keep it in base64",
        )
    return value


def _read_secret(aws: Aws, arn: str) -> str | None:
    """Returns the text of a secret in Secrets Manager; None: it is binary."""
    answer = aws.call("secretsmanager", "GetSecretValue", SecretId=arn)
    if answer.get("SecretString") is None:
        return None
    return str(answer["SecretString"])


def _read_parameter(aws: Aws, arn: str) -> str | None:
    """Returns the text of a parameter in SSM, decrypted."""
    # Of its account: the name alone, with a slash in front where it has folders.
    name = arn.partition(":parameter/")[2]
    named = f"/{name}" if "/" in name else name
    answer = aws.call("ssm", "GetParameter", Name=named, WithDecryption=True)
    parameter = answer.get("Parameter")
    if isinstance(parameter, Mapping):
        return str(parameter["Value"])
    return None


def _refusal(name: str, err: ServiceError, where: str) -> PlatformError:
    """Returns the error for a secret that AWS does not give."""
    what = f"the secret {name} cannot be read: {err.what}"
    fix = err.fix
    if err.kind == "denied":
        missing = "kms:Decrypt for its key" if "KMS" in err.what else err.action
        what = f"the job's role may not read the secret {name}: {missing} is missing"
        fix = f"allow it: {_STACK}; a key of your own also needs kms:Decrypt for this role"
    elif err.kind == "missing" or err.code.endswith("NotFound"):
        what = f"there is no secret {name}: {err.code}"
        fix = "check the ARN, and its region"
    elif err.kind == "away":
        fix = "in a VPC, add an endpoint for secretsmanager or ssm (and kms), or a NAT gateway"
    return PlatformError(what, where=where, fix=fix)


def _of_key(content: str, key: str, where: str) -> str:
    """Returns the value of a key of a secret that is a JSON object; never shows values."""
    try:
        document: Json = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, Mapping):
        raise UsageError(
            f"the secret has a key {key} only if it is a JSON object, and this secret is not one",
            where=where,
            fix="leave json_key out",
        )
    if key not in document:
        keys = ", ".join(sorted(document)[:_SHOWN_KEYS]) or "none"
        raise UsageError(
            f"the secret has no key {key}; its keys: {keys}", where=where, fix="correct json_key"
        )
    value = document[key]
    if isinstance(value, str):
        return value
    return json.dumps(value)
