"""What an hour of a host costs under a training plan, which is paid in advance.

A job names its plan in `sagemaker.request` (ResourceConfig.TrainingPlanArn). Its upfront fee is for
all hosts and hours that it reserves, used or not.
"""

from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.records import SageMakerSettings
from stoker.records.base import Document, mappings, text
from stoker.records.platforms import patch_document

KEY = "key sagemaker.request.ResourceConfig.TrainingPlanArn"
_USABLE = ("Pending", "Scheduled", "Active")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A training plan.

    Attributes:
        types: Instance types of its hosts, with `ml.`.
        host_hours: Hours of all its hosts together.
        usd_per_hour: Dollars of an hour of one host; None: its fee is not in dollars, or it has
            hosts of several types.
    """

    name: str
    types: tuple[str, ...]
    host_hours: float
    usd_per_hour: float | None

    @property
    def words(self) -> str:
        return f"training plan {self.name}, paid in advance, over {self.host_hours:g} host-hours"


def plan_arn(settings: SageMakerSettings | None) -> str:
    """Returns the ARN of the jobs' training plan; empty: they have none."""
    request = patch_document(settings.request) if settings else {}
    return text(request, "ResourceConfig", "TrainingPlanArn")


def read_plan(aws: Aws, arn: str) -> TrainingPlan:
    """Returns a training plan.

    Raises:
        UsageError: If it is over, or of another service's hosts.
        ServiceError: If AWS does not tell it.
    """
    name = arn.rpartition("/")[2]
    return plan_of(aws.call("sagemaker", "DescribeTrainingPlan", TrainingPlanName=name))


def plan_of(answer: Document) -> TrainingPlan:
    """Returns the plan in an answer of DescribeTrainingPlan; raises UsageError for one in vain."""
    name = str(answer.get("TrainingPlanName"))
    status = str(answer.get("Status"))
    if status not in _USABLE:
        raise UsageError(
            f"the training plan {name} is {status}: no job can have its hosts",
            where=KEY,
            fix="name another plan, or leave it out",
        )
    targets = answer.get("TargetResources")
    if isinstance(targets, list) and targets and "training-job" not in targets:
        raise UsageError(
            f"the training plan {name} is for {', '.join(map(str, targets))}, not for jobs",
            where=KEY,
            fix="name a plan for training-job, or leave it out",
        )
    reserved = mappings(answer, "ReservedCapacitySummaries")
    types = tuple(dict.fromkeys(str(each["InstanceType"]) for each in reserved))
    hours = sum(
        _hours(each, of_plan=answer) * _number(each, "TotalInstanceCount") for each in reserved
    )
    fee = _number(answer, "UpfrontFee")
    currency = answer.get("CurrencyCode") or "USD"
    usd_per_hour = None
    # The fee is for all hosts: of several types it does not say which share is whose.
    if len(types) == 1 and hours > 0 and fee > 0 and currency == "USD":
        usd_per_hour = fee / hours
    return TrainingPlan(name=name, types=types, host_hours=hours, usd_per_hour=usd_per_hour)


def _hours(reserved: Document, *, of_plan: Document) -> float:
    """Returns the hours of a part of a plan; the plan's own where the part tells none."""
    hours = [
        _number(each, "DurationHours") + _number(each, "DurationMinutes") / 60
        for each in (reserved, of_plan)
    ]
    return next((each for each in hours if each), 0.0)


def _number(answer: Document, key: str) -> float:
    try:
        return float(str(answer.get(key) or 0))
    except ValueError:
        return 0.0
