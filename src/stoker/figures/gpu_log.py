"""gpu.csv and its line in the log: the load of a dnn host's GPUs, looked at once a second.

A thread of the launcher asks the driver (`host.gpus`), so that a driver in trouble holds up nothing
else. Each dnn host writes gpu.csv into its own output folder; followers send the leader their
latest samples, and in the end their loads. The leader logs a `gpu_load` line now and then, which
`stoker watch` reads, and writes the loads of all hosts into training.json.

gpu.csv is bounded as a timeline is: with each further LEVEL_BYTES its rows stand for twice as long.
Eight GPUs of a week are 5 MiB.
"""

import csv
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TextIO

import msgspec

from stoker.feed import timeline
from stoker.feed.timeline import MeasuredStep
from stoker.feed.training_steps import read_timelines
from stoker.figures.feed_intervals import interval_of
from stoker.host.gpu_owners import GpuOwners
from stoker.host.gpus import (
    THROTTLE_REASONS,
    VISIBLE,
    Gpu,
    GpuReader,
    GpuSample,
    GpuState,
    GpusUnreadError,
    Look,
)
from stoker.logs import EventName, Log, LogEvent, LogValue
from stoker.record_words import gpu_noun
from stoker.records import GpuLoad
from stoker.records.gpu import GpuFigure, GpuLoads, busy_share
from stoker.units import known_mean, numbered, percentage

FILE = "gpu.csv"
# Of the steps as they are, which a profile measures first.
BASELINE_FILE = "baseline-timeline-rank{rank}.csv"
_FIGURES = (
    "utilization",
    "memory_bytes",
    "power_watts",
    "sm_clock_mhz",
    "pcie_received_bytes_per_second",
)
# Share of the row's time, by reason.
_THROTTLED = tuple(f"throttled_{reason}" for reason in THROTTLE_REASONS)
# Seconds since the first look, length of the row's time, and looks in it; then means over them. An
# empty cell: the GPU does not tell.
COLUMNS = ("start_seconds", "seconds", "samples", "gpu", *_FIGURES, *_THROTTLED)
LEVEL_BYTES = 512 << 10
# Bound for reading: more than the file ever has.
MAX_READ_BYTES = 64 << 20
LOOK_SECONDS = 1.0
# At most this share of a core: a look that costs more is taken more rarely. What PCIe traffic costs
# has its own share (host.gpus), and both are 0.1%.
MAX_CPU_SHARE = 0.0008
MAX_LOOK_SECONDS = 20.0
_LOOKS_COMPARED = 9
# For a call of the driver that is under way; one that hangs is left.
CLOSE_SECONDS = 3.0
# An older sample is none: the driver hangs, or the host is gone.
STALE_SECONDS = 30.0
# Followers report so often.
TELL_SECONDS = 5.0
# Container runtimes cut lines at 16 KiB.
_GPUS_IN_A_LINE = 100

GpuShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
GpuAmount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """A row of gpu.csv: means of one GPU over `seconds`; None: it does not tell."""

    start_seconds: float
    seconds: float
    samples: int
    gpu: str
    utilization: float | None = None
    memory_bytes: float | None = None
    power_watts: float | None = None
    sm_clock_mhz: float | None = None
    pcie_received_bytes_per_second: float | None = None
    throttled_power: float | None = None
    throttled_thermal: float | None = None
    throttled_other: float | None = None

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds

    @property
    def middle_seconds(self) -> float:
        return self.start_seconds + self.seconds / 2

    @property
    def is_whole(self) -> bool:
        """Whether the row can be of a gpu.csv: finite, and of some time."""
        values = [getattr(self, name) for name in (*_FIGURES, *_THROTTLED)]
        figures = [self.start_seconds, *(figure for figure in values if figure is not None)]
        shares = [self.utilization, *(getattr(self, name) for name in _THROTTLED)]
        is_share = all(share is None or share <= 1 for share in shares)
        is_finite = all(0 <= figure < math.inf for figure in figures)
        return is_share and is_finite and 0 < self.seconds < math.inf and self.samples > 0


def row_of(
    gpu: str, samples: Sequence[GpuSample], *, start_seconds: float, seconds: float
) -> GpuRow:
    """Returns the means of one GPU's samples, of which there is at least one."""
    means: dict[str, float | None] = {}
    for name in _FIGURES:
        means[name] = known_mean(getattr(sample, name) for sample in samples)
    throttled = [sample.throttled for sample in samples if sample.throttled is not None]
    for reason in THROTTLE_REASONS:
        means[f"throttled_{reason}"] = known_mean(reason in reasons for reasons in throttled)
    return GpuRow(
        start_seconds=start_seconds, seconds=seconds, samples=len(samples), gpu=gpu, **means
    )


def csv_line(row: GpuRow) -> str:
    text = StringIO()
    cells = (getattr(row, column) for column in COLUMNS)
    shown = [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells]
    csv.writer(text, lineterminator="\n").writerow(shown)
    return text.getvalue()


def read_rows(path: Path) -> list[GpuRow]:
    """Reads a gpu.csv; rows that are cut off or malformed are left out."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_READ_BYTES).decode(errors="replace")
    except OSError:
        return []
    rows = []
    for cells in csv.DictReader(text.splitlines()):
        filled = {name: cell for name, cell in cells.items() if cell}
        try:
            row = msgspec.convert(filled, GpuRow, strict=False)
        except (msgspec.ValidationError, ValueError, TypeError):
            continue
        if row.is_whole:
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class StepSpans:
    """When a host's ranks made their steps, in seconds since the first look, by start."""

    spans: tuple[tuple[float, float], ...] = ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """From the first to the last step; None: no step is known."""
        if not self.spans:
            return None
        return self.spans[0][0], max(end for _, end in self.spans)

    def has(self, seconds: float) -> bool:
        """Whether a step was under way."""
        place = bisect_right(self.spans, (seconds, math.inf))
        return place > 0 and seconds <= self.spans[place - 1][1]


def spans_of(ranks: Mapping[int, tuple[float, Sequence[MeasuredStep]]]) -> StepSpans:
    """Returns the spans of steps of all ranks, without the first ones of each epoch.

    Args:
        ranks: When each rank asked for its first batch, in seconds since the first look, and its
            timeline.
    """
    spans: list[tuple[float, float]] = []
    for zero, steps in ranks.values():
        # A row of several steps has no weight, and lies between single ones.
        first = {id(step) for step in timeline.steady(steps)}
        spans += [
            (zero + step.start_seconds, zero + step.end_seconds)
            for step in steps
            if id(step) in first or not step.weight
        ]
    return StepSpans(_merged(sorted(spans)))


def _merged(spans: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        # Steps follow each other within microseconds, which round to some.
        if merged and start <= merged[-1][1] + 1e-3:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def loads_of(
    rows: Sequence[GpuRow], gpus: Sequence[Gpu], *, host: str, spans: StepSpans
) -> GpuLoads:
    """Returns the loads of a host's GPUs while it trained; without known steps, all the time."""
    by_gpu: defaultdict[str, list[GpuRow]] = defaultdict(list)
    for row in rows:
        by_gpu[row.gpu].append(row)
    return tuple(
        _load(by_gpu[gpu.number], gpu, host=host, spans=spans)
        for gpu in gpus
        if by_gpu.get(gpu.number)
    )


def _load(rows: Sequence[GpuRow], gpu: Gpu, *, host: str, spans: StepSpans) -> GpuLoad:
    used = rows
    inside = list[GpuRow]()
    during: Literal["steps", "command"] = "command"
    if bounds := spans.bounds:
        begin, end = bounds
        inside = [row for row in rows if begin <= row.middle_seconds <= end]
    if inside:
        used = inside
        during = "steps"
    # Beside the time from the first to the last step, which includes validation.
    stepping = [row for row in inside if spans.has(row.middle_seconds)]
    throttled: dict[str, float] = {}
    for reason, name in zip(THROTTLE_REASONS, _THROTTLED, strict=True):
        if share := _figure(used, name):
            throttled[reason] = min(1.0, share.mean)
    step_share = None
    if stepping_load := _figure(stepping, "utilization"):
        step_share = min(1.0, stepping_load.mean)
    return GpuLoad(
        host=host,
        index=gpu.index,
        slice=gpu.slice,
        uuid=gpu.uuid,
        model=gpu.model,
        memory_total_bytes=gpu.memory_total_bytes,
        during=during,
        begin_seconds=used[0].start_seconds,
        end_seconds=used[-1].end_seconds,
        samples=sum(row.samples for row in used),
        utilization=_figure(used, "utilization"),
        step_utilization=step_share,
        memory_bytes=_figure(used, "memory_bytes"),
        power_watts=_figure(used, "power_watts"),
        sm_clock_mhz=_figure(used, "sm_clock_mhz"),
        pcie_received_bytes_per_second=_figure(used, "pcie_received_bytes_per_second"),
        throttled=throttled,
    )


def _figure(rows: Sequence[GpuRow], name: str) -> GpuFigure | None:
    weighted = [(value, row.seconds) for row in rows if (value := getattr(row, name)) is not None]
    whole = sum(seconds for _, seconds in weighted)
    if not weighted:
        return None
    weighted.sort()
    return GpuFigure(
        mean=sum(value * seconds for value, seconds in weighted) / whole,
        low=_quantile(weighted, 0.25 * whole),
        median=_quantile(weighted, 0.5 * whole),
        high=_quantile(weighted, 0.75 * whole),
    )


def _quantile(ordered: Sequence[tuple[float, float]], seconds: float) -> float:
    """Returns the value below which the GPU was for so many seconds."""
    passed = 0.0
    for value, length in ordered:
        passed += length
        if passed >= seconds:
            return value
    return ordered[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """A GPU's latest sample, as a `gpu_load` line of the leader's log has it."""

    host: str
    gpu: str
    utilization: GpuShare | None = None
    memory_bytes: GpuAmount | None = None
    power_watts: GpuAmount | None = None
    sm_clock_mhz: GpuAmount | None = None
    pcie_received_bytes_per_second: GpuAmount | None = None
    throttled: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusNow:
    """The GPUs of all dnn hosts, the first of them one by one.

    Attributes:
        count: How many there are.
        utilization: Mean of those that are busy, of all where none is; None: not known.
    """

    count: Annotated[int, msgspec.Meta(ge=1)]
    utilization: GpuShare | None = None
    gpus: tuple[GpuNow, ...] = ()

    @property
    def words(self) -> str:
        """`GPU 28% busy`; empty: not known."""
        if self.utilization is None:
            return ""
        return f"{gpu_noun(self.count)} {percentage(self.utilization)} busy"


def gpus_in(event: LogEvent) -> GpusNow | None:
    """Returns the load in a `gpu_load` line; None in another or a broken line."""
    if event.event != EventName.GPU_LOAD:
        return None
    names = [item.name for item in fields(GpuNow)]
    rows = event.values.get("rows", "").split()
    gpus = []
    try:
        for row in csv.DictReader(rows, fieldnames=names):
            cells = {name: cell for name, cell in row.items() if cell}
            gpus.append(msgspec.convert(cells, GpuNow, strict=False))
        values: dict[str, object] = {"count": event.values.get("count", ""), "gpus": gpus}
        if share := event.values.get("gpu_utilization"):
            values["utilization"] = share
        return msgspec.convert(values, GpusNow, strict=False)
    except (msgspec.ValidationError, csv.Error):
        return None


def words_for_log(hosts: Mapping[str, Sequence[GpuState]]) -> dict[str, LogValue]:
    """Returns the values of a `gpu_load` line; empty without a GPU."""
    states = []
    for host in sorted(hosts):
        states += [(host, state) for state in hosts[host]]
    if not states:
        return {}
    shares = [state.sample.utilization for _, state in states]
    busy = [share for share in shares if share]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for host, state in states[:_GPUS_IN_A_LINE]:
        sample = state.sample
        figures = [getattr(sample, name) for name in _FIGURES]
        shown = [f"{figure:.4g}" if figure is not None else None for figure in figures]
        writer.writerow([host, state.gpu.number, *shown, "+".join(sample.throttled or ())])
    return {
        "count": len(states),
        "gpu_utilization": known_mean(busy or shares),
        "rows": text.getvalue(),
    }


@dataclass(eq=False)
class GpuLines:
    """Logs the latest samples of all dnn hosts, as often as the feed's rates are logged."""

    log: Log
    _: KW_ONLY
    hosts: Callable[[], Mapping[str, Sequence[GpuState]]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self._logged_at = self.clock()

    def tick(self) -> None:
        now = self.clock()
        if now - self._logged_at < interval_of(now - self._began):
            return
        self._logged_at = now
        if values := words_for_log(self.hosts()):
            self.log.event(EventName.GPU_LOAD, **values)

    def close(self) -> None:
        """Does nothing: the latest line is as good as a last one."""


def look_pause(costs: Sequence[float]) -> float:
    """Returns the seconds to the next look, from the CPU-seconds that the latest ones took.

    By their median: the first look, and one in the middle of a page fault, cost ten times as much.
    """
    cost = median(costs) if len(costs) > 1 else 0.0
    return min(max(LOOK_SECONDS, cost / MAX_CPU_SHARE), MAX_LOOK_SECONDS)


@dataclass(eq=False)
class _Rows:
    """Writes gpu.csv; samples are gathered for as long as a row stands for."""

    path: Path
    log: Log
    samples: defaultdict[str, list[GpuSample]] = field(default_factory=lambda: defaultdict(list))
    size: int = 0
    start_seconds: float = 0.0
    is_broken: bool = False
    _file: TextIO | None = None

    def add(self, states: Sequence[GpuState], *, now: float) -> None:
        for state in states:
            self.samples[state.gpu.number].append(state.sample)
        row_seconds = LOOK_SECONDS * (1 << self.size // LEVEL_BYTES)
        # A look comes a moment early or late.
        if now - self.start_seconds >= row_seconds - LOOK_SECONDS / 2:
            self.write(now=now)

    def write(self, *, now: float) -> None:
        start = self.start_seconds
        seconds = now - self.start_seconds
        self.start_seconds = now
        gathered = self.samples
        self.samples = defaultdict(list)
        if self.is_broken or seconds <= 0 or not gathered:
            return
        try:
            if self._file is None:
                self._file = self.path.open("w", encoding="utf-8")
                self.size += self._file.write(",".join(COLUMNS) + "\n")
            for number, samples in gathered.items():
                row = row_of(number, samples, start_seconds=start, seconds=seconds)
                self.size += self._file.write(csv_line(row))
            self._file.flush()
        except OSError as err:
            # A full disk must not end the training.
            self.is_broken = True
            text = f"cannot write {self.path}: {err.strerror}; the training continues"
            self.log.event(EventName.GPU_WRITE_FAILED, text=text)

    def close(self, *, now: float) -> None:
        self.write(now=now)
        if self._file:
            self._file.close()


class GpuLog:
    """The load of the command's GPUs on this host, read in a separate thread.

    gpu.csv has all GPUs that the command may use; states and loads are of those that it does use,
    as far as the driver tells.

    Args:
        output: Folder of gpu.csv and of the ranks' timelines.
        environ: Variables of the command.
        is_allotted: All GPUs here are the command's, as on a platform that gives them to its job.
        tell: Called in the thread with the latest states, every TELL_SECONDS.
        open_reader: Opens the driver's library; raises GpusUnreadError.
    """

    def __init__(
        self,
        output: Path,
        *,
        environ: Mapping[str, str],
        host: str,
        log: Log,
        is_allotted: bool = False,
        tell: Callable[[tuple[GpuState, ...]], None] = lambda states: None,
        open_reader: Callable[[Mapping[str, str]], GpuReader] = GpuReader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output
        self._environ = environ
        self._host = host
        self._log = log
        # Whoever sets the variable has chosen the GPUs.
        self._is_allotted = is_allotted or VISIBLE in environ
        self._owners = GpuOwners(is_allotted=self._is_allotted)
        self._has_said_whose = False
        self._tell = tell
        self._open_reader = open_reader
        self._clock = clock
        self._zero = clock()
        self._began = time.time()
        self._zeros: dict[Path, float] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._latest: tuple[float, tuple[GpuState, ...]] = (-math.inf, ())
        self._told_at = -math.inf
        self._rows = _Rows(output / FILE, log)
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def states(self) -> tuple[GpuState, ...]:
        """The latest sample of each GPU that answers; empty if it is old."""
        looked_at, states = self._latest
        if self._clock() - looked_at >= STALE_SECONDS:
            return ()
        return states

    def start(self) -> None:
        (self._output / FILE).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and leaves it if the driver hangs; may be called twice."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                text = "GPU load: the driver does not answer; figures end where it stopped"
                self._log.event(EventName.GPU_LOAD_UNREAD, text=text)
            self._thread = None

    def loads(self) -> GpuLoads:
        """Returns the loads of the command, and logs whose they are if in doubt; after `close`."""
        rows = read_rows(self._output / FILE) if self._gpus else []
        gpus = self._owners.of_run(self._gpus)
        loads = loads_of(rows, gpus, host=self._host, spans=self._spans())
        self._say_whose(loads)
        return loads

    def _say_whose(self, loads: GpuLoads) -> None:
        """Logs, once, that GPUs of other people may be among the loads, or that all are theirs."""
        if self._has_said_whose or self._is_allotted or not self._gpus:
            return
        text = ""
        num_gpus = numbered(len(self._gpus), "GPU")
        if self._owners.is_known and not loads:
            text = (
                f"GPU load: only processes outside this run compute on the {num_gpus}: what they "
                "load does not count"
            )
        elif not self._owners.is_known and len(loads) > 1 and busy_share(loads):
            text = (
                f"GPU load: which of the {len(loads)} GPUs the run uses is not known (the driver "
                f"names no process of it), so the load is of all; set {VISIBLE}"
            )
        if text:
            self._has_said_whose = True
            self._log.event(EventName.GPU_LOAD_INCOMPLETE, text=text)

    def _run(self) -> None:
        try:
            reader = self._open_reader(self._environ)
        except GpusUnreadError as err:
            if err.is_news:
                self._log.event(EventName.GPU_LOAD_UNREAD, text=f"GPU load: {err}")
            return
        try:
            self._gpus = reader.gpus
            if reader.left_out:
                self._log.event(EventName.GPU_LOAD_UNREAD, text=f"GPU load: {reader.left_out}")
            self._look_until_closed(reader)
        except Exception as err:  # at the edge of a thread, without which the training continues
            self._log.event(EventName.GPU_LOAD_UNREAD, text=f"GPU load: {err!r}")
        finally:
            self._rows.close(now=self._clock() - self._zero)
            reader.close()

    def _look_until_closed(self, reader: GpuReader) -> None:
        due = self._zero = self._clock()
        costs: deque[float] = deque(maxlen=_LOOKS_COMPARED)
        while reader.gpus and not self._is_closing.wait(max(0.0, due - self._clock())):
            before = time.thread_time()
            look = reader.look()
            self._owners.look(reader)
            self._take(look)
            self._find_zeros()
            costs.append(time.thread_time() - before - look.pcie_cpu_seconds)
            # Not several at once, after a suspended process or a slow driver.
            due = max(due + look_pause(costs), self._clock())

    def _take(self, look: Look) -> None:
        now = self._clock()
        used_gpus = self._owners.of_run([state.gpu for state in look.states])
        states = tuple(state for state in look.states if state.gpu in used_gpus)
        self._latest = (now, states)
        if look.refused:
            text = f"GPU load: not known here: {'; '.join(look.refused)}"
            self._log.event(EventName.GPU_LOAD_INCOMPLETE, text=text)
        for lost in look.lost:
            text = f"{lost}; its load is no longer read, the training continues"
            self._log.event(EventName.GPU_LOST, text=text)
        self._rows.add(look.states, now=now - self._zero)
        if now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            self._tell(states)

    def _find_zeros(self) -> None:
        """Notes when ranks asked for their first batch, from which their timelines count.

        A timeline is written when a step ends: its file's time is the end of its last row.
        """
        for file in (BASELINE_FILE, timeline.FILE):
            for rank in timeline.timeline_ranks(self._output, file=file):
                path = self._output / file.format(rank=rank)
                if path not in self._zeros:
                    self._note_zero(path)

    def _note_zero(self, path: Path) -> None:
        try:
            written = path.stat().st_mtime
            # Not one that an earlier attempt left here.
            rows = timeline.read_timeline(path) if written >= self._began else []
            # Written to since: the next look sees it.
            is_settled = path.stat().st_mtime == written
        except OSError:
            return
        if rows and is_settled:
            ago = time.time() - written
            end = self._clock() - self._zero - ago
            self._zeros[path] = end - max(row.end_seconds for row in rows)

    def _spans(self) -> StepSpans:
        self._find_zeros()
        for file in (BASELINE_FILE, timeline.FILE):
            spans = {
                rank: (self._zeros[path], steps)
                for rank, steps in read_timelines(self._output, file=file).items()
                if (path := self._output / file.format(rank=rank)) in self._zeros
            }
            if spans:
                return spans_of(spans)
        return StepSpans()
