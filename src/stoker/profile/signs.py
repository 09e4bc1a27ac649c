"""The signs of one rank by which the states of a training are told. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.profile.evidence import Evidence
from stoker.profile.raw import AsIs, Drain, RankResult
from stoker.records import Parts

# Below this share of a step a state is not worth a line; it is what two profiles of one training
# differ by.
MIN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What a rank's phases say together.

    Attributes:
        rank: As it was measured.
        as_is: Its steps.
        evidence: What was seen beside them; nothing was, where all is zero.
        alone: The loader with its fewest workers, and
        many: with its most, where it was tried with more than one number of them.
    """

    rank: RankResult
    as_is: AsIs
    evidence: Evidence
    alone: Drain | None
    many: Drain | None

    @property
    def workers(self) -> int:
        """Of this rank's loader."""
        return self.rank.loader.num_workers if self.rank.loader else 0

    @property
    def step_seconds(self) -> float:
        """As is."""
        return self.as_is.step_seconds.median

    @property
    def wait_share(self) -> float:
        """Of a step, in next(); 0 to 1."""
        return min(1.0, self.as_is.wait_seconds.median / self.step_seconds)

    @property
    def lost_share(self) -> float:
        """Of a step, what it takes longer than with cached batches, waiting included; 0 to 1."""
        if self.rank.accelerator is None:
            return self.wait_share
        replayed = self.rank.accelerator.step_seconds.median
        return max(self.wait_share, 1 - replayed / self.step_seconds)

    @property
    def worker_idle_share(self) -> float:
        """Of a worker's time for a batch, what it neither computes nor waits for a CPU; 0 to 1."""
        if self.alone is None or self.alone.wall_seconds.mean <= 0:
            return 0.0
        return max(0.0, 1 - self.alone.cpu_seconds.mean / self.alone.wall_seconds.mean)

    @property
    def gain(self) -> float:
        """How much faster the loader is with `many` workers than `alone`; 0: not known."""
        if self.alone is None or self.many is None or self.alone.batches_per_second <= 0:
            return 0.0
        return self.many.batches_per_second / self.alone.batches_per_second

    @property
    def worker_ratio(self) -> float:
        """Workers of `many` to those of `alone`; 1 where the loader was tried once."""
        return self.many.workers / self.alone.workers if self.alone and self.many else 1.0

    @property
    def received_per_second(self) -> float:
        """Bytes that the host's network received."""
        seconds = self.evidence.seconds
        return self.evidence.received_bytes / seconds if seconds else 0.0

    @property
    def own_seconds(self) -> float:
        """Of a step, all but collectives and backward, in which ranks wait for each other."""
        seconds = self.evidence.seconds / self.evidence.steps if self.evidence.steps else 0.0
        return max(0.0, seconds - self.evidence.collective_seconds)

    @property
    def rates(self) -> str:
        """What fewest and most workers load; empty where the loader was tried once."""
        if self.alone is None or self.many is None:
            return ""
        return (
            f"{self.alone.workers} alone: {self.alone.batches_per_second:.1f} batches a second, "
            f"{self.many.workers}: {self.many.batches_per_second:.1f}"
        )

    def rate(self, workers: int) -> float:
        """Batches a second of the loader alone with so many workers; 0: not known."""
        return max(
            (d.batches_per_second for d in self.rank.drains if d.workers == workers), default=0.0
        )


def signs_of(rank: RankResult) -> Signs:
    """The signs of a rank whose steps as is are known."""
    assert rank.as_is is not None
    drains: Sequence[Drain] = sorted(
        (drain for drain in rank.drains if drain.batches_per_second > 0),
        key=lambda drain: drain.workers,
    )
    return Signs(
        rank=rank,
        as_is=rank.as_is,
        evidence=rank.evidence or Evidence(),
        alone=drains[0] if drains else None,
        many=drains[-1] if len(drains) > 1 else None,
    )


def within(parts: Parts, *, vcpus: float, is_throttled: bool) -> Parts:
    """The parts on the vCPUs that quotas leave."""
    wall, cpu = parts.loader_wall_seconds, parts.loader_cpu_seconds
    return replace(
        parts,
        vcpus=min(parts.vcpus, vcpus),
        # The loader alone was stopped by the quota, too.
        loader_wall_seconds=min(wall, cpu) if is_throttled else wall,
    )


def vcpus_of(signs: Sequence[Signs]) -> float:
    """Of all hosts, as far as quotas let them be used."""
    hosts = {
        own.rank.host: min(own.rank.vcpus, own.evidence.quota_vcpus or own.rank.vcpus)
        for own in signs
    }
    return sum(hosts.values())


def busy_share(signs: Sequence[Signs], *, vcpus: float) -> float:
    """Of all hosts' vCPUs, whoever keeps them busy."""
    machines = {own.rank.host: own.evidence.busy_vcpus for own in signs}
    used = sum(
        (own.as_is.trainer_cpu_seconds + own.as_is.children_cpu_seconds)
        / own.as_is.step_seconds.mean
        for own in signs
    )
    return min(1.0, max(used, sum(machines.values())) / vcpus)


def others_of(signs: Sequence[Signs]) -> float:
    """vCPUs that other programs kept busy on the hosts of these ranks.

    To a rank, those beside it are others: all ranks of a host are to be given.
    """
    hosts: dict[str, list[AsIs]] = {}
    for own in signs:
        hosts.setdefault(own.rank.host, []).append(own.as_is)
    found = 0.0
    for ranks in hosts.values():
        used = sum(
            (own.trainer_cpu_seconds + own.children_cpu_seconds) / own.step_seconds.mean
            for own in ranks
        )
        busy = sum(own.others_vcpus for own in ranks) + used
        found += max(0.0, busy / len(ranks) - used)
    return found


def where(own: Signs, signs: Sequence[Signs]) -> str:
    """Which rank that is, where there are several."""
    return f" (rank {own.rank.rank}, host {own.rank.host})" if len(signs) > 1 else ""


def in_ms(seconds: float) -> str:
    """In words."""
    return f"{seconds * 1e3:.1f} ms"
