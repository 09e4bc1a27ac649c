"""The cost model: how long a global step takes on a cluster.

With the remote share x that minimises it, a step takes

    t = max(g + r + n(x),                              accelerator
            ((1-x) c + (1-x/2) turns + trainer + x receive) / V_t,   cpu of the dnn hosts
            x c / (eta sum n_h (V_h - q_h) s_h),       cpu of the data hosts
            B + wall / workers,                        latency, dnn and data hosts
            net(x), recv(x), storage(x))

The terms of hosts that load alone, including today's, are defined in `step_model.py`.

n: what loading on the dnn hosts' own cores adds to the accelerator's step, 0 where the data hosts
make all batches; c: CPU-seconds of loading; turns: what loading and training cost each other on the
same cores; V: vCPUs; s: CoreMark per vCPU over the profiled host's; q_h: one vCPU for the agent on
data hosts with 8 or more; eta: efficiency of data hosts, higher where they make all batches (x is
1). The waiting part of the worker-seconds takes as long anywhere: eta and s apply to the rest.
Every term but the first is linear in x, so the exact minimum is at an end or where two lines cross.
Where the accelerator is the limit, x leaves the other terms most room.

The trainer's own CPU is charged in seconds (it holds on one-core hosts, where loading and training
share the core); only where no seconds were measured are whole vCPUs reserved. Without accelerators
the accelerator-only step is CPU work itself and becomes faster with the CPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from stoker.catalog import Instance
from stoker.records import Bottleneck, EpochTimes, Limit, Storage
from stoker.records.other_programs import LEAST_FREE
from stoker.step_model import COMPUTES, WAITS, Neighbour, Parts, SharedLoading

# CPU efficiency of data hosts after network and serialisation: alone, and where dnn hosts make
# batches too, so that batches come in order from hosts of different pace. Calibrated on the
# published runs on p3 (alone) and p4d (both), see tests/unit/test_decide_published.py; a dedicated
# core on one machine reaches 0.91 to 0.97 alone.
EFFICIENCY = 0.93
EFFICIENCY_MIXED = 0.85
# More than eight are worth less: cedar measured .90, .86, .77, .65 at 2, 4, 8, 12 processes.
WORTH_BEYOND = 0.88
MANY_HOSTS = 8
# Share of the turns that stays when all batches are made elsewhere, as the trainer then takes turns
# with its receiving threads.
_TURNS_LEFT = 0.5
# Share of a network interface's nominal rate that a feed reaches.
NETWORK_EFFICIENCY = 0.7
# Below this much of a host's vCPUs the trainer's reserve is not believed.
_LEAST_FREE = 1 / 8
# A prediction never goes below this fraction of today's step: it would rest on no term at all.
_LEAST_STEP = 1e-3
# Of equal terms the first is named as the limit.
_LIMITS: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "network", "receive", "storage")
# What loading on the dnn hosts is limited by.
LOADING: tuple[Limit, ...] = ("cpu", "latency")
# The term that a bottleneck of hosts without a data group is.
_LIMIT_OF: Mapping[Bottleneck, Limit] = {
    "cpu": "cpu",
    "accelerator": "accelerator",
    "workers": "latency",
    "latency": "latency",
    "storage": "storage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Something that was not measured; `width` is the relative error it may add."""

    width: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained:
    """Why a profile supports no recommendation.

    Attributes:
        kind: only_step: it has only the time of a step; not_measured: a part is missing;
            other_programs: they made it too noisy; contradiction: its parts miss the step.
    """

    kind: Literal["only_step", "not_measured", "other_programs", "contradiction"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one global step, in CPU-seconds of the profiled host.

    Attributes:
        reference: The profiled type, with the measured vCPUs and accelerators.
        hosts: Hosts of that type that train today.
        ranks: Trainer processes of all hosts.
        num_workers: Loader workers of one host; None: not known.
        accelerator_seconds: Accelerator-only step with its all-reduce; 0: not known.
        receive_seconds: With the feed, in the trainer's own thread, not overlapped.
        local_receive_seconds: The same with local workers alone, as part of what a rank's process
            uses; None: not known, as with the feed.
        neighbour: What loading on today's hosts adds to the accelerator's step.
        handover_seconds: Wall clock to take a ready batch from a local worker; 0: not known.
        loader_cpu_seconds: Loading and augmenting, all ranks.
        loader_wall_seconds: Worker-seconds of the same work, with the fewest workers.
        trainer_cpu_seconds: The trainer processes, all ranks.
        turns_cpu_seconds: What a step used beyond loading and training apart; see `Parts`.
        reserved_vcpus: vCPUs of one host for the trainer, instead of trainer_cpu_seconds.
        receive_cpu_seconds: The feed's receive side for a whole global batch, all ranks.
        read_seconds: Time of today's storage for a step; 0: not known.
        rates: Global batches per second of the loader alone, by workers of all of today's hosts.
        wait_seconds: Part of today's step that waits for data; None: not known.
        others_vcpus: vCPUs of today's hosts that other programs kept busy.
        machine_width: Relative error from other programs and a CPU of changing speed.
        storage: per_host: each host has a separate storage rate; unknown counts as shared.
        is_checked: The profile was checked against its own parts.
        efficiency: Factor on the data hosts' efficiency, from earlier runs.
        calibration_spread: Relative error of that factor; 0: none, or no earlier runs.
        parts_seconds: The step that the parts give.
        correction: Measured step over `parts_seconds`.
        corrected: The limits that the correction applies to: those that bind today.
        shards: Shards of the stream over all ranks, which limit the busy workers; 0: no limit.
        ranks_per_process: Profiled ranks over `ranks`, as a script may start more.
        divides: The stream divides itself among its workers; None: not known.
        epochs: Time beyond the usual steps of whole epochs, on the profiled hosts.
        are_shards_set: `feed.shards` sets the number of shards, not the script.
        splits: Several workers of a data host make the first batch of an epoch together.
        launch_share: Share of accelerator_seconds in which no kernel runs, though no batch is
            waited for: the script launches them too slowly.
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
    neighbour: Neighbour = Neighbour()  # noqa: RUF009 - frozen
    turns_cpu_seconds: float = 0.0
    read_seconds: float = 0.0
    shared: SharedLoading = SharedLoading()  # noqa: RUF009 - frozen
    rates: Mapping[int, float] = field(default_factory=dict)
    wait_seconds: float | None = None
    others_vcpus: float = 0.0
    machine_width: float = 0.0
    storage: Storage = "unknown"
    local_receive_seconds: float | None = None
    handover_seconds: float = 0.0
    doubts: tuple[Doubt, ...] = ()
    unexplained: Unexplained | None = None
    is_checked: bool = False
    parts_seconds: float = 0.0
    correction: float = 1.0
    corrected: tuple[Limit, ...] = ()
    global_batch_size: int | None = None
    epochs: EpochTimes | None = None
    efficiency: float = 1.0
    calibration_spread: float = 0.0
    data: "tuple[Hosts, ...]" = ()
    shards: int = 0
    ranks_per_process: float = 1.0
    divides: bool | None = None
    are_shards_set: bool = False
    splits: bool = False
    launch_share: float = 0.0

    @property
    def has_own_storage(self) -> bool:
        return self.storage == "per_host"

    @property
    def parallel_seconds(self) -> float:
        """Worker-seconds of loading that more workers divide among them."""
        return max(0.0, self.loader_wall_seconds - self.shared.least * self.shared.seconds)

    @property
    def waits(self) -> bool:
        """Whether loading waits for something that its workers do not share."""
        return self.parallel_seconds > WAITS * self.loader_cpu_seconds

    def factor(self, limit: Limit) -> float:
        """Returns the factor on a model term with which today's cluster gives today's step."""
        if limit in self.corrected:
            return self.correction
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts of one type. workers: data workers of one host; None: as many as its vCPUs."""

    instance: Instance
    count: int
    workers: int | None = None

    @property
    def workers_per_host(self) -> int:
        if self.workers is None:
            return self.instance.vcpus
        return self.workers

    @property
    def all_workers(self) -> int:
        return self.count * self.workers_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
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


class _TermLine(NamedTuple):
    limit: Limit
    at_none: float
    at_all: float

    def times(self, factor: float) -> "_TermLine":
        return _TermLine(self.limit, self.at_none * factor, self.at_all * factor)

    def at(self, share: float) -> float:
        # Exact at both ends, so that a term that is flat stays flat.
        return self.at_none * (1 - share) + self.at_all * share


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


def estimate(work: StepWork, shape: ClusterShape) -> Estimate:
    """Estimates how long a global step of `work` takes on `shape`."""
    work = of_workers(work, shape)
    local = parts_on(work, shape)
    receive = local.receive_seconds
    if shape.data:
        # The feed hands batches over, not torch's own loader.
        receive = work.receive_seconds
    accelerator = local.accelerator_seconds * work.factor("accelerator")
    # The share that data hosts make is the one with which the step is shortest.
    lines, share = _lines(work, shape, local)
    terms = dict.fromkeys(_LIMITS, 0.0)
    # The trainer's thread receives between two steps of the accelerator: its time is added.
    neighbour = local.neighbour.seconds_at(local.loading_share(1 - share))
    terms["accelerator"] = accelerator + (receive + neighbour) * work.factor("accelerator")
    for line in lines:
        terms[line.limit] = max(terms[line.limit], line.at(share))
    largest = max(terms.values())
    # Two lines that cross are one limit, whatever their last digits are.
    limit = next(name for name in _LIMITS if terms[name] >= largest * (1 - 1e-9))
    limit = _named(limit, terms=terms, work=work, shape=shape, local=local)
    same = {limit}
    if limit in LOADING and not work.waits:
        # CPU and workers are one limit where loading does not wait.
        same.update(LOADING)
    second = max((name for name in _LIMITS if name not in same), key=terms.__getitem__)
    # Where no term is known the step would be 0, and the speed-up without end.
    step = max(largest, work.step_seconds * _LEAST_STEP)
    return Estimate(
        step_seconds=step,
        remote_share=share,
        limit=limit,
        second_limit=second,
        # `limit` may be below the largest term: never more than the step.
        second_seconds=min(terms[second], step),
        accelerator_seconds=min(accelerator, step),
    )


def of_workers(work: StepWork, shape: ClusterShape) -> StepWork:
    """Returns the work without the factor of a trainer that loads, on hosts that have workers.

    The main process loads with more threads than a worker has.
    """
    if work.num_workers != 0 or loads_itself(shape):
        return work
    corrected = tuple(limit for limit in work.corrected if limit != "latency")
    return replace(work, corrected=corrected)


def loads_itself(shape: ClusterShape) -> bool:
    """Whether the trainer loads its own batches, between its steps."""
    return shape.dnn.workers == 0 and not shape.data


def _named(
    limit: Limit, *, terms: Mapping[Limit, float], work: StepWork, shape: ClusterShape, local: Parts
) -> Limit:
    """Returns the limit under the name that the bottleneck of these hosts has."""
    if not shape.data:
        if limit == "latency" or local.measured_seconds > 0:
            return _LIMIT_OF.get(local.bottleneck, limit)
        return limit
    # Workers that compute all the time need the CPU: the two terms differ by noise.
    is_cpu = not work.waits and terms["cpu"] * COMPUTES >= terms["latency"]
    if limit == "latency" and is_cpu:
        return "cpu"
    return limit


def shards_on(work: StepWork, shape: ClusterShape) -> int:
    """Returns the stream's shards, as many per rank as today; 0: no limit.

    One worker makes a shard, so no more workers can be busy on all hosts together.
    """
    if not work.shards:
        return 0
    return max(1, round(work.shards * shape.dnn.count * shape.processes / work.ranks))


def _ranks_on(work: StepWork, shape: ClusterShape) -> int:
    return max(1, round(shape.dnn.count * shape.processes * work.ranks_per_process))


def busy_workers(work: StepWork, shape: ClusterShape) -> tuple[int, int]:
    """Returns the workers of the dnn hosts and of the data hosts that can be busy."""
    local = shape.dnn.all_workers
    shards = shards_on(work, shape)
    # A data host has one worker at least.
    remote = sum(max(hosts.count, hosts.all_workers) for hosts in shape.data)
    if not shards:
        return local, remote
    # As the feed assigns shards: to a data host while one has a free worker.
    remote = min(remote, shards)
    return min(local, shards - remote), remote


def parts_on(work: StepWork, shape: ClusterShape) -> Parts:
    """Returns the parts of a step that the dnn hosts of `shape` make without data hosts."""
    dnn = shape.dnn
    instance = shape.dnn.instance
    storage = 1.0
    if work.has_own_storage:
        # Measured on today's hosts: more hosts divide that time.
        storage = work.hosts / dnn.count
    speed = _step_speed(work, shape)
    receive, taking = _taking_seconds(work, shape)
    workers = busy_workers(work, shape)[0]
    vcpus = dnn.count * instance.capacity * _speed(work, instance)
    parts = Parts(
        accelerator_seconds=work.accelerator_seconds / speed,
        neighbour=replace(work.neighbour, seconds=work.neighbour.seconds / speed),
        receive_seconds=receive,
        loader_cpu_seconds=work.loader_cpu_seconds,
        # Where the trainer loads, it shares with no worker.
        loader_wall_seconds=worker_seconds(work, instance)
        + work.shared.least * work.shared.seconds * storage,
        # The trainer was measured with cached batches, which it takes from no worker.
        trainer_cpu_seconds=work.trainer_cpu_seconds + taking,
        turns_cpu_seconds=_turns_seconds(work, workers),
        vcpus=vcpus,
        others_vcpus=vcpus - free_vcpus(work, dnn),
        workers=workers,
        hosts=dnn.count,
        ranks=_ranks_on(work, shape),
        read_seconds=work.read_seconds * storage,
        shared=replace(work.shared, seconds=work.shared.seconds * storage),
    )
    if not _is_todays(work, shape):
        return parts
    return replace(
        parts,
        rates=work.rates,
        measured_seconds=work.step_seconds,
        wait_seconds=work.wait_seconds,
    )


def _step_speed(work: StepWork, shape: ClusterShape) -> float:
    """Returns how many times as fast as today an accelerator-only step of the global batch is."""
    # The global batch stays: N replicas divide it, and each further one is worth `scaling`.
    speed = shape.replicas
    if shape.replicas > 1:
        speed *= shape.scaling
    # Without accelerators the step is CPU work, which a faster CPU shortens.
    if not shape.dnn.instance.accelerators:
        speed *= _speed(work, shape.dnn.instance)
    return speed


def _taking_seconds(work: StepWork, shape: ClusterShape) -> tuple[float, float]:
    """Returns what taking a batch from local workers costs: seconds, and CPU-seconds of all ranks.

    Nothing is handed over where the trainer's own thread loads.
    """
    if loads_itself(shape):
        return 0.0, 0.0
    local = work.local_receive_seconds
    if local is None:
        return max(work.receive_seconds, work.handover_seconds), 0.0
    taking = local * work.ranks * work.ranks_per_process
    return max(local, work.handover_seconds), taking


def _turns_seconds(work: StepWork, workers: int) -> float:
    # As `Parts.with_workers`.
    if work.num_workers is not None and workers > work.num_workers * work.hosts:
        return max(0.0, work.turns_cpu_seconds)
    return work.turns_cpu_seconds


def _is_todays(work: StepWork, shape: ClusterShape) -> bool:
    """Whether these are today's hosts with today's workers, and neither had data hosts."""
    dnn = shape.dnn
    is_same = dnn.instance.type == work.reference.type and dnn.count == work.hosts
    is_alone = not shape.data and not work.data and shape.replicas == 1
    return is_same and is_alone and dnn.workers == work.num_workers


def free_vcpus(work: StepWork, hosts: Hosts) -> float:
    """Returns the vCPUs of all dnn hosts that the trainer leaves, as vCPUs of the profiled type."""
    instance = hosts.instance
    reserved = work.reserved_vcpus
    # One trainer process per accelerator.
    if work.reference.accelerators:
        reserved *= instance.accelerators / work.reference.accelerators
    # Other programs that ran on today's hosts are assumed on all hosts of that type.
    if instance.type == work.reference.type:
        reserved += work.others_vcpus / work.hosts
    least = LEAST_FREE
    if work.reserved_vcpus:
        # A reserve is a guess and may not take nearly all vCPUs; measured programs may.
        least = _LEAST_FREE
    free = max(instance.capacity - reserved, instance.capacity * least)
    return hosts.count * free * _speed(work, instance)


def worker_seconds(work: StepWork, instance: Instance, *, efficiency: float = 1.0) -> float:
    """Returns worker-seconds of a step's loading on this type, without what the workers share."""
    # A faster CPU shortens only the computing, not waiting for reads or services.
    waiting = max(0.0, work.parallel_seconds - work.loader_cpu_seconds)
    running = work.parallel_seconds - waiting
    return running / (_speed(work, instance) * efficiency) + waiting


def cpu_seconds(work: StepWork, instance: Instance) -> float:
    """Returns CPU-seconds of a step's loading on this type, with all vCPUs busy."""
    return work.loader_cpu_seconds / _speed(work, instance)


def _speed(work: StepWork, instance: Instance) -> float:
    if instance.coremark_per_vcpu is None or work.reference.coremark_per_vcpu is None:
        return 1.0
    return instance.coremark_per_vcpu / work.reference.coremark_per_vcpu


def _lines(work: StepWork, shape: ClusterShape, parts: Parts) -> tuple[list[_TermLine], float]:
    """Returns the terms but the first, and the remote share that makes their largest the least."""
    if not shape.data:
        terms = parts.terms
        alone = [_TermLine(name, terms[name], 0.0) for name in ("cpu", "latency", "storage")]
        return _corrected(work, alone), 0.0
    # The efficiency jumps at x = 1 (the data hosts make all batches), so both cases are tried.
    alone = _corrected(work, _mixed_lines(work, shape, parts, efficiency=EFFICIENCY))
    local, remote = busy_workers(work, shape)
    if local == 0:
        return alone, 1.0
    mixed = _corrected(work, _mixed_lines(work, shape, parts, efficiency=EFFICIENCY_MIXED))
    if work.shards:
        # All shards give the same number of batches.
        return mixed, remote / (local + remote)
    share = _best_share(mixed)
    if _largest(mixed, share) <= _largest(alone, 1.0):
        return mixed, share
    return alone, 1.0


def _corrected(work: StepWork, lines: Sequence[_TermLine]) -> list[_TermLine]:
    return [line.times(work.factor(line.limit)) for line in lines]


def _mixed_lines(
    work: StepWork, shape: ClusterShape, parts: Parts, *, efficiency: float
) -> list[_TermLine]:
    """Returns the terms from no batch made on the data hosts to all of them."""
    dnn = parts.terms
    data = shape.data
    cpu, workers = _remote_rates(work, data, efficiency=efficiency)
    if work.shards:
        without_limit = busy_workers(replace(work, shards=0), shape)[1]
        workers *= busy_workers(work, shape)[1] / without_limit
    # Measured on one core, over the CPU-seconds with cached batches: 1.0 to 1.1 times with all
    # batches made elsewhere, 1.1 to 1.4 times with a local worker. Half of the turns fits both.
    alone = max(0.0, work.trainer_cpu_seconds + _TURNS_LEFT * work.turns_cpu_seconds)
    training = alone / parts.free_vcpus
    return [
        # dnn hosts: ((1-x) c + (1-x/2) turns + trainer + x receive) / V; data hosts: x c / their
        # vCPUs.
        _TermLine("cpu", dnn["cpu"], training + work.receive_cpu_seconds / parts.free_vcpus),
        _TermLine("cpu", 0.0, work.loader_cpu_seconds / cpu),
        # One thread of a rank receives: more vCPUs do not help it.
        _TermLine("receive", 0.0, work.receive_cpu_seconds / _ranks_on(work, shape)),
        _TermLine("network", 0.0, _network_seconds(work, (shape.dnn,))),
        _TermLine("network", 0.0, _network_seconds(work, data)),
        # A host's own work is divided.
        *_waiting_lines(work, data, parts, divided=1 / workers if workers else 0.0),
    ]


def _waiting_lines(
    work: StepWork, data: Sequence[Hosts], parts: Parts, *, divided: float
) -> list[_TermLine]:
    """Returns the terms of workers that wait, and of the storage.

    Args:
        work: The work of a step.
        data: The data hosts.
        parts: Those of the dnn hosts.
        divided: Seconds of a step for what the data hosts' workers divide among them.
    """
    # Shared storage takes the same time for each reader, wherever a batch is made: it is at both
    # ends of each line.
    other_end = shared = work.shared.seconds
    reads = [_TermLine("storage", work.read_seconds, work.read_seconds)]
    if work.has_own_storage:
        # Separate storages are needed only for a host's own batches.
        share = work.hosts / sum(hosts.count for hosts in data)
        other_end = 0.0
        shared *= share
        reads = [
            _TermLine("storage", parts.read_seconds, 0.0),
            _TermLine("storage", 0.0, work.read_seconds * share),
        ]
    lines = []
    if parts.workers:
        name: Limit = "storage" if parts.is_shared else "latency"
        seconds = parts.shared.seconds + parts.parallel_seconds / parts.workers
        lines.append(_TermLine(name, seconds, other_end))
    name = "storage" if shared > divided else "latency"
    return [*lines, _TermLine(name, other_end, shared + divided), *reads]


def _remote_rates(
    work: StepWork, data: Sequence[Hosts], *, efficiency: float
) -> tuple[float, float]:
    """Returns the data hosts' vCPUs as vCPUs of the profiled type, and their workers' steps/s."""

    def vcpus_of(hosts: Hosts) -> float:
        # The agent encrypts and sends: it takes one vCPU of a large host, else it shares.
        agent = 1 if hosts.instance.capacity >= 8 else 0
        return (hosts.instance.capacity - agent) * _speed(work, hosts.instance)

    left = MANY_HOSTS
    cpu = 0.0
    steps_a_second = 0.0
    # The strongest first, so that the weakest are those beyond the eighth, which count for less:
    # one more host always adds something.
    for hosts in sorted(data, key=vcpus_of, reverse=True):
        first = min(hosts.count, left)
        left -= first
        workers = max(hosts.workers_per_host, 1)
        # Hosts up to the eighth, then further hosts of this type.
        for count, less in ((first, 1.0), (hosts.count - first, WORTH_BEYOND)):
            worth = efficiency * less * work.efficiency
            seconds = worker_seconds(work, hosts.instance, efficiency=worth)
            cpu += count * worth * vcpus_of(hosts)
            if seconds > 0:
                steps_a_second += count * workers / seconds
    return cpu, steps_a_second


def _network_seconds(work: StepWork, group: Sequence[Hosts]) -> float:
    # An unknown rate is no limit.
    gbps = sum(hosts.count * (hosts.instance.sustained_gbps or math.inf) for hosts in group)
    return work.batch_bytes * 8 / (NETWORK_EFFICIENCY * gbps * 1e9)


def _best_share(lines: Sequence[_TermLine]) -> float:
    # The maximum of lines is convex: its minimum is at an end, or where a falling line crosses a
    # rising one. Two lines cross between the ends if their order there differs.
    shares = {0.0, 1.0}
    for index, one in enumerate(lines):
        for other in lines[index + 1 :]:
            at_none = one.at_none - other.at_none
            at_all = one.at_all - other.at_all
            if at_none * at_all < 0:
                shares.add(at_none / (at_none - at_all))
    return min(sorted(shares), key=lambda share: _largest(lines, share))


def _largest(lines: Sequence[_TermLine], share: float) -> float:
    # As `at`, whose calls take a tenth of a decision.
    local = 1 - share
    return max([line.at_none * local + line.at_all * share for line in lines])
