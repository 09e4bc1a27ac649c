"""The cost model: how long a global step takes on a cluster.

Hosts that load alone have the terms of `parts.Parts`. With data hosts, `terms` has a share x of the
batches made there, and `estimate` takes the x for which the largest term is smallest:

    t = max( g + n (1-x),                                   accelerator
             ((1-x) c + (1-x/2) turns + trainer + x receive) / V,   cpu of the dnn hosts
             x c / (eta sum n_h (V_h - q_h) s_h),           cpu of the data hosts
             B + wall / workers,                            latency, dnn and data hosts
             net(x), recv(x), storage(x) )

s: CoreMark per vCPU over the profiled host's; q_h: one vCPU for the agent on data hosts with 8 or
more; eta: efficiency of data hosts. The waiting part of worker-seconds takes as long anywhere: eta
and s apply to the rest. Every term is linear in x, so the exact minimum is at an end or where two
lines cross. Without accelerators the accelerator-only step is CPU work itself and becomes faster
with the CPU. Pure.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from stoker.catalog import Instance
from stoker.decide.parts import COMPUTES, LIMITS, Parts, largest_of
from stoker.records import EpochTimes, Limit, Storage
from stoker.records.profile import LEAST_FREE

# CPU efficiency of data hosts after network and serialisation: alone, and where dnn hosts make
# batches too, so that batches come in order from hosts of different pace. Calibrated on the
# published runs on p3 (alone) and p4d (both), see tests/keel/test_decide_published.py; a dedicated
# core on one machine reaches 0.91 to 0.97 alone.
_EFFICIENCY = 0.93
_EFFICIENCY_MIXED = 0.85
# More than eight are worth less: cedar measured .90, .86, .77, .65 at 2, 4, 8, 12 processes.
_WORTH_BEYOND = 0.88
_MANY_HOSTS = 8
# Share of the turns that stays when all batches are made elsewhere. Measured on one core, over the
# CPU-seconds without loading: 1.0 to 1.1 times with all batches made elsewhere, 1.1 to 1.4 times
# with a local worker.
_TURNS_LEFT = 0.5
# Share of a network interface's nominal rate that a feed reaches.
_NETWORK_EFFICIENCY = 0.7
# Below this much of a host's vCPUs the trainer's reserve is not believed.
_LEAST_FREE = 1 / 8
# A prediction never goes below this fraction of today's step: it would rest on no term at all.
_LEAST_STEP = 1e-3
# What loading on the dnn hosts is limited by.
LOADING: tuple[Limit, ...] = ("cpu", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Something that was not measured; `width` is the relative error it may add."""

    width: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained:
    """Why a profile supports no recommendation.

    Attributes:
        kind: not_measured: a part is missing; other_programs: they made it too noisy;
            contradiction: its parts miss the step.
    """

    kind: Literal["not_measured", "other_programs", "contradiction"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one global step, in CPU-seconds of the profiled host.

    Attributes:
        parts: Of today's hosts, with today's workers.
        reference: Today's type, with the measured vCPUs and accelerators.
        cpu_speed: Speed of its vCPUs over the profiled ones.
        processes: Trainer processes of one host, as they are launched; a script may start more.
        num_workers: Loader workers of one host; None: not known.
        step_seconds: Today's step.
        batch_bytes: Bytes of a global batch; 0: not known.
        receive_cpu_seconds: The feed's receive side for a whole global batch, all ranks.
        reserved_vcpus: vCPUs of one host for the trainer, where its CPU-seconds are not known.
        storage: per_host: each host has a separate storage rate; unknown counts as shared.
        shards: Shards of the stream over all ranks, which limit the busy workers; 0: no limit.
        launch_share: Share of the accelerator's step in which no kernel runs, though no batch is
            waited for: the script launches them too slowly.
        epochs: Time beyond the usual steps of whole epochs.
        others_width: Relative error from other programs.
        is_checked: The profile was checked against its own parts.
        parts_seconds: The step that the parts give.
        correction: Measured step over `parts_seconds`.
        corrected: The limits that the correction applies to: those that bind today.
    """

    parts: Parts
    reference: Instance
    cpu_speed: float = 1.0
    processes: int
    num_workers: int | None
    step_seconds: float
    batch_bytes: float = 0.0
    receive_cpu_seconds: float = 0.0
    reserved_vcpus: float = 0.0
    storage: Storage = "unknown"
    shards: int = 0
    launch_share: float = 0.0
    global_batch_size: int | None = None
    epochs: EpochTimes | None = None
    doubts: tuple[Doubt, ...] = ()
    unexplained: Unexplained | None = None
    others_width: float = 0.0
    is_checked: bool = False
    parts_seconds: float = 0.0
    correction: float = 1.0
    corrected: tuple[Limit, ...] = ()

    @property
    def hosts(self) -> int:
        return self.parts.hosts

    @property
    def has_own_storage(self) -> bool:
        return self.storage == "per_host"

    @property
    def todays(self) -> "Cluster":
        """Today's hosts with today's workers."""
        dnn = Hosts(instance=self.reference, count=self.hosts, workers=self.num_workers)
        return Cluster(dnn=dnn, processes=self.processes)

    def factor(self, limit: Limit) -> float:
        """Returns the factor on a model term with which today's cluster gives today's step."""
        return self.correction if limit in self.corrected else 1.0

    def speed(self, instance: Instance) -> float:
        """Returns the speed of a vCPU of the type over the profiled one's."""
        there = instance.coremark_per_vcpu
        here = self.reference.coremark_per_vcpu
        return self.cpu_speed * there / here if there and here else self.cpu_speed

    def shared_on(self, hosts: int) -> float:
        """Returns the seconds for what workers share: so many hosts divide separate storages."""
        divided = self.parts.hosts / hosts if self.has_own_storage else 1.0
        return self.parts.shared_seconds * divided

    def worker_seconds(self, instance: Instance, *, efficiency: float = 1.0) -> float:
        """Returns worker-seconds of loading on a type, without what the workers share."""
        # A faster CPU shortens only the computing, not waiting for reads or services.
        parallel = self.parts.parallel_seconds
        waiting = max(0.0, parallel - self.parts.loader_cpu_seconds)
        return (parallel - waiting) / (self.speed(instance) * efficiency) + waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts of one type. workers: data workers of one host; None: as many as its vCPUs."""

    instance: Instance
    count: int
    workers: int | None = None

    @property
    def all_workers(self) -> int:
        return self.count * (self.instance.vcpus if self.workers is None else self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster.

    Attributes:
        dnn: The hosts that train; with `workers` 0 and data hosts they load nothing.
        processes: Trainer processes of one dnn host.
        replicas: Accelerators over today's.
        scaling: Worth of each further replica, 0 to 1.
    """

    dnn: Hosts
    data: tuple[Hosts, ...] = ()
    processes: int = 1
    replicas: float = 1.0
    scaling: float = 1.0

    @property
    def hosts(self) -> tuple[Hosts, ...]:
        return (self.dnn, *self.data)

    def with_workers(self, workers: int | None) -> "Cluster":
        """Returns the cluster with so many loader workers on each dnn host."""
        return replace(self, dnn=replace(self.dnn, workers=workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The model's figures for a cluster.

    Attributes:
        step_seconds: A step with today's global batch, also where the replicas differ.
        remote_share: Fraction of batches made on the data hosts.
        second_seconds: The step if only `second_limit` held.
    """

    step_seconds: float
    remote_share: float
    limit: Limit
    second_limit: Limit
    second_seconds: float
    accelerator_seconds: float


# A term's limit, and its seconds with no batch and with all batches made on data hosts.
_Line = tuple[Limit, float, float]


def estimate(work: Work, cluster: Cluster) -> Estimate:
    """Estimates how long a global step of `work` takes on `cluster`."""
    if work.num_workers == 0 and (cluster.dnn.workers != 0 or cluster.data):
        # A main process loads with more threads than a worker has: its factor is not theirs.
        corrected = tuple(limit for limit in work.corrected if limit != "latency")
        work = replace(work, corrected=corrected)
    parts = parts_on(work, cluster)
    share = _best_share(work, cluster, parts)
    seconds = terms(work, cluster, share, parts=parts)
    largest = largest_of(seconds)
    limit = largest
    if cluster.data:
        # Workers that compute all the time need the CPU: the two terms differ by noise.
        if limit == "latency" and not work.parts.waits:
            limit = "cpu" if seconds["cpu"] * COMPUTES >= seconds["latency"] else limit
    elif limit == "latency" or parts.measured_seconds:
        # Under the name that the bottleneck of these hosts has.
        bottleneck = parts.bottleneck
        if bottleneck == "workers":
            limit = "latency"
        elif bottleneck in ("cpu", "accelerator", "latency", "storage"):
            limit = bottleneck
    # CPU and workers are one limit where loading does not wait.
    is_one = limit in LOADING and not work.parts.waits
    same = LOADING if is_one else (limit,)
    second = max((name for name in LIMITS if name not in same), key=seconds.__getitem__)
    # Where no term is known the step would be 0, and the speed-up without end.
    step = max(seconds[largest], work.step_seconds * _LEAST_STEP)
    accelerator = parts.accelerator_seconds * work.factor("accelerator")
    return Estimate(
        step_seconds=step,
        remote_share=share,
        limit=limit,
        second_limit=second,
        # `limit` may be below the largest term: never more than the step.
        second_seconds=min(seconds[second], step),
        accelerator_seconds=min(accelerator, step),
    )


def terms(
    work: Work, cluster: Cluster, x: float, *, parts: Parts | None = None
) -> dict[Limit, float]:
    """Returns the seconds of a step by each limit, with a share `x` of batches on data hosts.

    Args:
        work: The work of a step.
        cluster: The hosts.
        x: Share of the batches that data hosts make.
        parts: What the dnn hosts make alone, if it is known.
    """
    parts = parts or parts_on(work, cluster)
    seconds = dict.fromkeys(LIMITS, 0.0)
    for limit, at_none, at_all in _lines(work, cluster, parts, is_alone=x == 1):
        # Exact at both ends, so that a term that is flat stays flat.
        seconds[limit] = max(seconds[limit], at_none * (1 - x) + at_all * x)
    # The trainer's thread takes a batch between two steps of the accelerator: its time is added.
    # The feed has it ready.
    floor = parts.accelerator_seconds + (0.0 if cluster.data else parts.receive_seconds)
    floor += (1 - x) * parts.neighbour_seconds
    seconds["accelerator"] = floor * work.factor("accelerator")
    return seconds


def shards_on(work: Work, cluster: Cluster) -> int:
    """Returns the stream's shards, as many per rank as today; 0: no limit.

    One worker makes a shard, so no more workers can be busy on all hosts together.
    """
    if not work.shards:
        return 0
    ranks = work.hosts * work.processes
    return max(1, round(work.shards * cluster.dnn.count * cluster.processes / ranks))


def _busy_workers(work: Work, cluster: Cluster) -> tuple[int, int]:
    """Returns the workers of the dnn hosts and of the data hosts that can be busy."""
    local = cluster.dnn.all_workers
    # A data host has one worker at least.
    remote = sum(max(hosts.count, hosts.all_workers) for hosts in cluster.data)
    if shards := shards_on(work, cluster):
        # As the feed assigns shards: to a data host while one has a free worker.
        remote = min(remote, shards)
        local = min(local, shards - remote)
    return local, remote


def _ranks_on(work: Work, cluster: Cluster) -> int:
    launched = work.hosts * work.processes
    return max(1, round(cluster.dnn.count * cluster.processes * work.parts.ranks / launched))


def parts_on(work: Work, cluster: Cluster) -> Parts:
    """Returns the parts of a step that the dnn hosts of a cluster make without data hosts."""
    today = work.parts
    dnn = cluster.dnn
    instance = dnn.instance
    speed = work.speed(instance)
    # The global batch stays: N replicas divide it, and each further one is worth `scaling`.
    step_speed = cluster.replicas
    if cluster.replicas > 1:
        step_speed *= cluster.scaling
    # Without accelerators the step is CPU work, which a faster CPU shortens.
    if not instance.accelerators:
        step_speed *= speed
    shared = work.shared_on(dnn.count)
    is_todays = dnn == work.todays.dnn and cluster.replicas == 1 and not cluster.data
    workers = _busy_workers(work, cluster)[0]
    turns = today.turns_cpu_seconds
    if work.num_workers is not None and workers > work.num_workers * today.hosts:
        # As `Parts.with_workers`.
        turns = max(0.0, turns)
    vcpus = dnn.count * instance.capacity * speed
    return replace(
        today,
        accelerator_seconds=today.accelerator_seconds / step_speed,
        # On more cores the same loading is less in the way.
        neighbour_seconds=today.neighbour_seconds / step_speed * today.vcpus / vcpus,
        loader_wall_seconds=work.worker_seconds(instance) + today.fewest * shared,
        turns_cpu_seconds=turns,
        vcpus=vcpus,
        others_vcpus=vcpus - free_vcpus(work, dnn),
        workers=workers,
        hosts=dnn.count,
        ranks=_ranks_on(work, cluster),
        shared_seconds=shared,
        rates=today.rates if is_todays else {},
        measured_seconds=today.measured_seconds if is_todays else 0.0,
        wait_seconds=today.wait_seconds if is_todays else None,
    )


def free_vcpus(work: Work, hosts: Hosts) -> float:
    """Returns the vCPUs of all dnn hosts that the trainer leaves, as vCPUs of the profiled type."""
    instance = hosts.instance
    reserved = work.reserved_vcpus
    # One trainer process per accelerator.
    if work.reference.accelerators:
        reserved *= instance.accelerators / work.reference.accelerators
    # Other programs that ran on today's hosts are assumed on all hosts of that type.
    if instance.type == work.reference.type:
        reserved += work.parts.others_vcpus / work.hosts
    # A reserve is a guess and may not take nearly all vCPUs; measured programs may.
    least = _LEAST_FREE if work.reserved_vcpus else LEAST_FREE
    free = max(instance.capacity - reserved, instance.capacity * least)
    return hosts.count * free * work.speed(instance)


def _lines(work: Work, cluster: Cluster, parts: Parts, *, is_alone: bool) -> list[_Line]:
    """Returns all terms but the accelerator's."""
    if cluster.data:
        lines = _remote_lines(work, cluster, parts, is_alone=is_alone)
    else:
        local = parts.terms
        lines = ((name, local[name], 0.0) for name in ("cpu", "latency", "storage"))
    return [
        (limit, at_none * work.factor(limit), at_all * work.factor(limit))
        for limit, at_none, at_all in lines
    ]


def _remote_lines(work: Work, cluster: Cluster, parts: Parts, *, is_alone: bool) -> Iterator[_Line]:
    """Yields the terms from no batch made on the data hosts to all of them.

    Args:
        work: The work of a step.
        cluster: With data hosts.
        parts: What its dnn hosts make alone.
        is_alone: Data hosts make all batches, and need not keep an order with local workers.
    """
    today = work.parts
    data = cluster.data
    number = sum(hosts.count for hosts in data)
    beyond = max(0, number - _MANY_HOSTS)
    worth = _EFFICIENCY if is_alone else _EFFICIENCY_MIXED
    worth *= (number - beyond + _WORTH_BEYOND * beyond) / number
    cpu = 0.0
    rate = 0.0
    for hosts in data:
        # The agent encrypts and sends: it takes one vCPU of a large host, else it shares.
        vcpus = hosts.instance.capacity - (1 if hosts.instance.capacity >= 8 else 0)
        cpu += hosts.count * worth * vcpus * work.speed(hosts.instance)
        if seconds := work.worker_seconds(hosts.instance, efficiency=worth):
            rate += max(hosts.all_workers, hosts.count) / seconds
    if work.shards:
        able = _busy_workers(replace(work, shards=0), cluster)[1]
        rate *= _busy_workers(work, cluster)[1] / able
    training = today.trainer_cpu_seconds - today.receive_seconds * today.ranks
    training += _TURNS_LEFT * today.turns_cpu_seconds
    used = max(0.0, training) + work.receive_cpu_seconds
    yield "cpu", parts.terms["cpu"], used / parts.free_vcpus
    yield "cpu", 0.0, today.loader_cpu_seconds / cpu
    # One thread of a rank receives: more vCPUs do not help it.
    yield "receive", 0.0, work.receive_cpu_seconds / _ranks_on(work, cluster)
    for group in ((cluster.dnn,), data):
        yield "network", 0.0, _network_seconds(work, group)
    # Shared storage takes the same time for each reader, wherever a batch is made: it is at both
    # ends of each line. Separate storages are needed only for a host's own batches.
    shared = work.shared_on(number)
    elsewhere = 0.0 if work.has_own_storage else shared
    if parts.workers:
        local = parts.shared_seconds + parts.parallel_seconds / parts.workers
        yield "storage" if parts.is_shared else "latency", local, elsewhere
    divided = 1 / rate if rate else 0.0
    yield "storage" if shared > divided else "latency", elsewhere, shared + divided


def _network_seconds(work: Work, group: Sequence[Hosts]) -> float:
    # An unknown rate is no limit.
    gbps = sum(hosts.count * (hosts.instance.sustained_gbps or math.inf) for hosts in group)
    return work.batch_bytes * 8 / (_NETWORK_EFFICIENCY * gbps * 1e9)


def _best_share(work: Work, cluster: Cluster, parts: Parts) -> float:
    """Returns the share of remote batches that makes the largest term the least."""
    if not cluster.data:
        return 0.0
    local, remote = _busy_workers(work, cluster)
    if local == 0:
        return 1.0
    if work.shards:
        # All shards give the same number of batches.
        return remote / (local + remote)
    lines = _lines(work, cluster, parts, is_alone=False)
    # The maximum of lines is convex: its minimum is at an end, or where a falling line crosses a
    # rising one. Two lines cross between the ends if their order there differs.
    shares = {0.0, 1.0}
    for (_, one_at_none, one_at_all), (_, other_at_none, other_at_all) in combinations(lines, 2):
        at_none = one_at_none - other_at_none
        at_all = one_at_all - other_at_all
        if at_none * at_all < 0:
            shares.add(at_none / (at_none - at_all))
    share = min(sorted(shares), key=lambda share: _largest(lines, share))
    # The efficiency jumps where the data hosts make all batches.
    alone = _lines(work, cluster, parts, is_alone=True)
    return share if _largest(lines, share) <= _largest(alone, 1.0) else 1.0


def _largest(lines: Sequence[_Line], share: float) -> float:
    local = 1 - share
    return max([at_none * local + at_all * share for _, at_none, at_all in lines])
