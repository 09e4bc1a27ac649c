"""`stoker profile` measures what a step of the unchanged training command waits for."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    HIDDEN,
    AsJson,
    OutputFiles,
    Overrides,
    PlatformName,
    StepParams,
    Words,
    Yes,
    check_writable,
    told_by_flag,
    typed_keys,
)
from stoker.errors import UsageError, WorkloadError
from stoker.logs import EventName, parse_line
from stoker.run.progress import is_of_platform
from stoker.terminal import (
    program,
    relative,
    say,
    step_line,
    terminal_bar,
    title_column,
    words_column,
    working,
)
from stoker.units import duration, ms, wait_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

    from stoker.platforms.base import LogLine, Platform
    from stoker.records import Cluster, Profile, Workload
    from stoker.run.earlier_profiles import EarlierProfile
    from stoker.run.outputs import Outputs

# What is measured after an event.
_DOING: dict[str, str] = {
    EventName.PROFILE_STARTED: "measures the script as it is",
    EventName.PROFILE_AS_IS: "measures with cached batches",
    EventName.PROFILE_ACCELERATOR: "measures the loader alone",
}


def profile_verb(
    words: Words = None,
    *,
    context: typer.Context,
    budget: float | None = None,
    instance_type: str | None = None,
    platform: PlatformName = None,
    copy: bool = False,
    training_job: str | None = None,
    logs: Path | None = None,
    region: str | None = None,
    find: Annotated[str | None, HIDDEN] = None,
    package: Annotated[Path | None, HIDDEN] = None,
    files: OutputFiles,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Measure what a training step waits for.

    The command runs unchanged and for real, writes its files (with --copy: in a copy of this
    folder), and is stopped after the measurement. The record is profile.json, unless --out names
    another file.

    Args:
        budget (SECONDS): Measure for this many seconds, from the first batch on (default: from the
            workload, or 180).
        instance_type (T): Name the instance type of this host; auto asks the cloud (default: from
            the workload; on EC2, auto).
        copy: Run the command in a temporary copy of this folder, so that no file here changes
            (default: run it here).
        training_job (NAME): Run nothing; read the CPU and GPU load of this SageMaker job (default:
            run the command).
        logs (F): With --training-job: read the time of a step from this log file of the job
            (default: none).
        region (R): AWS region (default: as boto3 finds it).
        find (RUN): Measure nothing; look for a kept profile of the same cost, for this run of a
            pipeline.
        package (F): With --find: the code's package.

    Examples:
        stoker profile -- python train.py --epochs 10
        stoker profile configs/mnist.yaml --budget 60
    """
    from stoker.catalog import catalog_of
    from stoker.cli.workloads import resolve
    from stoker.environment import own_pod
    from stoker.platforms import platform_named
    from stoker.profile.profiled_job import COPY, UnmeasuredError, notebook_refusal, scratch_copy
    from stoker.records import Group, to_json, write_json
    from stoker.run.billing import confirm, say_unused_types
    from stoker.run.clusters import todays_cluster
    from stoker.run.earlier_profiles import earlier_profile, kept_profiles
    from stoker.run.outputs import outputs_of, step_inputs
    from stoker.run.run_folders import named_run_dir, new_run_dir, run_base

    if (logs or region) and not training_job:
        raise typer.BadParameter("only together with --training-job", param_hint="--logs, --region")
    outputs, given = outputs_of(files), step_inputs(files)
    if training_job:
        if words or platform or copy or budget is not None:
            raise UsageError(
                "--training-job runs nothing, so it takes no command, --platform, --copy or "
                "--budget",
                where="command line",
                fix=f"stoker profile --training-job {training_job}",
            )
        observe(training_job, logs=logs, region=region, outputs=outputs, as_json=as_json)
        return
    keys = {
        ("profile.budget_seconds", "--budget"): budget,
        ("platform", "--platform"): platform,
        ("profile.instance_type", "--instance-type"): instance_type or None,
    }
    flags, sets = typed_keys(keys, overrides)
    # First: a notebook is a file that exists and that cannot be run.
    refused = notebook_refusal(words, where="command line") if words else None
    if refused:
        raise refused
    params = [*given.params, *(params or ())]
    with told_by_flag(flags):
        workload = resolve(words or given.words, overrides=sets, params=params, verb="profile")
    service = platform_named(workload.platform, settings=workload)
    kept_before = kept_profiles(workload, platform=service, span=given.cache_key)
    earlier = earlier_profile(
        workload, params=params, kept=kept_before, run=find or "", package=package, outputs=outputs
    )
    if earlier.is_answer:
        tell_earlier(earlier, workload, outputs=outputs, as_json=as_json)
        return
    is_here = workload.platform_info.is_this_machine
    if copy and not is_here:
        raise UsageError(
            f"--copy cannot be used on {workload.platform}: the command runs in a container there",
            where="command line",
            fix="leave --copy out",
        )
    # Before minutes are spent on a measurement that could not be kept.
    check_writable(outputs.out or Path("profile.json"), flag="--out")
    cluster = todays_cluster(workload, all_cores=workload.command == tuple(words or ()))
    today = [Group.of_today(cluster.dnn)]
    say_unused_types(workload, today, quiet=as_json)
    confirm(
        workload,
        today,
        catalog=catalog_of(workload),
        decision=None,
        assume_yes=yes,
        quiet=as_json,
        is_profile=True,
    )
    pod = own_pod()
    # A retry of a pipeline's step follows the job of the first attempt.
    is_step = pod and pod.run_id and not is_here
    branch = given.branch
    name = f"{workload.run_name(pod.run_id, branch=branch)}-profile" if pod and is_step else None
    run_dir = named_run_dir(name) if name else new_run_dir(run_base(workload, kind="profile"))
    folder: AbstractContextManager[object] = nullcontext()
    how = " and writes its files"
    how += "; --copy runs it in a copy of this folder" if is_here else ""
    if copy:
        # The measurement has another working directory.
        run_dir = run_dir.absolute()
        # A channel of this machine is a folder, which the script reads.
        data = [Path(each.uri.removeprefix("file://")) for each in workload.channels.values()]
        folder = scratch_copy(Path.cwd(), run_dir / COPY, linked=data)
        how = ", in a copy of this folder"
    say(f"the command runs for real{how}", quiet=as_json)
    say(
        f"profile of {workload.name}: measures {workload.profile.budget_seconds:.0f} s from the "
        f"first batch on, then stops the command; its output: {relative(run_dir / 'logs')}",
        quiet=as_json,
    )
    try:
        with folder:
            record = profile_and_keep(
                workload,
                cluster=cluster,
                platform=service,
                run_dir=run_dir,
                records={"step": "profile", "workload.json": to_json(workload)} if name else {},
                quiet=as_json,
            )
    except KeyboardInterrupt:
        # The parser ends with 130 and prints nothing.
        again = shlex.join([program(), *(context.obj or ["profile", *(words or ())])])
        say(
            f"stopped before there was a verdict\nkept:  {relative(run_dir / 'logs')}\n"
            f"again: {again}",
            quiet=as_json,
        )
        raise
    except UnmeasuredError as err:
        if err.observed:
            # `decide` can make a guess of it, so it is written although this is an error.
            out = outputs.out or Path("profile.json")
            write_json(out, err.observed)
            say(
                f"not enough was measured for a verdict; what was observed is in {out}",
                quiet=as_json,
            )
        raise
    kept_before.keep(record)
    deliver_profile(record, outputs=outputs, as_json=as_json)


def deliver_profile(record: "Profile", *, outputs: "Outputs", as_json: bool) -> None:
    from stoker.profile import explain
    from stoker.run.outputs import deliver, told_of_profile

    told = told_of_profile(record)
    deliver(record, outputs=outputs, name="profile", explain=explain, as_json=as_json, told=told)


def tell_earlier(
    earlier: "EarlierProfile", workload: "Workload", *, outputs: "Outputs", as_json: bool
) -> None:
    """Says what is used in place of a measurement, and delivers it."""
    from stoker.run.earlier_profiles import reused_words

    say(f"profile of {workload.name}: {earlier.words}", quiet=as_json)
    if earlier.profile is not None:
        age = reused_words(earlier.profile, workload, package=earlier.package)
        say(age.words if age else "", quiet=as_json or age is None)
        deliver_profile(earlier.profile, outputs=outputs, as_json=as_json)


def profile_and_keep(
    workload: "Workload",
    *,
    cluster: "Cluster",
    platform: "Platform[object]",
    run_dir: Path,
    records: Mapping[str, str],
    quiet: bool,
) -> "Profile":
    """Profiles and shows the progress; in a pipeline, returns what an earlier attempt measured."""
    from stoker.profile import profile
    from stoker.profile.profiled_job import profiled_job
    from stoker.records import Profile, read_json, to_json

    job = profiled_job(workload, group=cluster.dnn, run_dir=run_dir, records=records)
    request = platform.plan(job)
    kept = platform.kept(request) if records else ""
    if kept:
        say(f"{job.name} has measured before: this is its record", quiet=quiet)
        return read_json(kept, Profile)
    try:
        with following_profile(workload, quiet=quiet) as followed:
            record = profile(
                workload,
                cluster=cluster,
                platform=platform,
                run_dir=run_dir,
                records=records,
                on_line=followed.line,
            )
    except (UsageError, WorkloadError):
        if records:
            platform.keep(request, "")
        raise
    if records:
        platform.keep(request, to_json(record))
    return record


class FollowedProfile:
    """Progress of a profile, from the log of its first rank.

    Once all ranks have logged their waits, the longest-waiting rank is shown.
    """

    def __init__(self, *, bar: "Bar | None", quiet: bool, budget: str) -> None:
        self._bar = bar
        words = "starts the command"
        self._task = bar.add_task("profile", total=None, words=words) if bar else None
        self._quiet = quiet
        self._budget = budget
        self._said: set[str] = set()
        self._run = ""
        # By event and rank: waits that are not yet known of all ranks.
        self._waits: dict[str, dict[int, Mapping[str, str]]] = {}

    def line(self, line: "LogLine") -> None:
        """Takes a line of the job's log; the script's own lines are in files."""
        if is_of_platform(line):
            say(step_line("", line.text, None), quiet=self._quiet)
            return
        event = parse_line(line.text) if line.text.startswith("stoker ") else None
        # Of the first event's run, which the launcher writes before the script begins.
        self._run = self._run or (event.run if event else "")
        rank_text = event.values.get("rank", "0") if event else ""
        if event is None or event.run != self._run or not rank_text.isdecimal():
            return
        rank = int(rank_text)
        if "wait_share" in event.values:
            known = self._waits.setdefault(event.event, {})
            known[rank] = event.values
            if len(known) >= int(event.values.get("ranks", "1")):
                self._say_waits()
        elif rank == 0:
            # A rank whose log is not seen: stop waiting for it.
            self._say_waits()
            self._say(event.event, event.values)
        # In lockstep all ranks would log the same.
        if rank != 0:
            return
        doing = _DOING.get(event.event)
        if doing and self._bar and self._task is not None:
            if event.event == EventName.PROFILE_STARTED:
                # The budget counts from here.
                self._bar.reset(self._task)
            self._bar.update(self._task, words=f"of {self._budget}: {doing}")

    def _say_waits(self) -> None:
        # Imported here: verbs that only print a line start faster.
        from stoker.feed.timeline import waits_longest

        if self._waits:
            name, known = self._waits.popitem()
            self._waits.clear()
            shares = {rank: float(values["wait_share"]) for rank, values in known.items()}
            rank = waits_longest(shares)
            self._say(name, {**known[rank], "least": str(min(shares.values()))})

    def _say(self, name: str, values: Mapping[str, str]) -> None:
        words = _WORDS.get(name)
        # Once, though several ranks log the same event.
        once = f"{name} {values.get('workers')}"
        if words and once not in self._said:
            self._said.add(once)
            title, text = words
            say(step_line(title, text(values), None), quiet=self._quiet)


@contextmanager
def following_profile(workload: "Workload", *, quiet: bool) -> Iterator[FollowedProfile]:
    def columns(console: "Console") -> "Sequence[ProgressColumn]":
        from rich.progress import SpinnerColumn, TimeElapsedColumn

        words = words_column(console, taken=len("profile    - 0:00:00 "))
        return (title_column("profile"), SpinnerColumn("line"), TimeElapsedColumn(), words)

    with terminal_bar(columns, quiet=quiet) as bar:
        budget = duration(workload.profile.budget_seconds)
        yield FollowedProfile(bar=bar, quiet=quiet, budget=budget)


def _took(values: Mapping[str, str]) -> str:
    return f"a step takes {ms(float(values['step_seconds']))}"


def _so_far(values: Mapping[str, str]) -> str:
    took = _took(values) if values.get("step_seconds") else "no step has ended yet"
    return f"{_waits(values, 'of the time is spent waiting for data')}; {took}"


def _loader(values: Mapping[str, str]) -> str:
    who = "1 worker" if values["workers"] == "1" else f"{values['workers']} workers"
    return f"{who} alone: {ms(float(values['cpu_seconds']))} of CPU per batch"


def _waits(values: Mapping[str, str], of: str) -> str:
    rank, least = int(values.get("rank", "0")), float(values["least"])
    return wait_words(float(values["wait_share"]), least=least, rank=rank, of=of)


_WORDS: Mapping[str, tuple[str, Callable[[Mapping[str, str]], str]]] = {
    EventName.PROFILE_STARTED: ("begins", lambda _: "the script asks for its first batch"),
    EventName.PROFILE_PROGRESS: ("so far", _so_far),
    EventName.PROFILE_AS_IS: (
        "as is",
        lambda it: f"{_took(it)}, {_waits(it, 'of it waiting for data')}",
    ),
    EventName.PROFILE_ACCELERATOR: ("no loader", lambda it: f"with cached batches {_took(it)}"),
    EventName.PROFILE_LOADER: ("loader", _loader),
    EventName.PROFILE_GUARDED: (
        "ends here",
        lambda it: (
            f"the script is about to {it['action']}, with a model trained on repeated batches"
        ),
    ),
}


def observe(
    name: str, *, logs: Path | None, region: str | None, outputs: "Outputs", as_json: bool
) -> None:
    """Makes a profile of a training job's load; runs nothing."""
    from stoker.catalog import load_catalog
    from stoker.platforms.aws import Aws
    from stoker.platforms.sagemaker.cloudwatch import describe_job, observe_job
    from stoker.profile.combine import observed_profile, steps_in

    lines = steps = None
    if logs:
        # First: a log without steps is an error before any network.
        try:
            # Progress bars leave bytes that are not UTF-8.
            lines = logs.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as err:
            raise UsageError(
                f"cannot read the log: {err.strerror or err}",
                where=f"--logs {logs}",
                fix="name a text file with the job's log",
            ) from None
        steps = steps_in(lines, source=str(logs))
    aws = Aws(region=region)
    say(f"profile of training job {name}: reading CloudWatch", quiet=as_json)
    with working(f"reading training job {name}", quiet=as_json):
        state = describe_job(aws, name)
    catalog = load_catalog("sagemaker")
    sizes = {}
    for kind, _ in state.groups.values():
        instance = catalog.get(kind)
        # CloudWatch gives percent of one vCPU, or of one GPU.
        sizes[kind] = (instance.vcpus, instance.accelerators)
    with working(f"reading the load of {name}", quiet=as_json):
        job = observe_job(aws, state, sizes=sizes, log=lines, now=datetime.now(UTC))
    record = observed_profile(job, sizes=sizes, steps=steps)
    deliver_profile(record, outputs=outputs, as_json=as_json)
