"""Candidates: today's cluster, and the changes that the flow chart considers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stoker.catalog import Catalog, Instance
from stoker.decide.model import (
    ClusterShape,
    Estimate,
    Hosts,
    Work,
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
class Site:
    """What plans are made from: today's work, today's hosts, and the catalog of types.

    Attributes:
        own_storage: The work with a separate storage per host; None: known or irrelevant.
        today: Today's type, with the measured vCPUs and accelerators.
        unfed: Why data hosts cannot make the batches.
        in_step: Why workers cannot make them either: the loop changes what they are made from.
        most_workers: Loader workers that one of today's hosts has memory for. None: not known.
    """

    work: Work
    own_storage: Work | None = None
    catalog: Catalog
    today: Instance
    processes: int
    feed: FeedSettings
    unfed: str = ""
    in_step: str = ""
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


def keep(site: Site) -> Candidate:
    work = site.work
    dnn = Hosts(instance=site.today, count=work.hosts, workers=work.num_workers)
    return _candidate(site, "keep", ClusterShape(dnn=dnn, data=work.data, processes=site.processes))


def tune(site: Site) -> Iterator[Candidate]:
    """Yields today's hosts with as many loader workers as help, where that is more than today."""
    work = site.work
    if work.num_workers is None or work.data or site.in_step:
        return
    today = ClusterShape(
        dnn=Hosts(instance=site.today, count=work.hosts, workers=work.num_workers),
        processes=site.processes,
    )
    better = more_workers(parts_on(work, today))
    has_shards = work.shards > 0
    # More workers of a stream need more shards, which the script or feed.shards sets.
    if better is None or (has_shards and (work.divides is False or work.are_shards_set)):
        return
    shape = replace(today, dnn=replace(today.dnn, workers=better.workers // work.hosts))
    # The script has to make more shards with its workers: `problem` says so.
    tuned = _candidate(with_any_shards(site), "tune", shape)
    problem = ""
    if has_shards:
        problem = more_shards_words(site, tuned.groups)
    workers_per_host = better.workers // work.hosts
    if site.most_workers is not None and workers_per_host > max(1, site.most_workers):
        problem = f"the host has no memory for {workers_per_host} loader workers"
    # What a script sets is of one rank, and a host may have several.
    num_workers = math.ceil(better.workers / better.ranks)
    yield replace(tuned, problem=problem, num_workers=num_workers)


def with_any_shards(site: Site) -> Site:
    """Returns the site with a stream that has a shard for each worker."""
    own_storage = site.own_storage and replace(site.own_storage, shards=0)
    return replace(site, work=replace(site.work, shards=0), own_storage=own_storage)


def more_shards_words(site: Site, groups: Sequence[Group]) -> str:
    """Returns what to change so that each worker of these groups has a shard of the stream."""
    workers = sum(group.count * (group.workers_per_host or 0) for group in groups)
    processes = sum(g.count * (g.processes_per_host or 1) for g in groups if g.role == "dnn")
    # Shards and num_workers are of one rank of the script.
    per_process = math.ceil(workers / max(1, round(processes * site.work.ranks_per_process)))
    shards = site.work.shards
    change = f"feed.shards: {per_process}"
    if not site.work.are_shards_set:
        change = f"num_workers={per_process} in the script, or {change}"
    if site.work.divides is None:
        change += ", if it divides itself by get_worker_info()"
    return f"the stream has {numbered(shards, 'shard')}: set {change}"


def scale_up(site: Site) -> Iterator[Candidate]:
    """Yields larger types of the same family with the same accelerators."""
    today = site.today
    for instance in _of_the_family(site):
        if instance.vcpus > today.capacity and instance.accelerators == today.accelerators:
            shape = ClusterShape(dnn=_dnn(site, instance), processes=site.processes)
            yield _planned(site, "scale_up", shape)


def _of_the_family(site: Site) -> Iterator[Instance]:
    model = site.today.accelerator_model
    for listed in site.catalog.instances:
        instance = site.get(listed.type)
        if instance.family == site.today.family and instance.accelerator_model == model:
            yield instance


def heterogeneous(site: Site, instance: Instance, *, most: int) -> Iterator[Candidate]:
    """Yields today's hosts with 1 to `most` data hosts of a type.

    They start from the free plan: at most its workers join on a dnn host.
    """
    dnn = _dnn(site, site.today)
    # What costs nothing comes first: data hosts are not to be credited with it.
    if free := next(tune(site), None):
        dnn = free.shape.dnn
    for count in range(1, most + 1):
        shape = ClusterShape(
            dnn=dnn,
            data=(Hosts(instance=instance, count=count, workers=instance.vcpus),),
            processes=site.processes,
        )
        yield _planned(site, "heterogeneous", shape)


def scale_out(site: Site) -> Iterator[Candidate]:
    """Yields more accelerators of the same model: larger instances first, then more instances."""
    today = site.today
    work = site.work
    # All hosts of this machine have the same accelerators.
    if today.accelerators == 0 or site.catalog.info.is_this_machine:
        return
    for instance in _of_the_family(site):
        if instance.accelerators > today.accelerators:
            # The fewest larger hosts with more accelerators than today.
            count = work.hosts * today.accelerators // instance.accelerators + 1
            yield _planned(site, "scale_out", _replicated(site, instance, count))
    for times in _MORE_HOSTS:
        yield _planned(site, "scale_out", _replicated(site, today, work.hosts * times))


def named(site: Site, groups: Sequence[Group]) -> Candidate:
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
    instance = site.get(group.instance_type)
    workers = group.workers_per_host
    data = tuple(_data_hosts(site, other) for other in groups if other.role == "data")
    shape = replace(_replicated(site, instance, group.count), data=data)
    if group.processes_per_host is not None:
        shape = replace(shape, processes=group.processes_per_host)
    if workers is not None:
        shape = replace(shape, dnn=replace(shape.dnn, workers=workers))
    action = _action(site, shape)
    problem = _problem(site, shape, workers=workers)
    if workers is None and not problem:
        candidate = _planned(site, action, shape)
    else:
        candidate = _candidate(site, action, shape, problem=problem)
    return replace(candidate, asked_for=True)


def _data_hosts(site: Site, group: Group) -> Hosts:
    hosts = Hosts(
        instance=site.get(group.instance_type), count=group.count, workers=group.workers_per_host
    )
    return replace(hosts, workers=hosts.workers_per_host)


def _problem(site: Site, shape: ClusterShape, *, workers: int | None) -> str:
    """Returns why a named cluster cannot be predicted or run; empty: nothing is in the way."""
    instance = shape.dnn.instance
    if shape.data and site.unfed:
        return site.unfed
    if workers and site.in_step:
        return f"workers make no batch ahead: {site.in_step}"
    if site.catalog.info.is_this_machine and instance.accelerators and shape.replicas > 1:
        return f"this machine has no accelerators for {shape.dnn.count} training hosts"
    todays = _accelerators(site.today)
    there = _accelerators(instance)
    if there != todays:
        what = f"the accelerators differ ({todays} today, {there} here)"
        return f"{what}: profile the training there"
    return ""


def _action(site: Site, shape: ClusterShape) -> Action:
    dnn = shape.dnn
    work = site.work
    if shape.data:
        is_today = dnn.instance.type == site.today.type and dnn.count == work.hosts
        is_same = is_today and _kinds(shape.data) == _kinds(work.data)
        if is_same and dnn.workers == work.num_workers:
            return "keep"
        return "heterogeneous"
    if shape.replicas != 1 or dnn.count != site.work.hosts:
        return "scale_out"
    if dnn.instance.type != site.today.type:
        return "scale_up"
    if dnn.workers in (None, work.num_workers) and not work.data:
        return "keep"
    return "tune"


def _kinds(hosts: Sequence[Hosts]) -> list[tuple[str, int]]:
    return sorted((group.instance.type, group.count) for group in hosts)


def _replicated(site: Site, instance: Instance, count: int) -> ClusterShape:
    """Returns dnn hosts alone, with replicas according to their accelerators."""
    hosts = site.work.hosts
    larger = 1.0
    if instance.accelerators and site.today.accelerators:
        larger = instance.accelerators / site.today.accelerators
    return ClusterShape(
        dnn=_dnn(site, instance, count=count),
        # A process drives as many accelerators as today.
        processes=max(1, round(site.processes * larger)),
        replicas=max(count * larger / hosts, 1e-6),
        scaling=_SCALING_ACROSS if count > hosts else _SCALING_INSIDE,
    )


def _dnn(site: Site, instance: Instance, *, count: int | None = None) -> Hosts:
    """Returns dnn hosts with the most workers that can help; `_planned` reduces them."""
    work = site.work
    if site.in_step:
        return Hosts(instance=instance, count=count or work.hosts, workers=work.num_workers)
    workers = most_workers(
        vcpus=instance.capacity, parallel=work.parallel_seconds, cpu=work.loader_cpu_seconds
    )
    return Hosts(instance=instance, count=count or work.hosts, workers=workers)


def _planned(site: Site, action: Action, shape: ClusterShape) -> Candidate:
    """Returns the candidate with the workers that stoker would set on the dnn hosts."""
    if site.in_step:
        return _candidate(site, action, shape)
    shards = shards_on(site.work, shape)
    if shards and shape.dnn.workers is not None:
        most = min(shape.dnn.workers, math.ceil(shards / shape.dnn.count))
        shape = replace(shape, dnn=replace(shape.dnn, workers=most))
    if shape.data and site.feed.local_workers != "auto":
        fixed = replace(shape.dnn, workers=site.feed.local_workers)
        return _candidate(site, action, replace(shape, dnn=fixed))
    with_local = estimate(site.work, shape)
    if shape.data:
        alone = replace(shape, dnn=replace(shape.dnn, workers=0))
        without_local = estimate(site.work, alone)
        # Local workers gain nothing where the data hosts alone are 15 % below the accelerator's
        # step, and without them the trainer has the CPUs.
        is_floor = without_local.limit == "accelerator"
        has_room = without_local.second_seconds <= 0.85 * without_local.step_seconds
        as_fast = without_local.step_seconds <= with_local.step_seconds * (1 + 1e-9)
        if as_fast and ((is_floor and has_room) or with_local.remote_share >= 1):
            return _candidate(site, action, alone)
    # The estimate with the most workers stays: the removed ones hardly helped.
    workers = _useful_workers(site, shape, with_local)
    trimmed = replace(shape, dnn=replace(shape.dnn, workers=workers))
    return _candidate(site, action, trimmed, made=with_local, most=shape)


def _useful_workers(site: Site, shape: ClusterShape, made: Estimate) -> int:
    """Returns the workers of a dnn host that are busy at this step, and a tenth more."""
    dnn = shape.dnn
    work = of_workers(site.work, shape)
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
    site: Site,
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
        made = made or estimate(site.work, shape)
        if site.own_storage:
            own_storage = estimate(site.own_storage, most or shape)
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
