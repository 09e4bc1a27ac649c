"""Checks of an AWS account, or of a cluster, for one workload. Nothing is made."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from stoker.doctor.host import Finding
from stoker.errors import ServiceError, StokerError
from stoker.platforms.aws import Aws, split_uri
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.api import CLAIMS, JOBSETS, TRAINJOBS, ClusterApi, Resource
from stoker.platforms.kubernetes.pods import claim_of
from stoker.platforms.sagemaker.request import sagemaker_of
from stoker.records import Group, SageMakerSettings, Workload, bare_type
from stoker.records.base import text

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.[a-z.]+/"
    r"(?P<name>[^:@]+)(:(?P<tag>[^@]+))?(@(?P<digest>.+))?"
)


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    """Returns what a check finds; a missing right is a warning that names it."""
    try:
        return check()
    except ServiceError as err:
        if err.kind != "denied":
            return Finding(name, "fail", err.what, err.fix)
        fix = "ask an administrator for the right; what it checks may be in order"
        return Finding(name, "warn", f"cannot be checked: {err.what}", fix)
    except StokerError as err:
        return Finding(name, "fail", err.what, err.fix)


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
    found = _checked("account", partial(_account_finding, aws))
    yield found
    if found.state == "fail":
        # The other checks would fail alike.
        return
    uris = [settings.output_uri, settings.checkpoint_uri, settings.source]
    uris += [channel.uri for channel in workload.channels.values()]
    buckets = [split_uri(uri)[0] for uri in uris if uri and uri.startswith("s3://")]
    images = (workload.image, settings.control.image)
    for name, check, values in (
        ("role", _has_role, (settings.role, settings.control.role)),
        # Elsewhere than in ECR, an image cannot be asked for.
        ("image", _has_image, [each for each in images if each and ".dkr.ecr." in each]),
        ("bucket", _has_bucket, buckets),
    ):
        for value in sorted({*filter(None, values)}):
            yield _checked(name, partial(_there_finding, name, value, check, aws))
    yield _checked("quota", partial(_quota_finding, aws, workload, settings))


def _account_finding(aws: Aws) -> Finding:
    identity = aws.call("sts", "GetCallerIdentity")
    text = f"{identity['Account']}, {aws.region}, as {identity['Arn']}"
    return Finding("account", "ok", text)


def _there_finding(name: str, value: str, has: Callable[[Aws, str], bool], aws: Aws) -> Finding:
    """Finds whether an object of the account is there, in the region of the jobs."""
    if has(aws, value):
        return Finding(name, "ok", value)
    fix = "make it there, or correct its key; configs/sagemaker/stoker.yaml makes roles and bucket"
    return Finding(name, "fail", f"there is no {value} in {aws.region}", fix)


def _has_role(aws: Aws, arn: str) -> bool:
    # arn:aws:iam::ACCOUNT:role/PATH/NAME
    return aws.find("iam", "GetRole", RoleName=arn.rpartition("/")[2]) is not None


def _has_bucket(aws: Aws, bucket: str) -> bool:
    answer = aws.find("s3", "HeadBucket", Bucket=bucket)
    return answer is not None and answer.get("BucketRegion") in (None, aws.region)


def _has_image(aws: Aws, image: str) -> bool:
    found = _ECR.fullmatch(image)
    if found is None or found["region"] != aws.region:
        return False
    version = {"imageTag": found["tag"] or "latest"}
    if found["digest"]:
        version = {"imageDigest": found["digest"]}
    names = {"registryId": found["account"], "repositoryName": found["name"]}
    return aws.find("ecr", "DescribeImages", **names, imageIds=[version]) is not None


def _quota_finding(aws: Aws, workload: Workload, settings: SageMakerSettings) -> Finding:
    """Compares the account's quotas with today's hosts and the steps' host."""
    # The account's quotas by name, and the service's where it has none.
    quotas = {
        str(each["QuotaName"]): float(str(each["Value"]))
        for verb in ("ListAWSDefaultServiceQuotas", "ListServiceQuotas")
        for each in aws.pages("service-quotas", verb, items="Quotas", ServiceCode="sagemaker")
    }
    # Quotas are found by their names, such as "ml.g5.xlarge for training job usage".
    needed = {f"{settings.control.instance_type} for processing job usage": 1}
    if workload.cluster is not None:
        today = workload.cluster.dnn
        needed[f"ml.{bare_type(today.instance_type)} for training job usage"] = today.count
    # Without a quota of that name, the account cannot have the type at all.
    short = [
        f"{name}: {quotas.get(name, 0):.0f} of {count}"
        for name, count in needed.items()
        if quotas.get(name, 0) < count
    ]
    if short:
        fix = "raise it in Service Quotas (Amazon SageMaker), which takes hours to days"
        return Finding("quota", "fail", f"too small: {', '.join(short)}", fix)
    return Finding("quota", "ok", ", ".join(needed))


def examine_cluster(workload: Workload) -> Iterator[Finding]:
    """Yields each finding at once; a check that needs a right the caller lacks is a warning."""
    settings = workload.kubernetes_settings
    cluster = ClusterApi(context=settings.context, namespace=settings.namespace)
    resource = TRAINJOBS if settings.api == "trainer" else JOBSETS
    found = _checked("cluster", partial(_cluster_finding, cluster, resource))
    yield found
    if found.state == "fail":
        # The other checks would fail alike.
        return
    if workload.cluster and workload.image:
        group = Group.of_today(workload.cluster.dnn)
        yield _checked("job", partial(_job_finding, cluster, workload, group))
    uris = [channel.uri for channel in workload.channels.values()]
    claims = {
        claim_of(uri, where="the workload")[0]
        for uri in (*uris, settings.output or "")
        if uri.startswith("pvc://")
    }
    for claim in sorted(claims):
        yield _checked("claim", partial(_claim_finding, cluster, claim))


def _cluster_finding(cluster: ClusterApi, resource: Resource) -> Finding:
    cluster.list(resource)
    kind = f"{resource.plural}.{resource.group}, {resource.version}"
    return Finding("cluster", "ok", f"namespace {cluster.namespace} has {kind}")


def _job_finding(cluster: ClusterApi, workload: Workload, group: Group) -> Finding:
    """Asks the cluster to check the job on today's nodes in a dry run: rights, schema, quotas."""
    job = JobSpec.of(workload, groups=[group], run_dir=Path(f"{workload.name}-doctor"))
    request = KubernetesPlatform().plan(job)
    # A TrainJob is checked against its runtime, which is there only for a run.
    checked = request.runtime or request.main
    cluster.create(checked, is_dry_run=True)
    return Finding("job", "ok", f"the cluster would take its {text(checked, 'kind')} (dry run)")


def _claim_finding(cluster: ClusterApi, name: str) -> Finding:
    claim = cluster.find(CLAIMS, name)
    if claim is None:
        words = f"{name} not found in namespace {cluster.namespace}"
        return Finding("claim", "fail", words, "make it, or correct its name")
    return Finding("claim", "ok", f"{name}, {text(claim, 'status', 'phase')}")
