"""Candidates: today's cluster, and the changes that the flow chart considers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stoker.catalog import Catalog, Instance
from stoker.decide.model import (
    ClusterShape,
    Estimate,
    Hosts,
    StepWork,
    cpu_seconds,
    estimate,
    of_workers,
    parts_on,
    shards_on,
    worker_seconds,
)
from stoker.errors import UsageError
from stoker.records import Action, FeedSettings, Group
from stoker.step_model import busy_worker_seconds, more_workers, most_workers, useful_workers
from stoker.units import numbered

# Worth of a further replica inside one host (8 GPUs: a little over an eighth of the time of 1) and
# across hosts (published on p3.16xlarge: 1.8, 3.7, 7.3 times on 2, 4, 8 hosts).
_SCALING_INSIDE = 0.95
_SCALING_ACROSS = 0.9
_MORE_HOSTS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cluster to predict and price.

    Attributes:
        own_storage: With a separate storage per host; None: known or irrelevant.
        problem: Why it cannot be run or predicted.
        asked_for: The user named it, so that limits of the search do not apply.
        num_workers: Loader workers of each rank, if only these change.
    """

    action: Action
    shape: ClusterShape
    groups: tuple[Group, ...]
    estimate: Estimate | None
    problem: str = ""
    asked_for: bool = False
    own_storage: Estimate | None = None
    num_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What candidates are made from: a step's work, today's hosts, and the catalog of types.

    Attributes:
        own_storage: The work with a separate storage per host; None: known or irrelevant.
        today: Today's type, with the measured vCPUs and accelerators.
        unfed: Why data hosts cannot make the batches.
        unworkable: Why workers cannot make them either, as a sentence.
        most_workers: Loader workers that one of today's hosts has memory for. None: not known.
    """

    work: StepWork
    own_storage: StepWork | None = None
    catalog: Catalog
    today: Instance
    processes: int
    feed: FeedSettings
    unfed: str = ""
    unworkable: str = ""
    most_workers: int | None = None

    def get(self, instance_type: str) -> Instance:
        """Returns a type; today's with what was measured, and all of this machine with its GPUs."""
        instance = self.catalog.get(instance_type)
        if instance.type == self.today.type:
            return self.today
        if not self.catalog.info.is_this_machine:
            return instance
        return replace(
            instance,
            accelerators=self.today.accelerators,
            accelerator_model=self.today.accelerator_model,
        )


def keep(space: SearchSpace) -> Candidate:
    work = space.work
    dnn = Hosts(instance=space.today, count=work.hosts, workers=work.num_workers)
    return _candidate(
        space, "keep", ClusterShape(dnn=dnn, data=work.data, processes=space.processes)
    )


def tune(space: SearchSpace) -> Iterator[Candidate]:
    """Yields today's hosts with as many loader workers as help, where that is more than today."""
    work = space.work
    if work.num_workers is None or work.data or space.unworkable:
        return
    today = ClusterShape(
        dnn=Hosts(instance=space.today, count=work.hosts, workers=work.num_workers),
        processes=space.processes,
    )
    better = more_workers(parts_on(work, today))
    has_shards = work.shards > 0
    # More workers of a stream need more shards, which the script or feed.shards sets.
    if better is None or (has_shards and (work.divides is False or work.are_shards_set)):
        return
    shape = replace(today, dnn=replace(today.dnn, workers=better.workers // work.hosts))
    # The script has to make more shards with its workers: `problem` says so.
    tuned = _candidate(with_any_shards(space), "tune", shape)
    problem = ""
    if has_shards:
        problem = more_shards_words(space, tuned.groups)
    workers_per_host = better.workers // work.hosts
    if space.most_workers is not None and workers_per_host > max(1, space.most_workers):
        problem = f"the host has no memory for {workers_per_host} loader workers"
    # What a script sets is of one rank, and a host may have several.
    num_workers = math.ceil(better.workers / better.ranks)
    yield replace(tuned, problem=problem, num_workers=num_workers)


def with_any_shards(space: SearchSpace) -> SearchSpace:
    """Returns the search space with a stream that has a shard for each worker."""
    own_storage = space.own_storage and replace(space.own_storage, shards=0)
    return replace(space, work=replace(space.work, shards=0), own_storage=own_storage)


def more_shards_words(space: SearchSpace, groups: Sequence[Group]) -> str:
    """Returns what to change so that each worker of these groups has a shard of the stream."""
    workers = sum(group.count * (group.workers_per_host or 0) for group in groups)
    processes = sum(g.count * (g.processes_per_host or 1) for g in groups if g.role == "dnn")
    # Shards and num_workers are of one rank of the script.
    per_process = math.ceil(workers / max(1, round(processes * space.work.ranks_per_process)))
    shards = space.work.shards
    change = f"feed.shards: {per_process}"
    if not space.work.are_shards_set:
        change = f"num_workers={per_process} in the script, or {change}"
    if space.work.divides is None:
        change += ", if it divides itself by get_worker_info()"
    return f"the stream has {numbered(shards, 'shard')}: set {change}"


def scale_up(space: SearchSpace) -> Iterator[Candidate]:
    """Yields larger types of the same family with the same accelerators."""
    today = space.today
    for instance in _of_the_family(space):
        if instance.vcpus > today.capacity and instance.accelerators == today.accelerators:
            shape = ClusterShape(dnn=_dnn(space, instance), processes=space.processes)
            yield _planned(space, "scale_up", shape)


def _of_the_family(space: SearchSpace) -> Iterator[Instance]:
    model = space.today.accelerator_model
    for listed in space.catalog.instances:
        instance = space.get(listed.type)
        if instance.family == space.today.family and instance.accelerator_model == model:
            yield instance


def heterogeneous(space: SearchSpace, instance: Instance, *, most: int) -> Iterator[Candidate]:
    """Yields today's hosts with 1 to `most` data hosts of a type.

    They start from the free plan: at most its workers join on a dnn host.
    """
    dnn = _dnn(space, space.today)
    # What costs nothing comes first: data hosts are not to be credited with it.
    if free := next(tune(space), None):
        dnn = free.shape.dnn
    for count in range(1, most + 1):
        shape = ClusterShape(
            dnn=dnn,
            data=(Hosts(instance=instance, count=count, workers=instance.vcpus),),
            processes=space.processes,
        )
        yield _planned(space, "heterogeneous", shape)


def scale_out(space: SearchSpace) -> Iterator[Candidate]:
    """Yields more accelerators of the same model: larger instances first, then more instances."""
    today = space.today
    work = space.work
    # All hosts of this machine have the same accelerators.
    if today.accelerators == 0 or space.catalog.info.is_this_machine:
        return
    for instance in _of_the_family(space):
        if instance.accelerators > today.accelerators:
            # The fewest larger hosts with more accelerators than today.
            count = work.hosts * today.accelerators // instance.accelerators + 1
            yield _planned(space, "scale_out", _replicated(space, instance, count))
    for times in _MORE_HOSTS:
        yield _planned(space, "scale_out", _replicated(space, today, work.hosts * times))


def named(space: SearchSpace, groups: Sequence[Group]) -> Candidate:
    """Returns the cluster that the user named.

    Raises UsageError if it has no dnn group or several, or a type that is not in the catalog.
    """
    dnn_groups = [group for group in groups if group.role == "dnn"]
    if len(dnn_groups) != 1:
        raise UsageError(
            f"a cluster needs exactly one dnn group, this one has {len(dnn_groups)}",
            where="--group",
            fix="for example --group dnn=1 --group data=c5.4xlarge:2",
        )
    group = dnn_groups[0]
    # A group without :WORKERS leaves them to stoker, as a searched cluster does.
    instance = space.get(group.instance_type)
    workers = group.workers_per_host
    data = tuple(_data_hosts(space, other) for other in groups if other.role == "data")
    shape = replace(_replicated(space, instance, group.count), data=data)
    if group.processes_per_host is not None:
        shape = replace(shape, processes=group.processes_per_host)
    if workers is not None:
        shape = replace(shape, dnn=replace(shape.dnn, workers=workers))
    action = _action(space, shape)
    problem = _problem(space, shape, workers=workers)
    if workers is None and not problem:
        candidate = _planned(space, action, shape)
    else:
        candidate = _candidate(space, action, shape, problem=problem)
    return replace(candidate, asked_for=True)


def _data_hosts(space: SearchSpace, group: Group) -> Hosts:
    hosts = Hosts(
        instance=space.get(group.instance_type), count=group.count, workers=group.workers_per_host
    )
    return replace(hosts, workers=hosts.workers_per_host)


def _problem(space: SearchSpace, shape: ClusterShape, *, workers: int | None) -> str:
    """Returns why a named cluster cannot be predicted or run; empty: nothing is in the way."""
    instance = shape.dnn.instance
    if shape.data and space.unfed:
        return space.unfed
    if workers and space.unworkable:
        return space.unworkable
    if space.catalog.info.is_this_machine and instance.accelerators and shape.replicas > 1:
        return f"this machine has no accelerators for {shape.dnn.count} training hosts"
    todays = _accelerators(space.today)
    there = _accelerators(instance)
    if there != todays:
        what = f"the accelerators differ ({todays} today, {there} here)"
        return f"{what}: profile the training there"
    return ""


def _action(space: SearchSpace, shape: ClusterShape) -> Action:
    dnn = shape.dnn
    work = space.work
    if shape.data:
        is_today = dnn.instance.type == space.today.type and dnn.count == work.hosts
        is_same = is_today and _kinds(shape.data) == _kinds(work.data)
        if is_same and dnn.workers == work.num_workers:
            return "keep"
        return "heterogeneous"
    if shape.replicas != 1 or dnn.count != space.work.hosts:
        return "scale_out"
    if dnn.instance.type != space.today.type:
        return "scale_up"
    if dnn.workers in (None, work.num_workers) and not work.data:
        return "keep"
    return "tune"


def _kinds(hosts: Sequence[Hosts]) -> list[tuple[str, int]]:
    return sorted((group.instance.type, group.count) for group in hosts)


def _replicated(space: SearchSpace, instance: Instance, count: int) -> ClusterShape:
    """Returns dnn hosts alone, with replicas according to their accelerators."""
    hosts = space.work.hosts
    larger = 1.0
    if instance.accelerators and space.today.accelerators:
        larger = instance.accelerators / space.today.accelerators
    return ClusterShape(
        dnn=_dnn(space, instance, count=count),
        # A process drives as many accelerators as today.
        processes=max(1, round(space.processes * larger)),
        replicas=max(count * larger / hosts, 1e-6),
        scaling=_SCALING_ACROSS if count > hosts else _SCALING_INSIDE,
    )


def _dnn(space: SearchSpace, instance: Instance, *, count: int | None = None) -> Hosts:
    """Returns dnn hosts with the most workers that can help; `_planned` reduces them."""
    work = space.work
    if space.unworkable:
        return Hosts(instance=instance, count=count or work.hosts, workers=work.num_workers)
    workers = most_workers(
        vcpus=instance.capacity, parallel=work.parallel_seconds, cpu=work.loader_cpu_seconds
    )
    return Hosts(instance=instance, count=count or work.hosts, workers=workers)


def _planned(space: SearchSpace, action: Action, shape: ClusterShape) -> Candidate:
    """Returns the candidate with the workers that stoker would set on the dnn hosts."""
    if space.unworkable:
        return _candidate(space, action, shape)
    shards = shards_on(space.work, shape)
    if shards and shape.dnn.workers is not None:
        most = min(shape.dnn.workers, math.ceil(shards / shape.dnn.count))
        shape = replace(shape, dnn=replace(shape.dnn, workers=most))
    if shape.data and space.feed.local_workers != "auto":
        fixed = replace(shape.dnn, workers=space.feed.local_workers)
        return _candidate(space, action, replace(shape, dnn=fixed))
    with_local = estimate(space.work, shape)
    if shape.data:
        alone = replace(shape, dnn=replace(shape.dnn, workers=0))
        without_local = estimate(space.work, alone)
        # Local workers gain nothing where the data hosts alone are 15% below the accelerator's
        # step, and without them the trainer has the CPUs.
        is_floor = without_local.limit == "accelerator"
        has_room = without_local.second_seconds <= 0.85 * without_local.step_seconds
        as_fast = without_local.step_seconds <= with_local.step_seconds * (1 + 1e-9)
        if as_fast and ((is_floor and has_room) or with_local.remote_share >= 1):
            return _candidate(space, action, alone)
    # The estimate with the most workers stays: the removed ones hardly helped.
    workers = _useful_workers(space, shape, with_local)
    trimmed = replace(shape, dnn=replace(shape.dnn, workers=workers))
    return _candidate(space, action, trimmed, made=with_local, most=shape)


def _useful_workers(space: SearchSpace, shape: ClusterShape, made: Estimate) -> int:
    """Returns the workers of a dnn host that are busy at this step, and a tenth more."""
    dnn = shape.dnn
    work = of_workers(space.work, shape)
    alone = worker_seconds(work, dnn.instance)
    busy = busy_worker_seconds(parallel=alone, cpu=cpu_seconds(work, dnn.instance))
    local = (1 - made.remote_share) * busy / dnn.count
    shared = parts_on(work, shape).shared.seconds
    if shape.data and work.has_own_storage:
        # The data hosts' reads do not slow down local workers.
        shared = 0.0
    return useful_workers(
        parallel=local * work.factor("latency"),
        shared=shared * work.factor("storage"),
        step=made.step_seconds,
        most=dnn.workers or 1,
    )


def _candidate(
    space: SearchSpace,
    action: Action,
    shape: ClusterShape,
    *,
    made: Estimate | None = None,
    most: ClusterShape | None = None,
    problem: str = "",
) -> Candidate:
    """Returns the candidate; `made` is its estimate, with the workers of `most`."""
    own_storage = None
    if not problem:
        made = made or estimate(space.work, shape)
        if space.own_storage:
            own_storage = estimate(space.own_storage, most or shape)
    dnn = Group(
        name="dnn",
        role="dnn",
        instance_type=shape.dnn.instance.type,
        count=shape.dnn.count,
        processes_per_host=shape.processes,
        workers_per_host=shape.dnn.workers,
    )
    data = [
        Group(
            name=_data_name(index),
            role="data",
            instance_type=hosts.instance.type,
            count=hosts.count,
            workers_per_host=hosts.workers,
        )
        for index, hosts in enumerate(shape.data)
    ]
    return Candidate(
        action=action,
        shape=shape,
        groups=(dnn, *data),
        estimate=made,
        problem=problem,
        own_storage=own_storage,
    )


def _data_name(index: int) -> str:
    # The first is named as in a cluster of two groups, which most are.
    if index == 0:
        return "data"
    return f"data-{index + 1}"


def _accelerators(instance: Instance) -> str:
    if not instance.accelerators:
        return "none"
    return instance.accelerator_model or "unknown"
