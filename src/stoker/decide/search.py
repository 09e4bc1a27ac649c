"""The search: today's cluster, and the changes that the flow chart considers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stoker.catalog import Instance
from stoker.decide.model import Cluster, Hosts, estimate, more_workers, shards_on, tuned
from stoker.decide.price import Space, make_plan
from stoker.records import Action, Group, Plan

_MORE_HOSTS = (2, 4)
# Local workers gain nothing where the data hosts alone are so far below the accelerator's step.
_ROOM = 0.85
# More data hosts have to make a step shorter by this at least.
_SHORTER = 0.99
# Data types whose plans are listed. Each has a plan for each number of hosts (8 by default): more
# types would hide the useful rows.
_BEST_TYPES = 5


def searched(space: Space, keep: Plan) -> Iterator[Plan]:
    """Yields the plans of the flow chart: more workers, a larger type, data hosts, more replicas.

    Args:
        space: What plans are made from.
        keep: Today's cluster.
    """
    free = free_plan(space)
    if free:
        yield free
    today = space.today
    is_here = space.catalog.info.is_this_machine
    kind = (today.family, today.accelerator_model)
    family = []
    for listed in space.catalog.instances:
        instance = space.get(listed.type)
        is_alike = (instance.family, instance.accelerator_model) == kind
        if is_alike and not space.why_unusable(instance):
            family.append(instance)
    for instance in family:
        if instance.vcpus > today.capacity and instance.accelerators == today.accelerators:
            yield _planned(space, "scale_up", _cluster(space, instance, space.work.hosts))
    if not space.unfed:
        yield from _best_heterogeneous(space, free)
    outcome = keep.predicted
    # More accelerators change the global batch, thus the training: searched only if needed. All
    # hosts of this machine have the same ones.
    is_needed = outcome is not None and (
        outcome.limit in ("accelerator", "launch") or space.misses_deadline(outcome)
    )
    if not is_needed or not today.accelerators or is_here:
        return
    hosts = space.work.hosts
    for instance in family:
        if instance.accelerators > today.accelerators:
            # The fewest larger hosts with more accelerators than today.
            count = hosts * today.accelerators // instance.accelerators + 1
            yield _planned(space, "scale_out", _cluster(space, instance, count))
    for times in _MORE_HOSTS:
        yield _planned(space, "scale_out", _cluster(space, today, hosts * times))


def free_plan(space: Space) -> Plan | None:
    """Returns today's hosts with as many loader workers as help; None: more than today's do not.

    More workers of a stream need more shards, which the script sets: it gets advice.
    """
    work = space.work
    if work.num_workers is None or space.unworkable or work.shards:
        return None
    better = more_workers(work)
    return make_plan(space, "tune", better) if better else None


def _best_heterogeneous(space: Space, free: Plan | None) -> Iterator[Plan]:
    """Yields today's hosts with data hosts: those of the best types, each with 1 to the most."""
    base = space.work.todays
    if space.work.num_workers is None:
        base = _cluster(space, space.today, space.work.hosts)
    if free:
        # What costs nothing comes first: data hosts are not to be credited with it.
        base = base.with_workers(free.groups[0].workers_per_host)
    by_type = []
    for instance in _data_types(space):
        plans: list[Plan] = []
        least = math.inf
        for count in range(1, space.constraints.max_data_hosts + 1):
            data = Hosts(instance=instance, count=count, workers=instance.vcpus)
            plan = _planned(space, "heterogeneous", replace(base, data=data))
            step = plan.predicted.step_seconds if plan.predicted else least
            # Hosts that make a step no shorter are of no use.
            if step > least * _SHORTER:
                break
            least = step
            plans.append(plan)
        if plans:
            by_type.append((min(map(space.rank, plans)), plans))
    for _, plans in sorted(by_type)[:_BEST_TYPES]:
        yield from plans


def _data_types(space: Space) -> Iterator[Instance]:
    """Yields the types without accelerators that may load, in the order of their names."""
    for listed in space.catalog.instances:
        instance = space.get(listed.type)
        # All of this machine has its accelerators.
        if not listed.accelerators and not space.why_unusable(instance):
            yield instance


def named(space: Space, groups: Sequence[Group]) -> Plan:
    """Returns the plan of a cluster that the user named.

    Args:
        space: What plans are made from.
        groups: The dnn hosts, and the data hosts if there are any.

    Raises:
        UsageError: If a type is not in the catalog.
    """
    group, *others = groups
    workers = group.workers_per_host
    instance = space.get(group.instance_type)
    cluster = _cluster(space, instance, group.count)
    for other in others:
        kind = space.get(other.instance_type)
        own = other.workers_per_host
        data = Hosts(instance=kind, count=other.count, workers=kind.vcpus if own is None else own)
        cluster = replace(cluster, data=data)
    # A group without :WORKERS leaves them to stoker, as a searched cluster does.
    cluster = _settled(space, cluster) if workers is None else cluster.with_workers(workers)
    todays, there = map(_accelerators, (space.today, instance))
    problem = ""
    if cluster.data and space.unfed:
        problem = space.unfed
    elif workers and space.unworkable:
        problem = space.unworkable
    elif there != todays:
        what = f"the accelerators differ ({todays} today, {there} here)"
        problem = f"{what}: profile the training there"
    return make_plan(space, _action(space, cluster), cluster, problem=problem, asked_for=True)


def _accelerators(instance: Instance) -> str:
    return (instance.accelerator_model or "unknown") if instance.accelerators else "none"


def _action(space: Space, cluster: Cluster) -> Action:
    dnn = cluster.dnn
    if cluster.data:
        return "heterogeneous"
    if cluster.replicas != 1 or dnn.count != space.work.hosts:
        return "scale_out"
    if dnn.instance.type != space.today.type:
        return "scale_up"
    return "keep" if dnn.workers in (None, space.work.num_workers) else "tune"


def _cluster(space: Space, instance: Instance, count: int) -> Cluster:
    """Returns dnn hosts with the workers that help, and replicas as their accelerators."""
    work = space.work
    larger = 1.0
    if instance.accelerators and space.today.accelerators:
        larger = instance.accelerators / space.today.accelerators
    cluster = Cluster(
        dnn=Hosts(instance=instance, count=count, workers=work.num_workers),
        # A process drives as many accelerators as today.
        processes=max(1, round(work.processes * larger)),
        replicas=max(count * larger / work.hosts, 1e-6),
    )
    return cluster if space.unworkable else tuned(work, cluster)


def _planned(space: Space, action: Action, cluster: Cluster) -> Plan:
    return make_plan(space, action, _settled(space, cluster))


def _settled(space: Space, cluster: Cluster) -> Cluster:
    """Returns the cluster with the workers that stoker would set on the dnn hosts."""
    work = space.work
    shards = shards_on(work, cluster)
    if shards and cluster.dnn.workers is not None:
        most = min(cluster.dnn.workers, math.ceil(shards / cluster.dnn.count))
        cluster = cluster.with_workers(most)
    if not cluster.data:
        return cluster
    if space.feed.local_workers != "auto":
        return cluster.with_workers(space.feed.local_workers)
    alone = cluster.with_workers(0)
    mixed = estimate(work, cluster)
    made = estimate(work, alone)
    # Without local workers the trainer has the CPUs. Data hosts need none if they make all batches,
    # or if the accelerator is the limit with room left.
    has_room = made.limit == "accelerator" and made.second_seconds <= _ROOM * made.step_seconds
    is_enough = mixed.remote_share >= 1 or has_room
    return alone if is_enough and made.step_seconds <= mixed.step_seconds * (1 + 1e-9) else cluster
