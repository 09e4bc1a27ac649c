"""AWS's price list and EC2's types, as their APIs give them, in a catalog's terms. Pure."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from stoker.records import Json

# USE1-Train:ml.p4d.24xlarge; spot, reserved and cluster hours have other words before the colon.
_TRAINING = re.compile(r"^(?:[A-Z0-9]+-)?Train:(?P<type>ml\.[a-z0-9-]+\.[a-z0-9-]+)$")
_ON_DEMAND: Mapping[str, str] = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
_HOURS = ("hrs", "hr", "hours", "hour")
_NETWORK = re.compile(
    r"^(?P<burst>Up to )?(?:(?P<cards>\d+)x )?(?P<gbps>\d+(?:\.\d+)?) (?P<unit>Giga|Mega)bit$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Dollars an hour by instance type, spelt without `ml.`.

    Attributes:
        usd: One price each.
        unclear: Types that the list has several prices of.
    """

    usd: Mapping[str, str]
    unclear: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A type as EC2 describes it; None where it does not say."""

    vcpus: int | None = None
    cores: int | None = None
    memory_gib: float | None = None
    accelerators: int | None = None
    network_gbps: float | None = None
    is_burst_network: bool = False


def training_filters(region: str) -> list[dict[str, str]]:
    """Filters of GetProducts for AmazonSageMaker."""
    return _filters({"regionCode": region, "component": "Training"})


def ec2_filters(region: str) -> list[dict[str, str]]:
    """Filters of GetProducts for AmazonEC2: on demand, Linux, nothing installed."""
    return _filters({"regionCode": region, **_ON_DEMAND})


def training_prices(products: Iterable[Json], *, region: str) -> Priced:
    """Prices of SageMaker training hours in an answer of GetProducts.

    Args:
        products: Items of PriceList: JSON, as text or parsed.
        region: Others' products are left out.
    """
    found: dict[str, set[str]] = {}
    for attributes, prices in _products(products, region):
        match = _TRAINING.match(str(attributes.get("usagetype", "")))
        if match:
            found.setdefault(match.group("type").removeprefix("ml."), set()).update(prices)
    return _priced(found)


def ec2_prices(products: Iterable[Json], *, region: str) -> Priced:
    """Prices of EC2's on-demand Linux hours in an answer of GetProducts."""
    found: dict[str, set[str]] = {}
    for attributes, prices in _products(products, region):
        kind = attributes.get("instanceType")
        is_on_demand = attributes.get("marketoption", "OnDemand") == "OnDemand"
        is_plain = all(attributes.get(key) == value for key, value in _ON_DEMAND.items())
        if isinstance(kind, str) and is_on_demand and is_plain:
            found.setdefault(kind, set()).update(prices)
    return _priced(found)


def machines(described: Iterable[Mapping[str, Json]]) -> Mapping[str, Machine]:
    """EC2's types by name, of an answer of DescribeInstanceTypes."""
    return {
        str(item["InstanceType"]): _machine(item) for item in described if item.get("InstanceType")
    }


def _machine(item: Mapping[str, Json]) -> Machine:
    vcpus, memory = _mapping(item.get("VCpuInfo")), _mapping(item.get("MemoryInfo"))
    mebibytes = memory.get("SizeInMiB")
    gbps, is_burst = _network(_mapping(item.get("NetworkInfo")).get("NetworkPerformance"))
    return Machine(
        vcpus=_whole(vcpus.get("DefaultVCpus")),
        cores=_whole(vcpus.get("DefaultCores")),
        memory_gib=mebibytes / 1024 if isinstance(mebibytes, int) and mebibytes > 0 else None,
        accelerators=_accelerators(item),
        network_gbps=gbps,
        is_burst_network=is_burst,
    )


def _accelerators(item: Mapping[str, Json]) -> int | None:
    for holder, key in (("GpuInfo", "Gpus"), ("NeuronInfo", "NeuronDevices")):
        listed = _mapping(item.get(holder)).get(key)
        if isinstance(listed, list):
            counts = [_whole(_mapping(one).get("Count")) or 0 for one in listed]
            # A part of a GPU counts as none here: leave such types as they were.
            return sum(counts) or None
    return None


def _network(words: Json) -> tuple[float | None, bool]:
    match = _NETWORK.match(words) if isinstance(words, str) else None
    if match is None:
        return None, False
    gbps = float(match.group("gbps")) * int(match.group("cards") or 1)
    return gbps / (1000 if match.group("unit") == "Mega" else 1), bool(match.group("burst"))


def _filters(fields: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in fields.items()
    ]


def _products(
    products: Iterable[Json], region: str
) -> Iterator[tuple[Mapping[str, Json], set[str]]]:
    """Attributes and hourly prices of each product of the region."""
    for product in products:
        document = _parsed(product)
        attributes = _mapping(_mapping(document.get("product")).get("attributes"))
        if attributes.get("regionCode", region) == region:
            yield attributes, set(_hourly(document))


def _hourly(document: Mapping[str, Json]) -> Iterator[str]:
    terms = _mapping(_mapping(document.get("terms")).get("OnDemand"))
    for term in terms.values():
        for dimension in _mapping(_mapping(term).get("priceDimensions")).values():
            price = _mapping(dimension)
            usd = _mapping(price.get("pricePerUnit")).get("USD")
            is_hourly = str(price.get("unit", "")).lower() in _HOURS
            if is_hourly and isinstance(usd, str) and _is_price(usd):
                yield _plain(usd)


def _parsed(product: Json) -> Mapping[str, Json]:
    if not isinstance(product, str):
        return _mapping(product)
    try:
        document: Json = json.loads(product)
    except ValueError:
        return {}
    return _mapping(document)


def _priced(found: Mapping[str, set[str]]) -> Priced:
    return Priced(
        usd={kind: next(iter(prices)) for kind, prices in found.items() if len(prices) == 1},
        unclear=tuple(sorted(kind for kind, prices in found.items() if len(prices) > 1)),
    )


def _is_price(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    # Products of 0 $ are free tiers and capacity that is paid elsewhere.
    return math.isfinite(value) and 0 < value < 1e6


def _plain(usd: str) -> str:
    """`3.0600000000` as `3.06`: the same price, however it is written."""
    return f"{float(usd):.10f}".rstrip("0").rstrip(".")


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
