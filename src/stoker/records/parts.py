"""The parts of a step are what the terms of a profile give together.

This is the only sum. The profile's self-check and the cost model of `decide` both take it from
here, so that they cannot say two things about one step. On the hosts that train today,

    t = max( g + r,                         the accelerator, and taking a batch from a worker
             (c + trainer + turns) / vCPUs, CPU that other programs leave
             B + (wall - m B) / workers,    the loader's own time
             bytes read / storage rate )      and the largest is the limit: `Parts.limit`

and g + wall / ranks where the trainer loads on its own. c and the trainer's CPU-seconds were
measured apart; `turns` is what the measured step used beyond them, as workers and trainer take
turns on cores and caches: a trainer on one core with its worker used 1.1 to 1.4 times the CPU that
it uses alone. B is what the workers share: the measured throughput by worker count (1 / t(m) with
the fewest workers m, 1 / t(n) with the most) gives B = (n t(n) - m t(m)) / (n - m), which no worker
and no host makes shorter unless the hosts have a storage each. B is 0 where more workers loaded
more, as far as the CPU allows it, and never more than what each further worker made a batch wait
longer: a worker that computes all of its time waits for nothing, however few batches it makes on
vCPUs that other programs use. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.records.decision import Bottleneck, Limit
from stoker.records.profile import LoaderRate, Profile, StepTerms
from stoker.text import vcpus_words

# A loader that needs more worker-seconds than this over its CPU-seconds waits for something.
WAITS = 1.25
# Workers of a loader that waits: more than vCPUs, yet each costs memory.
MOST_WORKERS_PER_VCPU = 4
# Throughputs of one loader, tried twice, differ by less: by little where it waits, and by more
# where it computes, on vCPUs and caches that are not its own.
_NOISE_WAITING = 1.1
_NOISE_COMPUTING = 1.3
# Workers beyond those that are busy at the predicted step, against jitter.
_SPARE = 1.1
# Where loading is shared: the fewest workers that come so near to the best.
_NEAR_BEST = 1.05
# Below this share of the vCPUs nothing was measured on them.
LEAST_FREE = 0.02
# Other programs that keep more of the vCPUs busy than this make the numbers doubtful.
MAX_OTHERS = 0.10
# A CPU's own speed that differs by less from second to second is steady.
MIN_SPEED_SPREAD = 0.03
# What other programs took they may leave, or take again from the plan: a step may be so much
# longer as they took over what they left. From here on that is beyond any band: nothing is said.
_BEYOND_TELLING = 0.6
# A storage that would take so much longer than the step is not what the step reads from.
_IN_MEMORY = 1.15

# How the reason begins where other programs make a profile too noisy.
OTHERS = "other programs were using"
AGAIN = "profile again on a quiet machine"

_ORDER: tuple[Limit, ...] = ("cpu", "accelerator", "latency", "storage")
# Less waiting than this of a worker's time is no evidence, in a profile that says only that.
_MIN_IDLE = 0.05

_WORDS: Mapping[Bottleneck, str] = {
    "cpu": "the CPU",
    "workers": "too few loader workers",
    "latency": "what each loader worker waits for (latency)",
    "accelerator": "the accelerator",
    "storage": "the storage or network, which all workers share",
    "network": "the network",
    "none": "the training itself: loading costs nothing",
    "unexplained": "not explained",
}


def limit_words(bottleneck: Bottleneck) -> str:
    """Says what sets the pace today: the same words in profile, decide and report."""
    return _WORDS[bottleneck]


def bottleneck_of(limit: Limit, *, waits: bool, workers: int | None) -> Bottleneck:
    """Names the limit of today's step by what is to be done about it.

    Args:
        limit: The slowest term of the step.
        waits: Whether a worker waits for its own reads for most of the time in which it does not
            compute.
        workers: Loader workers today; 0: the trainer loads; None: not known.
    """
    if limit == "latency":
        # With num_workers=0 even a loader that waits is first of all short of workers.
        return "latency" if waits and workers != 0 else "workers"
    return "network" if limit == "receive" else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoading:
    """Describes the resource that loader workers share, by their measured throughput.

    Attributes:
        seconds: Time of a global step with any number of workers; 0: more workers load more.
        least: The fewest workers that were tried, of all hosts; 0: not known.
        most: The most workers that were tried, of all hosts; 0: not known.
    """

    seconds: float = 0.0
    least: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Holds the parts of a global step on the hosts that train, all ranks together.

    Attributes:
        accelerator_seconds: Time of the trainer's step with data at hand.
        receive_seconds: Wall-clock time of the trainer's thread to take a batch from a worker.
        loader_cpu_seconds: CPU-seconds of loading.
        loader_wall_seconds: Worker-seconds of loading with the fewest workers.
        trainer_cpu_seconds: CPU-seconds of the trainer processes, receiving inside.
        turns_cpu_seconds: CPU-seconds that a step used beyond loading and training apart; below 0
            where it used less.
        vcpus: vCPUs of all hosts.
        others_vcpus: vCPUs that other programs kept busy.
        workers: Loader workers of all hosts; 0: the trainer loads on its own, between its steps.
        ranks: Trainer processes of all hosts.
        read_seconds: What the storage needs for a step's bytes; 0: it keeps up, or is not known.
        shared: What the workers share.
    """

    accelerator_seconds: float
    receive_seconds: float
    loader_cpu_seconds: float
    loader_wall_seconds: float
    trainer_cpu_seconds: float
    turns_cpu_seconds: float = 0.0
    vcpus: float
    others_vcpus: float = 0.0
    workers: int
    ranks: int = 1
    read_seconds: float = 0.0
    shared: SharedLoading = SharedLoading()

    @property
    def free_vcpus(self) -> float:
        """Returns the vCPUs that other programs leave."""
        return max(self.vcpus - self.others_vcpus, self.vcpus * LEAST_FREE)

    @property
    def parallel_seconds(self) -> float:
        """Returns the worker-seconds that more workers divide among them."""
        return max(0.0, self.loader_wall_seconds - self.shared.least * self.shared.seconds)

    @property
    def is_shared(self) -> bool:
        """Returns whether workers wait longer for what they share than each for its own batch."""
        return self.shared.seconds > self.parallel_seconds / max(1, self.workers)

    @property
    def terms(self) -> Mapping[Limit, float]:
        """Returns the seconds of a step that each limit asks for; the slowest one sets the pace."""
        floor = self.accelerator_seconds + self.receive_seconds
        used = self.loader_cpu_seconds + self.trainer_cpu_seconds + self.turns_cpu_seconds
        cpu = used / self.free_vcpus
        latency, storage = 0.0, self.read_seconds
        if self.workers == 0:
            latency = self.accelerator_seconds + self.loader_wall_seconds / self.ranks
        else:
            divided = self.parallel_seconds / self.workers
            latency = self.shared.seconds + divided
            if self.is_shared:
                # The same time under the name of what is to be done about it: no worker makes it
                # shorter.
                latency, storage = divided, max(storage, latency)
        return {"cpu": cpu, "accelerator": floor, "latency": latency, "storage": storage}

    @property
    def step_seconds(self) -> float:
        """Returns the step that the parts give: the slowest of the things that overlap."""
        return max(self.terms.values())

    @property
    def limit(self) -> Limit:
        """Returns the term that sets the pace."""
        terms, step = self.terms, self.step_seconds
        return next(name for name in _ORDER if terms[name] >= step * (1 - 1e-9))

    @property
    def bottleneck(self) -> Bottleneck:
        """Returns the limit of today's step: the one answer of profile, decide and report."""
        if self.loader_cpu_seconds == 0 and self.loader_wall_seconds == 0:
            return "none"
        waits = self.parallel_seconds > WAITS * self.loader_cpu_seconds
        return bottleneck_of(self.limit, waits=waits, workers=self.workers)


def parts_of(profile: Profile, *, ranks: int | None = None) -> Parts | None:
    """Returns the parts of a profile's step; None where one of them was not measured.

    Args:
        ranks: Trainer processes of all hosts; absent: as the profile says.
    """
    step, vcpus, hosts = profile.step, profile.host.capacity, profile.host.count
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
    said = profile.what.get("ranks")
    ranks = ranks or (said if isinstance(said, int) else hosts)
    local = step.local_receive_seconds
    receive = (step.receive_seconds or 0.0) if local is None else local
    # Taking a batch lasts as long as the worker's answer or the trainer's own CPU time, the longer
    # one.
    receive = max(receive, step.handover_seconds or 0.0)
    others = others_vcpus_of(profile)
    return Parts(
        accelerator_seconds=step.accelerator_step_seconds,
        receive_seconds=receive if step.num_workers else 0.0,
        loader_cpu_seconds=step.loader_cpu_seconds,
        loader_wall_seconds=step.loader_wall_seconds,
        trainer_cpu_seconds=step.trainer_cpu_seconds
        # Measured with cached batches, which nobody hands over.
        + ((local or 0.0) * ranks if step.num_workers else 0.0),
        turns_cpu_seconds=turns_cpu_seconds(step, ranks=ranks),
        vcpus=vcpus * hosts,
        others_vcpus=others,
        workers=step.num_workers * hosts,
        ranks=ranks,
        read_seconds=read_seconds(profile),
        shared=shared_of(profile, vcpus=vcpus * hosts - others),
    )


def turns_cpu_seconds(step: StepTerms, *, ranks: int) -> float:
    """Returns CPU-seconds that a step used beyond loading and training apart; 0: not known."""
    used, loader, trainer = (
        step.used_cpu_seconds,
        step.loader_cpu_seconds,
        step.trainer_cpu_seconds,
    )
    if used is None or loader is None or trainer is None:
        return 0.0
    receive = (step.local_receive_seconds or 0.0) * ranks if step.num_workers else 0.0
    return used - loader - trainer - receive


def read_seconds(profile: Profile) -> float:
    """Returns the seconds that today's storage needs for a step; 0: it keeps up, or not known."""
    step = profile.timed_step
    if step.storage_bytes_per_second is None or not step.read_bytes:
        return 0.0
    seconds = step.read_bytes / (step.storage_bytes_per_second * profile.host.count)
    # Cold reads would take longer than the step itself did: it found its files in memory.
    return 0.0 if seconds > _IN_MEMORY * step.step_seconds else seconds


def shared_of(profile: Profile, *, vcpus: float) -> SharedLoading:
    """Returns what the profile's loader workers share, on so many vCPUs of all hosts."""
    step, hosts = profile.timed_step, profile.host.count
    cpu = step.loader_cpu_seconds
    if cpu is None:
        return SharedLoading()
    wall = step.loader_wall_seconds
    return shared_by_rates(
        profile.loader_rates, wall=cpu if wall is None else wall, cpu=cpu, vcpus=vcpus, hosts=hosts
    )


def shared_by_rates(
    rates: Sequence[LoaderRate], *, wall: float, cpu: float, vcpus: float, hosts: int = 1
) -> SharedLoading:
    """Returns what the workers share, by throughputs at different numbers of them.

    Args:
        rates: Rates of the loader alone.
        wall: Worker-seconds of a step's loading.
        cpu: CPU-seconds of it.
        vcpus: vCPUs of all hosts that the loader had.
        hosts: Hosts that the loader was tried on at once.
    """
    known = sorted(rates, key=lambda rate: rate.workers)
    if not known:
        return SharedLoading()
    few, many = known[0], known[-1]
    least, most = few.workers * hosts, many.workers * hosts
    if least == most:
        return SharedLoading(least=least, most=most)
    # The two ends tell most: between them the difference is smaller, and the noise is not.
    alone, together = 1 / few.steps_per_second, 1 / many.steps_per_second
    # What more workers should reach: the time divided among them, or all of the CPU.
    expected = max(least * alone / most, cpu / max(min(most, vcpus), 1e-9))
    noise = _NOISE_WAITING if wall > WAITS * cpu else _NOISE_COMPUTING
    if together <= noise * expected:
        return SharedLoading(least=least, most=most)
    best = min(1 / rate.steps_per_second for rate in known)
    # A lone worker waits for what it shares within its own time for a batch.
    seconds = min((most * together - least * alone) / (most - least), best, wall / least)
    return SharedLoading(
        seconds=max(0.0, min(seconds, _waited(few, many, wall=wall, cpu=cpu, more=most - least))),
        least=least,
        most=most,
    )


def _waited(few: LoaderRate, many: LoaderRate, *, wall: float, cpu: float, more: int) -> float:
    """Returns how much longer a batch waits for each further worker: what is shared is no more."""
    if few.wait_seconds is None or many.wait_seconds is None:
        # Nobody looked while many were at work: a lone worker that waits is all the evidence.
        return math.inf if wall - cpu > _MIN_IDLE * wall else 0.0
    return (many.wait_seconds - few.wait_seconds) / more


def others_vcpus_of(profile: Profile) -> float:
    """Returns the vCPUs of all hosts that other programs kept busy; 0 where not known."""
    observed = profile.observed
    return 0.0 if observed is None else observed.others_vcpus or 0.0


def others_width(profile: Profile, *, vcpus: float) -> float:
    """Returns the relative error that other programs may cause; 0 where they are hardly there.

    Args:
        vcpus: vCPUs of all hosts.
    """
    return _width(others_vcpus_of(profile), vcpus=vcpus)


def _width(busy: float, *, vcpus: float) -> float:
    # Never all of them: what they left is divided by.
    others = min(busy, vcpus * (1 - LEAST_FREE))
    return others / (vcpus - others) if others > MAX_OTHERS * vcpus else 0.0


def speed_width(profile: Profile) -> float:
    """Returns the relative error that the CPU's own speed may cause; 0 where it was steady."""
    spread = profile.observed.cpu_speed_spread if profile.observed else None
    # Two standard deviations of a second: minutes of the profile and of the training that follows
    # differ by about one each, as slow changes weigh more than fast ones.
    return 2 * spread if spread is not None and spread >= MIN_SPEED_SPREAD else 0.0


def speed_words(profile: Profile) -> str:
    """Says that the CPU's own speed varied; empty where it was steady."""
    width = speed_width(profile)
    if not width:
        return ""
    return (
        f"the CPU's own speed varied by {width / 2:.0%} from second to second while it was "
        "profiled: other machines probably share its cores"
    )


def too_busy(profile: Profile, *, vcpus: float, machine_vcpus: float | None = None) -> str:
    """Returns why other programs make the profile too noisy; empty where they do not.

    Args:
        vcpus: vCPUs of all hosts.
        machine_vcpus: vCPUs of the machine that all plans must run on; None: they have their own.
    """
    if others_width(profile, vcpus=vcpus) > _BEYOND_TELLING:
        return (
            f"{OTHERS} {others_vcpus_of(profile):.1f} of the {vcpus_words(vcpus)}, so the "
            "measurement is not reliable"
        )
    elsewhere = (profile.observed.elsewhere_vcpus if profile.observed else None) or 0.0
    rest = (machine_vcpus or 0.0) - vcpus
    if rest > 0 and _width(elsewhere, vcpus=rest) > _BEYOND_TELLING:
        other = "vCPU" if rest == 1 else vcpus_words(rest)
        return (
            f"{OTHERS} {elsewhere:.1f} of this machine's other {other}, so the "
            "measurement is not reliable"
        )
    return ""


def most_workers(*, vcpus: float, parallel: float, cpu: float) -> int:
    """Returns the workers of a host that can be of use: a vCPU each, and more where they wait."""
    waits = max(1.0, parallel / cpu) if cpu > 0 else MOST_WORKERS_PER_VCPU if parallel > 0 else 1.0
    return math.ceil(vcpus * min(waits, MOST_WORKERS_PER_VCPU))


def useful_workers(*, parallel: float, shared: float, step: float, most: int) -> int:
    """Returns the fewest workers with a step as fast as with `most`, and a tenth more for jitter.

    Args:
        parallel: Worker-seconds that they divide among them.
        shared: Seconds that no worker makes shorter.
        step: Seconds of a step with `most` workers.
    """
    is_shared = shared > parallel / most
    left = (_NEAR_BEST * step if is_shared else step) - shared
    busy = (parallel if is_shared else _SPARE * parallel) / left if left > 0 else float(most)
    # Of numbers that are whole but for the last digits, no worker more.
    return max(1, min(most, math.ceil(busy - 1e-9)))


def tuned(parts: Parts, *, hosts: int = 1) -> Parts:
    """Returns the same hosts with as many workers as are of use, the same number on each."""
    vcpus = parts.vcpus / hosts
    parallel = parts.parallel_seconds
    most = most_workers(vcpus=vcpus, parallel=parallel, cpu=parts.loader_cpu_seconds)
    # As fast as with the most of them, then as few as give that.
    best = replace(parts, workers=most * hosts).step_seconds
    workers = useful_workers(
        parallel=parallel / hosts, shared=parts.shared.seconds, step=best, most=most
    )
    return replace(parts, workers=workers * hosts)
