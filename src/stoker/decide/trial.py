"""How to measure a plan before it is relied on: the command, its minutes and its dollars."""

import math
import shlex
from collections.abc import Sequence

from stoker.catalog import Catalog
from stoker.record_words import group_arguments
from stoker.records import Group, Plan, Profile, Trial
from stoker.records.decision import START_UP_SECONDS
from stoker.units import numbered

# A profile's usual budget (records/workload.py, ProfileSettings); as many seconds of steps do.
_MEASURED_SECONDS = 180.0
_EXAMPLE = ("python", "train.py")


def trial_of(
    plan: Plan,
    *,
    profile: Profile,
    catalog: Catalog,
    subject: Sequence[str] = (),
    is_elsewhere: bool = False,
) -> Trial:
    """Returns how to measure a step on the plan's hosts.

    Args:
        profile: It knows the training's command, if `subject` is empty.
        subject: The training as words of stoker's commands: a workload file, or `--` and a command.
        is_elsewhere: The profile was not taken on today's hosts.
    """
    words = list(subject) or ["--", *(profile.command or _EXAMPLE)]
    # A workload file: its platform starts the hosts. A bare command runs where it is typed.
    is_named = words[0] != "--"
    is_here = catalog.info.is_this_machine
    seconds = _MEASURED_SECONDS
    if not is_here:
        seconds += START_UP_SECONDS
    outcome = plan.predicted
    dnn = plan.groups[0]
    # No dollars on this machine, whose prices are nominal.
    usd = None
    if outcome is not None and outcome.usd_per_hour is not None and not is_here:
        usd = outcome.usd_per_hour * seconds / 3600
    condition = None
    if plan.action == "heterogeneous":
        # A profile has no data hosts: only a training run on them shows what they give.
        verb = "train"
        options = _train_options(plan.groups, usd=usd)
        if not (is_named or is_here):
            options = ["--platform", catalog.platform, *options]
    else:
        is_todays = dnn.instance_type == profile.host.instance_type and not is_elsewhere
        is_there = is_todays or is_named or is_here
        verb = "profile"
        options = []
        condition = _condition(dnn, is_there=is_there)
        if not is_todays and is_there:
            options = ["--set", f"cluster.dnn.instance_type={dnn.instance_type}"]
        if dnn.count != profile.host.count and is_named:
            options += ["--set", f"cluster.dnn.count={dnn.count}"]
    # Whatever follows `--` is the script's.
    command = [*options, *words]
    if is_named:
        command = [*words, *options]
    return Trial(
        command=shlex.join(["stoker", verb, *command]),
        condition=condition,
        minutes=seconds / 60,
        usd=usd,
        is_estimate=usd is not None and outcome is not None and outcome.is_estimate,
    )


def _train_options(groups: Sequence[Group], *, usd: float | None) -> list[str]:
    options = group_arguments(groups)
    if usd is not None:
        # It ends without being asked. Rounded up: less would end it too soon.
        options += ["--max-usd", f"{math.ceil(usd * 100) / 100:.2f}"]
    return options


def _condition(dnn: Group, *, is_there: bool) -> str | None:
    """Returns where the command is to run, and what the script has to ask for."""
    parts = []
    if not is_there:
        parts.append(f"on a host of type {dnn.instance_type}")
    if dnn.workers_per_host:
        workers = numbered(dnn.workers_per_host, "loader worker")
        parts.append(f"with {workers} per host in the script")
    return ", ".join(parts) or None
