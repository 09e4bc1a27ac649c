"""The catalog holds the instance types of one platform with their prices."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date

from stoker.errors import UsageError
from stoker.records import PLATFORM_INFOS, Group, Json, PlatformName, Prices, bare_type, nearest

# Prices that are older are said to be stale.
STALE_DAYS = 90

# AWS's baseline behind an "up to" figure is at least this for c, m and p types (c5.xlarge: 1.25
# of "up to 10" for 4 vCPUs); beyond it the network runs on credits, which a training uses up.
_BASELINE_GBPS_PER_VCPU = 0.3125


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance type; None is *not known*.

    Attributes:
        type: Name as the catalog's platform spells it: `ml.c5.xlarge`, `c5.xlarge`, `local.c2`.
        family: Types of one family have the same CPU and the same accelerator model.
        vcpus: Of one host.
        accelerators: Of one host.
        network_gbps: Gbit/s; a burst figure where `is_burst_network`.
        coremark_per_vcpu: CoreMark of all threads together over the vCPUs.
        usd_per_hour: Of one host on the catalog's platform; None: the type cannot be used.
        priced_on: Date of that price.
        in_training_enum: Whether a SageMaker training job takes the type.
        quota_vcpus: What a container's CPU quota leaves of one host, where that is no whole number.
    """

    type: str
    family: str
    vcpus: int
    accelerators: int = 0
    accelerator_model: str | None = None
    accelerator_memory_gib: float | None = None
    memory_gib: float | None = None
    network_gbps: float | None = None
    is_burst_network: bool = False
    coremark_per_vcpu: float | None = None
    usd_per_hour: float | None = None
    priced_on: date | None = None
    in_training_enum: bool = True
    quota_vcpus: float | None = None

    @property
    def capacity(self) -> float:
        """The vCPUs of one host to divide CPU-seconds by."""
        return self.vcpus if self.quota_vcpus is None else self.quota_vcpus

    @property
    def sustained_gbps(self) -> float | None:
        """The network rate that holds for hours: of a burst figure, the baseline behind it."""
        if self.network_gbps is None or not self.is_burst_network:
            return self.network_gbps
        return min(self.network_gbps, _BASELINE_GBPS_PER_VCPU * self.vcpus)


class Catalog:
    """The instance types of one platform with their prices.

    Attributes:
        instances: All types that are listed, by name.
        max_total_vcpus: vCPUs that all hosts of a plan have together; None: no such bound.
        added_by: Where one adds a type.
    """

    def __init__(
        self,
        *,
        platform: PlatformName,
        instances: Iterable[Instance],
        source: str,
        region: str | None = None,
        purchase: str = "on-demand",
        max_total_vcpus: int | None = None,
        make: Callable[[str], Instance | None] | None = None,
        added_by: str = "--prices FILE",
    ) -> None:
        self.platform = platform
        self.info = PLATFORM_INFOS[platform]
        self._by_type = {instance.type: instance for instance in instances}
        self.instances = tuple(self._by_type[name] for name in sorted(self._by_type))
        self.source = source
        self.region = region
        self.purchase = purchase
        self.max_total_vcpus = max_total_vcpus
        self.added_by = added_by
        self._make = make

    def get(self, instance_type: str) -> Instance:
        """Returns the type of that name, with or without `ml.`.

        Raises:
            UsageError: If the catalog has no such type, with the nearest one.
        """
        name = instance_type.strip()
        for spelling in (name, bare_type(name), f"ml.{name}"):
            if spelling in self._by_type:
                return self._by_type[spelling]
        made = self._make(name) if self._make else None
        if made is not None:
            return made
        raise UsageError(
            f"the catalog of platform {self.platform} has no instance type {name!r}",
            fix=_suggestion(name, tuple(self._by_type)) + f"; add it with {self.added_by}",
        )

    def usd_per_hour(self, groups: Iterable[Group]) -> float | None:
        """Returns the dollars an hour of all hosts together; None without a type or its price."""
        total = 0.0
        for group in groups:
            try:
                usd = self.get(group.instance_type).usd_per_hour
            except UsageError:
                return None
            if usd is None:
                return None
            total += usd * group.count
        return total

    def table(self) -> str:
        """Returns all types for a person to read, at most 88 columns wide."""
        lines = [
            f"prices: {self.source}, {self.region or 'no region'}, {self.purchase}",
            f"{'type':<17} {'vCPUs':>5} {'accelerators':<12} {'Gbit/s':>6} {'CoreMark':>8} "
            f"{'$/hour':>8}  priced on",
        ]
        for i in self.instances:
            accelerators = f"{i.accelerators} {i.accelerator_model or ''}" if i.accelerators else ""
            usd = f"{i.usd_per_hour:8.4f}" if i.usd_per_hour is not None else f"{'unknown':>8}"
            note = (
                "  cannot train" if self.info.needs_training_enum and not i.in_training_enum else ""
            )
            lines.append(
                f"{i.type:<17} {i.vcpus:>5} {accelerators:<12} {_shown(i.network_gbps):>6} "
                f"{_shown(i.coremark_per_vcpu):>8} {usd}  {i.priced_on or 'unknown'}{note}"
            )
        return "\n".join(lines)

    def to_document(self) -> dict[str, Json]:
        """Returns the catalog for machines; what is not known is null."""
        return {
            "platform": self.platform,
            "source": self.source,
            "region": self.region,
            "purchase": self.purchase,
            "instances": [_document(instance) for instance in self.instances],
        }

    def prices(self, used: Iterable[Instance], *, today: date) -> Prices:
        """Returns where the prices of these types come from; the date is the oldest of theirs."""
        dates = [i.priced_on for i in used if i.usd_per_hour is not None]
        oldest = min((d for d in dates if d is not None), default=None)
        is_known = oldest is not None and None not in dates
        return Prices(
            date=oldest.isoformat() if oldest is not None and is_known else None,
            region=self.region,
            purchase=self.purchase,
            source=self.source,
            stale=oldest is not None and (today - oldest).days > STALE_DAYS,
        )


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _document(instance: Instance) -> dict[str, Json]:
    document: dict[str, Json] = asdict(instance)
    # Of a container that was profiled, not of a type.
    del document["quota_vcpus"]
    document["priced_on"] = instance.priced_on.isoformat() if instance.priced_on else None
    return document


def _suggestion(name: str, known: tuple[str, ...]) -> str:
    hint = nearest(name if name.startswith("ml.") else f"ml.{name}", known)
    if not hint.startswith("did you mean"):
        hint = nearest(name, known)
    return hint if hint.startswith("did you mean") else "see: stoker catalog"
