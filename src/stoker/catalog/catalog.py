"""The instance types of one platform with their prices: AWS's, local ones, and a user's."""

import contextlib
import csv
import functools
import io
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import TypeVar

from stoker.catalog.rules import architecture_of, is_burst_type, price_ratio, why_barred
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
from stoker.records.decision import NOMINAL
from stoker.records.notices import STALE_DAYS
from stoker.units import ESTIMATE

# AWS's baseline behind an "up to" figure is at least this for c, m and p types (c5.xlarge: 1.25
# of "up to 10" for 4 vCPUs); beyond it the network runs on credits, which a training run uses up.
_BASELINE_GBPS_PER_VCPU = 0.3125
_COLUMNS = (
    "family",
    "instance_type",
    "vcpus",
    "physical_cores",
    "memory_gib",
    "gpus",
    "gpu_model",
    "gpu_memory_gib_each",
    "network_gbps",
    "network_kind",
    "sagemaker_usd_per_hour_us_east_1",
    "sagemaker_usd_per_hour_2022_2024",
    "ec2_usd_per_hour_us_east_1",
    "usd_per_hour",
    "priced_on",
    "in_training_enum",
    "cpu_model",
    "coremark_per_vcpu",
    "coremark_source",
    "source",
    "node_selector",
    "taints",
)
_PRICE = re.compile(r"^(?P<payer>sagemaker|ec2)_usd_per_hour_(?P<region>[a-z]{2}(?:_[a-z]+)+_\d+)$")
_EC2_DATE = re.compile(r"EC2:[a-z-]*?(\d{4}-\d\d-\d\d)")
# In a row's source: its SageMaker price was read for another component, or in another region.
_ELSEWHERE = "SM~:"
_USD = "dollars an hour above 0 (blank: not to be used)"
_DATE = "a date like 2026-09-27"
_T = TypeVar("_T")
# Nominal, to compare local plans in money; near the price of a vCPU.
LOCAL_USD_PER_CORE_HOUR = 0.05
# Loopback carries more than any plan here needs; the receive CPU limits first.
_LOOPBACK_GBPS = 20.0
_LOCAL = re.compile(r"^local\.c([1-9]\d{0,3})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance type; None is *not known*.

    Attributes:
        type: Name as the catalog's platform spells it: `ml.c5.xlarge`, `c5.xlarge`, `local.c2`.
        family: Types of one family have the same CPU and the same accelerator model.
        network_gbps: Gbit/s; a burst figure where `is_burst_network`.
        coremark_per_vcpu: CoreMark of all threads together over the vCPUs.
        usd_per_hour: Price of one host on the catalog's platform; None: the type cannot be used.
        in_training_enum: Whether a SageMaker training job takes the type.
        estimate: How the price was estimated; empty: it is the payer's own price.
        price_region: AWS region of the price, where the table names it.
        barred: Why no plan may have the type; empty: it may.
        is_known: Whether more than its name is known.
        quota_vcpus: vCPUs of one host under a container's CPU quota, where that is no whole number.
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
    estimate: str = ""
    price_region: str | None = None
    barred: str = ""
    is_known: bool = True
    quota_vcpus: float | None = None
    cpu_model: str | None = None

    @property
    def architecture(self) -> str:
        """Architecture of its images: `arm64` or `amd64`."""
        return architecture_of(self.type)

    @property
    def capacity(self) -> float:
        """vCPUs of one host to divide CPU-seconds by."""
        if self.quota_vcpus is None:
            return self.vcpus
        return self.quota_vcpus

    @property
    def sustained_gbps(self) -> float | None:
        """Network rate that holds for hours: a burst figure's baseline."""
        if self.network_gbps is None or not self.is_burst_network:
            return self.network_gbps
        return min(self.network_gbps, _BASELINE_GBPS_PER_VCPU * self.vcpus)

    @property
    def price_words(self) -> str:
        """Dollars an hour as tables show them, an estimate with its mark."""
        if self.usd_per_hour is None:
            return "unknown"
        if self.estimate:
            return f"{ESTIMATE}{self.usd_per_hour:.4f}"
        return f"{self.usd_per_hour:.4f}"


def _no_type(name: str) -> Instance | None:
    """Makes no type of its name."""
    return None


@dataclass(kw_only=True, eq=False)
class Catalog:
    """The instance types of one platform with their prices.

    Attributes:
        instances: All types, by name; of two with one name the later counts.
        max_total_vcpus: vCPUs that all hosts of a plan have together; None: unlimited.
        make: Makes another type of its name; None of it: there is no such type.
        added_by: Option or key that adds a type.
        has_pools: Its types are the node pools of a cluster, and no others.
        hosts_region: AWS region of the hosts, if it is known and the prices are of another one.
    """

    platform: PlatformName
    instances: Sequence[Instance]
    source: str
    region: str | None = None
    purchase: str = "on-demand"
    max_total_vcpus: int | None = None
    make: Callable[[str], Instance | None] = _no_type
    added_by: str = "constraints.prices_file or --prices FILE"
    has_pools: bool = False
    hosts_region: str | None = None

    def __post_init__(self) -> None:
        self._by_type = {instance.type: instance for instance in self.instances}
        self.instances = tuple(self._by_type[name] for name in sorted(self._by_type))

    @property
    def info(self) -> PlatformInfo:
        return PLATFORM_INFOS[self.platform]

    def with_type(self, instance: Instance) -> "Catalog":
        """Returns the catalog with one type more."""
        return replace(self, instances=(*self.instances, instance))

    def with_names(self, make: Callable[[str], Instance | None]) -> "Catalog":
        """Returns the catalog that makes other types of their names."""
        return replace(self, make=make)

    def for_hosts_in(self, region: str | None) -> "Catalog":
        """Returns the catalog with prices of other regions as estimates, where hosts are there."""
        instances = [_in_region(instance, region) for instance in self.instances]
        if region is None or self.region in (None, region):
            return replace(self, instances=instances)
        return replace(self, instances=instances, hosts_region=region)

    def for_plan(
        self, types: Collection[str], *, usd_per_hour: float | None, words: str
    ) -> "Catalog":
        """Returns the catalog for jobs that get hosts of a training plan alone.

        Args:
            types: Names of the plan's types, without `ml.`; none: they are not known.
            usd_per_hour: Dollars of an hour of one host; None: the list's price.
            words: What the plan is, for records.
        """
        instances = []
        for instance in self.instances:
            if types and bare_type(instance.type) not in types:
                barred = instance.barred or f"outside the {words}"
                instances.append(replace(instance, barred=barred))
            elif usd_per_hour is None:
                instances.append(instance)
            else:
                priced = replace(instance, usd_per_hour=usd_per_hour, estimate=words, barred="")
                instances.append(priced)
        return replace(self, instances=instances)

    def get(self, instance_type: str) -> Instance:
        """Returns the type of that name, with or without `ml.`; else raises UsageError."""
        name = instance_type.strip()
        # As it is written first: a node pool may have any name, also one that begins with `ml.`.
        for spelling in (name, bare_type(name), f"ml.{name}"):
            if spelling in self._by_type:
                return self._by_type[spelling]
        if instance := self.make(name):
            return instance
        names = tuple(self._by_type)
        # Both spellings: without its prefix a short name is too far from SageMaker's names.
        close = close_match(f"ml.{name.removeprefix('ml.')}", names) or close_match(name, names)
        fix = "See: stoker catalog."
        if close:
            fix = f"did you mean {close}?"
        raise UsageError(
            f"the catalog of platform {self.platform} has no instance type {name!r}",
            fix=f"{fix} Or add it with {self.added_by}.",
        )

    def coremark_of_cpu(self, model: str | None) -> float | None:
        """Returns the median CoreMark per vCPU of the types with this CPU; None: there are none."""
        speeds = [
            instance.coremark_per_vcpu
            for instance in self.instances
            if instance.coremark_per_vcpu is not None
            and model is not None
            and instance.cpu_model is not None
            and _cpu_words(instance.cpu_model) == _cpu_words(model)
        ]
        if speeds:
            return statistics.median(speeds)
        return None

    def usd_per_hour(self, groups: Iterable[Group]) -> float | None:
        """Returns the dollars an hour of all hosts; None without a type or its price."""
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

    def estimates(self, groups: Iterable[Group]) -> dict[str, str]:
        """Returns how the prices of these hosts were estimated, by type; {}: none was."""
        estimates: dict[str, str] = {}
        for group in groups:
            with contextlib.suppress(UsageError):
                instance = self.get(group.instance_type)
                if instance.usd_per_hour is not None and instance.estimate:
                    estimates[instance.type] = instance.estimate
        return estimates

    def table(self) -> str:
        """Returns all types as text, at most 88 columns wide."""
        if self.purchase == NOMINAL:
            head = "hosts of this machine are not billed: they are compared by their cores"
            rows = [f"{i.type:<17} {i.vcpus:>5}" for i in self.instances]
            return "\n".join([head, f"{'type':<17} {'cores':>5}", *rows])
        lines = [
            f"prices: {self.source}, {self.region or 'no region'}, {self.purchase}; ~: estimated",
            f"{'type':<21} {'vCPUs':>5} {'accelerators':<14} {'Gbit/s':>6} {'CoreMark':>8} "
            f"{'$ per hour':>10}  priced on",
        ]
        for i in self.instances:
            kind = " ".join(self._notes(i))
            gbps = _cell(i.network_gbps)
            coremark = _cell(i.coremark_per_vcpu)
            lines.append(
                f"{i.type:<21} {i.vcpus:>5} {kind:<14} {gbps:>6} {coremark:>8} "
                f"{i.price_words:>10}  {i.priced_on or 'unknown'}"
            )
        return "\n".join(lines)

    def _notes(self, instance: Instance) -> Iterator[str]:
        """Yields what the table says of a type besides its figures, in a word or two each."""
        if instance.accelerators:
            yield f"{instance.accelerators} {instance.accelerator_model or ''}".strip()
        if self.info.needs_training_enum and not instance.in_training_enum:
            yield "cannot train"
        if is_burst_type(instance.type):
            yield "burst"
        if instance.architecture == "arm64":
            yield "arm64"

    def to_document(self) -> dict[str, Json]:
        return {
            "platform": self.platform,
            "source": self.source,
            "region": self.region,
            "purchase": self.purchase,
            "instances": [_document(instance) for instance in self.instances],
        }

    def prices(self, used: Iterable[Instance], *, today: date) -> Prices:
        """Returns where the prices of these types come from, with the oldest date."""
        priced = [instance for instance in used if instance.usd_per_hour is not None]
        dates = [instance.priced_on for instance in priced if instance.priced_on is not None]
        oldest = min(dates, default=None)
        date_of_all = None
        # With one price without a date, the date of all is unknown.
        if oldest is not None and len(dates) == len(priced):
            date_of_all = oldest.isoformat()
        return Prices(
            estimated={i.type: i.estimate for i in priced if i.estimate} or None,
            hosts_region=self.hosts_region,
            date=date_of_all,
            region=self.region,
            purchase=self.purchase,
            source=self.source,
            stale=oldest is not None and (today - oldest).days > STALE_DAYS,
        )


def _cell(number: float | None) -> str:
    """Returns a figure as the table shows it: nothing where it is not known."""
    if number is None:
        return ""
    return f"{number:g}"


def _cpu_words(model: str) -> tuple[str, ...]:
    # `AMD EPYC 7R13 Processor` is `AMD EPYC 7R13`; marks and the clock are not part of the name.
    bare = re.sub(r"\((R|TM)\)|CPU|Processor|@.*", " ", model, flags=re.IGNORECASE)
    return tuple(bare.lower().split())


def _document(instance: Instance) -> dict[str, Json]:
    document: dict[str, Json] = asdict(instance)
    # Of a container that was profiled.
    del document["quota_vcpus"]
    document["architecture"] = instance.architecture
    if instance.priced_on is not None:
        document["priced_on"] = instance.priced_on.isoformat()
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of instance types for one platform.

    Attributes:
        price_column: The column this platform pays; None: the table has no prices for it.
        region: Region of the prices, where the column names it.
    """

    source: str
    columns: tuple[str, ...]
    rows: tuple["Row", ...]
    price_column: str | None
    region: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table, which errors name."""

    source: str
    line: int
    cells: Mapping[str, str]

    @property
    def instance_type(self) -> str:
        return self.cells["instance_type"].strip()

    def error(self, column: str, what: str) -> UsageError:
        return UsageError(what, where=f"{self.source}:{self.line}, column {column}")

    def value(self, column: str, parse: Callable[[str], _T], expected: str) -> _T | None:
        """Returns the parsed cell; None where it is blank or the table lacks the column."""
        text = self.cells.get(column, "").strip()
        if not text:
            return None
        try:
            return parse(text)
        except (ValueError, KeyError):
            raise self.error(column, f"expected {expected}, found {text!r}") from None


def parse_table(
    text: str, *, platform: PlatformName, source: str, region: str | None = None
) -> Table:
    """Parses a CSV text. Raises UsageError with line and column where it is wrong.

    Args:
        platform: Its payer's column of prices counts.
        source: The file's name, for errors.
        region: Whose column counts, where the table has columns of several regions.
    """
    # Spreadsheet programs begin a CSV file with a byte order mark.
    lines = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    header = tuple(cell.strip() for cell in next(_rows(lines, source), []))
    _check_header(header, source)
    rows = []
    seen: dict[str, int] = {}
    for cells in _rows(lines, source):
        if not any(cell.strip() for cell in cells):
            continue
        line = lines.line_num
        if len(cells) != len(header):
            raise UsageError(
                f"{len(cells)} cells in a table of {len(header)} columns",
                where=f"{source}:{line}",
                fix="quote cells that hold a comma",
            )
        row = Row(source=source, line=line, cells=dict(zip(header, cells, strict=True)))
        name = row.instance_type
        if not name:
            raise row.error("instance_type", "the instance type has no name")
        bare = bare_type(name)
        # ml.c5.xlarge and c5.xlarge are one type: the later row would silently replace the other.
        if bare in seen:
            raise row.error("instance_type", f"{name} is in line {seen[bare]}, too")
        seen[bare] = line
        rows.append(row)
    column, priced_region = _price_column(header, platform, region)
    return Table(
        source=source, columns=header, rows=tuple(rows), price_column=column, region=priced_region
    )


def short_table(text: str) -> str:
    """Returns a table without the columns that repeat the catalog's cells, as CSV text."""
    table = parse_table(text, platform="sagemaker", source="prices")
    shipped = {bare_type(row.instance_type): row.cells for row in _shipped().rows}
    kept = [name for name in table.columns if _says_more(name, table, shipped)]
    written = io.StringIO()
    writer = csv.DictWriter(written, kept, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells for row in table.rows)
    return written.getvalue()


def _says_more(column: str, table: Table, shipped: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a table's column is more than a repetition of the catalog's."""
    if column in ("instance_type", "usd_per_hour", "priced_on") or _PRICE.match(column):
        return True
    if column == "source":
        return any(_is_source_read(row.cells) for row in table.rows)
    return any(
        row.cells[column] != shipped.get(bare_type(row.instance_type), {}).get(column)
        for row in table.rows
    )


def _is_source_read(cells: Mapping[str, str]) -> bool:
    """Whether a row's source changes a price's day, or makes it an estimate."""
    match = _EC2_DATE.search(cells["source"])
    is_other_day = match is not None and match[1] != cells.get("priced_on", "").strip()
    return is_other_day or _ELSEWHERE in cells["source"]


def to_instance(
    row: Row, table: Table, *, platform: PlatformName, base: Instance | None
) -> Instance:
    """Returns the row as an instance type; `base` has the values of columns that the table lacks.

    Raises UsageError with line and column, if a cell is wrong or a necessary one is missing.
    """
    name = platform_name(row.instance_type, platform)

    def cell(
        column: str, parse: Callable[[str], _T], expected: str = "", *, field: str = ""
    ) -> _T | None:
        # A column that the table has decides, blank cells too: blank is "not known", not "as it
        # was".
        is_said = column in table.columns or base is None
        if is_said:
            return row.value(column, parse, expected)
        earlier: _T | None = getattr(base, field or column)
        return earlier

    vcpus = cell("vcpus", _count(1, 4096), "a number of vCPUs")
    if vcpus is None:
        raise row.error("vcpus", f"{name} is not in the catalog: its vCPUs are needed")
    accelerators = cell("gpus", _count(0, 1024), "a number of accelerators", field="accelerators")
    is_burst = {"up_to": True, "sustained": False}.__getitem__
    may_train = {"yes": True, "no": False}.__getitem__
    price = _price(row, table, platform, base)
    barred = ""
    # The rules on names are AWS's: a type of this machine may have any name.
    if PLATFORM_INFOS[platform].payer:
        barred = why_barred(name)
    return Instance(
        type=name,
        # ml.c5 of ml.c5.xlarge; a name without a dot is the family.
        family=cell("family", str) or name.rpartition(".")[0] or name,
        vcpus=vcpus,
        accelerators=accelerators or 0,
        accelerator_model=cell("gpu_model", str, field="accelerator_model"),
        accelerator_memory_gib=cell(
            "gpu_memory_gib_each", _positive, "GiB above 0", field="accelerator_memory_gib"
        ),
        memory_gib=cell("memory_gib", _positive, "GiB above 0"),
        network_gbps=cell("network_gbps", _positive, "Gbit/s above 0"),
        is_burst_network=bool(
            cell("network_kind", is_burst, "up_to or sustained", field="is_burst_network")
        ),
        coremark_per_vcpu=cell("coremark_per_vcpu", _positive, "a CoreMark above 0"),
        usd_per_hour=price.usd_per_hour,
        priced_on=price.priced_on,
        estimate=price.estimate,
        price_region=price.region,
        barred=barred,
        # Blank counts as yes: a row that a user adds is meant to be used.
        in_training_enum=cell("in_training_enum", may_train, "yes or no") is not False,
        cpu_model=cell("cpu_model", str),
    )


def platform_name(instance_type: str, platform: PlatformName) -> str:
    """Returns the platform's spelling of the type: `ml.` on SageMaker, nothing elsewhere."""
    return PLATFORM_INFOS[platform].type_prefix + bare_type(instance_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """Dollars an hour of one host, the day of that price, and how it was estimated, if it was."""

    usd_per_hour: float | None = None
    priced_on: date | None = None
    estimate: str = ""
    region: str | None = None


def _price(row: Row, table: Table, platform: PlatformName, base: Instance | None) -> _Price:
    # A table without prices (of GPUs or network, say) leaves the catalog's prices.
    if table.price_column is None:
        if base is None:
            return _Price()
        return _Price(
            usd_per_hour=base.usd_per_hour,
            priced_on=base.priced_on,
            estimate=base.estimate,
            region=base.price_region,
        )
    usd = row.value(table.price_column, _positive, _USD)
    is_ec2s = PLATFORM_INFOS[platform].payer == "ec2"
    if usd is None:
        if is_ec2s:
            return _Price()
        return _estimated(row, table)
    listed = _Price(
        usd_per_hour=usd,
        priced_on=row.value("priced_on", date.fromisoformat, _DATE),
        region=table.region,
    )
    source = row.cells.get("source", "")
    if not is_ec2s:
        if _ELSEWHERE in source:
            return replace(listed, estimate="SageMaker's price of another component or region")
        return listed
    # The table's date is SageMaker's; EC2's own is in its sources.
    if match := _EC2_DATE.search(source):
        return replace(listed, priced_on=date.fromisoformat(match[1]))
    return listed


def _estimated(row: Row, table: Table) -> _Price:
    """Returns EC2's price of the same region times the family's ratio; none where one lacks."""
    priced_on = row.value("priced_on", date.fromisoformat, _DATE)
    column = (table.price_column or "").replace("sagemaker_", "ec2_", 1)
    # A column of plain prices has no counterpart: blank means that the type is not to be used.
    if column == table.price_column or column not in table.columns:
        return _Price()
    usd = row.value(column, _positive, _USD)
    ratio = price_ratio(row.instance_type)
    if usd is None or ratio is None:
        return _Price()
    return _Price(
        usd_per_hour=usd * ratio,
        priced_on=priced_on,
        estimate=f"EC2's ${usd:g} x {ratio:.2f}",
        region=table.region,
    )


def _rows(lines: Iterator[list[str]], source: str) -> Iterator[list[str]]:
    try:
        yield from lines
    except csv.Error as err:
        raise UsageError(
            f"this is not a CSV table: {err}",
            where=source,
            fix="check its quotes; the first line names the columns, each other line is a type",
        ) from None


def _check_header(header: Sequence[str], source: str) -> None:
    for column in header:
        if column not in _COLUMNS and not _PRICE.match(column):
            fix = nearest(column, _COLUMNS)
            if ";" in column or "\t" in column:
                fix = "separate the columns by commas"
            raise UsageError(f"unknown column {column!r}", where=f"{source}:1", fix=fix)
        if header.count(column) > 1:
            raise UsageError(
                f"the column {column} is there twice", where=f"{source}:1", fix="remove one"
            )
    if "instance_type" not in header:
        raise UsageError(
            "the table has no column instance_type",
            where=f"{source}:1",
            fix="start with a line: instance_type,vcpus,usd_per_hour,priced_on",
        )


def _price_column(
    header: Sequence[str], platform: PlatformName, region: str | None
) -> tuple[str | None, str | None]:
    # A user's own column goes before those that name payer and region, which may be copied along.
    if "usd_per_hour" in header:
        return "usd_per_hour", None
    payer = PLATFORM_INFOS[platform].payer
    matches = [match for column in header if (match := _PRICE.match(column))]
    columns = {
        match["region"].replace("_", "-"): match[0] for match in matches if match["payer"] == payer
    }
    if not columns:
        return None, None
    if region is None or region not in columns:
        region = next(iter(columns))
    return columns[region], region


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise ValueError(text)
    return number


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise ValueError(text)
        return number

    return parse


def load_catalog(platform: str, prices: Path | None = None, *, cores: int | None = None) -> Catalog:
    """Returns the instance types that a plan on `platform` can be made of.

    Args:
        platform: SageMaker pays its own prices, Kubernetes EC2's, local hosts nominal ones.
        prices: CSV file whose rows extend the catalog or replace types of the same name; columns it
            does not have are kept from the catalog.
        cores: Cores of this machine (local only); absent: those this process may use.

    Raises:
        UsageError: If the platform is unknown, or the file is missing or wrong.
    """
    named = next((name for name in PLATFORM_INFOS if name == platform), None)
    if named is None:
        raise UsageError(
            f"no platform is called {platform!r}", fix=nearest(platform, list(PLATFORM_INFOS))
        )
    is_this_machine = PLATFORM_INFOS[named].is_this_machine
    catalog = _local(named, cores) if is_this_machine else _aws(named)
    if prices is None:
        return catalog
    table = parse_table(read_text(prices), platform=catalog.platform, source=str(prices))
    return extended(catalog, table)


def local_instance(instance_type: str) -> Instance | None:
    """Returns the local type of that name (`local.cN`: N cores); None for other names."""
    match = _LOCAL.match(instance_type)
    if match is None:
        return None
    cores = int(match[1])
    # The bound of a table's vCPUs (`to_instance`), for invented names.
    if cores > 4096:
        return None
    return Instance(
        type=instance_type,
        family="local",
        vcpus=cores,
        network_gbps=_LOOPBACK_GBPS,
        # Only ratios count, and all cores of this machine are alike.
        coremark_per_vcpu=1.0,
        usd_per_hour=round(cores * LOCAL_USD_PER_CORE_HOUR, 6),
        in_training_enum=False,
    )


def _local(platform: PlatformName, cores: int | None) -> Catalog:
    if cores is None:
        cores = num_cpus()
    instances = (local_instance(f"local.c{number}") for number in range(1, cores + 1))
    return Catalog(
        platform=platform,
        instances=[instance for instance in instances if instance is not None],
        source=f"nominal: {LOCAL_USD_PER_CORE_HOUR} $ per core and hour, not billed",
        purchase=NOMINAL,
        max_total_vcpus=cores,
        make=local_instance,
    )


@functools.cache
def _aws(platform: PlatformName) -> Catalog:
    table = _shipped(platform)
    return Catalog(
        platform=platform,
        instances=[to_instance(row, table, platform=platform, base=None) for row in table.rows],
        source=PLATFORM_INFOS[platform].price_list,
        region=table.region,
    )


def _in_region(instance: Instance, region: str | None) -> Instance:
    """Returns the type for hosts in a region: there a price of another region is an estimate."""
    other = instance.price_region
    if region is None or other in (None, region) or instance.usd_per_hour is None:
        return instance
    words = f"the price of {other}"
    if instance.estimate.startswith(words):
        return instance
    if instance.estimate:
        words += f", {instance.estimate}"
    return replace(instance, estimate=words)


def unknown_instance(name: str, *, platform: PlatformName, vcpus: int = 1) -> Instance:
    """Returns a type of which only the name is known, and perhaps the measured vCPUs.

    Today's hosts may have it; no plan proposes it.
    """
    full_name = platform_name(name.strip(), platform)
    return Instance(
        type=full_name,
        family=full_name.rpartition(".")[0] or full_name,
        vcpus=vcpus,
        barred=f"nothing is known of {full_name}: no price, no size",
        is_known=False,
    )


@functools.cache
def _shipped(platform: PlatformName = "sagemaker") -> Table:
    name = "aws_training_instances.csv"
    text = resources.files("stoker.catalog").joinpath(name).read_text(encoding="utf-8")
    return parse_table(text, platform=platform, source=name)


def extended(catalog: Catalog, table: Table) -> Catalog:
    """Returns the catalog with the table's rows; raises UsageError where one of them is wrong."""
    platform = catalog.platform
    instances = {instance.type: instance for instance in catalog.instances}
    for row in table.rows:
        name = platform_name(row.instance_type, platform)
        base = instances.get(name)
        if base is None and catalog.info.is_this_machine:
            base = local_instance(name)
        instances[name] = to_instance(row, table, platform=platform, base=base)
    longer = replace(
        catalog,
        instances=[_in_region(instance, table.region) for instance in instances.values()],
        region=table.region or catalog.region,
    )
    if table.price_column is None:
        return longer
    source = f"{table.source}, else {catalog.source}"
    return replace(longer, source=source, purchase="as in the price file")
