"""One profile of a run: measured, or kept by an earlier attempt, and delivered."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from stoker.catalog import catalog_of, load_catalog
from stoker.environment import own_pod
from stoker.errors import UsageError, WorkloadError
from stoker.platforms import platform_named
from stoker.platforms.aws import Aws
from stoker.platforms.base import Platform
from stoker.platforms.sagemaker.observed_job import describe_job, observe_job
from stoker.profile import explain, profile
from stoker.profile.combine import observed_profile
from stoker.profile.profiled_job import COPY, UnmeasuredError, profiled_job, scratch_copy
from stoker.records import Cluster, Group, Profile, Workload, read_json, to_json, write_json
from stoker.run.billing import confirm, say_unused_types
from stoker.run.clusters import todays_cluster
from stoker.run.earlier_profiles import EarlierProfile, reused_words
from stoker.run.outputs import Outputs, deliver, told_of_profile
from stoker.run.profile_progress import following_profile
from stoker.run.run_folders import named_run_dir, new_run_dir, run_base
from stoker.terminal import (
    relative,
    say,
    working,
)


@dataclass(frozen=True, kw_only=True)
class ProfileOrder:
    """A measurement that is asked for, before its price is confirmed or its folder made.

    Attributes:
        all_cores: Whether today's cluster is all cores of this machine, if the workload names none.
        in_copy: Whether the command runs in a temporary copy of this folder.
        branch: Which training job of a pipeline's run it is for; empty: its only one.
        again: The command line that measures again after a stop.
    """

    workload: Workload
    outputs: Outputs
    all_cores: bool = False
    in_copy: bool = False
    branch: str = ""
    again: str = ""
    quiet: bool = False
    assume_yes: bool = False

    @cached_property
    def platform(self) -> Platform[object]:
        return platform_named(self.workload.platform, settings=self.workload)

    @cached_property
    def cluster(self) -> Cluster:
        return todays_cluster(self.workload, all_cores=self.all_cores)

    @cached_property
    def step_name(self) -> str:
        """Name by which a retry of a pipeline's step finds its first attempt's job; empty: none."""
        pod = own_pod()
        if self.workload.platform_info.is_this_machine or not (pod and pod.run_id):
            return ""
        return f"{self.workload.run_name(pod.run_id, branch=self.branch)}-profile"

    @cached_property
    def run_dir(self) -> Path:
        """The run's folder, made at the first use."""
        if self.step_name:
            return named_run_dir(self.step_name)
        folder = new_run_dir(run_base(self.workload, kind="profile"))
        if self.in_copy:
            # The measurement has another working directory.
            return folder.absolute()
        return folder

    def measure(self) -> Profile:
        """Asks for the price, runs the command and measures it; blocks until the command ended.

        Raises:
            DeclinedError: If the answer is no.
            UnmeasuredError: If not enough was measured; what was observed is written before.
        """
        self._confirm()
        self._announce()
        records = {}
        if self.step_name:
            records = {"step": "profile", "workload.json": to_json(self.workload)}
        try:
            with self._working_folder():
                return profile_and_keep(
                    self.workload,
                    cluster=self.cluster,
                    platform=self.platform,
                    run_dir=self.run_dir,
                    records=records,
                    quiet=self.quiet,
                )
        except KeyboardInterrupt:
            # The parser ends with 130 and prints nothing.
            self._say(
                f"stopped before there was a verdict\nkept:  {self._logs}\nagain: {self.again}"
            )
            raise
        except UnmeasuredError as err:
            if err.observed:
                self._write_observed(err.observed)
            raise

    def _confirm(self) -> None:
        today = [Group.of_today(self.cluster.dnn)]
        say_unused_types(self.workload, today, quiet=self.quiet)
        confirm(
            self.workload,
            today,
            catalog=catalog_of(self.workload),
            decision=None,
            assume_yes=self.assume_yes,
            quiet=self.quiet,
            is_profile=True,
        )

    def _announce(self) -> None:
        where = " and writes its files"
        if self.in_copy:
            where = ", in a copy of this folder"
        elif self.workload.platform_info.is_this_machine:
            where += "; --copy runs it in a copy of this folder"
        self._say(f"the command runs for real{where}")
        self._say(
            f"profile of {self.workload.name}: measures "
            f"{self.workload.profile.budget_seconds:.0f} s from the first batch on, then stops the "
            f"command; its output: {self._logs}"
        )

    def _working_folder(self) -> AbstractContextManager[object]:
        """Returns the context in which the command runs: this folder, or a copy of it."""
        if not self.in_copy:
            return nullcontext()
        # A channel of this machine is a folder, which the script reads.
        channels = self.workload.channels.values()
        data = [Path(channel.uri.removeprefix("file://")) for channel in channels]
        return scratch_copy(Path.cwd(), self.run_dir / COPY, linked=data)

    def _write_observed(self, observed: Profile) -> None:
        """Writes what was observed, although it is an error: `decide` can make a guess of it."""
        out = self.outputs.out or Path("profile.json")
        write_json(out, observed)
        self._say(f"not enough was measured for a verdict; what was observed is in {out}")

    @property
    def _logs(self) -> str:
        return relative(self.run_dir / "logs")

    def _say(self, words: str) -> None:
        say(words, quiet=self.quiet)


def deliver_profile(record: Profile, *, outputs: Outputs, as_json: bool) -> None:
    summary = told_of_profile(record)
    deliver(record, outputs=outputs, name="profile", explain=explain, as_json=as_json, told=summary)


def tell_earlier(
    earlier: EarlierProfile, workload: Workload, *, outputs: Outputs, as_json: bool
) -> None:
    """Says what is used in place of a measurement, and delivers it.

    Args:
        earlier: What was found.
        workload: As this run has it.
        outputs: Where the profile goes.
        as_json: Whether JSON is printed instead of text.
    """
    say(f"profile of {workload.name}: {earlier.words}", quiet=as_json)
    if earlier.profile is not None:
        age = reused_words(earlier.profile, workload, package=earlier.package)
        if age:
            say(age.words, quiet=as_json)
        deliver_profile(earlier.profile, outputs=outputs, as_json=as_json)


def profile_and_keep(
    workload: Workload,
    *,
    cluster: Cluster,
    platform: Platform[object],
    run_dir: Path,
    records: Mapping[str, str],
    quiet: bool,
) -> Profile:
    """Profiles and shows the progress; in a pipeline, returns what an earlier attempt measured."""
    job = profiled_job(workload, group=cluster.dnn, run_dir=run_dir, records=records)
    request = platform.plan(job)
    # A step that is retried does not pay for the measurement again.
    if records and (kept := platform.kept(request)):
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


def observe(name: str, *, region: str | None, outputs: Outputs, as_json: bool) -> None:
    """Makes a profile of a training job's load; runs nothing.

    Args:
        name: Name of the training job on SageMaker.
        region: AWS region of the job.
        outputs: Where the profile goes.
        as_json: Whether JSON is printed instead of text.
    """
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
        job = observe_job(aws, state, sizes=sizes, now=datetime.now(UTC))
    record = observed_profile(job, sizes=sizes)
    deliver_profile(record, outputs=outputs, as_json=as_json)
