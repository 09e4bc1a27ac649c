"""The instance types of one platform with their prices: AWS's, local ones, and a user's.

A table is CSV. What is a rule about a type is a column of it (`estimate`, `is_burst`,
`sustained_gbps`, `architecture`): tools/refresh_prices.py writes them.
"""

import csv
import functools
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from stoker.errors import UsageError
from stoker.host.machine import num_cpus
from stoker.records import (
    PLATFORM_INFOS,
    Group,
    Json,
    PlatformInfo,
    PlatformName,
    Prices,
    bare_type,
    close_match,
    nearest,
    read_text,
)
from stoker.records.decision import NOMINAL, STALE_DAYS
from stoker.units import ESTIMATE, table_lines

_PRICE = re.compile(r"^(?P<payer>sagemaker|ec2)_usd_per_hour_(?P<region>[a-z]{2}(?:_[a-z]+)+_\d+)$")
# Nominal, to compare local plans in money; near the price of a vCPU.
LOCAL_USD_PER_CORE_HOUR = 0.05
# Loopback carries more than any plan here needs; the receive CPU limits first.
_LOOPBACK_GBPS = 20.0
_LOCAL = re.compile(r"^local\.c([1-9]\d{0,2})$")
_SHIPPED = "aws_training_instances.csv"
_Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
_HEADS = ("type", "accelerators", "vCPUs", "Gbit/s", "CoreMark", "$/h", "priced on")
# Columns with another name than the field.
_FIELDS = {"gpus": "accelerators", "gpu_model": "accelerator_model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance type; None is *not known*.

    Attributes:
        type: Name as the catalog's platform spells it: `ml.c5.xlarge`, `c5.xlarge`, `local.c2`.
        family: Types of one family have the same CPU and the same accelerator model.
        sustained_gbps: Network rate that holds for hours.
        coremark_per_vcpu: CoreMark of all threads together over the vCPUs.
        usd_per_hour: Price of one host on the catalog's platform; None: the type cannot be used.
        in_training_enum: Whether a SageMaker training job takes the type.
        estimate: How the price was estimated; empty: it is the payer's own price.
        is_burst: Its vCPUs hold their full speed for a limited time only.
        architecture: Of its images: `arm64` or `amd64`.
        barred: Why no plan may have the type; empty: it may.
        quota_vcpus: vCPUs of one host under a container's CPU quota, where that is no whole number.
    """

    type: str
    vcpus: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    family: str = ""
    accelerators: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    accelerator_model: str | None = None
    memory_gib: _Positive | None = None
    sustained_gbps: _Positive | None = None
    coremark_per_vcpu: _Positive | None = None
    usd_per_hour: _Positive | None = None
    priced_on: date | None = None
    in_training_enum: bool = True
    estimate: str = ""
    is_burst: bool = False
    architecture: str = "amd64"
    barred: str = ""
    quota_vcpus: float | None = None

    @property
    def capacity(self) -> float:
        """vCPUs of one host to divide CPU-seconds by."""
        if self.quota_vcpus is None:
            return self.vcpus
        return self.quota_vcpus


@dataclass(kw_only=True, eq=False)
class Catalog:
    """The instance types of one platform with their prices.

    Attributes:
        instances: All types, by name; of two with one name the later counts.
        max_total_vcpus: vCPUs that all hosts of a plan have together; None: unlimited.
        added_by: Option or key that adds a type.
        hosts_region: AWS region of the hosts, if it is known and the prices are of another one.
    """

    platform: PlatformName
    instances: Sequence[Instance]
    source: str
    region: str | None = None
    purchase: str = "on-demand"
    max_total_vcpus: int | None = None
    added_by: str = "constraints.prices_file or --prices FILE"
    hosts_region: str | None = None

    def __post_init__(self) -> None:
        self._by_type = {instance.type: instance for instance in self.instances}
        self.instances = tuple(self._by_type[name] for name in sorted(self._by_type))

    @property
    def info(self) -> PlatformInfo:
        return PLATFORM_INFOS[self.platform]

    def find(self, instance_type: str) -> Instance | None:
        """Returns the type of that name, with or without `ml.`; None: there is none."""
        name = instance_type.strip()
        # As it is written first: a node pool may have any name, also one that begins with `ml.`.
        known = self._by_type.get(name) or self._by_type.get(platform_name(name, self.platform))
        # A type of more cores than this machine has is known, too: plans say that it is too large.
        return known or (local_instance(name) if self.info.is_this_machine else None)

    def get(self, instance_type: str, *, where: str = "") -> Instance:
        """Returns the type of that name, with or without `ml.`; else raises UsageError."""
        if instance := self.find(instance_type):
            return instance
        name = instance_type.strip()
        close = close_match(platform_name(name, self.platform), tuple(self._by_type))
        fix = f"did you mean {close}?" if close else "See: stoker catalog."
        raise UsageError(
            f"the catalog of platform {self.platform} has no instance type {name!r}",
            where=where,
            fix=f"{fix} Or add it with {self.added_by}.",
        )

    def usd_per_hour(self, groups: Iterable[Group]) -> float | None:
        """Returns the dollars an hour of all hosts; None without a type or its price."""
        total = 0.0
        for group in groups:
            instance = self.find(group.instance_type)
            if instance is None or instance.usd_per_hour is None:
                return None
            total += instance.usd_per_hour * group.count
        return total

    def estimates(self, groups: Iterable[Group]) -> dict[str, str]:
        """Returns how the prices of these hosts were estimated, by type; {}: none was."""
        found = (self.find(group.instance_type) for group in groups)
        return {each.type: each.estimate for each in found if each and each.estimate}

    def table(self) -> str:
        """Returns all types as text."""
        if self.purchase == NOMINAL:
            head = "hosts of this machine are not billed: they are compared by their cores"
            cores = ((each.type, str(each.vcpus)) for each in self.instances)
            return "\n".join([head, *table_lines(("type", "vCPUs"), cores)])
        head = f"prices: {self.source}, {self.region or 'no region'}, {self.purchase}; "
        head += f"{ESTIMATE}: estimated"
        return "\n".join([head, *table_lines(_HEADS, map(self._cells, self.instances))])

    def _cells(self, each: Instance) -> list[str]:
        words = f"{each.accelerators} {each.accelerator_model or ''}" if each.accelerators else ""
        if self.info.needs_training_enum and not each.in_training_enum:
            words += " cannot train"
        words += " burst" * each.is_burst + " arm64" * (each.architecture == "arm64")
        figures = (each.vcpus, each.sustained_gbps, each.coremark_per_vcpu, each.usd_per_hour)
        *cells, price = ["?" if value is None else f"{value:g}" for value in figures]
        price = ESTIMATE * bool(each.estimate) + price
        return [each.type, words.strip(), *cells, price, str(each.priced_on or "?")]

    def to_document(self) -> dict[str, Json]:
        return {
            "platform": self.platform,
            "source": self.source,
            "region": self.region,
            "purchase": self.purchase,
            "instances": msgspec.to_builtins(self.instances),
        }

    def prices(self, groups: Sequence[Group], *, today: date) -> Prices:
        """Returns where the prices of these hosts come from, with the oldest date."""
        used = [self.get(group.instance_type) for group in groups]
        dates = [each.priced_on for each in used if each.usd_per_hour is not None]
        known = [day for day in dates if day]
        # With one price without a date, the date of all is unknown.
        oldest = min(known, default=None) if len(known) == len(dates) else None
        return Prices(
            hosts_region=self.hosts_region,
            date=str(oldest) if oldest else None,
            region=self.region,
            purchase=self.purchase,
            source=self.source,
            stale=oldest is not None and (today - oldest).days > STALE_DAYS,
            estimated=self.estimates(groups) or None,
        )


# Tables.


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table, which errors name: its cells by column, the price as usd_per_hour."""

    where: str
    cells: Mapping[str, str]

    def error(self, column: str, what: str) -> UsageError:
        return UsageError(what, where=f"{self.where}, column {column}")

    def instance(self, name: str, base: Instance | None) -> Instance:
        """Returns the row as an instance type.

        A column that the table has decides, blank cells too: blank is "not known", not "as it was".

        Args:
            name: As the platform spells it.
            base: Has the values of columns that the table lacks.
        """
        fields = asdict(base) if base else {}
        if "usd_per_hour" in self.cells:
            fields["estimate"] = None
        fields |= {_FIELDS.get(column, column): cell or None for column, cell in self.cells.items()}
        # ml.c5 of ml.c5.xlarge; a name without a dot is the family.
        family = (base and base.family) or name.rpartition(".")[0] or name
        fields |= {"type": name, "family": fields.get("family") or family}
        present = {field: value for field, value in fields.items() if value is not None}
        try:
            return msgspec.convert(present, Instance, strict=False)
        except msgspec.ValidationError as err:
            raise UsageError(f"{name}: {err}", where=self.where) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of instance types for one platform.

    Attributes:
        rows: By the name of the type, without `ml.`; of two with one name the later counts.
        has_prices: Whether it has the column that this platform pays.
        region: Region of the prices, where the column names it.
    """

    source: str
    rows: Mapping[str, Row]
    has_prices: bool
    region: str | None


def parse_table(
    text: str, *, platform: PlatformName, source: str, region: str | None = None
) -> Table:
    """Parses a CSV text. Raises UsageError with line and column where it is wrong.

    Args:
        text: The table.
        platform: Its payer's column of prices counts.
        source: The file's name, for errors.
        region: Whose column counts, where the table has columns of several regions.
    """
    # Spreadsheet programs begin a CSV file with a byte order mark.
    file = io.StringIO(text.removeprefix("\ufeff"))
    lines = csv.DictReader(file, strict=True, skipinitialspace=True)
    try:
        header = [*(lines.fieldnames or ())]
        numbered = [(lines.line_num, cells) for cells in lines]
    except csv.Error as err:
        raise UsageError(f"this is not a CSV table: {err}", where=source) from None
    _check_header(header, where=f"{source}:1")
    price, region = _price_column(header, platform, region)
    rows = {}
    for number, cells in numbered:
        row = Row(where=f"{source}:{number}", cells=cells)
        if None in cells or None in cells.values():
            what = f"not as many cells as the table has columns, {len(header)}"
            raise UsageError(what, where=row.where, fix="quote commas")
        if price:
            cells["usd_per_hour"] = cells[price]
        if price and price.startswith("ec2"):
            # EC2's own price is no estimate, and has its own date.
            cells["estimate"] = ""
            cells["priced_on"] = cells.get("ec2_priced_on", cells.get("priced_on", ""))
        if name := bare_type(cells.pop("instance_type").strip()):
            rows[name] = row
    return Table(source=source, rows=rows, has_prices=price is not None, region=region)


_COLUMNS = (
    *("instance_type", "family", "vcpus", "memory_gib", "gpus", "gpu_model", "sustained_gbps"),
    *("usd_per_hour", "estimate", "priced_on", "ec2_priced_on", "in_training_enum", "is_burst"),
    *("architecture", "cpu_model", "coremark_per_vcpu", "coremark_source", "source"),
    *("node_selector", "taints"),
)


def _check_header(header: Sequence[str], *, where: str) -> None:
    for column in header:
        if column not in _COLUMNS and not _PRICE.match(column):
            fix = nearest(column, _COLUMNS)
            raise UsageError(f"unknown column {column!r}", where=where, fix=fix)
    if "instance_type" not in header:
        raise UsageError(
            "the table has no column instance_type",
            where=where,
            fix="start with a line: instance_type,vcpus,usd_per_hour,priced_on",
        )


def _price_column(
    header: Sequence[str], platform: PlatformName, region: str | None
) -> tuple[str | None, str | None]:
    """Returns the column of prices that counts, and the region that it names; None: none."""
    # A user's own column goes before those that name payer and region, which may be copied along.
    if "usd_per_hour" in header:
        return "usd_per_hour", None
    payer = PLATFORM_INFOS[platform].payer
    columns = {}
    for column in header:
        if (match := _PRICE.match(column)) and match["payer"] == payer:
            columns[match["region"].replace("_", "-")] = column
    place = region if region in columns else next(iter(columns), None)
    return columns.get(place or ""), place


def platform_name(instance_type: str, platform: PlatformName) -> str:
    """Returns the platform's spelling of the type: `ml.` on SageMaker, nothing elsewhere."""
    return PLATFORM_INFOS[platform].type_prefix + bare_type(instance_type)


# Catalogs.


def load_catalog(
    platform: PlatformName, prices: Path | None = None, *, cores: int | None = None
) -> Catalog:
    """Returns the instance types that a plan on `platform` can be made of.

    Args:
        platform: SageMaker pays its own prices, Kubernetes EC2's, local hosts nominal ones.
        prices: CSV file whose rows extend the catalog or replace types of the same name; columns it
            does not have are kept from the catalog.
        cores: Cores of this machine (local only); absent: those this process may use.

    Raises:
        UsageError: If the file is missing or wrong.
    """
    is_this_machine = PLATFORM_INFOS[platform].is_this_machine
    catalog = _local(platform, cores or num_cpus()) if is_this_machine else _aws(platform)
    if prices is None:
        return catalog
    return extended(catalog, parse_table(read_text(prices), platform=platform, source=str(prices)))


def extended(catalog: Catalog, table: Table) -> Catalog:
    """Returns the catalog with the table's rows; raises UsageError where one of them is wrong."""
    instances = [*catalog.instances]
    for bare, row in table.rows.items():
        name = platform_name(bare, catalog.platform)
        instances.append(row.instance(name, catalog.find(name)))
    longer = replace(catalog, instances=instances, region=table.region or catalog.region)
    if not table.has_prices:
        return longer
    source = f"{table.source}, else {catalog.source}"
    return replace(longer, source=source, purchase="as in the price file")


def local_instance(instance_type: str) -> Instance | None:
    """Returns the local type of that name (`local.cN`: N cores); None for other names."""
    match = _LOCAL.match(instance_type)
    if match is None:
        return None
    cores = int(match[1])
    return Instance(
        type=instance_type,
        family="local",
        vcpus=cores,
        sustained_gbps=_LOOPBACK_GBPS,
        # Only ratios count, and all cores of this machine are alike.
        coremark_per_vcpu=1.0,
        usd_per_hour=round(cores * LOCAL_USD_PER_CORE_HOUR, 6),
        in_training_enum=False,
    )


def _local(platform: PlatformName, cores: int) -> Catalog:
    instances = (local_instance(f"local.c{number + 1}") for number in range(cores))
    return Catalog(
        platform=platform,
        instances=[*filter(None, instances)],
        source=f"nominal: {LOCAL_USD_PER_CORE_HOUR} $ per core and hour, not billed",
        purchase=NOMINAL,
        max_total_vcpus=cores,
    )


@functools.cache
def _aws(platform: PlatformName) -> Catalog:
    source = PLATFORM_INFOS[platform].price_list
    text = resources.files("stoker.catalog").joinpath(_SHIPPED).read_text(encoding="utf-8")
    table = parse_table(text, platform=platform, source=_SHIPPED)
    catalog = extended(Catalog(platform=platform, instances=(), source=source), table)
    return replace(catalog, source=source, purchase="on-demand")
