"""The price of a training plan in place of the list's, where a workload's jobs have one."""

from stoker.catalog import Catalog
from stoker.errors import ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.training_plan import KEY, plan_arn, read_plan
from stoker.records import Workload, bare_type
from stoker.terminal import say


def with_plan_price(
    catalog: Catalog, workload: Workload, *, quiet: bool, aws: Aws | None = None
) -> Catalog:
    """Returns the catalog with the price of the workload's training plan, and its types alone.

    Asks AWS if the workload names a plan. A plan that this caller may not see leaves the list's
    prices, and one line says so.

    Args:
        catalog: Types and list prices.
        workload: Names the plan.
        quiet: Whether nothing is said.
        aws: The account; default: of the workload's region.

    Raises:
        UsageError: If the plan is over, or has no hosts of today's type.
    """
    settings = workload.sagemaker
    arn = plan_arn(settings)
    if not arn or settings is None or workload.platform != "sagemaker":
        return catalog
    try:
        plan = read_plan(aws or Aws(region=settings.region), arn)
    except ServiceError as err:
        # A wrong name is a mistake; without the right to see a plan the list's prices are left.
        if err.kind == "missing":
            what = f"there is no training plan {arn}"
            raise UsageError(what, where=KEY, fix="name another plan, or leave it out") from err
        say(f"prices: of the list, as the training plan cannot be read: {err.what}", quiet=quiet)
        return catalog
    types = {bare_type(name) for name in plan.types}
    today = workload.todays_type
    if today and types and bare_type(today) not in types:
        what = f"the training plan {plan.name} has {', '.join(plan.types)}, and no {today}"
        fix = "set cluster.dnn.instance_type to the plan's type, or leave the plan out"
        raise UsageError(what, where=KEY, fix=fix)
    if plan.usd_per_hour is None:
        words = "the fee of the training plan cannot be divided by hosts and hours"
        say(f"prices: of the list, as {words}", quiet=quiet)
    else:
        say(f"price: ${plan.usd_per_hour:.2f} per host and hour: {plan.words}", quiet=quiet)
    return catalog.for_plan(types, usd_per_hour=plan.usd_per_hour, words=plan.words)
