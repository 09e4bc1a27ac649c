"""The cost model says how long a global step takes on a cluster.

Over the remote share x that minimises it,

    t = max(g + r,                                     accelerator
            ((1-x) c + (1-x/2) turns + trainer + x receive) / V_t,   cpu of the dnn hosts
            x c / (eta sum n_h (V_h - q_h) s_h),       cpu of the data hosts
            B + wall / workers,                        latency, dnn and data hosts
            net(x), recv(x), storage(x))

The terms of hosts that load alone, today's among them, are those of `records/parts.py`.

c CPU-seconds of loading, turns what loading and training cost each other on the same cores, V
vCPUs, s CoreMark a vCPU over the profiled host's, q_h one vCPU of data hosts of 8 and more (the
agent), eta what data hosts reach, more where they make all batches (x is 1). What of the worker-
seconds is waiting takes as long anywhere: eta and s are for the rest. Every term but the first is
linear in x, so the minimum is at an end or at a crossing of two lines: it is found exactly. Where
the accelerator is the limit, x is the share that leaves the other terms most room.

The trainer's own CPU is charged in seconds (it holds on one-core hosts, where loading and training
share the core); only where no seconds were measured are whole vCPUs reserved. Without accelerators
the accelerator-only step is CPU work itself and becomes faster with the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stoker.catalog import Instance
from stoker.records import Limit, Parts, SharedLoading, Storage
from stoker.records.parts import LEAST_FREE, WAITS

# What data hosts reach of their CPU, after network and serialisation: alone, and where dnn hosts
# make batches too, which then come in order from hosts of unlike pace. Calibrated on the published
# runs on p3 (alone) and p4d (both), see tests/unit/test_decide_published.py; a core of its own on
# one machine reaches 0.91 to 0.97 alone.
EFFICIENCY = 0.93
EFFICIENCY_MIXED = 0.85
# More than eight are worth less: cedar measured .90, .86, .77, .65 at 2, 4, 8, 12 processes.
WORTH_BEYOND = 0.88
MANY_HOSTS = 8
# Of what loading and training cost each other on the same cores: what stays when all batches are
# made elsewhere, as the trainer then takes turns with its receiving threads.
_TURNS_LEFT = 0.5
# What a feed reaches of a network interface's nominal rate.
NETWORK_EFFICIENCY = 0.7
# Below this much of a host's vCPUs the trainer's reserve is not believed.
_LEAST_FREE = 1 / 8
# A prediction never goes below this fraction of today's step: it would rest on no term at all.
_LEAST_STEP = 1e-3
# Of equal terms the first is named as the limit.
_LIMITS: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "network", "receive", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A doubt tells what was not measured; `width` is the relative error that it may cause."""

    width: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The model predicts from the work of one global step, in CPU-seconds of the profiled host.

    Attributes:
        reference: The profiled type, with the vCPUs and accelerators that were measured.
        hosts: Hosts of that type that train today.
        ranks: Trainer processes of all of them.
        num_workers: Loader workers of one host; None: not known.
        step_seconds: Measured, as is.
        accelerator_seconds: Accelerator-only step with its all-reduce; 0: not known.
        receive_seconds: Not overlapped, in the trainer's own thread, with the feed.
        local_receive_seconds: The same with local workers alone, and inside what a rank's process
            uses; None: not known, as with the feed.
        handover_seconds: Wall clock to take a ready batch from a local worker; 0: not known.
        loader_cpu_seconds: Loading and augmenting, all ranks: those that were measured.
        loader_wall_seconds: Worker-seconds of the same work, with the fewest workers.
        trainer_cpu_seconds: The trainer processes themselves, all ranks.
        turns_cpu_seconds: What a step used beyond loading and training apart; see `Parts`.
        reserved_vcpus: vCPUs of one host for the trainer, instead of trainer_cpu_seconds.
        receive_cpu_seconds: The feed's receive side for a whole global batch, all ranks.
        batch_bytes: 0: not known.
        read_seconds: What the storage of today's hosts needs for a step; 0: not known.
        shared: What today's loader workers share.
        others_vcpus: vCPUs of today's hosts that other programs kept busy.
        machine_width: The relative error that they, and a CPU of changing speed, may cause.
        storage: Whether each host brings a storage rate of its own; unknown: taken as shared.
        doubts: What was not measured.
        is_checked: Whether the profile was checked against its own parts.
        unexplained: Why this profile supports no recommendation; empty: it does.
        global_batch_size: Samples of a step today; None: not known.
        efficiency: Factor on what data hosts reach, from earlier runs.
        calibration_spread: Relative error that those runs leave; 0: none, or no such runs.
        data: Data hosts that load today; none, but where the profile is of such a run.
        parts_seconds: The step that the parts give.
        correction: Measured step over the step the parts gave.
        corrected: The limits that the correction is for: those that bind today.
        shards: Shards of the stream, of all ranks: so many workers can be busy; 0: any number can.
        ranks_per_process: Ranks that were profiled, over `ranks`: a script may start its own.
        divides: Whether the stream divides itself among its workers; None: not known.
        are_shards_set: Whether `feed.shards` says how many there are, and not the script.
    """

    reference: Instance
    hosts: int
    ranks: int
    num_workers: int | None
    step_seconds: float
    accelerator_seconds: float
    receive_seconds: float
    loader_cpu_seconds: float
    loader_wall_seconds: float
    trainer_cpu_seconds: float
    reserved_vcpus: float
    receive_cpu_seconds: float
    batch_bytes: float
    turns_cpu_seconds: float = 0.0
    read_seconds: float = 0.0
    shared: SharedLoading = SharedLoading()  # noqa: RUF009 - frozen
    others_vcpus: float = 0.0
    machine_width: float = 0.0
    storage: Storage = "unknown"
    local_receive_seconds: float | None = None
    handover_seconds: float = 0.0
    doubts: tuple[Doubt, ...] = ()
    unexplained: str = ""
    is_checked: bool = False
    parts_seconds: float = 0.0
    correction: float = 1.0
    corrected: tuple[Limit, ...] = ()
    global_batch_size: int | None = None
    efficiency: float = 1.0
    calibration_spread: float = 0.0
    data: "tuple[Hosts, ...]" = ()
    shards: int = 0
    ranks_per_process: float = 1.0
    divides: bool | None = None
    are_shards_set: bool = False

    @property
    def may_divide(self) -> bool:
        """Returns whether the stream may be divided into more shards."""
        return self.divides is not False

    @property
    def has_own_storage(self) -> bool:
        """Returns whether it is known that each host brings a storage rate of its own."""
        return self.storage == "per_host"

    @property
    def parallel_seconds(self) -> float:
        """Returns worker-seconds of loading that more workers divide among them."""
        return max(0.0, self.loader_wall_seconds - self.shared.least * self.shared.seconds)

    @property
    def waits(self) -> bool:
        """Returns whether loading waits for something else than what its workers share."""
        return self.parallel_seconds > WAITS * self.loader_cpu_seconds

    def factor(self, limit: Limit) -> float:
        """Returns the factor on a model term with which today's cluster gives today's step."""
        return self.correction if limit in self.corrected else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Counts hosts of one type. workers: data workers of one host; None: as many as its vCPUs."""

    instance: Instance
    count: int
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Describes a cluster.

    Attributes:
        dnn: The hosts that train; with `workers` 0 and data hosts they load nothing.
        data: The hosts that only load.
        processes: Trainer processes of one dnn host.
        replicas: Accelerators over today's.
        scaling: What each further replica is worth, of a whole one.
    """

    dnn: Hosts
    data: tuple[Hosts, ...] = ()
    processes: int = 1
    replicas: float = 1.0
    scaling: float = 1.0

    @property
    def machines(self) -> int:
        """Counts all hosts together."""
        return self.dnn.count + sum(hosts.count for hosts in self.data)

    @property
    def data_hosts(self) -> int:
        """Counts hosts that only load."""
        return sum(hosts.count for hosts in self.data)


class _TermLine(NamedTuple):
    limit: Limit
    at_none: float
    at_all: float

    def at(self, share: float) -> float:
        # Exact at both ends, so that a term that is flat stays flat.
        return self.at_none * (1 - share) + self.at_all * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Holds the model's figures for a cluster.

    Attributes:
        step_seconds: Time of a step with today's global batch, also where the replicas differ.
        remote_share: Fraction of batches made on the data hosts.
        limit: The binding term.
        second_limit: The next one.
        second_seconds: What the step would be with only that one.
        accelerator_seconds: Accelerator-only step on this cluster.
    """

    step_seconds: float
    remote_share: float
    limit: Limit
    second_limit: Limit
    second_seconds: float
    accelerator_seconds: float


def estimate(work: Work, shape: ClusterShape) -> Estimate:
    """Estimates how long a global step of `work` takes on `shape`."""
    local = parts_on(work, shape)
    # With data hosts the feed hands batches over, else torch's own loader does.
    receive = work.receive_seconds if shape.data else local.receive_seconds
    accelerator = local.accelerator_seconds * work.factor("accelerator")
    lines, share = _lines(work, shape, local)
    terms = dict.fromkeys(_LIMITS, 0.0)
    # The trainer's thread receives between two steps of the accelerator: its time is added.
    terms["accelerator"] = accelerator + receive * work.factor("accelerator")
    for line in lines:
        terms[line.limit] = max(terms[line.limit], line.at(share))
    largest = max(terms.values())
    # Two lines that cross are one limit, whatever their last digits are.
    limit = next(name for name in _LIMITS if terms[name] >= largest * (1 - 1e-9))
    # CPU and workers are one limit where loading does not wait.
    one = () if work.waits else ("cpu", "latency")
    others = [name for name in _LIMITS if name != limit and not (limit in one and name in one)]
    second = max(others, key=terms.__getitem__)
    step = max(terms[limit], work.step_seconds * _LEAST_STEP)
    return Estimate(
        step_seconds=step,
        remote_share=share,
        limit=limit,
        second_limit=second,
        second_seconds=terms[second],
        # `limit` may be a billionth below the largest term (above): never more than the step.
        accelerator_seconds=min(accelerator, step),
    )


def shards_on(work: Work, shape: ClusterShape) -> int:
    """Returns the shards of a stream on the cluster, whose ranks have as many as today's; 0: any.

    A worker makes a shard alone: no more workers can be busy, on whichever hosts they are.
    """
    if not work.shards:
        return 0
    return max(1, round(work.shards * shape.dnn.count * shape.processes / work.ranks))


def _ranks_on(work: Work, shape: ClusterShape) -> int:
    return max(1, round(shape.dnn.count * shape.processes * work.ranks_per_process))


def busy_workers(work: Work, shape: ClusterShape) -> tuple[int, int]:
    """Returns the workers of the dnn hosts and of the data hosts that find something to do."""
    dnn, shards = shape.dnn, shards_on(work, shape)
    local = dnn.count * (dnn.instance.vcpus if dnn.workers is None else dnn.workers)
    remote = sum(
        hosts.count * max(1, hosts.instance.vcpus if hosts.workers is None else hosts.workers)
        for hosts in shape.data
    )
    if not shards:
        return local, remote
    # As the feed places them: a shard goes to a data host while one has a free worker.
    remote = min(remote, shards)
    return min(local, shards - remote), remote


def parts_on(work: Work, shape: ClusterShape) -> Parts:
    """Returns the parts of a step that the dnn hosts of `shape` make without data hosts."""
    dnn, instance = shape.dnn, shape.dnn.instance
    loads_itself = dnn.workers == 0 and not shape.data
    local = work.local_receive_seconds
    receive = work.receive_seconds if local is None else local
    # What the storage needs was measured on today's hosts: where each brings its own, more hosts
    # divide that time.
    storage = work.hosts / dnn.count if work.has_own_storage else 1.0
    return Parts(
        accelerator_seconds=_accelerator_seconds(work, shape),
        # Nothing is handed over where the trainer's own thread loads.
        receive_seconds=0.0 if loads_itself else max(receive, work.handover_seconds),
        loader_cpu_seconds=work.loader_cpu_seconds,
        # Where the trainer loads, it shares with no worker.
        loader_wall_seconds=worker_seconds(work, instance)
        + work.shared.least * work.shared.seconds * storage,
        trainer_cpu_seconds=work.trainer_cpu_seconds
        # The trainer's CPU was measured with cached batches: taking them from workers comes on top.
        + (0.0 if local is None or loads_itself else local * work.ranks * work.ranks_per_process),
        turns_cpu_seconds=work.turns_cpu_seconds,
        vcpus=free_vcpus(work, dnn),
        workers=busy_workers(work, shape)[0],
        ranks=_ranks_on(work, shape),
        read_seconds=work.read_seconds * storage,
        shared=replace(work.shared, seconds=work.shared.seconds * storage),
    )


def free_vcpus(work: Work, hosts: Hosts) -> float:
    """Returns the vCPUs of all dnn hosts that the trainer leaves, as vCPUs of the profiled type."""
    instance = hosts.instance
    reserved = work.reserved_vcpus
    # A trainer process for each accelerator: more accelerators, more vCPUs for them.
    if work.reference.accelerators:
        reserved *= instance.accelerators / work.reference.accelerators
    # Other programs were seen on today's hosts: a plan with hosts of that type has them, too.
    if instance.type == work.reference.type:
        reserved += work.others_vcpus / work.hosts
    # A reserve is a guess, so that it may not take nearly all; measured programs may.
    least = _LEAST_FREE if work.reserved_vcpus else LEAST_FREE
    free = max(instance.capacity - reserved, instance.capacity * least)
    return hosts.count * free * _speed(work, instance)


def worker_seconds(work: Work, instance: Instance, *, efficiency: float = 1.0) -> float:
    """Returns worker-seconds of a step's loading on this type: CPU by speed, waiting as it is.

    The part that the workers share is left out.
    """
    # A faster CPU shortens computing alone; a read or a service takes its time on any host.
    parallel = work.parallel_seconds
    waiting = max(0.0, parallel - work.loader_cpu_seconds)
    running = parallel - waiting
    return running / (_speed(work, instance) * efficiency) + waiting


def _speed(work: Work, instance: Instance) -> float:
    if instance.coremark_per_vcpu is None or work.reference.coremark_per_vcpu is None:
        return 1.0
    return instance.coremark_per_vcpu / work.reference.coremark_per_vcpu


def _accelerator_seconds(work: Work, shape: ClusterShape) -> float:
    # The global batch stays: N replicas divide it, and each further one is worth `scaling`.
    seconds = work.accelerator_seconds
    if shape.replicas != 1:
        seconds /= shape.replicas * (shape.scaling if shape.replicas > 1 else 1.0)
    if shape.dnn.instance.accelerators == 0:
        # Without accelerators the step is CPU work, which a faster CPU shortens.
        seconds /= _speed(work, shape.dnn.instance)
    return seconds


def _lines(work: Work, shape: ClusterShape, parts: Parts) -> tuple[list[_TermLine], float]:
    """Returns the terms but the first, and the remote share that makes their largest the least."""
    if not shape.data:
        terms = parts.terms
        alone = [_TermLine(name, terms[name], 0.0) for name in ("cpu", "latency", "storage")]
        return _corrected(work, alone), 0.0
    # The efficiency jumps where x becomes 1 (the data hosts make all batches), so that no line
    # holds both cases: both are tried, and the shorter step counts.
    alone = _corrected(work, _mixed_lines(work, shape, parts, efficiency=EFFICIENCY))
    local, remote = busy_workers(work, shape)
    if local == 0:
        return alone, 1.0
    mixed = _corrected(work, _mixed_lines(work, shape, parts, efficiency=EFFICIENCY_MIXED))
    if work.shards:
        # Each shard gives as many batches as another one: where they are made says the share.
        return mixed, remote / (local + remote)
    share = _best_share(mixed)
    return (mixed, share) if _largest(mixed, share) <= _largest(alone, 1.0) else (alone, 1.0)


def _corrected(work: Work, lines: Sequence[_TermLine]) -> list[_TermLine]:
    return [
        _TermLine(line.limit, line.at_none * factor, line.at_all * factor)
        for line in lines
        for factor in (work.factor(line.limit),)
    ]


def _mixed_lines(
    work: Work, shape: ClusterShape, parts: Parts, *, efficiency: float
) -> list[_TermLine]:
    """Returns the terms from no batch made on the data hosts to all of them."""
    dnn, data = parts.terms, shape.data
    cpu, workers = _remote_rates(work, data, efficiency=efficiency)
    if work.shards:
        without_limit = busy_workers(replace(work, shards=0), shape)[1]
        workers *= busy_workers(work, shape)[1] / without_limit
    network = [_network_seconds(work, (shape.dnn,)), _network_seconds(work, data)]
    # With all batches made elsewhere: on one core a trainer used 1.0 to 1.1 times the CPU-seconds
    # that it uses with cached batches, and 1.1 to 1.4 times next to a worker; half fits both ends.
    alone = max(0.0, work.trainer_cpu_seconds + _TURNS_LEFT * work.turns_cpu_seconds)
    training = alone / parts.vcpus
    lines = [
        # dnn hosts: ((1-x) c + (1-x/2) turns + trainer + x receive) / V; data hosts: x c / their
        # vCPUs.
        _TermLine("cpu", dnn["cpu"], training + work.receive_cpu_seconds / parts.vcpus),
        _TermLine("cpu", 0.0, work.loader_cpu_seconds / cpu),
        # One thread of a rank receives: more vCPUs do not help it.
        _TermLine("receive", 0.0, work.receive_cpu_seconds / _ranks_on(work, shape)),
        *(_TermLine("network", 0.0, seconds) for seconds in network),
    ]
    # Storage that all hosts share takes the same time for each reader; work of a host is divided.
    divided = 1 / workers if workers else 0.0
    shared, read = work.shared.seconds, work.read_seconds
    own = work.hosts / shape.data_hosts
    remote_shared, remote_read = (
        (shared * own, read * own) if work.has_own_storage else (shared, read)
    )
    # A storage that all share takes its time wherever a batch is made, so both ends of each line
    # hold it. With a storage each, hosts need it for their own batches only.
    at_none, at_all = (0.0, 0.0) if work.has_own_storage else (shared, shared)
    if parts.workers:
        name: Limit = "storage" if parts.is_shared else "latency"
        seconds = parts.shared.seconds + parts.parallel_seconds / parts.workers
        lines.append(_TermLine(name, seconds, at_all))
    name = "storage" if remote_shared > divided else "latency"
    lines.append(_TermLine(name, at_none, remote_shared + divided))
    if work.has_own_storage:
        lines += [
            _TermLine("storage", parts.read_seconds, 0.0),
            _TermLine("storage", 0.0, remote_read),
        ]
    else:
        lines.append(_TermLine("storage", read, read))
    return lines


def _remote_rates(work: Work, data: Sequence[Hosts], *, efficiency: float) -> tuple[float, float]:
    """Returns the data hosts' vCPUs as vCPUs of the profiled type, and their workers' steps/s."""
    rated: list[tuple[float, int, Hosts]] = []
    for index, hosts in enumerate(data):
        instance = hosts.instance
        # The agent encrypts and sends: it takes a vCPU of a host that has many, else it shares.
        agent = 1 if instance.vcpus >= 8 else 0
        rated.append(((instance.capacity - agent) * _speed(work, instance), index, hosts))
    left, cpu, steps_a_second = MANY_HOSTS, 0.0, 0.0
    # The strongest hosts first: those beyond the eighth, which count for less, are the weakest, so
    # that one more host always adds something.
    for vcpus, _, hosts in sorted(rated, key=lambda rate: (-rate[0], rate[1])):
        first = min(hosts.count, left)
        left -= first
        workers = hosts.instance.vcpus if hosts.workers is None else hosts.workers
        # Hosts up to the eighth, then those of this type beyond it.
        for count, less in ((first, 1.0), (hosts.count - first, WORTH_BEYOND)):
            worth = efficiency * less * work.efficiency
            seconds = worker_seconds(work, hosts.instance, efficiency=worth)
            cpu += count * worth * vcpus
            steps_a_second += count * max(workers, 1) / seconds if seconds > 0 else 0.0
    return cpu, steps_a_second


def _network_seconds(work: Work, group: Sequence[Hosts]) -> float:
    gbps = 0.0
    for hosts in group:
        sustained = hosts.instance.sustained_gbps
        # Not known is no limit: a plan is not refused for a figure that is missing.
        if sustained is None:
            return 0.0
        gbps += hosts.count * sustained
    return work.batch_bytes * 8 / (NETWORK_EFFICIENCY * gbps * 1e9)


def _best_share(lines: Sequence[_TermLine]) -> float:
    # The largest of several lines is convex: it is least at an end, or where a falling line
    # crosses a rising one. Two lines cross between the ends if their order there differs.
    shares = {0.0, 1.0}
    for index, one in enumerate(lines):
        for other in lines[index + 1 :]:
            at_none, at_all = one.at_none - other.at_none, one.at_all - other.at_all
            if at_none * at_all < 0:
                shares.add(at_none / (at_none - at_all))
    return min(sorted(shares), key=lambda share: _largest(lines, share))


def _largest(lines: Sequence[_TermLine], share: float) -> float:
    # As `at`, whose calls take a tenth of a decision.
    local = 1 - share
    return max([line.at_none * local + line.at_all * share for line in lines])
