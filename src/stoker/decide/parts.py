"""The parts of a step on hosts that load alone: one sum for profile, decision and report.

    t = max( g + r + n,                     accelerator, taking a batch, and beside busy workers
             (c + trainer + turns) / V,     CPU that other programs leave
             B + (wall - m B) / workers )   the loader's time; the largest is the limit

and g + wall / ranks if the trainer loads without workers. g: accelerator-only step; n: what busy
workers on the same cores add to it, as kernels are launched late; c: CPU-seconds of loading; turns:
what the measured step used beyond loading and training apart, as both compete for cores and caches
(a trainer on one core with its worker used 1.1 to 1.4 times its CPU alone); V: vCPUs.

B is the time for what workers share: with throughput 1 / t(m) for the fewest workers m and 1 / t(n)
for the most, B = (n t(n) - m t(m)) / (n - m). Neither workers nor hosts reduce it, unless each host
has a separate storage. It is 0 if more workers loaded as much more as the CPU allows, and at most
the extra wait that each further worker caused. Whether more workers would be faster is asked in one
place, `more_workers`. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stoker.records import Bottleneck, Limit
from stoker.records.profile import LEAST_FREE, Profile
from stoker.units import wait_share

# Worker-seconds over CPU-seconds above which a loader waits for something.
WAITS = 1.25
# Worker-seconds over CPU-seconds below which a worker only computes, as repeated measurements say.
COMPUTES = 1.1
# For a loader that waits: more workers than vCPUs help, but each costs memory.
MOST_WORKERS_PER_VCPU = 4
# Repeated measurements of one loader differ by less; more if it computes, as it shares vCPUs and
# caches.
_NOISE_WAITING = 1.1
_NOISE_COMPUTING = 1.3
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
# Minimum waiting share of a worker's time to count as evidence on its own.
_MIN_IDLE = 0.05
# Of equal terms the first is named as the limit.
LIMITS: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "network", "receive", "storage")
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
class Parts:
    """Parts of a global step on the hosts that train, all ranks and hosts together.

    Attributes:
        accelerator_seconds: Trainer's step with data at hand, with its all-reduce.
        neighbour_seconds: What loading on the same cores adds to it.
        receive_seconds: Wall-clock time of the trainer's thread to take a batch from a worker.
        loader_cpu_seconds: CPU-seconds of loading and augmenting.
        loader_wall_seconds: Worker-seconds of loading with the fewest workers.
        hidden_seconds: Of these, without workers, what passes while the accelerator computes.
        trainer_cpu_seconds: CPU-seconds of the trainer processes, receiving included.
        turns_cpu_seconds: CPU-seconds of a step beyond loading and training alone; may be negative.
        shared_seconds: Time for what workers share, with any number of them.
        fewest: Fewest workers that were tried, all hosts; 0: none were; likewise `most`.
        others_vcpus: vCPUs that other programs used, or that are reserved.
        workers: Loader workers; 0: the trainer loads between its steps.
        ranks: Trainer processes.
        hosts: Hosts that these workers are on, equally many on each.
        rates: Global batches per second of the loader alone, by the workers that were tried.
        measured_seconds: Today's step; 0: these are not today's hosts and workers.
        wait_seconds: Part of it that waits for data; None: not known.
    """

    accelerator_seconds: float = 0.0
    neighbour_seconds: float = 0.0
    receive_seconds: float = 0.0
    loader_cpu_seconds: float = 0.0
    loader_wall_seconds: float = 0.0
    hidden_seconds: float = 0.0
    trainer_cpu_seconds: float = 0.0
    turns_cpu_seconds: float = 0.0
    shared_seconds: float = 0.0
    fewest: int = 0
    most: int = 0
    vcpus: float
    others_vcpus: float = 0.0
    workers: int
    ranks: int = 1
    hosts: int = 1
    rates: Mapping[int, float] = field(default_factory=dict)
    measured_seconds: float = 0.0
    wait_seconds: float | None = None

    @property
    def free_vcpus(self) -> float:
        """vCPUs that other programs leave."""
        return max(self.vcpus - self.others_vcpus, self.vcpus * LEAST_FREE)

    @property
    def parallel_seconds(self) -> float:
        """Worker-seconds that more workers divide among them."""
        return max(0.0, self.loader_wall_seconds - self.fewest * self.shared_seconds)

    @property
    def is_shared(self) -> bool:
        """Whether workers wait longer for what they share than for their own batches."""
        return self.shared_seconds > self.parallel_seconds / max(1, self.workers)

    @property
    def waits(self) -> bool:
        """Whether a worker mostly waits for its own reads when it does not compute."""
        return self.parallel_seconds > WAITS * self.loader_cpu_seconds

    @property
    def terms(self) -> dict[Limit, float]:
        """Seconds of a step by each limit; the largest sets the pace."""
        used = self.loader_cpu_seconds + self.trainer_cpu_seconds + self.turns_cpu_seconds
        floor = self.accelerator_seconds + self.receive_seconds + self.neighbour_seconds
        terms: dict[Limit, float] = {"cpu": used / self.free_vcpus, "accelerator": floor}
        loading = self.loader_wall_seconds / self.ranks - self.hidden_seconds
        terms["latency"] = self.accelerator_seconds + max(0.0, loading)
        terms["storage"] = 0.0
        if self.workers:
            terms["latency"] = self.parallel_seconds / self.workers
            # One time, named for its remedy: of what they share, more workers get no more.
            name: Limit = "storage" if self.is_shared else "latency"
            terms[name] = self.shared_seconds + self.parallel_seconds / self.workers
        return terms

    @property
    def step_seconds(self) -> float:
        return max(self.terms.values())

    @property
    def limit(self) -> Limit:
        return largest_of(self.terms)

    @property
    def waited_share(self) -> float:
        """Share of today's step that waits for data; 1 if that is not known."""
        if not self.measured_seconds or self.wait_seconds is None:
            return 1.0
        return wait_share(step_seconds=self.measured_seconds, wait_seconds=self.wait_seconds)

    @property
    def lost_share(self) -> float:
        """Share of today's step that steps without loading would save; 1 if that is not known."""
        if not self.measured_seconds or self.wait_seconds is None:
            return 1.0
        return lost_share(
            step_seconds=self.measured_seconds,
            wait_seconds=self.wait_seconds,
            accelerator_seconds=self.accelerator_seconds + self.neighbour_seconds,
        )

    @property
    def bottleneck(self) -> Bottleneck:
        """Bottleneck of today's step, the same in profile, decide and report."""
        if self.loader_cpu_seconds == 0 and self.loader_wall_seconds == 0:
            return "none"
        if self.waited_share < LEAST_GAIN or self.lost_share < LEAST_GAIN:
            # No batch is waited for: only the CPU, which loading shares, slows the steps.
            is_cpu = self.terms["cpu"] > self.terms["accelerator"]
            return "cpu" if is_cpu and self.lost_share >= LEAST_GAIN else "accelerator"
        limit = self.limit
        if limit == "latency" and more_workers(self) is None:
            # No more workers would help: the limit is the one that would hold with them.
            limit = tuned(self, least=self.workers).limit
            if limit == "latency" and not (self.waits and self.workers):
                # A worker that computes all the time needs a core.
                return "cpu"
        return bottleneck_of(limit, waits=self.waits, workers=self.workers)

    def with_workers(self, workers: int) -> "Parts":
        """Returns the same hosts with another number of loader workers."""
        turns = self.turns_cpu_seconds
        if workers > self.workers:
            # With idle cores today's workers used less CPU than with all of them busy.
            turns = max(0.0, turns)
        return replace(
            self, workers=workers, turns_cpu_seconds=turns, measured_seconds=0.0, wait_seconds=None
        )


def largest_of(terms: Mapping[Limit, float]) -> Limit:
    # Two terms that are equal but for their last digits are one limit: the first.
    largest = max(terms.values())
    return next(name for name in LIMITS if terms.get(name, -1.0) >= largest * (1 - 1e-9))


def bottleneck_of(limit: Limit, *, waits: bool, workers: int | None) -> Bottleneck:
    """Returns the bottleneck that a limit means, where more workers would be faster.

    Args:
        limit: The slowest term of the step.
        waits: Whether workers mostly wait for their own reads when they do not compute.
        workers: Loader workers; 0: the trainer loads; None: not known.
    """
    if limit == "receive":
        return "network"
    if limit == "latency" and (workers == 0 or not waits):
        return "workers"
    return limit


def lost_share(*, step_seconds: float, wait_seconds: float, accelerator_seconds: float) -> float:
    """Returns the share of a step that steps without loading would save.

    Loading that competes with the training for CPUs costs more than the wait; a difference of
    less than `LEAST_GAIN` between the two is noise.
    """
    waited = wait_share(step_seconds=step_seconds, wait_seconds=wait_seconds)
    lost = 1 - accelerator_seconds / step_seconds
    return lost if lost > waited + LEAST_GAIN else waited


# The parts of a profile.


def parts_of(profile: Profile) -> Parts | None:
    """Returns the parts of a profile's step; None if one was not measured."""
    step = profile.step
    vcpus = profile.host.capacity
    measured = (
        step.accelerator_step_seconds,
        step.loader_cpu_seconds,
        step.loader_wall_seconds,
        step.trainer_cpu_seconds,
        step.num_workers,
    )
    if vcpus is None or None in measured:
        return None
    # A profile of numbers that were typed does not say: one a host.
    return known_parts(profile, vcpus=vcpus, ranks=profile.ranks or profile.host.count)


def known_parts(profile: Profile, *, vcpus: float, ranks: int) -> Parts:
    """Returns what a profile knows of its parts; 0 of what it does not.

    Args:
        profile: What was measured.
        vcpus: vCPUs of one host.
        ranks: Trainer processes of all hosts.
    """
    step = profile.step
    hosts = profile.host.count
    receive = step.local_receive_seconds or 0.0
    workers = math.ceil(vcpus)
    if step.num_workers is not None:
        workers = step.num_workers
    trainer = step.trainer_cpu_seconds
    loader = step.loader_cpu_seconds
    turns = 0.0
    if not workers:
        # One thread loads and trains in turn: it takes a batch from nobody. What it uses beyond
        # are threads of torch that look for work on every core while it loads.
        receive = 0.0
    elif step.used_cpu_seconds is not None and loader is not None and trainer is not None:
        turns = step.used_cpu_seconds - loader - trainer - receive * ranks
    parts = Parts(
        accelerator_seconds=step.accelerator_step_seconds or 0.0,
        neighbour_seconds=step.neighbour_seconds or 0.0,
        receive_seconds=receive,
        loader_cpu_seconds=loader or 0.0,
        loader_wall_seconds=step.loader_wall_seconds or 0.0,
        hidden_seconds=step.hidden_load_seconds or 0.0,
        # The trainer was measured on stock, which it takes from no worker.
        trainer_cpu_seconds=(trainer or 0.0) + receive * ranks,
        turns_cpu_seconds=turns,
        vcpus=vcpus * hosts,
        others_vcpus=others_vcpus_of(profile),
        workers=workers * hosts,
        ranks=ranks,
        hosts=hosts,
        rates={rate.workers * hosts: rate.steps_per_second for rate in profile.loader_rates},
        measured_seconds=step.step_seconds,
        wait_seconds=step.wait_seconds,
    )
    return _with_shared(parts, profile)


def others_vcpus_of(profile: Profile) -> float:
    """Returns the vCPUs of all hosts that other programs used; 0 if not known."""
    return (profile.observed and profile.observed.others_vcpus) or 0.0


def _with_shared(parts: Parts, profile: Profile) -> Parts:
    """Returns the parts with what the workers share, by the rates of the fewest and the most."""
    cpu = profile.step.loader_cpu_seconds
    rates = parts.rates
    if cpu is None or not rates:
        return parts
    # The ends: between them the difference is smaller, but the noise is not.
    fewest = min(rates)
    most = max(rates)
    parts = replace(parts, fewest=fewest, most=most)
    # A worker that was not timed alone is taken to compute all the time.
    wall = parts.loader_wall_seconds or cpu
    alone = 1 / rates[fewest]
    together = 1 / rates[most]
    # More workers divide the time, up to all of the CPU.
    vcpus = max(min(most, parts.vcpus - parts.others_vcpus), 1e-9)
    expected = max(fewest * alone / most, cpu / vcpus)
    noise = _NOISE_WAITING if wall > WAITS * cpu else _NOISE_COMPUTING
    if fewest == most or together <= noise * expected:
        return parts
    more = most - fewest
    waits = {rate.workers * parts.hosts: rate.wait_seconds for rate in profile.loader_rates}
    few, many = waits[fewest], waits[most]
    # The longer wait of a batch for each further worker. Where that was not measured, a single
    # worker that waits is the only evidence.
    waited = math.inf if wall - cpu > _MIN_IDLE * wall else 0.0
    if few is not None and many is not None:
        waited = (many - few) / more
    # Bounded by a single worker's time for a batch, which includes its wait.
    bounds = (1 / max(rates.values()), wall / fewest, waited)
    seconds = min((most * together - fewest * alone) / more, *bounds)
    return replace(parts, shared_seconds=max(0.0, seconds))


# More loader workers: bottleneck, states, fixes, plans and their words all follow `more_workers`.


def more_workers(parts: Parts) -> Parts | None:
    """Returns today's hosts with more loader workers, if that makes a step faster; else None.

    A step is faster only by what it waits for data today. Neither a modelled step that the
    measured one is shorter than, nor cores that are busy, nor a rate that was tried promises more.
    """
    better = tuned(parts)
    if better.workers <= parts.workers or not _is_faster_alone(parts):
        return None
    today = parts.step_seconds
    if parts.measured_seconds:
        today = min(today, parts.measured_seconds)
    # Compared as shares, as the model may miss the measured step.
    reached = max(better.step_seconds, (1 - parts.waited_share) * today)
    return better if reached < (1 - LEAST_GAIN) * today else None


def _is_faster_alone(parts: Parts) -> bool:
    """Whether no trial of the loader alone speaks against more workers than today's."""
    today = parts.rates.get(parts.workers)
    if today is None:
        return True
    # One batch a step is needed: a loader that alone makes many more is not what steps wait for.
    if today * parts.measured_seconds * _MIN_LOADING > 1:
        return False
    most = max(parts.rates)
    return most <= parts.workers or max(parts.rates.values()) > _FASTER * today


def tuned(parts: Parts, *, least: int = 1) -> Parts:
    """Returns the same hosts with as many workers as are useful, equally many on each.

    These are the fewest with a step as fast as with the most, plus a tenth for jitter. The most are
    one per free vCPU, and more where they wait.

    Args:
        parts: The hosts.
        least: Fewest workers of all hosts.
    """
    hosts = parts.hosts
    cpu = parts.loader_cpu_seconds
    parallel = parts.parallel_seconds
    # A worker that computes all the time fills a vCPU.
    waits = 1.0
    if cpu <= 0 < parallel:
        waits = math.inf
    elif cpu > 0 and parallel >= COMPUTES * cpu:
        waits = parallel / cpu
    vcpus = parts.vcpus / hosts
    most = math.ceil(min(MOST_WORKERS_PER_VCPU * vcpus, parts.free_vcpus / hosts * waits))
    step = parts.with_workers(most * hosts).step_seconds
    # A core that two workers share by hyper-threads is slower: `cpu` is with all of them.
    busy = max(parallel, cpu) / hosts
    if parts.shared_seconds > busy / most:
        # The last workers gain hardly anything: nearly the best step will do.
        step *= _NEAR_BEST
    else:
        busy *= _SPARE
    # What workers divide among them has to fit into the rest of the step.
    left = step - parts.shared_seconds
    workers = most
    if left > 0:
        # Rounding errors must not add a worker.
        workers = min(most, math.ceil(busy / left - 1e-9))
    return parts.with_workers(max(max(1, workers) * hosts, least))
