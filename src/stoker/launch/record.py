"""The leader's record of a run, training.json, and the metrics of its script."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.feed.bad_samples import FILE, join_lists
from stoker.feed.rank_reports import all_batches, counted_steps, why_unfed
from stoker.feed.step_times import read_timelines
from stoker.figures.measured import measure
from stoker.launch.host_client import HostRun
from stoker.launch.job_environment import Trainer, hyperparameters
from stoker.launch.limits import Limits
from stoker.launch.run_server import RunServer
from stoker.launch.topology import platform_name
from stoker.logs import EventName, printable
from stoker.records import Group, Host, HostMemory, Job, Json, Training, write_json
from stoker.records.base import word_of
from stoker.records.hyperparameters import record_of
from stoker.records.training import EndState, Metric

# Longer lines are dumps.
MAX_LINE = 1000
# Colours, and what else a terminal takes as no text.
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How the training ended.

    Attributes:
        exit_code: The training command's; None if it never ran or another host ended it.
    """

    status: EndState
    exit_code: int | None
    failure: str | None = None


class PrintedMetrics:
    """Metrics that a script only prints: the last match of each gate's pattern in its output.

    `read` is called by the threads that copy standard output and errors.

    Attributes:
        values: The text of the last match, by the metric's name.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = {name: re.compile(text) for name, text in patterns.items()}
        self.values: dict[str, str] = {}

    def read(self, lines: bytes) -> None:
        """Looks for the patterns in whole lines."""
        if not self._patterns:
            return
        for line in _COLOUR.sub("", lines.decode(errors="replace")).splitlines():
            for name, pattern in self._patterns.items():
                for match in pattern.finditer(line[:MAX_LINE]):
                    if match[1] is not None:
                        self.values[name] = match[1]


def write_record(
    outcome: RunOutcome,
    run: HostRun,
    *,
    limits: Limits,
    server: RunServer,
    printed: PrintedMetrics,
) -> None:
    """Writes the leader's record.

    Any error is logged, as the training has ended: its exit code counts.
    """
    try:
        record = _record(outcome, run, limits, server, printed)
        write_json(run.output / "training.json", record)
    except Exception as err:
        what = err.what if isinstance(err, UsageError) else repr(err)
        text = f"{what}: the training's figures are lost"
        run.log.event(EventName.RECORD_WRITE_FAILED, text=text)


def _record(
    outcome: RunOutcome,
    run: HostRun,
    limits: Limits,
    server: RunServer,
    printed: PrintedMetrics,
) -> Training:
    settings = run.settings
    topology = run.topology
    output = run.output
    progress = server.progress
    timelines = read_timelines(output)
    steps = counted_steps(output, timelines, progress)
    trainer = Trainer(run)
    per_host = trainer.processes_per_host
    groups = []
    hosts = []
    # dnn first, as readers of the record expect.
    for group in sorted(topology.groups, key=lambda group: group.role != "dnn"):
        is_dnn = group.role == "dnn"
        if group.hosts:
            own = Group(
                name=group.name,
                role=group.role,
                instance_type=group.instance_type or "unknown",
                count=len(group.hosts),
                processes_per_host=per_host if is_dnn else None,
                workers_per_host=settings.workers.get(group.role),
            )
            groups.append(own)
        hosts += [Host(host=host, group=group.name) for host in group.hosts]
    is_fed = settings.engine.name == "feed" and settings.profile is None
    fed = {group.name: group.hosts for group in topology.groups if is_fed and group.role == "data"}
    why = why_unfed(output, progress) if fed and outcome.status == "succeeded" else ""
    if why:
        run.log.event(EventName.FEED_UNUSED, text=why)
        server.note(why, host=topology.host)
    memory = [
        HostMemory(
            host=host,
            limit_bytes=peak.limit_bytes,
            peak_bytes=peak.peak_bytes,
            kills=peak.kills,
        )
        for host, peak in limits.peaks().items()
    ]
    return Training(
        status=outcome.status,
        exit_code=outcome.exit_code,
        failure=outcome.failure,
        groups=tuple(groups),
        hosts=tuple(hosts),
        strategy=trainer.strategy,
        engine=settings.engine.name,
        hyperparameters=record_of(hyperparameters(settings)),
        measured=measure(timelines, progress, replica_of=settings.feed.replica),
        memory=tuple(memory),
        gpus=limits.gpu_loads(),
        metrics=_metrics(run, printed=printed.values),
        events=tuple(server.events),
        steps=steps,
        spending=limits.spending.of_groups(
            progress,
            data_hosts=fed,
            all_batches=all_batches(progress) or steps or 0,
        ),
        # Ranks of other hosts report theirs; without a data group nobody reports.
        bad_samples=max(
            join_lists([output], output / FILE),
            sum(report.bad_samples for report in progress.values()),
        ),
        job=Job(platform=platform_name(run.environ), name=settings.run_id),
    )


def _metrics(run: HostRun, *, printed: Mapping[str, str]) -> dict[str, Metric]:
    """Returns the script's metrics: what it reported, and what a gate's pattern found in its log.

    A pattern comes first: the gate names it. What is no finite number is a text.
    """
    reported: dict[str, Json] = {}
    file = run.settings.metrics or run.output / "metrics.json"
    try:
        if file.exists():
            reported = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as err:
        run.log.event(EventName.METRICS_FAILED, reason=str(err))
    metrics: dict[str, Metric] = {}
    for name, value in {**reported, **printed}.items():
        try:
            # null: as JavaScript and SQL write NaN.
            number = float("nan" if value is None else value)  # type: ignore[arg-type]
            # JSON has no NaN.
            metrics[name] = number if math.isfinite(number) else word_of(number)
        except (TypeError, ValueError, OverflowError):
            metrics[name] = printable(str(value))
    return metrics
