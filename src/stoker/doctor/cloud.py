"""AWS as this host sees it: boto3, region, credentials."""

from collections.abc import Callable

from stoker.doctor.check import Check, within
from stoker.errors import StokerError
from stoker.platforms.aws import Aws

AWS_SECONDS = 30.0


def aws_check(connect: Callable[[], Aws] = Aws) -> Check:
    """Asks AWS who we are; blocks for AWS_SECONDS at most.

    Args:
        connect: Gives the connection; a default one where absent.
    """
    try:
        identity = within(AWS_SECONDS, lambda: connect().call("sts", "GetCallerIdentity"))
    except StokerError as err:
        return Check(name="aws", state="fail", text=err.what, fix=err.fix)
    except TimeoutError:
        return Check(
            name="aws",
            state="fail",
            text=f"no answer within {AWS_SECONDS:g} s",
            fix="look at the network: a route to AWS, a proxy, a VPC endpoint for sts",
        )
    return Check(name="aws", state="ok", text=f"{identity.get('Arn')}")
