"""Whether a plan can have what its job may get instead of it, or go through its queue."""

from stoker.catalog import Catalog, Instance
from stoker.errors import UsageError
from stoker.records import Constraints, Workload, bare_type

_KEY = "key sagemaker.further_types"


def refuse_preferences(workload: Workload, catalog: Catalog) -> None:
    """Raises UsageError for `sagemaker.further_types` or a queue that the constraints do not allow.

    SageMaker chooses one of the types without asking again, so the constraints must allow each.
    """
    if workload.sagemaker is None or not catalog.info.needs_training_enum:
        return
    further = workload.sagemaker.further_types
    constraints = workload.known_constraints
    if workload.sagemaker.queue and constraints.max_data_hosts != 0:
        what = "a queue of AWS Batch takes no data group, and a plan may have one"
        where = f"workload {workload.name}, key sagemaker.queue"
        raise UsageError(what, where=where, fix="set constraints.max_data_hosts: 0")
    if not further:
        return
    where = f"workload {workload.name}, {_KEY}"
    if constraints.max_data_hosts != 0:
        what = "instance groups have one type each, and a plan may have a data group"
        raise UsageError(what, where=where, fix="set constraints.max_data_hosts: 0")
    today = None
    count = 1
    if workload.cluster:
        today = catalog.get(workload.cluster.dnn.instance_type)
        count = workload.cluster.dnn.count
    for index, name in enumerate(further):
        place = f"{where}[{index}]"
        try:
            instance = catalog.get(name)
        except UsageError as err:
            raise UsageError(err.what, where=place, fix=err.fix) from None
        _refuse_other_machine(instance, today, where=place)
        _refuse_limits(instance, constraints, count=count, where=place)


def _refuse_other_machine(instance: Instance, today: Instance | None, *, where: str) -> None:
    """Refuses a type on which the same command would train something else, or not start."""
    if today is None:
        return
    if instance.accelerators != today.accelerators:
        what = (
            f"{instance.type} has {instance.accelerators} accelerators, "
            f"{today.type} has {today.accelerators}: the batch of a step would differ"
        )
        raise UsageError(what, where=where, fix="name types with as many")
    if instance.architecture != today.architecture:
        what = f"one image cannot run on both {today.type} and {instance.type}: arm64 is another"
        raise UsageError(what, where=where, fix="name types of one architecture")


def _refuse_limits(instance: Instance, constraints: Constraints, *, count: int, where: str) -> None:
    allowed = constraints.allowed_instance_types
    # Both lists may have the names with SageMaker's `ml.`, or without.
    names = {bare_type(name) for name in allowed or ()}
    if allowed is not None and bare_type(instance.type) not in names:
        what = f"{instance.type} is not among constraints.allowed_instance_types"
        raise UsageError(what, where=where, fix="add it there, or leave it out here")
    limits = (constraints.max_usd, constraints.max_usd_per_run, constraints.max_usd_per_hour)
    if instance.usd_per_hour is None:
        if any(limit is not None for limit in limits):
            what = f"the price of {instance.type} is not known, so no limit can be checked"
            raise UsageError(what, where=where, fix="leave it out, or give its price")
        return
    most = constraints.max_usd_per_hour
    usd = instance.usd_per_hour * count
    if most is not None and usd > most:
        what = f"{count} x {instance.type} costs ${usd:.2f} an hour, the limit is ${most:.2f}"
        raise UsageError(what, where=where, fix="leave it out, or raise max_usd_per_hour")
