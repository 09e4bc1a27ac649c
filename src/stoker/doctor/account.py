"""`stoker doctor --aws WORKLOAD` says what an AWS account lacks for a workload.

What may not be looked at is told as such, with the permission for it: it may be in order all the
same. Nothing is made or changed.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from stoker.doctor import AWS_SECONDS, Finding, State, listed, within
from stoker.errors import StokerError
from stoker.orchestrators.base import sagemaker_of
from stoker.orchestrators.sagemaker.roles import (
    SERVICES,
    Part,
    ecr_image,
    role_account,
    role_arns,
    trusts,
)
from stoker.platforms.aws import Aws, AwsError, split_uri
from stoker.platforms.sagemaker.checks import file_system, text
from stoker.records import Decision, Group, Json, Vpc, Workload, bare_type
from stoker.records.base import mapping, mappings
from stoker.text import duration

# Of one look; all quotas of SageMaker are some 60 pages.
LOOK_SECONDS = 120.0

# Operations that IAM calls otherwise.
_RIGHTS = {"s3:HeadBucket": "s3:ListBucket", "s3:ListObjectsV2": "s3:ListBucket"}


def examine_account(
    workload: Workload, *, decision: Decision | None = None, aws: Aws | None = None
) -> Iterator[Finding]:
    """Looks at what the workload names in its account; yields each finding as soon as it is made.

    Args:
        workload: Workload with settings for SageMaker.
        decision: The one whose plans' quotas are looked at, too.
        aws: The account; absent: what boto3 finds.

    Raises:
        UsageError: If the workload has no settings for SageMaker, or no region is known.
    """
    settings = sagemaker_of(workload)
    if aws is None:
        aws = Aws(region=settings.region)
    region = aws.region
    try:
        identity = within(AWS_SECONDS, partial(aws.call, "sts", "GetCallerIdentity"))
    except (StokerError, TimeoutError) as err:
        # `aws_check` asks in another region, where the account may well answer.
        what, fix = (err.what, err.fix) if isinstance(err, StokerError) else (str(err), "")
        yield Finding(
            name="account",
            state="fail",
            text=f"the account does not answer in {region}: {what}",
            fix=fix or "look at the network, and at sagemaker.region",
        )
        return
    account = text(identity, "Account")
    place = settings.output_uri
    yield from _look("bucket", place, partial(bucket_finding, aws, place, region=region))
    for name, channel in workload.channels.items():
        uri = channel.uri
        if not file_system(uri):
            yield from _look("data", uri, partial(data_finding, aws, name, uri))
    images = (workload.image, settings.control.image, settings.model.image)
    for image in dict.fromkeys(name for name in images if name):
        yield from _look("image", image, partial(image_finding, aws, image, region=region))
    held: dict[str, list[Part]] = {}
    for part, arn in role_arns(settings).items():
        held.setdefault(arn, []).append(part)
    for arn, parts in held.items():
        yield from _look("iam", arn, partial(role_finding, aws, arn, parts=parts, account=account))
    needed = quotas_of(workload, decision)
    yield from _look("quota", "SageMaker's quotas", partial(quota_findings, aws, needed))
    vpc = settings.vpc
    if vpc:
        yield from _look("vpc", "the VPC", partial(network_findings, aws, vpc, region=region))


def _look(
    name: str, subject: str, look: Callable[[], Finding | Iterator[Finding]]
) -> list[Finding]:
    """Returns what a look at `subject` finds, or why there is nothing to be seen."""
    try:
        return within(LOOK_SECONDS, lambda: listed(look()))
    except TimeoutError as err:
        fix = "look at the network: a route to AWS, a proxy, a VPC endpoint"
        return [Finding(name=name, state="fail", text=f"{subject}: {err}", fix=fix)]
    except StokerError as err:
        if not isinstance(err, AwsError) or not err.is_denied:
            return [Finding(name=name, state="fail", text=f"{subject}: {err.what}", fix=err.fix)]
        right = _RIGHTS.get(err.action, err.action.replace("service-quotas:", "servicequotas:"))
        return [
            Finding(
                name=name,
                state="warn",
                text=f"{subject} may not be looked at: permission {right} is missing",
                fix=f"allow {right} (stoker render iam WORKLOAD, caller.json); it may be in order",
            )
        ]


def bucket_finding(aws: Aws, uri: str, *, region: str) -> Finding:
    """Says whether the bucket of an address is there, in the region of the jobs."""
    bucket, _ = split_uri(uri)
    place = f"s3://{bucket}"
    try:
        answer = aws.call("s3", "HeadBucket", Bucket=bucket)
    except AwsError as err:
        if not err.is_missing:
            raise
        fix = f"aws s3 mb {place} --region {region}, or correct sagemaker.output_uri"
        return Finding(name="bucket", state="fail", text=f"there is no {place}", fix=fix)
    found = text(answer, "BucketRegion") or region
    if found != region:
        return Finding(
            name="bucket",
            state="fail",
            text=f"{place} is in {found}, and the jobs are to be in {region}",
            fix="name a bucket of that region, or another sagemaker.region",
        )
    return Finding(name="bucket", state="ok", text=f"{place} is there, in {region}")


def data_finding(aws: Aws, channel: str, uri: str) -> Finding:
    """Says whether there is anything at a channel's address."""
    bucket, key = split_uri(uri)
    answer = aws.call("s3", "ListObjectsV2", Bucket=bucket, Prefix=key, MaxKeys=1)
    if not mappings(answer.get("Contents")):
        return Finding(
            name="data",
            state="fail",
            text=f"channel {channel}: nothing is at {uri}",
            fix=f"copy the data there (aws s3 sync FOLDER {uri}), or correct the address",
        )
    return Finding(name="data", state="ok", text=f"channel {channel}: {uri}")


def image_finding(aws: Aws, name: str, *, region: str) -> Finding:
    """Says whether an image is in the region's ECR, and by which digest."""
    image = ecr_image(name)
    if image is None or image.region != region:
        where = f"in {image.region}" if image else "not in ECR"
        return Finding(
            name="image",
            state="fail",
            text=f"{name} is {where}: SageMaker pulls from ECR of its own region, {region}",
            fix=f"push it to ACCOUNT.dkr.ecr.{region}.amazonaws.com/REPOSITORY:TAG",
        )
    named = {"imageDigest": image.digest} if image.digest else {"imageTag": image.tag or "latest"}
    try:
        answer = aws.call(
            "ecr",
            "DescribeImages",
            registryId=image.account,
            repositoryName=image.repository,
            imageIds=[named],
        )
    except AwsError as err:
        if not err.is_missing:
            raise
        return Finding(
            name="image",
            state="fail",
            text=f"there is no {name}",
            fix=f"docker push {name} (docs/sagemaker.md, step 4), or correct the name",
        )
    found = mappings(answer.get("imageDetails"))
    digest = text(found[0], "imageDigest") if found else ""
    if image.digest:
        return Finding(name="image", state="ok", text=name)
    return Finding(
        name="image",
        state="ok",
        text=f"{name} is {digest} today; named by that digest it stays the same",
    )


def role_finding(aws: Aws, arn: str, *, parts: Sequence[Part], account: str) -> Finding:
    """Says whether a role is there, and trusts the service that is to take it on."""
    whose = f"{arn.rpartition('/')[2]} ({', '.join(parts)})"
    if role_account(arn) != account:
        return Finding(
            name="iam",
            state="fail",
            text=f"{whose} is in account {role_account(arn)}, and you are in {account}",
            fix="log in there, or name a role of this account",
        )
    service = SERVICES[parts[0]]
    trust = f"trust-{service.partition('.')[0]}.json"
    try:
        answer = aws.call("iam", "GetRole", RoleName=arn.rpartition("/")[2])
    except AwsError as err:
        if not err.is_missing:
            raise
        return Finding(
            name="iam",
            state="fail",
            text=f"there is no role {whose}",
            fix="stoker render cloudformation WORKLOAD makes the roles that the workload names",
        )
    role = mapping(answer.get("Role"))
    if text(role, "Arn") != arn:
        return Finding(
            name="iam",
            state="fail",
            text=f"{whose} is {text(role, 'Arn')}, and the workload says {arn}",
            fix="correct the path in the workload",
        )
    if not trusts(role.get("AssumeRolePolicyDocument"), service=service, account=account):
        return Finding(
            name="iam",
            state="fail",
            text=f"{whose} does not trust {service} for account {account}",
            fix=f"stoker render iam WORKLOAD --out iam; aws iam update-assume-role-policy "
            f"--role-name {arn.rpartition('/')[2]} --policy-document file://iam/{trust}",
        )
    return Finding(name="iam", state="ok", text=f"{whose} is there, and trusts {service}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededQuota:
    """A workload needs this quota of its account, at least at this value.

    Attributes:
        name: Name as Service Quotas calls it.
        value: Value that is needed: hosts, or seconds.
        why: What needs it.
        is_vital: Whether nothing can run without it; else some plans or steps could not.
        is_known: Whether Service Quotas must have one of that name.
    """

    name: str
    value: float
    why: str
    is_vital: bool = False
    is_known: bool = True


def quotas_of(workload: Workload, decision: Decision | None) -> list[NeededQuota]:
    """Returns the quotas of all types that the workload or a decision may use.

    Args:
        workload: Its cluster of today, the types that it allows to plans, its pipeline's steps.
        decision: The plan that was chosen, and those that are next where there are no hosts.
    """
    settings = sagemaker_of(workload)
    # Type to (hosts, why, whether it is vital): the strongest need of each counts.
    needs: dict[str, tuple[int, str, bool]] = {}

    def need(instance_type: str, count: int, why: str, *, is_vital: bool) -> None:
        name = f"ml.{bare_type(instance_type)}"
        known = needs.get(name)
        if known is None or (is_vital, count) > (known[2], known[0]):
            needs[name] = (count, why, is_vital)

    today = workload.cluster.dnn if workload.cluster else None
    if today:
        need(today.instance_type, today.count, "today's cluster", is_vital=True)
    for allowed in (workload.constraints.allowed_instance_types or ()) if not decision else ():
        need(allowed, 1, "allowed to plans", is_vital=False)
    chosen = decision.plan.groups if decision else ()
    for plan in decision.plans if decision else ():
        for instance_type, count in _hosts(plan.groups if plan.feasible else ()).items():
            need(instance_type, count, "a next plan", is_vital=False)
    for instance_type, count in _hosts(chosen).items():
        need(instance_type, count, "the decision", is_vital=True)
    usage = "spot training job" if settings.spot else "training job"
    found = [
        NeededQuota(name=f"{name} for {usage} usage", value=count, why=why, is_vital=is_vital)
        for name, (count, why, is_vital) in needs.items()
    ]
    if settings.keep_alive_seconds and today:
        found.append(
            NeededQuota(
                name=f"ml.{bare_type(today.instance_type)} for training warm pool usage",
                value=today.count,
                why="keep_alive_seconds",
            )
        )
    hosts = sum(group.count for group in chosen) or (today.count if today else 1)
    control = settings.control
    return [
        *found,
        NeededQuota(
            name=f"{control.instance_type} for processing job usage",
            value=1,
            why="steps of the pipeline",
        ),
        *(
            NeededQuota(name=name, value=value, why=why, is_known=False)
            for name, value, why in (
                ("Number of instances across training jobs", hosts, "one job"),
                (
                    "Longest run time for a training job",
                    settings.max_run_seconds,
                    "sagemaker.max_run_seconds",
                ),
                (
                    "Longest run time for a processing job",
                    control.max_run_seconds,
                    "sagemaker.control.max_run_seconds",
                ),
            )
        ),
    ]


def _hosts(groups: Sequence[Group]) -> Counter[str]:
    """Returns the hosts of one job by type: groups of the same type count together."""
    found: Counter[str] = Counter()
    for group in groups:
        found[bare_type(group.instance_type)] += group.count
    return found


def quota_findings(aws: Aws, needed: Sequence[NeededQuota]) -> Iterator[Finding]:
    """Yields for each quota whether it is enough."""
    values: dict[str, float] = {}
    _note(values, aws.pages("service-quotas", "ListServiceQuotas", items="Quotas", **_QUOTAS))
    if any(need.name not in values for need in needed):
        # A quota that nobody has changed may be listed by its default alone.
        defaults = aws.pages(
            "service-quotas", "ListAWSDefaultServiceQuotas", items="Quotas", **_QUOTAS
        )
        _note(values, defaults)
    for need in needed:
        value = values.get(need.name)
        if value is not None:
            yield _quota_finding(need, value)
        elif need.is_known:
            yield Finding(
                name="quota",
                state="warn",
                text=f"{need.name}: Service Quotas has none of that name ({need.why})",
                fix="check the type's name, and whether the region has it",
            )


_QUOTAS = {"ServiceCode": "sagemaker", "MaxResults": 100}


def _note(values: dict[str, float], quotas: Iterable[Mapping[str, Json]]) -> None:
    for quota in quotas:
        value = quota.get("Value")
        if isinstance(value, int | float):
            values.setdefault(text(quota, "QuotaName"), value)


def _quota_finding(need: NeededQuota, value: float) -> Finding:
    is_time = "run time" in need.name
    shown, wanted = (
        (duration(value), duration(need.value)) if is_time else (f"{value:g}", f"{need.value:g}")
    )
    line = f"{need.name}: {shown}, needed {wanted} ({need.why})"
    if value >= need.value:
        return Finding(name="quota", state="ok", text=line)
    key = need.why if is_time else "the hosts"
    # One whole number of hosts or seconds: half a host is none.
    state: State = "fail" if need.is_vital else "warn"
    return Finding(
        name="quota",
        state=state,
        text=line,
        fix=f"ask for {math.ceil(need.value)} (console, Service Quotas, Amazon SageMaker; it takes "
        f"hours to days), or lower {key}",
    )


# What the hosts of a job, and the small steps, call: without s3 no data comes, and without
# sagemaker.api a step that starts a job waits for a connection that never comes.
ENDPOINTS: Mapping[str, Literal["vital", "useful"]] = {
    "s3": "vital",
    "sagemaker.api": "vital",
    "ecr.api": "useful",
    "ecr.dkr": "useful",
    "logs": "useful",
    "monitoring": "useful",
}


def network_findings(aws: Aws, vpc: Vpc, *, region: str) -> Iterator[Finding]:
    """Says whether hosts in the network reach AWS's services, and each other."""
    subnets = mappings(
        aws.call("ec2", "DescribeSubnets", SubnetIds=list(vpc.subnets)).get("Subnets")
    )
    ids = {text(subnet, "VpcId") for subnet in subnets}
    if len(ids) != 1:
        yield Finding(
            name="vpc",
            state="fail",
            text=f"the subnets are in {len(ids)} VPCs: {', '.join(sorted(ids))}",
            fix="name subnets of one VPC in sagemaker.vpc.subnets",
        )
        return
    of_vpc = [{"Name": "vpc-id", "Values": sorted(ids)}]
    tables = list(aws.pages("ec2", "DescribeRouteTables", items="RouteTables", Filters=of_vpc))
    used = [_table_of(text(subnet, "SubnetId"), tables) for subnet in subnets]
    if used and all(map(_leads_out, used)):
        yield Finding(
            name="vpc", state="ok", text="the subnets reach AWS's services by their default routes"
        )
    else:
        endpoints = list(
            aws.pages("ec2", "DescribeVpcEndpoints", items="VpcEndpoints", Filters=of_vpc)
        )
        route_tables = {text(table, "RouteTableId") for table in used}
        yield _endpoint_finding(endpoints, route_tables=route_tables, region=region)
    groups = mappings(
        aws.call("ec2", "DescribeSecurityGroups", GroupIds=list(vpc.security_groups)).get(
            "SecurityGroups"
        )
    )
    yield _group_finding(groups)


def _table_of(subnet: str, tables: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
    """Returns the route table of a subnet: its own, else the VPC's main one."""
    main: Mapping[str, Json] = {}
    for table in tables:
        for association in mappings(table.get("Associations")):
            if text(association, "SubnetId") == subnet:
                return table
            if association.get("Main") is True:
                main = table
    return main


def _leads_out(table: Mapping[str, Json]) -> bool:
    # Hosts have no public address: an internet gateway alone leads them nowhere.
    return any(
        text(route, "DestinationCidrBlock") == "0.0.0.0/0"
        and text(route, "State") != "blackhole"
        and not text(route, "GatewayId").startswith(("igw-", "local"))
        for route in mappings(table.get("Routes"))
    )


def _endpoint_finding(
    endpoints: Sequence[Mapping[str, Json]], *, route_tables: Collection[str], region: str
) -> Finding:
    missing = [
        service
        for service in ENDPOINTS
        if not any(
            text(endpoint, "ServiceName").endswith(f".{region}.{service}")
            and _serves(endpoint, route_tables)
            for endpoint in endpoints
        )
    ]
    if not missing:
        found = f"the VPC has endpoints for {', '.join(ENDPOINTS)}"
        return Finding(name="vpc", state="ok", text=found)
    is_vital = any(ENDPOINTS[service] == "vital" for service in missing)
    return Finding(
        name="vpc",
        state="fail" if is_vital else "warn",
        text=f"no way from the subnets to {', '.join(missing)}",
        fix=f"make endpoints (aws ec2 create-vpc-endpoint, com.amazonaws.{region}.{missing[0]}; "
        "interfaces with private DNS, s3 with the subnets' route tables), or a NAT gateway",
    )


def _serves(endpoint: Mapping[str, Json], route_tables: Collection[str]) -> bool:
    if text(endpoint, "State").lower() not in ("", "available"):
        return False
    if text(endpoint, "VpcEndpointType") == "Interface":
        return endpoint.get("PrivateDnsEnabled") is True
    served = endpoint.get("RouteTableIds")
    return isinstance(served, list) and set(route_tables) <= {str(table) for table in served}


_ALL_PORTS = (0, 65535)


def _group_finding(groups: Sequence[Mapping[str, Json]]) -> Finding:
    ids = {text(group, "GroupId") for group in groups}
    for group in groups:
        for rule in mappings(group.get("IpPermissions")):
            ports = (rule.get("FromPort", 0), rule.get("ToPort", 65535))
            is_tcp = text(rule, "IpProtocol") == "-1" or (
                text(rule, "IpProtocol") == "tcp" and ports in (_ALL_PORTS, (1, 65535))
            )
            pairs = {text(pair, "GroupId") for pair in mappings(rule.get("UserIdGroupPairs"))}
            if is_tcp and pairs & ids:
                return Finding(
                    name="vpc", state="ok", text="the security groups let hosts reach each other"
                )
    return Finding(
        name="vpc",
        state="warn",
        text=f"no rule of {', '.join(sorted(ids))} lets hosts of the group reach each other by TCP",
        fix=f"aws ec2 authorize-security-group-ingress --group-id {min(ids, default='GROUP')} "
        f"--source-group {min(ids, default='GROUP')} --protocol tcp --port 0-65535",
    )
