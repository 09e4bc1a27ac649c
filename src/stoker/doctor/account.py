"""Checks of an AWS account for one workload: `stoker doctor --aws WORKLOAD`.

Roles, images, buckets, data, quotas of all allowed types, the queue, and the way out of a VPC. A
check that needs a right the caller lacks is a warning that names the right. Nothing is created.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

from stoker.catalog import load_catalog
from stoker.doctor import Finding
from stoker.errors import ServiceError, StokerError
from stoker.pipelines.base import sagemaker_of
from stoker.platforms.aws import Aws, split_uri
from stoker.platforms.sagemaker.batch_queue import SERVICE_JOB_TYPE
from stoker.records import Channel, SageMakerSettings, Workload, bare_type
from stoker.records.base import Document, item_at, mapping, mappings, texts
from stoker.records.platforms import QueueSettings, patch_document

# "Private registry authentication", Amazon ECR: the account, region and name of an image.
_ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/"
    r"(?P<name>[^:@]+)(:(?P<tag>[^@]+))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# What the hosts of a job and of the pipeline's steps ask without a NAT gateway. S3 for data and
# outputs; the others for the steps, which start the training and read its log.
_NEEDED_ENDPOINTS = ("s3", "sagemaker.api", "logs")
_QUOTAS_FIX = "raise it in Service Quotas (Amazon SageMaker), which takes hours to days"


def examine_account(workload: Workload, *, aws: Aws | None = None) -> Iterator[Finding]:
    """Yields each finding at once; blocks as long as AWS takes for some dozens of calls.

    Args:
        workload: What would run there.
        aws: The account. Absent: that of this machine's login, in the workload's region.

    Raises:
        UsageError: If the workload is not one for SageMaker.
    """
    settings = sagemaker_of(workload)
    aws = aws or Aws(region=settings.region)
    try:
        identity = aws.call("sts", "GetCallerIdentity")
        region = aws.region
    except StokerError as err:
        # The other checks would fail alike.
        yield Finding("account", "fail", err.what, err.fix)
        return
    account = str(identity["Account"])
    yield Finding("account", "ok", f"{account}, {region}, as {identity['Arn']}")
    for check in _checks(workload, settings, aws=aws, account=account):
        yield _checked(check)


NamedCheck = tuple[str, Callable[[], Finding]]


def _checks(
    workload: Workload, settings: SageMakerSettings, *, aws: Aws, account: str
) -> Iterator[NamedCheck]:
    for key, arn, service in _roles(settings):
        yield "role", partial(role_finding, aws, key, arn=arn, service=service, account=account)
    images = {"image": workload.image, "sagemaker.control.image": settings.control.image}
    for key, image in {**images, "sagemaker.model.image": settings.model.image}.items():
        if image:
            yield "image", partial(image_finding, aws, key, image)
    for bucket in sorted(_buckets(workload, settings)):
        yield "bucket", partial(bucket_finding, aws, bucket)
    for name, channel in workload.channels.items():
        if channel.uri.startswith("s3://"):
            yield "data", partial(data_finding, aws, name, channel)
    yield "quota", partial(quota_finding, aws, workload, settings)
    if settings.queue:
        num_hosts = workload.num_todays_hosts
        yield "queue", partial(queue_finding, aws, settings.queue, num_hosts=num_hosts)
    if settings.vpc:
        yield "vpc", partial(vpc_finding, aws, settings)


def _checked(check: NamedCheck) -> Finding:
    name, call = check
    try:
        return call()
    except StokerError as err:
        if isinstance(err, ServiceError) and err.kind == "denied":
            fix = "ask an administrator for the right; what it checks may be in order"
            return Finding(name, "warn", f"cannot be checked: {err.what}", fix)
        words = err.what
        if err.where:
            words += f" ({err.where})"
        return Finding(name, "fail", words, err.fix)


def _roles(settings: SageMakerSettings) -> Iterator[tuple[str, str, str]]:
    """Yields the workload's roles: the key, the ARN, and the service that takes the role."""
    for key, arn, service in (
        ("sagemaker.role", settings.role, "sagemaker"),
        ("sagemaker.control.role", settings.control.role, "sagemaker"),
        ("sagemaker.pipeline_role", settings.pipeline_role, "sagemaker"),
        ("sagemaker.schedule_role", settings.schedule_role, "scheduler"),
    ):
        if arn:
            yield key, arn, service


def role_finding(aws: Aws, key: str, *, arn: str, service: str, account: str) -> Finding:
    """Checks that a role is there, and that `service` may take it."""
    # arn:aws:iam::ACCOUNT:role/PATH/NAME
    of_account = arn.split(":")[4]
    name = arn.rpartition("/")[2]
    if of_account != account:
        words = f"{key} belongs to account {of_account}, and you are logged in to {account}"
        return Finding("role", "fail", words, "log in to that account, or change the key")
    answer = aws.find("iam", "GetRole", RoleName=name)
    if answer is None:
        fix = "deploy configs/sagemaker/stoker.yaml, or correct the key"
        return Finding("role", "fail", f"{key}: there is no role {name}", fix)
    trust = mapping(answer, "Role", "AssumeRolePolicyDocument")
    principal = f"{service}.amazonaws.com"
    if not any(_lets_in(each, principal) for each in mappings(trust, "Statement")):
        fix = f"let {principal} do sts:AssumeRole in its trust policy"
        return Finding("role", "fail", f"{key}: {name} is not for {principal}", fix)
    return Finding("role", "ok", f"{key}: {name}, for {principal}")


def _lets_in(statement: Document, principal: str) -> bool:
    if statement.get("Effect") != "Allow":
        return False
    # One service may stand without a list.
    services = item_at(statement, "Principal", "Service")
    if isinstance(services, list):
        return principal in services
    return services == principal


def image_finding(aws: Aws, key: str, image: str) -> Finding:
    ecr = _ECR_IMAGE.fullmatch(image)
    if ecr is None:
        words = f"{key}: {image} is not in ECR; whether it can be pulled is not checked"
        return Finding("image", "warn", words)
    if ecr["region"] != aws.region:
        words = f"{key}: {image} is in {ecr['region']}, the jobs in {aws.region}"
        return Finding("image", "fail", words, "push it to a repository in the jobs' region")
    version = {"imageTag": ecr["tag"] or "latest"}
    if ecr["digest"]:
        version = {"imageDigest": ecr["digest"]}
    answer = aws.find(
        "ecr",
        "DescribeImages",
        registryId=ecr["account"],
        repositoryName=ecr["name"],
        imageIds=[version],
    )
    if answer is None:
        fix = "make image, and push it; or correct the key"
        return Finding("image", "fail", f"{key}: there is no {image}", fix)
    return Finding("image", "ok", f"{key}: {image}")


def _buckets(workload: Workload, settings: SageMakerSettings) -> set[str]:
    addresses = [settings.output_uri, settings.checkpoint_uri, settings.resume_from]
    addresses += [settings.source, *(channel.uri for channel in workload.channels.values())]
    in_s3 = [address for address in addresses if address and address.startswith("s3://")]
    return {split_uri(address)[0] for address in in_s3}


def bucket_finding(aws: Aws, bucket: str) -> Finding:
    answer = aws.find("s3", "HeadBucket", Bucket=bucket)
    if answer is None:
        fix = "correct its name in the workload, or create it"
        return Finding("bucket", "fail", f"there is no bucket {bucket}", fix)
    region = answer.get("BucketRegion") or aws.region
    if region != aws.region:
        words = f"{bucket} is in {region}, the jobs are in {aws.region}"
        fix = f"use a bucket in {aws.region}: a job reads and writes buckets of its region only"
        return Finding("bucket", "fail", words, fix)
    return Finding("bucket", "ok", f"{bucket}, in {region}")


def data_finding(aws: Aws, name: str, channel: Channel) -> Finding:
    """Checks that a channel's address has an object."""
    bucket, key = split_uri(channel.uri)
    answer = aws.call("s3", "ListObjectsV2", Bucket=bucket, Prefix=key, MaxKeys=1)
    if not answer.get("KeyCount"):
        words = f"channel {name}: nothing is at {channel.uri}"
        return Finding("data", "fail", words, "upload the data, or correct the address")
    return Finding("data", "ok", f"channel {name}: {channel.uri}")


def quota_finding(aws: Aws, workload: Workload, settings: SageMakerSettings) -> Finding:
    """Compares the account's quotas with today's hosts, the steps' host, and the allowed types."""
    quotas = _quotas(aws)
    is_spot = patch_document(settings.request).get("EnableManagedSpotTraining") is True
    usage = "spot training job usage" if is_spot else "training job usage"
    step = settings.control.instance_type
    # Quotas are found by their names, such as "ml.g5.xlarge for training job usage".
    needed = {f"{step} for processing job usage": 1}
    if workload.cluster is not None:
        today = workload.cluster.dnn
        # The service compares all preferred types, not only the one that it takes.
        names = (today.instance_type, *settings.further_types)
        needed |= {f"ml.{bare_type(name)} for {usage}": today.count for name in names}
    # Without a quota of that name, the account cannot have the type at all.
    short = [
        f"{name}: {quotas.get(name, 0):.0f} of {count}"
        for name, count in needed.items()
        if quotas.get(name, 0) < count
    ]
    allowed = _allowed_types(workload)
    ready = [name for name in allowed if quotas.get(f"{name} for {usage}", 0) >= 1]
    words = f"{len(ready)} of {len(allowed)} allowed types can be used"
    if short:
        return Finding("quota", "fail", f"too small: {', '.join(short)}; {words}", _QUOTAS_FIX)
    missing = [name for name in allowed if name not in ready]
    if missing and workload.constraints.allowed_instance_types is not None:
        text = f"{words}; a plan with {', '.join(missing)} cannot start, as their quota is 0"
        return Finding("quota", "warn", text, _QUOTAS_FIX)
    return Finding("quota", "ok", words)


def _quotas(aws: Aws) -> dict[str, float]:
    """Returns the account's quotas of SageMaker by name, the service's where it has none."""
    code = {"ServiceCode": "sagemaker"}
    defaults = aws.pages("service-quotas", "ListAWSDefaultServiceQuotas", items="Quotas", **code)
    quotas = {str(quota["QuotaName"]): float(str(quota["Value"])) for quota in defaults}
    for quota in aws.pages("service-quotas", "ListServiceQuotas", items="Quotas", **code):
        quotas[str(quota["QuotaName"])] = float(str(quota["Value"]))
    return quotas


def queue_finding(aws: Aws, queue: QueueSettings, *, num_hosts: int) -> Finding:
    """Checks that a queue of AWS Batch takes training jobs of so many hosts."""
    answer = aws.call("batch", "DescribeJobQueues", jobQueues=[queue.job_queue])
    named = mappings(answer, "jobQueues")
    if not named:
        fix = "create it (type SAGEMAKER_TRAINING), or correct sagemaker.queue.job_queue"
        return Finding("queue", "fail", f"there is no queue {queue.job_queue}", fix)
    described = named[0]
    kind, state, status = (str(described.get(key)) for key in ("jobQueueType", "state", "status"))
    if kind != SERVICE_JOB_TYPE:
        words = f"{queue.name} is of the type {kind}, not {SERVICE_JOB_TYPE}"
        return Finding("queue", "fail", words, "name a queue with a service environment")
    if state != "ENABLED" or status != "VALID":
        words = f"{queue.name} is {state}, {status}: it takes no jobs"
        return Finding("queue", "fail", words, "enable it, or name another queue")
    has_share = bool(queue.share_identifier or queue.quota_share_name)
    has_policy = bool(described.get("schedulingPolicyArn"))
    # Batch refuses a job without a share in a queue that has a policy, and one with a share in a
    # queue that has none.
    if has_policy and not has_share:
        words = f"{queue.name} has a scheduling policy, and the workload names no share"
        fix = "name share_identifier or quota_share_name in sagemaker.queue"
        return Finding("queue", "fail", words, fix)
    if has_share and not has_policy:
        words = f"{queue.name} has no scheduling policy, and the workload names a share"
        fix = "leave share_identifier and quota_share_name out of sagemaker.queue"
        return Finding("queue", "fail", words, fix)
    return _room_finding(aws, queue, described, num_hosts=num_hosts)


def _room_finding(
    aws: Aws, queue: QueueSettings, described: Document, *, num_hosts: int
) -> Finding:
    """Compares the hosts of a job with what a queue's service environments may hold."""
    order = mappings(described, "serviceEnvironmentOrder")
    names = [str(place["serviceEnvironment"]) for place in order]
    answer = aws.call("batch", "DescribeServiceEnvironments", serviceEnvironments=names)
    environments = mappings(answer, "serviceEnvironments")
    enabled = [place for place in environments if place.get("state") == "ENABLED"]
    largest = max(map(_largest, enabled), default=0)
    words = f"{queue.name}, {len(enabled)} service environments, {largest} hosts at most"
    if largest < num_hosts:
        fix = "raise maxCapacity of its service environment"
        return Finding("queue", "fail", f"{words}; a job has {num_hosts}", fix)
    return Finding("queue", "ok", words)


def _largest(environment: Document) -> int:
    """Returns the most hosts that a service environment holds, of one type where it says so."""
    limits = mappings(environment, "capacityLimits")
    return max((int(str(limit.get("maxCapacity") or 0)) for limit in limits), default=0)


def _allowed_types(workload: Workload) -> list[str]:
    allowed = workload.constraints.allowed_instance_types
    if allowed is not None:
        return list(allowed)
    instances = load_catalog("sagemaker").instances
    return [instance.type for instance in instances if instance.in_training_enum]


def vpc_finding(aws: Aws, settings: SageMakerSettings) -> Finding:
    """Checks that the subnets are there, and reach AWS by a NAT gateway or by endpoints."""
    subnet_ids = texts(settings.vpc, "Subnets")
    subnets = mappings(aws.call("ec2", "DescribeSubnets", SubnetIds=subnet_ids), "Subnets")
    vpc = str(subnets[0]["VpcId"])
    free = sum(int(str(subnet["AvailableIpAddressCount"])) for subnet in subnets)
    text = f"{vpc}, {len(subnets)} subnets with {free} free addresses"
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = aws.call("ec2", "DescribeRouteTables", Filters=of_vpc)
    if any(_leads_out(table, subnet_ids) for table in mappings(tables, "RouteTables")):
        return Finding("vpc", "ok", f"{text}; a route leads out of it")
    endpoints = aws.pages("ec2", "DescribeVpcEndpoints", items="VpcEndpoints", Filters=of_vpc)
    # com.amazonaws.REGION.SERVICE
    services = {
        str(endpoint["ServiceName"]).partition(f"{aws.region}.")[2] for endpoint in endpoints
    }
    missing = [service for service in _NEEDED_ENDPOINTS if service not in services]
    if missing:
        words = f"{text}; no NAT gateway, and no endpoint for {', '.join(missing)}"
        return Finding("vpc", "fail", words, "make the endpoints, or a route to a NAT gateway")
    return Finding("vpc", "ok", f"{text}; endpoints for {', '.join(_NEEDED_ENDPOINTS)}")


def _leads_out(table: Document, subnet_ids: list[str]) -> bool:
    """Returns whether a route table is of these subnets, or the main one, and leads out."""
    links = mappings(table, "Associations")
    # Subnets without a table have the main one.
    is_used = any(link.get("Main") or link.get("SubnetId") in subnet_ids for link in links)
    if not is_used:
        return False
    # A job's network interface has no public address: an internet gateway alone is no way out.
    ways = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId")
    for route in mappings(table, "Routes"):
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and any(map(route.get, ways)):
            return True
    return False
