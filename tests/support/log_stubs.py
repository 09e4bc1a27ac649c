"""A client of CloudWatch's logs whose answers a test gives, each of which must be asked for."""

import contextlib
from collections.abc import Iterator

import boto3
from botocore.stub import Stubber


@contextlib.contextmanager
def stubbed_logs() -> Iterator[Stubber]:
    client = boto3.client(
        "logs", region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()
    client.close()
