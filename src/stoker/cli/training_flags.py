"""Flags of a training run, for `stoker train` and the step of a pipeline that trains."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.options import (
    GroupTexts,
    PlatformName,
    Prices,
    ReplaceDataLoader,
    told_by_flag,
    typed_keys,
)
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.run.outputs import StepInputs
    from stoker.run.training_order import TrainingOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    """What is trained on, under which name, and what it may cost.

    Attributes:
        decision (D): Train on the cluster that this decision.json chose (default: today's cluster).
        groups (ROLE=[TYPE:]HOSTS[:WORKERS]): Train on this instance group, such as dnn=1 or
            data=ml.c7i.8xlarge:2:32 (2 hosts with 32 data workers each); give one for each role,
            may be repeated (default: today's cluster).
        dry_run: Only print the request; do not send it.
        name (NAME): Give the run and its job this name (default: made from the workload and the
            time). If a job of that name exists, stoker follows it and does not start a second one.
        max_usd (X): End the run once it has cost X dollars, including retries; the script gets
            SIGTERM first and can save (default: from the workload, or no limit).
    """

    platform: PlatformName = None
    decision: Path | None = None
    groups: GroupTexts = None
    replace_dataloader: ReplaceDataLoader = None
    dry_run: bool = False
    name: str | None = None
    prices: Prices = None
    max_usd: float | None = None

    def order(
        self,
        words: Sequence[str],
        given: "StepInputs",
        *,
        overrides: Sequence[str] | None,
        again: str,
        quiet: bool,
        assume_yes: bool,
    ) -> "TrainingOrder":
        """Returns the training run that these flags ask for.

        Args:
            words: A workload file, or a command.
            given: Inputs of a pipeline's step.
            overrides: Keys of the workload that --set sets.
            again: The command line that continues after a stop.
            quiet: Whether nothing is printed on stderr.
            assume_yes: Whether nothing is asked.
        """
        from stoker.cli.workloads import resolve
        from stoker.decide import followed
        from stoker.records import Decision, read_json
        from stoker.run.clusters import groups_of
        from stoker.run.training_order import TrainingOrder

        keys = {
            ("platform", "--platform"): self.platform,
            ("constraints.max_usd", "--max-usd"): self.max_usd,
        }
        flags, sets = typed_keys(keys, overrides)
        if self.replace_dataloader:
            sets.append(f"feed.replace_dataloader={self.replace_dataloader}")
        with told_by_flag(flags):
            workload = resolve(words, overrides=sets, params=given.params, verb="train")
        decision = None
        if self.decision and self.groups:
            raise UsageError("--decision cannot be used with --group", fix="leave one of them out")
        if self.decision:
            record = read_json(self.decision, Decision)
            decision = followed(record, workload.constraints.follow)
            groups = decision.plan.groups
        else:
            groups = groups_of(workload, self.groups or ())
        return TrainingOrder(
            workload=workload,
            groups=groups,
            decision=decision,
            name=self.name or given.run_name(workload),
            is_step=bool(given.run_id),
            prices=self.prices,
            again=again,
            quiet=quiet,
            assume_yes=assume_yes,
        )
