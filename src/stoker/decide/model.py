"""The cost model: how long a global step takes on a cluster.

With a share x of the batches made on data hosts each limit has a time, and the largest sets the
pace; `estimate` takes the x for which that is smallest:

    t = max( g + n (1-x),                                   accelerator
             ((1-x) (c + turns) + x (turns/2 + recv) + trainer) / V,   cpu of the dnn hosts
             x c / (eta sum n_h (V_h - q_h) s_h),           cpu of the data hosts
             B + wall / workers,                            latency, dnn and data hosts
             net(x), recv(x), storage(x) )

and g + wait if the trainer loads without workers (g + wall / ranks if the wait is not known).
g: accelerator-only step; n: what busy workers on the same cores add to it, as kernels are launched
late; c: CPU-seconds of loading; turns: what the measured step used beyond loading and training
apart, as both compete for cores and caches (a trainer on one core with its worker used 1.1 to 1.4
times its CPU alone); V: vCPUs that other programs leave; s: CoreMark per vCPU over the profiled
host's; q_h: one vCPU for the agent on data hosts with 8 or more; eta: efficiency of data hosts. The
waiting part of worker-seconds takes as long anywhere: eta and s apply to the rest. Without
accelerators the accelerator-only step is CPU work itself and becomes faster with the CPU.

B is the time for what workers share; neither workers nor hosts reduce it, unless each host has a
separate storage. Every term is linear in x, so the exact minimum is at an end or where two lines
cross. Whether more workers would be faster is asked in one place, `more_workers`. Pure.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from stoker.catalog import Instance
from stoker.records import Bottleneck, Limit, Storage
from stoker.records.profile import LEAST_FREE
from stoker.units import wait_share

# Worker-seconds over CPU-seconds above which a loader waits for something.
WAITS = 1.25
# Worker-seconds over CPU-seconds below which a worker only computes, as repeated measurements say.
_COMPUTES = 1.1
# For a loader that waits: more workers than vCPUs help, but each costs memory.
MOST_WORKERS_PER_VCPU = 4
# A step that is shorter by less is no gain: two profiles of one training run differ by as much.
LEAST_GAIN = 0.05
# More workers that loaded less faster than this, when they were tried, are no remedy.
_FASTER = 1.1
# A loader that alone delivers a batch in less of a step is not what steps wait for.
_MIN_LOADING = 0.6
# Workers over those busy at the predicted step, for jitter.
_SPARE = 1.1
# If loading is shared: step over the best one for which the fewest workers are taken.
_NEAR_BEST = 1.05
# Worth of a further replica inside one host (8 GPUs: a little over an eighth of the time of 1) and
# across hosts (published on p3.16xlarge: 1.8, 3.7, 7.3 times on 2, 4, 8 hosts).
_SCALING_INSIDE = 0.95
_SCALING_ACROSS = 0.9
# CPU efficiency of data hosts after network and serialisation: alone, and where dnn hosts make
# batches too, so that batches come in order from hosts of different pace. Calibrated on the
# published runs on p3 (alone) and p4d (both), see tests/keel/test_decide_published.py; a dedicated
# core on one machine reaches 0.91 to 0.97 alone.
_EFFICIENCY = 0.93
_EFFICIENCY_MIXED = 0.85
# Share of the turns that stays when all batches are made elsewhere. Measured on one core, over the
# CPU-seconds without loading: 1.0 to 1.1 times with all batches made elsewhere, 1.1 to 1.4 times
# with a local worker.
_TURNS_LEFT = 0.5
# CPU-seconds a byte of the feed's receive side: benchmarks/feed.py measures 0.38 to 0.65 e-9.
_RECEIVE_CPU_PER_BYTE = 0.5e-9
# Share of a network interface's nominal rate that a feed reaches.
_NETWORK_EFFICIENCY = 0.7
# Each leaves two thirds of the shares that may be the best: 1e-8 of all are left.
_THIRDS = 45
# A prediction never goes below this fraction of today's step: it would rest on no term at all.
_LEAST_STEP = 1e-3
# What loading on the dnn hosts is limited by.
LOADING: tuple[Limit, ...] = ("cpu", "latency")
# Of equal terms the first is named as the limit.
_LIMITS: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "network", "receive", "storage")
_WORDS: Mapping[Bottleneck | Limit, str] = {
    "cpu": "the CPU",
    "workers": "too few loader workers",
    "latency": "what each loader worker waits for (latency)",
    "accelerator": "the accelerator",
    "launch": "the script's own thread, which launches the GPU's work",
    "storage": "the storage or network, which all workers share",
    "network": "the network",
    "receive": "receiving the batches",
    "none": "the training itself: loading costs nothing",
    "unexplained": "not explained",
}


def limit_words(limit: Bottleneck | Limit) -> str:
    """Returns a limit as text, the same in profile, decision and report."""
    return _WORDS[limit]


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
    """

    dnn: Hosts
    data: Hosts | None = None
    processes: int = 1
    replicas: float = 1.0

    @property
    def hosts(self) -> tuple[Hosts, ...]:
        return (self.dnn, self.data) if self.data else (self.dnn,)

    def with_workers(self, workers: int | None) -> "Cluster":
        """Returns the cluster with so many loader workers on each dnn host."""
        return replace(self, dnn=replace(self.dnn, workers=workers))


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
    """The work of one global step, all ranks and hosts together, and today's cluster.

    Attributes:
        reference: Today's type, with the measured vCPUs and accelerators.
        processes: Trainer processes of one host, as they are launched; a script may start more.
        ranks: Trainer processes of all hosts.
        num_workers: Loader workers of one host, 0: the trainer loads; None: not known.
        measured_seconds: Today's step.
        wait_seconds: Part of it that waits for data; None: not known.
        accelerator_seconds: Trainer's step with data at hand, with its all-reduce.
        neighbour_seconds: What loading on the same cores adds to it.
        loader_cpu_seconds: CPU-seconds of loading and augmenting.
        loader_wall_seconds: Worker-seconds of loading with the fewest workers.
        trainer_cpu_seconds: CPU-seconds of the trainer processes.
        turns_cpu_seconds: CPU-seconds of a step beyond loading and training alone; may be negative.
        shared_seconds: Time for what workers share, with any number of them.
        rates: Global batches per second of the loader alone, by the workers that were tried.
        others_vcpus: vCPUs that other programs used.
        reserved_vcpus: vCPUs of one host for the trainer, where its CPU-seconds are not known.
        batch_bytes: Bytes of a global batch; 0: not known.
        storage: per_host: each host has a separate storage rate; unknown counts as shared.
        shards: Shards of the stream over all ranks, which limit the busy workers; 0: no limit.
        launch_share: Share of the accelerator's step in which no kernel runs, though no batch is
            waited for: the script launches them too slowly.
        doubts: What was not measured, each with the relative error that it may add.
        others_width: Relative error from other programs.
        factors: Factor on a limit's term with which today's cluster gives today's step.
    """

    reference: Instance
    hosts: int = 1
    processes: int = 1
    ranks: int = 1
    num_workers: int | None = None
    measured_seconds: float
    wait_seconds: float | None = None
    accelerator_seconds: float = 0.0
    neighbour_seconds: float = 0.0
    loader_cpu_seconds: float = 0.0
    loader_wall_seconds: float = 0.0
    trainer_cpu_seconds: float = 0.0
    turns_cpu_seconds: float = 0.0
    shared_seconds: float = 0.0
    rates: Mapping[int, float] = field(default_factory=dict)
    others_vcpus: float = 0.0
    reserved_vcpus: float = 0.0
    batch_bytes: float = 0.0
    storage: Storage = "unknown"
    shards: int = 0
    launch_share: float = 0.0
    doubts: Mapping[str, float] = field(default_factory=dict)
    unexplained: Unexplained | None = None
    others_width: float = 0.0
    factors: Mapping[Limit, float] = field(default_factory=dict)

    @property
    def todays(self) -> Cluster:
        """Today's hosts with today's workers."""
        dnn = Hosts(instance=self.reference, count=self.hosts, workers=self.num_workers)
        return Cluster(dnn=dnn, processes=self.processes)

    @property
    def workers(self) -> int:
        """Loader workers of today's hosts."""
        return self.todays.dnn.all_workers

    @property
    def is_too_noisy(self) -> bool:
        """Whether other programs made the profile too noisy for any prediction."""
        return self.unexplained is not None and self.unexplained.kind == "other_programs"

    @property
    def vcpus(self) -> float:
        """vCPUs of today's hosts."""
        return self.hosts * self.reference.capacity

    @property
    def terms(self) -> dict[Limit, float]:
        """Seconds of today's step by each limit, as the parts give them."""
        return terms(self, self.todays)

    @property
    def step_seconds(self) -> float:
        """Today's step, as the parts give it."""
        # Where no term is known the step would be 0, and a speed-up without end.
        return max(*self.terms.values(), self.measured_seconds * _LEAST_STEP)

    @property
    def parallel_seconds(self) -> float:
        """Worker-seconds that more workers divide among them."""
        fewest = min(self.rates, default=0)
        return max(0.0, self.loader_wall_seconds - fewest * self.shared_seconds)

    @property
    def waiting_seconds(self) -> float:
        """Worker-seconds of `parallel_seconds` that wait for reads or services."""
        return max(0.0, self.parallel_seconds - self.loader_cpu_seconds)

    @property
    def waits(self) -> bool:
        """Whether a worker mostly waits for its own reads when it does not compute."""
        return self.parallel_seconds > WAITS * self.loader_cpu_seconds

    @property
    def waited_share(self) -> float:
        """Share of today's step that waits for data; 1 if that is not known."""
        if self.wait_seconds is None:
            return 1.0
        return wait_share(step_seconds=self.measured_seconds, wait_seconds=self.wait_seconds)

    @property
    def bottleneck(self) -> Bottleneck:
        """Bottleneck of today's step, the same in profile, decide and report."""
        if self.loader_cpu_seconds == 0 and self.loader_wall_seconds == 0:
            return "none"
        lost = 1.0
        if self.wait_seconds is not None:
            lost = lost_share(
                step_seconds=self.measured_seconds,
                wait_seconds=self.wait_seconds,
                accelerator_seconds=self.accelerator_seconds + self.neighbour_seconds,
            )
        seconds = self.terms
        if min(self.waited_share, lost) < LEAST_GAIN:
            # No batch is waited for: only the CPU, which loading shares, slows the steps.
            is_cpu = lost >= LEAST_GAIN and seconds["cpu"] > seconds["accelerator"]
            return "cpu" if is_cpu else "accelerator"
        cluster = self.todays
        better = more_workers(self)
        if better is None:
            # No more workers would help: the limit is the one that would hold with them.
            enough = tuned(self, cluster)
            cluster = max(cluster, enough, key=lambda each: each.dnn.all_workers)
        limit = _largest(terms(self, cluster))
        if limit == "latency" and not (self.waits and self.workers):
            # A worker that computes all the time needs a core.
            return "workers" if better else "cpu"
        return "network" if limit == "receive" else limit

    def speed(self, instance: Instance) -> float:
        """Returns the speed of a vCPU of the type over the profiled one's."""
        there = instance.coremark_per_vcpu
        here = self.reference.coremark_per_vcpu
        return there / here if there and here else 1.0

    def shared_on(self, hosts: int) -> float:
        """Returns the seconds for what workers share: so many hosts divide separate storages."""
        return self.shared_seconds * (self.hosts / hosts if self.storage == "per_host" else 1.0)

    def worker_seconds(self, instance: Instance, *, efficiency: float = 1.0) -> float:
        """Returns worker-seconds of loading on a type, without what the workers share."""
        # A faster CPU shortens only the computing, not waiting for reads or services.
        computing = self.parallel_seconds - self.waiting_seconds
        return computing / (self.speed(instance) * efficiency) + self.waiting_seconds

    def free_vcpus(self, hosts: Hosts) -> float:
        """Returns the vCPUs of all dnn hosts that the trainer leaves, in those of today's type."""
        instance = hosts.instance
        reserved = self.reserved_vcpus
        # One trainer process per accelerator.
        if self.reference.accelerators:
            reserved *= instance.accelerators / self.reference.accelerators
        # Other programs that ran on today's hosts are assumed on all hosts of that type.
        if instance.type == self.reference.type:
            reserved += self.others_vcpus / self.hosts
        free = max(instance.capacity - reserved, instance.capacity * LEAST_FREE)
        return hosts.count * free * self.speed(instance)


def lost_share(*, step_seconds: float, wait_seconds: float, accelerator_seconds: float) -> float:
    """Returns the share of a step that steps without loading would save.

    Loading that competes with the training for CPUs costs more than the wait; a difference of
    less than `LEAST_GAIN` between the two is noise.
    """
    waited = wait_share(step_seconds=step_seconds, wait_seconds=wait_seconds)
    lost = 1 - accelerator_seconds / step_seconds
    return lost if lost > waited + LEAST_GAIN else waited


def _largest(seconds: Mapping[Limit, float]) -> Limit:
    # Two terms that are equal but for their last digits are one limit: the first.
    largest = max(seconds.values())
    return next(name for name in _LIMITS if seconds[name] >= largest * (1 - 1e-6))


# The cost function.

# A limit, and the seconds of a step by it with no batch and with all batches made on data hosts.
_Line = tuple[Limit, float, float]


def terms(work: Work, cluster: Cluster, x: float = 0.0) -> dict[Limit, float]:
    """Returns the seconds of a step by each limit, with a share `x` of batches on data hosts."""
    return _at(_lines(work, cluster, is_alone=x == 1), x, factors={})


def _at(lines: Iterable[_Line], x: float, *, factors: Mapping[Limit, float]) -> dict[Limit, float]:
    seconds = dict.fromkeys(_LIMITS, 0.0)
    for limit, at_none, at_all in lines:
        # A term that is flat stays flat, to the last digit.
        term = (at_none + (at_all - at_none) * x) * factors.get(limit, 1.0)
        seconds[limit] = max(seconds[limit], term)
    return seconds


def _lines(work: Work, cluster: Cluster, *, is_alone: bool) -> Iterator[_Line]:
    """Yields what limits the dnn hosts, the data hosts, and the way from one to the other.

    Args:
        work: The work of a step.
        cluster: The hosts.
        is_alone: Data hosts make all batches, and need not keep an order with local workers.
    """
    dnn = cluster.dnn
    data = cluster.data
    speed = work.speed(dnn.instance)
    local, remote = busy_workers(work, cluster)
    ranks = _ranks_on(work, cluster)
    # The global batch stays: replicas divide it.
    pace = cluster.replicas
    if pace > 1:
        pace *= _SCALING_ACROSS if dnn.count > work.hosts else _SCALING_INSIDE
    # Without accelerators the step is CPU work, which a faster CPU shortens.
    if not dnn.instance.accelerators:
        pace *= speed
    step = work.accelerator_seconds / pace
    # On more cores the same loading is less in the way.
    vcpus = dnn.count * dnn.instance.capacity * speed
    yield "accelerator", step + work.neighbour_seconds / pace * work.vcpus / vcpus, step
    turns = work.turns_cpu_seconds
    if work.num_workers is not None and local > work.workers:
        # With idle cores today's workers used less CPU than with all of them busy.
        turns = max(0.0, turns)
    here = work.loader_cpu_seconds + work.trainer_cpu_seconds + turns
    there = max(0.0, work.trainer_cpu_seconds + _TURNS_LEFT * turns)
    receive = _RECEIVE_CPU_PER_BYTE * work.batch_bytes
    free = work.free_vcpus(dnn)
    yield "cpu", here / free, (there + receive) / free
    # Shared storage takes the same time for each reader, wherever a batch is made. Separate
    # storages are needed only for a host's own batches.
    elsewhere = 0.0 if work.storage == "per_host" else work.shared_seconds
    if local:
        limit, seconds = _made_by(work, dnn, local)
        yield limit, seconds, elsewhere
    elif data is None:
        loading = work.worker_seconds(dnn.instance) / ranks
        if work.wait_seconds is not None and work.parallel_seconds:
            # As it was seen: an accelerator notices a part of it only.
            loading *= work.wait_seconds * work.ranks / work.parallel_seconds
        yield "latency", step + loading, 0.0
    if data is None:
        return
    worth = _EFFICIENCY if is_alone else _EFFICIENCY_MIXED
    # The agent encrypts and sends: it takes one vCPU of a large host, else it shares.
    vcpus = data.instance.capacity - (1 if data.instance.capacity >= 8 else 0)
    vcpus *= data.count * worth * work.speed(data.instance)
    yield "cpu", 0.0, work.loader_cpu_seconds / vcpus
    # One thread of a rank receives: more vCPUs do not help it.
    yield "receive", 0.0, receive / ranks
    for hosts in cluster.hosts:
        # An unknown rate is no limit.
        gbps = hosts.count * (hosts.instance.sustained_gbps or math.inf)
        yield "network", 0.0, work.batch_bytes * 8 / (_NETWORK_EFFICIENCY * gbps * 1e9)
    limit, seconds = _made_by(work, data, remote, efficiency=worth)
    yield limit, elsewhere, seconds


def _made_by(
    work: Work, hosts: Hosts, workers: int, *, efficiency: float = 1.0
) -> tuple[Limit, float]:
    """Returns the time in which the hosts' workers make a global batch, named for its remedy."""
    shared = work.shared_on(hosts.count)
    divided = work.worker_seconds(hosts.instance, efficiency=efficiency) / workers
    # Of what they share, more workers get no more.
    return "storage" if shared > divided else "latency", shared + divided


def _ranks_on(work: Work, cluster: Cluster) -> int:
    launched = work.hosts * work.processes
    return max(1, round(cluster.dnn.count * cluster.processes * work.ranks / launched))


def shards_on(work: Work, cluster: Cluster) -> int:
    """Returns the stream's shards, as many per rank as today; 0: no limit.

    One worker makes a shard, so no more workers can be busy on all hosts together.
    """
    if not work.shards:
        return 0
    return max(1, round(work.shards * _ranks_on(work, cluster) / work.ranks))


def busy_workers(work: Work, cluster: Cluster) -> tuple[int, int]:
    """Returns the workers of the dnn hosts and of the data hosts that can be busy."""
    local = cluster.dnn.all_workers
    # A data host has one worker at least.
    remote = max(cluster.data.count, cluster.data.all_workers) if cluster.data else 0
    if remote and (shards := shards_on(work, cluster)):
        # As the feed assigns shards: to a data host while one has a free worker.
        remote = min(remote, shards)
        local = min(local, shards - remote)
    return local, remote


# The estimate.


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


def estimate(work: Work, cluster: Cluster) -> Estimate:
    """Estimates how long a global step of `work` takes on `cluster`."""
    factors = work.factors

    def loading(x: float) -> float:
        # Where the accelerator sets the pace, loading is to leave it as much room as it can.
        seconds = _at(alone if x == 1 else mixed, x, factors=factors)
        return max(seconds[name] for name in _LIMITS if name != "accelerator")

    local, remote = busy_workers(work, cluster)
    mixed = [*_lines(work, cluster, is_alone=False)]
    alone = [*_lines(work, cluster, is_alone=True)]
    # All shards give the same number of batches.
    share = remote / max(1, local + remote)
    if local and remote and not work.shards:
        # The efficiency jumps where the data hosts make all batches.
        share = min(_lowest(loading), 1.0, key=loading)
    seconds = _at(alone if share == 1 else mixed, share, factors=factors)
    largest = limit = _largest(seconds)
    if cluster == work.todays:
        # Under the name that the bottleneck has, where it is one of the terms.
        bottleneck = "latency" if work.bottleneck == "workers" else work.bottleneck
        limit = next((name for name in _LIMITS if name == bottleneck), limit)
    elif limit == "latency" and not work.waits:
        # Workers that compute all the time need the CPU: the two terms differ by noise.
        limit = "cpu" if seconds["cpu"] * _COMPUTES >= seconds["latency"] else limit
    # CPU and workers are one limit where loading does not wait.
    same = LOADING if limit in LOADING and not work.waits else (limit,)
    second = max((name for name in _LIMITS if name not in same), key=seconds.__getitem__)
    step = max(seconds[largest], work.measured_seconds * _LEAST_STEP)
    # With all batches made elsewhere nothing slows the accelerator.
    accelerator = _at(alone, 1.0, factors=factors)["accelerator"]
    return Estimate(
        step_seconds=step,
        remote_share=share,
        limit=limit,
        second_limit=second,
        # `limit` may be below the largest term: never more than the step.
        second_seconds=min(seconds[second], step),
        accelerator_seconds=min(accelerator, step),
    )


def _lowest(convex: Callable[[float], float]) -> float:
    """Returns the lowest x in 0 to 1 for which a convex function is smallest."""
    low, high = 0.0, 1.0
    for _ in range(_THIRDS):
        third = (high - low) / 3
        # A third in which it is larger has no minimum.
        if convex(low + third) > convex(high - third):
            low += third
        else:
            high -= third
    return low


# More loader workers: bottleneck, states, fixes, plans and their words all follow `more_workers`.


def more_workers(work: Work) -> Cluster | None:
    """Returns today's hosts with more loader workers, if that makes a step faster; else None.

    A step is faster only by what it waits for data today. Neither a modelled step that the
    measured one is shorter than, nor cores that are busy, nor a rate that was tried promises more.
    """
    better = tuned(work, work.todays)
    if better.dnn.all_workers <= work.workers:
        return None
    if rate := work.rates.get(work.workers):
        # One batch a step is needed: a loader that alone makes many more is not waited for.
        if rate * work.measured_seconds * _MIN_LOADING > 1:
            return None
        # Nor are more workers a remedy that loaded hardly faster when they were tried.
        if max(work.rates) > work.workers and max(work.rates.values()) <= _FASTER * rate:
            return None
    today = min(work.step_seconds, work.measured_seconds)
    # Compared as shares, as the model may miss the measured step.
    reached = max(*terms(work, better).values(), (1 - work.waited_share) * today)
    return better if reached < (1 - LEAST_GAIN) * today else None


def tuned(work: Work, cluster: Cluster) -> Cluster:
    """Returns the cluster with as many workers on its dnn hosts as are useful without data hosts.

    These are the fewest with a step as fast as with the most, plus a tenth for jitter. The most are
    one per free vCPU, and more where they wait.
    """
    dnn = cluster.dnn
    cpu = work.loader_cpu_seconds
    parallel = work.worker_seconds(dnn.instance)
    waits = parallel / cpu if cpu else math.inf
    if waits < _COMPUTES:
        # A worker that computes all the time fills a vCPU.
        waits = 1.0
    free = work.free_vcpus(dnn) / dnn.count
    vcpus = dnn.instance.capacity * work.speed(dnn.instance)
    most = math.ceil(min(MOST_WORKERS_PER_VCPU * vcpus, free * waits))
    step = max(terms(work, cluster.with_workers(most)).values())
    shared = work.shared_on(dnn.count)
    # A core that two workers share by hyper-threads is slower: `cpu` is with all of them.
    busy = max(parallel, cpu) / dnn.count
    if shared > busy / most:
        # The last workers gain hardly anything: nearly the best step will do.
        step *= _NEAR_BEST
    else:
        busy *= _SPARE
    # What workers divide among them has to fit into the rest of the step.
    left = step - shared
    # Rounding errors must not add a worker.
    workers = min(most, math.ceil(busy / left - 1e-9)) if left > 0 else most
    return cluster.with_workers(max(1, workers))
