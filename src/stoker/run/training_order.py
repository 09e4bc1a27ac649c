"""A training run that is ordered: planned, its price confirmed, its folder made."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from stoker.catalog import catalog_of
from stoker.platforms import platform_named
from stoker.platforms.base import JobSpec, Platform
from stoker.records import Decision, Group, Profile, Workload, groups_in_words, to_json, write_json
from stoker.run.billing import confirm, say_unused_types
from stoker.run.plan_price import with_plan_price
from stoker.run.run_folders import RUNS, named_run_dir, new_run_dir, run_base
from stoker.run.training_run import FollowedTraining
from stoker.terminal import relative, say
from stoker.train import prepare

# Of the profile that is kept with a job: what its ConfigMap has room for.
_MAX_PROFILE_BYTES = 700 << 10


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """A training run that is asked for, before anything is made or sent.

    Attributes:
        decision: The decision that it follows; None: its groups were named.
        profile: The profile that was decided on, for the report.
        name: Name of the run and its job; None: made from the workload and the time.
        is_step: Whether it is a step of Kubeflow, whose last step may have to follow the job.
        prices: File of prices that adds to the catalog.
        again: The command line that continues after a stop.
    """

    workload: Workload
    groups: tuple[Group, ...]
    decision: Decision | None = None
    profile: Profile | None = None
    name: str | None = None
    is_step: bool = False
    prices: Path | None = None
    again: str = ""
    quiet: bool = False
    assume_yes: bool = False

    @cached_property
    def platform(self) -> Platform[object]:
        return platform_named(self.workload.platform, settings=self.workload)

    def job_in(self, folder: Path) -> JobSpec:
        """Returns the job of the run in a folder, which need not exist."""
        job = prepare(
            workload=self.workload, groups=self.groups, run_dir=folder, decision=self.decision
        )
        if self.is_step:
            # For a pipeline's last step, which follows the job where this step is lost.
            return replace(job, records=self._records())
        return job

    def request(self, *, as_json: bool) -> str:
        """Returns the request that the platform would get, as text; makes and sends nothing."""
        say_unused_types(self.workload, self.groups, quiet=self.quiet)
        request = self.platform.plan(self.job_in(RUNS / (self.name or "dry-run")))
        if as_json:
            return json.dumps(self.platform.describe(request), indent=2)
        return self.platform.manifest(request)

    def begin(self) -> FollowedTraining:
        """Asks for the price and makes the run's folder; nothing is sent yet.

        Raises:
            UsageError: If the platform refuses the request, with its key.
            DeclinedError: If the answer is no.
            PlatformError: If a run of that name still runs here.
        """
        workload = self.workload
        quiet = self.quiet
        say_unused_types(workload, self.groups, quiet=quiet)
        catalog = with_plan_price(catalog_of(workload, self.prices), workload, quiet=quiet)
        confirm(
            workload,
            self.groups,
            catalog=catalog,
            decision=self.decision,
            assume_yes=self.assume_yes,
            quiet=quiet,
        )
        folder = named_run_dir(self.name) if self.name else new_run_dir(run_base(workload))
        job = self.job_in(folder)
        # Before anything starts: a wrong request is refused here, with its key.
        self.platform.plan(job)
        # A run of that name that still runs keeps its files, and its run in MLflow.
        self.platform.check_free(job)
        # For the report of the run, now and from `stoker report`.
        write_json(folder / "workload.json", workload)
        if self.decision:
            write_json(folder / "decision.json", self.decision)
        if self.profile:
            write_json(folder / "profile.json", self.profile)
        say(
            f"train of {workload.name} on {groups_in_words(self.groups)}: {relative(folder)}",
            quiet=quiet,
        )
        return FollowedTraining(
            job=job,
            workload=workload,
            platform=self.platform,
            catalog=catalog,
            decision=self.decision,
            again=self.again,
            quiet=quiet,
            assume_yes=self.assume_yes,
        )

    def _records(self) -> dict[str, str]:
        """Returns the records, if any, from which a pipeline's last step can follow the job."""
        if self.decision is None:
            return {}
        records = {
            "step": "training",
            "workload.json": to_json(self.workload),
            "decision.json": to_json(self.decision),
        }
        if self.profile:
            measured = to_json(self.profile)
            if len(measured.encode()) <= _MAX_PROFILE_BYTES:
                records["profile.json"] = measured
        return records
