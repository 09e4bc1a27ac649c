"""`stoker profile` measures what a step of the unchanged training command waits for."""

from collections.abc import Sequence
from dataclasses import dataclass
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
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Workload
    from stoker.run.earlier_profiles import EarlierProfile, KeptProfiles
    from stoker.run.outputs import Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFlags:
    """What is measured, where, and for how long.

    Attributes:
        budget (SECONDS): Measure for this many seconds, from the first batch on (default: from the
            workload, or 180).
        instance_type (T): Name the instance type of this host; auto asks the cloud (default: from
            the workload; on EC2, auto).
        copy: Run the command in a temporary copy of this folder, so that no file here changes
            (default: run it here).
        training_job (NAME): Run nothing; read the CPU and GPU load of this SageMaker job (default:
            run the command).
        region (R): AWS region (default: as boto3 finds it).
        find (RUN): Measure nothing; look for a kept profile of the same cost, for this run of a
            pipeline.
        package (F): With --find: the code's package.
    """

    budget: float | None = None
    instance_type: str | None = None
    platform: PlatformName = None
    copy: bool = False
    training_job: str | None = None
    region: str | None = None
    find: Annotated[str | None, HIDDEN] = None
    package: Annotated[Path | None, HIDDEN] = None

    def refuse_contradictions(self, words: Sequence[str]) -> None:
        """Raises for flags that cannot be used together, or with a command."""
        if self.region and not self.training_job:
            raise typer.BadParameter("only together with --training-job", param_hint="--region")
        if not self.training_job:
            return
        if words or self.platform or self.copy or self.budget is not None:
            raise UsageError(
                "--training-job runs nothing, so it takes no command, --platform, --copy or "
                "--budget",
                where="command line",
                fix=f"stoker profile --training-job {self.training_job}",
            )

    def workload(
        self, words: Sequence[str], *, params: Sequence[str], overrides: Sequence[str] | None
    ) -> "Workload":
        """Returns the workload that is measured, with the keys that these flags set.

        Args:
            words: A workload file, or a command.
            params: Parameters of a pipeline's run.
            overrides: Keys of the workload that --set sets.
        """
        from stoker.cli.workloads import resolve
        from stoker.profile.profiled_job import notebook_refusal

        keys = {
            ("profile.budget_seconds", "--budget"): self.budget,
            ("platform", "--platform"): self.platform,
            ("profile.instance_type", "--instance-type"): self.instance_type or None,
        }
        flags, sets = typed_keys(keys, overrides)
        # First: a notebook is a file that exists and that cannot be run.
        if words and (refused := notebook_refusal(words, where="command line")):
            raise refused
        with told_by_flag(flags):
            return resolve(words, overrides=sets, params=params, verb="profile")

    def earlier(
        self,
        workload: "Workload",
        *,
        params: Sequence[str],
        kept: "KeptProfiles",
        outputs: "Outputs",
    ) -> "EarlierProfile":
        """Returns the profile that takes the place of a measurement, or why there is none.

        Args:
            workload: With the values of the run's parameters.
            params: Parameters of a pipeline's run; `reuse_profile` gives a profile.
            kept: Where Kubeflow's steps keep them.
            outputs: Where the answer to --find is written.
        """
        from stoker.run.earlier_profiles import earlier_profile

        return earlier_profile(
            workload,
            params=params,
            kept=kept,
            run=self.find or "",
            package=self.package,
            outputs=outputs,
        )

    def refuse_copy_on(self, workload: "Workload") -> None:
        """Raises UsageError for --copy where the command does not run in this folder."""
        if self.copy and not workload.platform_info.is_this_machine:
            raise UsageError(
                f"--copy cannot be used on {workload.platform}: the command runs in a container "
                "there",
                where="command line",
                fix="leave --copy out",
            )


def profile_verb(
    words: Words = None,
    *,
    context: typer.Context,
    flags: ProfileFlags,
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

    Examples:
        stoker profile -- python train.py --epochs 10
        stoker profile configs/mnist.yaml --budget 60
    """
    from stoker.run.command_lines import command_line
    from stoker.run.earlier_profiles import kept_profiles
    from stoker.run.outputs import outputs_of, step_inputs
    from stoker.run.profiling import ProfileOrder, deliver_profile, observe, tell_earlier

    words = words or []
    flags.refuse_contradictions(words)
    outputs = outputs_of(files)
    given = step_inputs(files)
    if flags.training_job:
        observe(flags.training_job, region=flags.region, outputs=outputs, as_json=as_json)
        return
    words = words or given.words
    params = [*given.params, *(params or ())]
    workload = flags.workload(words, params=params, overrides=overrides)
    order = ProfileOrder(
        workload=workload,
        outputs=outputs,
        # A bare command trains on all cores that it may use.
        all_cores=workload.command == tuple(words),
        in_copy=flags.copy,
        branch=given.branch,
        again=command_line(context.obj or ["profile", *words]),
        quiet=as_json,
        assume_yes=yes,
    )
    kept = kept_profiles(workload, platform=order.platform, span=given.cache_key)
    earlier = flags.earlier(workload, params=params, kept=kept, outputs=outputs)
    if earlier.is_answer:
        tell_earlier(earlier, workload, outputs=outputs, as_json=as_json)
        return
    flags.refuse_copy_on(workload)
    # Before minutes are spent on a measurement that could not be kept.
    check_writable(outputs.out or Path("profile.json"), flag="--out")
    record = order.measure()
    kept.keep(record)
    deliver_profile(record, outputs=outputs, as_json=as_json)
