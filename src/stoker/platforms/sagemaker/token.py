"""The run's token: a random object in S3 that every host gets as one more channel.

It is written before the job is created and deleted at its end; neither the request nor a log holds
it. docs/threat-model.md says whom it keeps out.
"""

import secrets

from stoker.errors import StokerError
from stoker.logs import Log
from stoker.platforms.aws import Aws

# As long as the feed asks for; in the file they are hexadecimal digits.
TOKEN_BYTES = 32


def put_token(aws: Aws, uri: str, *, kms_key: str | None) -> None:
    """Makes the token unless there is one.

    One that is there already was left by an earlier attempt, or is another attempt's of this very
    moment: hosts of its job may have read it, so that it must stay as it is.

    Raises:
        AwsError: If it cannot be written.
    """
    content = secrets.token_bytes(TOKEN_BYTES).hex().encode("ascii")
    aws.create_object(uri, content, kms_key=kms_key)


def delete_token(aws: Aws, uri: str, *, log: Log) -> None:
    """Deletes the token; what hinders it is logged, for a job has ended by then."""
    try:
        aws.delete_object(uri)
    except StokerError as err:
        log.event("token_not_deleted", object=uri, why=err.what)
