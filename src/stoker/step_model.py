"""The parts of a step, computed from a profile.

The profile's self-check and the cost model of `decide` both use this sum, so they cannot disagree.
On the hosts that train today,

    t = max( g + r + n,                     accelerator, and taking a batch from a worker
             (c + trainer + turns) / vCPUs, CPU that other programs leave
             B + (wall - m B) / workers,    the loader's time
             bytes read / storage rate )    the largest is the limit: `Parts.limit`

and g + wall / ranks if the trainer loads without workers. n is how much longer an accelerator's
step takes while workers load on the same cores, though it waits for nothing: its kernels are
launched late (see `Neighbour`). c and the trainer's CPU-seconds were
measured separately; `turns` is what the measured step used beyond both, as workers and trainer
compete for cores and caches: a trainer on one core with its worker used 1.1 to 1.4 times its CPU
alone. B is the time for what workers share: with throughput 1 / t(m) for the fewest workers m and 1
/ t(n) for the most, B = (n t(n) - m t(m)) / (n - m). Neither workers nor hosts reduce it, unless
each host has its own storage. B is 0 if more workers loaded as much more as the CPU allows, and at
most the extra wait that each further worker caused: a worker that computes all the time waits for
nothing.

Whether more workers on the same cores would be faster is asked in one place, `more_workers`:
bottleneck, states, fixes, plans and their words all follow it. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stoker.records.decision import Bottleneck, Limit
from stoker.records.other_programs import (
    LEAST_FREE,
    OTHERS,
    error_width,
    is_beyond_telling,
)
from stoker.records.profile import LoaderRate, Profile, StepTerms
from stoker.units import vcpus_words, wait_share

# Worker-seconds over CPU-seconds above which a loader waits for something.
WAITS = 1.25
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
# Worker-seconds over CPU-seconds below which a worker only computes, as repeated measurements say.
COMPUTES = 1.1
# Workers over those busy at the predicted step, for jitter.
_SPARE = 1.1
# If loading is shared: step over the best one for which the fewest workers are taken.
_NEAR_BEST = 1.05
# How an accelerator's step becomes longer with the share of the vCPUs that load, below the share
# that was measured: one H100 beside 16 cores, MobileNet-v3 with 8 and 16 busy workers 18.0 to 20.3
# and 36.0 ms, ResNet-50 34.4 to 34.4 and 38.5.
_NEIGHBOUR_POWER = 3
# Below this spread between seconds a CPU's speed is steady.
MIN_SPEED_SPREAD = 0.03
# If cold reads took longer than the step by this factor, the step reads from memory.
_IN_MEMORY = 1.15

_UNRELIABLE = "the measurement is not reliable"
AGAIN = "profile again on a quiet machine"

_ORDER: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "storage")
# Minimum waiting share of a worker's time to count as evidence on its own.
_MIN_IDLE = 0.05

_WORDS: Mapping[Bottleneck, str] = {
    "cpu": "the CPU",
    "workers": "too few loader workers",
    "latency": "what each loader worker waits for (latency)",
    "accelerator": "the accelerator",
    "launch": "the script's own thread, which launches the GPU's work",
    "storage": "the storage or network, which all workers share",
    "network": "the network",
    "none": "the training itself: loading costs nothing",
    "unexplained": "not explained",
}


def limit_words(bottleneck: Bottleneck) -> str:
    """Returns the bottleneck as text, the same in profile, decide and report."""
    return _WORDS[bottleneck]


def bottleneck_of(limit: Limit, *, waits: bool, workers: int | None) -> Bottleneck:
    """Returns the bottleneck that a limit means, where more workers would be faster.

    Args:
        limit: The slowest term of the step.
        waits: Whether workers mostly wait for their own reads when they do not compute.
        workers: Loader workers; 0: the trainer loads; None: not known.
    """
    if limit == "receive":
        return "network"
    if limit != "latency":
        return limit
    # With num_workers=0 workers come first, even for a loader that waits.
    if waits and workers != 0:
        return "latency"
    return "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoading:
    """A resource that loader workers share, by their measured throughput.

    Attributes:
        seconds: Time of a global step with any number of workers; 0: more workers load more.
        least: Fewest workers tried, all hosts; 0: not known; likewise for `most`.
    """

    seconds: float = 0.0
    least: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """What loader workers on the same cores add to an accelerator's step that waits for nothing.

    Attributes:
        seconds: Measured; 0: nothing, or not measured.
        loading_share: Share of the vCPUs that loading kept busy during that time.
    """

    seconds: float = 0.0
    loading_share: float = 0.0

    def seconds_at(self, loading_share: float) -> float:
        """Returns what another share of loading adds: no more than in proportion above today's."""
        if not self.loading_share:
            return 0.0
        ratio = loading_share / self.loading_share
        if ratio > 1:
            return self.seconds * ratio
        return float(self.seconds * ratio**_NEIGHBOUR_POWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a global step on the hosts that train, all ranks and hosts together.

    Attributes:
        accelerator_seconds: Trainer's step with data at hand.
        transfer_seconds: Part of it in which the accelerator waits for copies from the host.
        neighbour: What workers on the same cores add to it.
        receive_seconds: Wall-clock time of the trainer's thread to take a batch from a worker.
        loader_wall_seconds: Worker-seconds of loading with the fewest workers.
        hidden_seconds: Of these, without workers, what passes while the accelerator computes.
        trainer_cpu_seconds: CPU-seconds of the trainer processes, receiving included.
        turns_cpu_seconds: CPU-seconds of a step beyond loading and training alone; may be negative.
        others_vcpus: vCPUs that other programs used.
        workers: Loader workers; 0: the trainer loads between its steps.
        hosts: Hosts that these workers are on, equally many on each.
        read_seconds: Storage time of a step's bytes; 0: fast enough, or not known.
        rates: Global batches per second of the loader alone, by the number of workers that was
            tried, all hosts.
        measured_seconds: Today's step; 0: these are not today's hosts and workers.
        wait_seconds: Part of it that waits for data; None: not known.
    """

    accelerator_seconds: float
    transfer_seconds: float = 0.0
    neighbour: Neighbour = Neighbour()
    receive_seconds: float
    loader_cpu_seconds: float
    loader_wall_seconds: float
    hidden_seconds: float = 0.0
    trainer_cpu_seconds: float
    turns_cpu_seconds: float = 0.0
    vcpus: float
    others_vcpus: float = 0.0
    workers: int
    ranks: int = 1
    hosts: int = 1
    read_seconds: float = 0.0
    shared: SharedLoading = SharedLoading()
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
        return max(0.0, self.loader_wall_seconds - self.shared.least * self.shared.seconds)

    @property
    def is_shared(self) -> bool:
        """Whether workers wait longer for what they share than for their own batches."""
        return self.shared.seconds > self.parallel_seconds / max(1, self.workers)

    def loading_share(self, local_share: float = 1.0) -> float:
        """Returns the share of the vCPUs that loading needs at the accelerator's pace.

        Args:
            local_share: Share of the batches that these hosts make.
        """
        pace = self.accelerator_seconds + self.receive_seconds
        if pace <= 0:
            return 0.0
        busy = min(self.workers, local_share * self.loader_cpu_seconds / pace, self.free_vcpus)
        return busy / self.free_vcpus

    @property
    def neighbour_seconds(self) -> float:
        """Seconds that loading on these hosts adds to the accelerator's step."""
        return self.neighbour.seconds_at(self.loading_share())

    @property
    def terms(self) -> Mapping[Limit, float]:
        """Seconds of a step by each limit; the largest sets the pace."""
        floor = self.accelerator_seconds + self.receive_seconds + self.neighbour_seconds
        used = self.loader_cpu_seconds + self.trainer_cpu_seconds + self.turns_cpu_seconds
        cpu = used / self.free_vcpus
        storage = self.read_seconds
        if self.workers == 0:
            loading = max(0.0, self.loader_wall_seconds / self.ranks - self.hidden_seconds)
            latency = self.accelerator_seconds + loading
        else:
            divided = self.parallel_seconds / self.workers
            latency = self.shared.seconds + divided
            if self.is_shared:
                # The same time, named for its remedy: more workers do not help.
                latency, storage = divided, max(storage, latency)
        return {"cpu": cpu, "accelerator": floor, "latency": latency, "storage": storage}

    @property
    def step_seconds(self) -> float:
        return max(self.terms.values())

    @property
    def limit(self) -> Limit:
        terms = self.terms
        step = self.step_seconds
        return next(name for name in _ORDER if terms[name] >= step * (1 - 1e-9))

    @property
    def waits(self) -> bool:
        """Whether a worker mostly waits for its own reads when it does not compute."""
        return self.parallel_seconds > WAITS * self.loader_cpu_seconds

    @property
    def waited_share(self) -> float:
        """Share of today's step that waits for data; 1 if that is not known."""
        if not self.measured_seconds or self.wait_seconds is None:
            return 1.0
        return wait_share(step_seconds=self.measured_seconds, wait_seconds=self.wait_seconds)

    @property
    def lost_share(self) -> float:
        """Share of today's step that cached batches would save; 1 if that is not known."""
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
        if self.lost_share < LEAST_GAIN:
            return "accelerator"
        if self.waited_share < LEAST_GAIN:
            # No batch is waited for: only the CPU, which loading shares, slows the steps.
            if self.terms["cpu"] > self.terms["accelerator"]:
                return "cpu"
            return "accelerator"
        limit = self.limit
        if limit != "latency" or more_workers(self) is not None:
            return bottleneck_of(limit, waits=self.waits, workers=self.workers)
        # No more workers would help: the limit is the one that would hold with them.
        limit = tuned(self, least=self.workers).limit
        if limit != "latency":
            return bottleneck_of(limit, waits=self.waits, workers=self.workers)
        if self.waits and self.workers:
            return "latency"
        # A worker that computes all the time needs a core.
        return "cpu"

    def with_workers(self, workers: int) -> "Parts":
        """Returns the same hosts with another number of loader workers."""
        turns = self.turns_cpu_seconds
        if workers > self.workers:
            # With idle cores today's workers used less CPU than with all of them busy.
            turns = max(0.0, turns)
        return replace(
            self, workers=workers, turns_cpu_seconds=turns, measured_seconds=0.0, wait_seconds=None
        )


def parts_of(profile: Profile, *, ranks: int | None = None) -> Parts | None:
    """Returns the parts of a profile's step; None if one was not measured."""
    step = profile.step
    vcpus = profile.host.capacity
    hosts = profile.host.count
    if (
        step is None
        or vcpus is None
        or step.accelerator_step_seconds is None
        or step.loader_cpu_seconds is None
        or step.loader_wall_seconds is None
        or step.trainer_cpu_seconds is None
        or step.num_workers is None
    ):
        return None
    ranks = ranks or _ranks_of(profile)
    receive, taking = _taking_seconds(step)
    others = others_vcpus_of(profile)
    parts = Parts(
        accelerator_seconds=step.accelerator_step_seconds,
        transfer_seconds=min(step.transfer_seconds or 0.0, step.accelerator_step_seconds),
        receive_seconds=receive,
        loader_cpu_seconds=step.loader_cpu_seconds,
        loader_wall_seconds=step.loader_wall_seconds,
        hidden_seconds=step.hidden_load_seconds or 0.0,
        # The trainer was measured with cached batches, which it takes from no worker.
        trainer_cpu_seconds=step.trainer_cpu_seconds + taking * ranks,
        turns_cpu_seconds=turns_cpu_seconds(step, ranks=ranks),
        vcpus=vcpus * hosts,
        others_vcpus=others,
        workers=step.num_workers * hosts,
        ranks=ranks,
        hosts=hosts,
        read_seconds=read_seconds(profile),
        shared=shared_of(profile, vcpus=vcpus * hosts - others),
        rates=rates_of(profile),
        measured_seconds=step.step_seconds,
        wait_seconds=step.wait_seconds,
    )
    return with_neighbour(parts, seconds=step.neighbour_seconds or 0.0)


def _ranks_of(profile: Profile) -> int:
    ranks = profile.what.get("ranks")
    if isinstance(ranks, int):
        return ranks
    # A profile of numbers that were typed does not say: one a host.
    return profile.host.count


def _taking_seconds(step: StepTerms) -> tuple[float, float]:
    """Returns what taking a batch from a worker costs a rank: seconds, and CPU-seconds."""
    if not step.num_workers:
        # The trainer's own thread loads.
        return 0.0, 0.0
    handover = step.handover_seconds or 0.0
    local = step.local_receive_seconds
    if local is None:
        return max(step.receive_seconds or 0.0, handover), 0.0
    # The longer of the worker's answer and the trainer's own CPU time.
    return max(local, handover), local


def with_neighbour(parts: Parts, *, seconds: float) -> Parts:
    """Returns the parts of the hosts on which loading was measured to add `seconds` to a step."""
    share = parts.loading_share()
    return replace(parts, neighbour=Neighbour(seconds=seconds, loading_share=share))


def rates_of(profile: Profile) -> Mapping[int, float]:
    """Returns global batches per second of the loader alone, by workers of all hosts."""
    hosts = profile.host.count
    return {rate.workers * hosts: rate.steps_per_second for rate in profile.loader_rates}


def lost_share(*, step_seconds: float, wait_seconds: float, accelerator_seconds: float) -> float:
    """Returns the share of a step that cached batches would save.

    Loading that competes with the training for CPUs costs more than the wait; a difference of
    less than `LEAST_GAIN` between the two is noise.
    """
    waited = wait_share(step_seconds=step_seconds, wait_seconds=wait_seconds)
    lost = 1 - accelerator_seconds / step_seconds
    if lost > waited + LEAST_GAIN:
        return lost
    return waited


def turns_cpu_seconds(step: StepTerms, *, ranks: int) -> float:
    """Returns CPU-seconds that a step used beyond loading and training apart; 0: not known."""
    used = step.used_cpu_seconds
    loader = step.loader_cpu_seconds
    trainer = step.trainer_cpu_seconds
    if used is None or loader is None or trainer is None:
        return 0.0
    if step.num_workers == 0:
        # One thread loads and trains in turn. What it uses beyond are threads of torch that look
        # for work on every core while it loads: a worker has none.
        return 0.0
    return used - loader - trainer - (step.local_receive_seconds or 0.0) * ranks


def read_seconds(profile: Profile) -> float:
    """Returns the storage time of a step; 0: fast enough, or not known."""
    step = profile.timed_step
    if step.storage_bytes_per_second is None or not step.read_bytes:
        return 0.0
    seconds = step.read_bytes / (step.storage_bytes_per_second * profile.host.count)
    if seconds > _IN_MEMORY * step.step_seconds:
        return 0.0
    return seconds


def shared_of(profile: Profile, *, vcpus: float) -> SharedLoading:
    """Returns what the profile's loader workers share, on `vcpus` of all hosts."""
    step = profile.timed_step
    hosts = profile.host.count
    cpu = step.loader_cpu_seconds
    wall = step.loader_wall_seconds
    rates = sorted(profile.loader_rates, key=lambda rate: rate.workers)
    if cpu is None or not rates:
        return SharedLoading()
    if wall is None:
        # A worker that was not timed alone is taken to compute all the time.
        wall = cpu
    few = rates[0]
    many = rates[-1]
    least = few.workers * hosts
    most = many.workers * hosts
    if least == most:
        return SharedLoading(least=least, most=most)
    # The ends: between them the difference is smaller, but the noise is not.
    alone = 1 / few.steps_per_second
    together = 1 / many.steps_per_second
    # More workers divide the time, up to all of the CPU.
    expected = max(least * alone / most, cpu / max(min(most, vcpus), 1e-9))
    noise = _NOISE_WAITING if wall > WAITS * cpu else _NOISE_COMPUTING
    if together <= noise * expected:
        return SharedLoading(least=least, most=most)
    best = min(1 / rate.steps_per_second for rate in rates)
    # Bounded by a single worker's time for a batch, which includes its wait.
    seconds = min((most * together - least * alone) / (most - least), best, wall / least)
    return SharedLoading(
        seconds=max(0.0, min(seconds, _waited(few, many, wall=wall, cpu=cpu, more=most - least))),
        least=least,
        most=most,
    )


def _waited(few: LoaderRate, many: LoaderRate, *, wall: float, cpu: float, more: int) -> float:
    """Returns the longer wait of a batch for each further worker, which bounds what is shared."""
    if few.wait_seconds is None or many.wait_seconds is None:
        # Not measured with many workers: a single worker that waits is the only evidence.
        if wall - cpu > _MIN_IDLE * wall:
            return math.inf
        return 0.0
    return (many.wait_seconds - few.wait_seconds) / more


def others_vcpus_of(profile: Profile) -> float:
    """Returns the vCPUs of all hosts that other programs used; 0 if not known."""
    observed = profile.observed
    if observed is None:
        return 0.0
    return observed.others_vcpus or 0.0


def others_width(profile: Profile, *, vcpus: float) -> float:
    """Returns the relative error that other programs may cause; 0 if they are negligible."""
    return error_width(others_vcpus_of(profile), vcpus=vcpus)


def speed_width(profile: Profile) -> float:
    """Returns the relative error from the CPU's changing speed; 0 if it was steady."""
    if profile.observed is None:
        return 0.0
    spread = profile.observed.cpu_speed_spread or 0.0
    if spread < MIN_SPEED_SPREAD:
        return 0.0
    # Two standard deviations of seconds: profile and training differ by about one each, as slow
    # changes matter more than fast ones.
    return 2 * spread


def speed_words(profile: Profile) -> str:
    """Returns a warning that the CPU's speed varied; empty if it was steady."""
    width = speed_width(profile)
    if not width:
        return ""
    return (
        f"the CPU's speed varied by {width / 2:.0%} between seconds of the profile: "
        "other machines probably share its cores"
    )


def too_busy(profile: Profile, *, vcpus: float, machine_vcpus: float | None = None) -> str:
    """Returns why other programs make the profile too noisy; empty if they do not.

    Args:
        vcpus: vCPUs of all hosts.
        machine_vcpus: vCPUs of the machine that all plans must share; None: hosts have their own.
    """
    if is_beyond_telling(others_vcpus_of(profile), vcpus=vcpus):
        return f"{_UNRELIABLE}: {OTHERS} {others_vcpus_of(profile):.1f} of the {vcpus_words(vcpus)}"
    elsewhere = (profile.observed.elsewhere_vcpus if profile.observed else None) or 0.0
    rest = (machine_vcpus or 0.0) - vcpus
    if rest > 0 and is_beyond_telling(elsewhere, vcpus=rest):
        other = "vCPU" if rest == 1 else vcpus_words(rest)
        return f"{_UNRELIABLE}: {OTHERS} {elsewhere:.1f} of this machine's other {other}"
    return ""


def most_workers(*, vcpus: float, parallel: float, cpu: float, free: float | None = None) -> int:
    """Returns the maximum useful workers of a host: one per free vCPU, more if they wait.

    Args:
        vcpus: vCPUs of the host.
        parallel: Worker-seconds that the workers divide among them.
        cpu: CPU-seconds of these.
        free: vCPUs that other programs leave; None: all.
    """
    if free is None:
        free = vcpus
    most = MOST_WORKERS_PER_VCPU * vcpus
    if cpu > 0:
        waits = parallel / cpu
        if waits < COMPUTES:
            # A worker that computes all the time fills a vCPU.
            waits = 1.0
        most = min(most, free * waits)
    elif parallel == 0:
        most = free
    return math.ceil(most)


def useful_workers(*, parallel: float, shared: float, step: float, most: int) -> int:
    """Returns the fewest workers with a step as fast as with `most`, plus a tenth for jitter.

    Args:
        parallel: Worker-seconds that they divide among them, with busy vCPUs.
        shared: Seconds that workers do not reduce.
        step: Seconds of a step with `most` workers.
    """
    if shared > parallel / most:
        # The last workers gain hardly anything: nearly the best step will do.
        step *= _NEAR_BEST
    else:
        parallel *= _SPARE
    # What workers divide among them has to fit into the rest of the step.
    left = step - shared
    if left <= 0:
        return max(1, most)
    # Rounding errors must not add a worker.
    return max(1, min(most, math.ceil(parallel / left - 1e-9)))


def busy_worker_seconds(*, parallel: float, cpu: float) -> float:
    """Returns worker-seconds of loading with every vCPU busy, from those of a lone worker.

    A core that two workers share by hyper-threads is slower: `cpu` was measured with all of them.
    """
    return max(parallel, cpu)


def tuned(parts: Parts, *, least: int = 1) -> Parts:
    """Returns the same hosts with as many workers as are useful, equally many on each.

    Args:
        least: Fewest workers of all hosts.
    """
    hosts = parts.hosts
    parallel = parts.parallel_seconds
    cpu = parts.loader_cpu_seconds
    most = most_workers(
        vcpus=parts.vcpus / hosts, free=parts.free_vcpus / hosts, parallel=parallel, cpu=cpu
    )
    workers = useful_workers(
        parallel=busy_worker_seconds(parallel=parallel, cpu=cpu) / hosts,
        shared=parts.shared.seconds,
        step=parts.with_workers(most * hosts).step_seconds,
        most=most,
    )
    return parts.with_workers(max(workers * hosts, least))


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
    if reached >= (1 - LEAST_GAIN) * today:
        return None
    return better


def _is_faster_alone(parts: Parts) -> bool:
    """Whether no trial of the loader alone speaks against more workers than today's."""
    today = parts.rates.get(parts.workers)
    if today is None:
        return True
    # One batch a step is needed: a loader that alone makes many more is not what steps wait for.
    if today * parts.measured_seconds * _MIN_LOADING > 1:
        return False
    more = [rate for workers, rate in parts.rates.items() if workers > parts.workers]
    return not more or max(more) > _FASTER * today
