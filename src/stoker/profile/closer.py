"""From what the ranks saw of storage, loading and the host to the record. Pure."""

from collections.abc import Sequence

from stoker.profile.raw import Cost, Quartiles, RankResult
from stoker.records import ProfiledHost, ProfileSettings, TodaysGroup, TransformCost

# Rows of the table of parts.
_MAX_ROWS = 20


def read_bytes_of(ranks: Sequence[RankResult]) -> Quartiles | None:
    """Bytes that a global step reads from storage; None where a rank's are not known, or none."""
    known = [rank.reads.batch_bytes for rank in ranks if rank.reads is not None]
    if not known or len(known) != len(ranks):
        return None
    return _added(known)


def storage_rate_of(ranks: Sequence[RankResult]) -> Quartiles | None:
    """Bytes a second of the slowest host's storage, all its ranks reading; None: not known."""
    hosts: dict[str, list[Quartiles]] = {}
    for rank in ranks:
        if rank.reads is None or rank.reads.bytes_per_second is None:
            return None
        hosts.setdefault(rank.host, []).append(rank.reads.bytes_per_second)
    found = [_added(own) for own in hosts.values()]
    return min(found, key=lambda own: own.mean, default=None)


def batch_bytes_of(ranks: Sequence[RankResult]) -> Quartiles | None:
    """Bytes of a global batch, of those that were kept to be replayed."""
    known = [rank.batch.sizes for rank in ranks if rank.batch and rank.batch.sizes]
    return _added(known) if known and len(known) == len(ranks) else None


def transforms_of(ranks: Sequence[RankResult]) -> tuple[TransformCost, ...]:
    """The parts of loading: getitem and what is in it, then collate, each the dearest first."""
    costs = next((rank.costs for rank in ranks if rank.costs), ())
    whole = sum(cost.cpu_seconds for cost in costs if cost.within is None)
    if not whole:
        return ()
    rows: list[Cost] = []
    for head in (cost for cost in costs if cost.within is None):
        inside = [cost for cost in costs if cost.within == head.name]
        rows += [head, *sorted(inside, key=lambda cost: -cost.cpu_seconds)]
    return tuple(
        TransformCost(
            name=cost.name,
            within=cost.within,
            cpu_seconds=cost.cpu_seconds,
            share=min(1.0, cost.cpu_seconds / whole),
            bytes_in=cost.bytes_in,
            bytes_out=cost.bytes_out,
            samples=cost.samples,
        )
        for cost in rows[:_MAX_ROWS]
    )


def host_of(
    rank: RankResult, *, group: TodaysGroup, settings: ProfileSettings, is_named: bool
) -> ProfiledHost:
    """The profiled hosts by the name that says most.

    Args:
        rank: The first one.
        group: Today's.
        settings: With the type that the user gave, if any.
        is_named: Whether the workload itself names `group`'s type.
    """
    found = rank.inventory
    given = settings.instance_type
    name = group.instance_type
    if given and given != "auto":
        name = given
    elif found and found.instance_type and (given == "auto" or not is_named):
        name = found.instance_type
    return ProfiledHost(
        instance_type=name,
        count=group.count,
        vcpus=max(1, int(rank.vcpus)),
        quota_vcpus=None if rank.vcpus == round(rank.vcpus) else rank.vcpus,
        accelerators=found.accelerators if found else None,
        accelerator_model=found.accelerator_model if found else None,
        cpu_model=found.cpu_model if found else None,
    )


def note_of_host(rank: RankResult, host: ProfiledHost) -> str | None:
    """What to say where this host calls itself something else than the profile does."""
    found = rank.inventory
    if (
        found is None
        or not found.instance_type
        or _bare(found.instance_type) == _bare(host.instance_type)
    ):
        return None
    return (
        f"this host is a {found.instance_type} ({found.source}), profiled as {host.instance_type}: "
        f"--instance-type {found.instance_type} prices it as what it is"
    )


def _bare(instance_type: str) -> str:
    return instance_type.removeprefix("ml.")


def _added(parts: Sequence[Quartiles]) -> Quartiles:
    return Quartiles(
        mean=sum(part.mean for part in parts),
        median=sum(part.median for part in parts),
        low=sum(part.low for part in parts),
        high=sum(part.high for part in parts),
        samples=min(part.samples for part in parts),
    )
