"""The cost model: how long a global step takes on a cluster.

Over the remote share x that minimises it,

    t = max(g + r,                                     accelerator
            ((1-x) c + trainer + x receive) / V_t,     cpu of the dnn hosts
            x c / (eta sum n_h (V_h - q_h) s_h),       cpu of the data hosts
            wall / workers,                            latency, dnn and data hosts
            net(x), recv(x), storage(x))

c CPU-seconds of loading, V vCPUs, s CoreMark a vCPU over the profiled host's, q_h one vCPU of data
hosts of 8 and more (the agent), eta what data hosts reach, more where they make all batches (x is
1). What of the worker-seconds is waiting takes as long anywhere: eta and s are for the rest. Every
term but the first is linear in x, so the minimum is at an end or at a crossing of two lines: it is
found exactly. Where the accelerator is the limit, x is the share that leaves the other terms most
room.

The trainer's own CPU is charged in seconds (it holds on one-core hosts, where loading and training
share the core); only where no seconds were measured are whole vCPUs reserved. Without accelerators
the accelerator-only step is CPU work itself and becomes faster with the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.catalog import Instance
from stoker.decide.work import Hosts, Shape, Work
from stoker.records import Limit

# What data hosts reach of their CPU, after network and serialisation: alone, and where dnn hosts
# make batches too, which then come in order from hosts of unlike pace. Calibrated on the published
# runs on p3 (alone) and p4d (both), see tests/unit/test_decide_published.py; a core of its own on
# one machine reaches 0.91 to 0.97 alone.
EFFICIENCY = 0.93
EFFICIENCY_MIXED = 0.85
# More than eight are worth less: cedar measured .90, .86, .77, .65 at 2, 4, 8, 12 processes.
WORTH_BEYOND = 0.88
MANY_HOSTS = 8
# Of a network interface's figure, what a feed reaches.
NETWORK_EFFICIENCY = 0.7
# A loader that needs more worker-seconds than this over its CPU-seconds waits for something.
WAITS = 1.25
# Below this much of a host's vCPUs the trainer's reserve is not believed.
_LEAST_FREE = 1 / 8
# A prediction never goes below this fraction of today's step: it would rest on no term at all.
_LEAST_STEP = 1e-3

_LIMITS: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "network", "receive", "storage")


class _Line(NamedTuple):
    limit: Limit
    at_none: float
    at_all: float

    def at(self, share: float) -> float:
        # Exact at both ends, so that a term that is flat stays flat.
        return self.at_none * (1 - share) + self.at_all * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the model says of a cluster.

    Attributes:
        step_seconds: For today's global batch, also where the replicas differ.
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


def estimate(work: Work, shape: Shape) -> Estimate:
    """How long a global step of `work` takes on `shape`."""
    accelerator = _accelerator_seconds(work, shape)
    floor = accelerator + work.receive_seconds
    lines, share = _lines(work, shape)
    terms = dict.fromkeys(_LIMITS, 0.0)
    terms["accelerator"] = floor
    for line in lines:
        terms[line.limit] = max(terms[line.limit], line.at(share))
    if not shape.data and shape.dnn.workers == 0:
        # Loaded by the trainer itself, between its steps.
        alone = work.loader_wall_seconds / _speed(work, shape.dnn.instance)
        terms["latency"] = floor + alone / (shape.dnn.count * shape.processes)
    largest = max(terms.values())
    # Two lines that cross are one limit, whatever the last digits say.
    limit = next(name for name in _LIMITS if terms[name] >= largest * (1 - 1e-9))
    second = max(
        (name for name in _LIMITS if name != limit and not _is_one(work, limit, name)),
        key=lambda name: terms[name],
    )
    step = max(terms[limit], work.step_seconds * _LEAST_STEP)
    return Estimate(
        step_seconds=step,
        remote_share=share,
        limit=limit,
        second_limit=second,
        second_seconds=terms[second],
        accelerator_seconds=min(accelerator, step),
    )


def free_vcpus(work: Work, hosts: Hosts) -> float:
    """vCPUs of all these dnn hosts that the trainer leaves, as vCPUs of the profiled type."""
    instance = hosts.instance
    reserved = work.reserved_vcpus
    if work.reference.accelerators:
        reserved *= instance.accelerators / work.reference.accelerators
    free = max(instance.capacity - reserved, instance.capacity * _LEAST_FREE)
    return hosts.count * free * _speed(work, instance)


def worker_seconds(work: Work, instance: Instance, *, efficiency: float = 1.0) -> float:
    """Worker-seconds of a step's loading on hosts of this type: CPU by speed, waiting as it is."""
    waiting = max(0.0, work.loader_wall_seconds - work.loader_cpu_seconds)
    running = work.loader_wall_seconds - waiting
    return running / (_speed(work, instance) * efficiency) + waiting


def _speed(work: Work, instance: Instance) -> float:
    if instance.coremark_per_vcpu is None or work.reference.coremark_per_vcpu is None:
        return 1.0
    return instance.coremark_per_vcpu / work.reference.coremark_per_vcpu


def _is_one(work: Work, one: Limit, other: Limit) -> bool:
    """Whether the two limits are one: CPU and workers, of a loader that does not wait."""
    waits = work.loader_wall_seconds > WAITS * work.loader_cpu_seconds
    return not waits and {one, other} == {"cpu", "latency"}


def _accelerator_seconds(work: Work, shape: Shape) -> float:
    seconds = work.accelerator_seconds
    if shape.replicas != 1:
        seconds /= shape.replicas * (shape.scaling if shape.replicas > 1 else 1.0)
    if shape.dnn.instance.accelerators == 0:
        seconds /= _speed(work, shape.dnn.instance)
    return seconds


def _lines(work: Work, shape: Shape) -> tuple[list[_Line], float]:
    """The terms but the first, and the remote share with which the largest of them is least."""
    local = _local_lines(work, shape)
    if not shape.data:
        return local, 0.0
    alone = [*local, *_remote_lines(work, shape, efficiency=EFFICIENCY)]
    if shape.dnn.workers == 0:
        return alone, 1.0
    mixed = [*local, *_remote_lines(work, shape, efficiency=EFFICIENCY_MIXED)]
    share = _best_share(mixed)
    return (mixed, share) if _largest(mixed, share) <= _largest(alone, 1.0) else (alone, 1.0)


def _local_lines(work: Work, shape: Shape) -> list[_Line]:
    dnn = shape.dnn
    free = free_vcpus(work, dnn)
    loading, training = work.loader_cpu_seconds / free, work.trainer_cpu_seconds / free
    lines = [
        _Line("cpu", loading + training, training + work.receive_cpu_seconds / free),
        _Line("storage", _storage_seconds(work, dnn.count), 0.0),
    ]
    workers = dnn.instance.vcpus if dnn.workers is None else dnn.workers
    if workers:
        seconds = worker_seconds(work, dnn.instance) / (dnn.count * workers)
        lines.append(_Line("latency", seconds, 0.0))
    return lines


def _remote_lines(work: Work, shape: Shape, *, efficiency: float) -> list[_Line]:
    cpu, workers = _remote_rates(work, shape.data, efficiency=efficiency)
    ranks = shape.dnn.count * shape.processes
    network = [_network_seconds(work, (shape.dnn,)), _network_seconds(work, shape.data)]
    return [
        _Line("cpu", 0.0, work.loader_cpu_seconds / cpu),
        _Line("latency", 0.0, 1 / workers if workers else 0.0),
        _Line("storage", 0.0, _storage_seconds(work, shape.data_hosts)),
        _Line("receive", 0.0, work.receive_cpu_seconds / ranks),
        *(_Line("network", 0.0, seconds) for seconds in network),
    ]


def _remote_rates(work: Work, data: Sequence[Hosts], *, efficiency: float) -> tuple[float, float]:
    """vCPUs of the data hosts as vCPUs of the profiled type, and steps a second of their workers.

    The eight strongest hosts count with `efficiency`, the rest with less: one more host always
    adds something.
    """
    rated: list[tuple[float, int, Hosts]] = []
    for index, hosts in enumerate(data):
        instance = hosts.instance
        agent = 1 if instance.vcpus >= 8 else 0
        rated.append(((instance.capacity - agent) * _speed(work, instance), index, hosts))
    left, cpu, steps_a_second = MANY_HOSTS, 0.0, 0.0
    for vcpus, _, hosts in sorted(rated, key=lambda rate: (-rate[0], rate[1])):
        first = min(hosts.count, left)
        left -= first
        workers = hosts.instance.vcpus if hosts.workers is None else hosts.workers
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
        if sustained is None:
            return 0.0
        gbps += hosts.count * sustained
    return work.batch_bytes * 8 / (NETWORK_EFFICIENCY * gbps * 1e9)


def _storage_seconds(work: Work, hosts: int) -> float:
    rate = work.storage_bytes_per_second
    return 0.0 if rate is None else work.read_bytes / (rate * hosts)


def _best_share(lines: Sequence[_Line]) -> float:
    shares = {0.0, 1.0}
    for index, one in enumerate(lines):
        for other in lines[index + 1 :]:
            at_none, at_all = one.at_none - other.at_none, one.at_all - other.at_all
            if at_none * at_all < 0:
                shares.add(at_none / (at_none - at_all))
    return min(sorted(shares), key=lambda share: _largest(lines, share))


def _largest(lines: Sequence[_Line], share: float) -> float:
    return max(line.at(share) for line in lines)
