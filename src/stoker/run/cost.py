"""The hosts of a run, what they cost, and the question whether to start it.

Prices come from `catalog`; what a run has cost so far is counted in `launch/limits.py`.
"""

import re
from collections.abc import Sequence

import msgspec

from stoker.catalog import Catalog, catalog_of
from stoker.decide.choose import step_time_words
from stoker.decide.explain import break_even_words
from stoker.errors import DeclinedError, UsageError
from stoker.host.machine import usable_vcpus
from stoker.records import Cluster, Decision, Group, TodaysGroup, Workload, groups_in_words
from stoker.records.decision import START_UP_SECONDS, predicted_of
from stoker.terminal import ask, say
from stoker.units import ESTIMATE, as_fast, duration, usd

_GROUP = re.compile(r"(dnn|data)=(?:([^:]*[^:\d][^:]*):)?([1-9][0-9]*)(?::([0-9]+))?")
_FIX = (
    "dnn are the hosts that train, data those that make batches with workers, each once: "
    "--group dnn=1 --group data=ml.c7i.8xlarge:2:32, or data=local.c1:1 here"
)
_DECLINED = DeclinedError("cancelled", fix="use --yes to start without this question")


def todays_cluster(workload: Workload, *, all_cores: bool = False) -> Cluster:
    """Returns today's cluster; raises UsageError in a cloud if the workload names none.

    By default it is one core of this machine; or, as for a bare command without stoker,
    `all_cores` that it may use.
    """
    if workload.cluster:
        return workload.cluster
    if workload.platform_info.is_this_machine:
        cores = usable_vcpus() if all_cores else 1
        return Cluster(dnn=TodaysGroup(instance_type=f"local.c{cores}", count=1))
    raise UsageError(
        "the workload does not name the cluster on which it trains today",
        where=f"workload {workload.name}, key cluster",
        fix="add cluster: {dnn: {instance_type: ..., count: ...}}",
    )


def groups_of(workload: Workload, texts: Sequence[str]) -> tuple[Group, ...]:
    """Returns the groups named on the command line, else today's dnn group."""
    today = todays_cluster(workload).dnn
    if not texts:
        return (Group.of_today(today),)
    dnn, *data = parse_groups(texts, default_type=today.instance_type)
    # Another type has other accelerators, and by default a process for each. On this machine any
    # number of cores is the same type.
    if dnn.instance_type == today.instance_type or workload.platform_info.is_this_machine:
        dnn = msgspec.structs.replace(dnn, processes_per_host=today.processes_per_host)
    return (dnn, *data)


def parse_groups(texts: Sequence[str], *, default_type: str | None) -> tuple[Group, ...]:
    """Returns the groups of a cluster, dnn first, each from `ROLE=[TYPE:]HOSTS[:WORKERS]`."""
    groups: dict[str, Group] = {}
    for text in texts:
        match = _GROUP.fullmatch(text)
        if not match:
            raise UsageError(f"--group {text} is not ROLE=[TYPE:]HOSTS[:WORKERS]", fix=_FIX)
        name, named_type, hosts, workers = match.groups()
        instance_type = named_type or default_type
        if not instance_type or name in groups:
            raise UsageError(f"--group {text}: a type is needed, and each role once", fix=_FIX)
        groups[name] = Group(
            name=name,
            role="dnn" if name == "dnn" else "data",
            instance_type=instance_type,
            count=int(hosts),
            workers_per_host=int(workers) if workers else None,
        )
    if "dnn" not in groups or ((data := groups.get("data")) and data.workers_per_host == 0):
        raise UsageError("--group: dnn hosts are needed, and data hosts need workers", fix=_FIX)
    return tuple(sorted(groups.values(), key=lambda group: group.role, reverse=True))


def confirm(
    workload: Workload,
    groups: Sequence[Group],
    *,
    catalog: Catalog,
    decision: Decision | None,
    assume_yes: bool,
    is_profile: bool = False,
) -> None:
    """Prints what the job will cost and asks; does not ask where there is no terminal.

    Args:
        workload: With its limits on what a run may cost.
        groups: The hosts that are asked about.
        catalog: Prices.
        decision: The decision whose plan they are, with its prediction; None: they were named.
        assume_yes: Whether nothing is asked.
        is_profile: Whether only a profile is paid for, to which no limit of a training run applies.

    Raises:
        UsageError: If a training run could or should cost more than the workload allows.
        DeclinedError: If the answer is no.
    """
    if workload.platform_info.is_this_machine:
        return
    lines = bill(workload, groups, catalog=catalog, decision=decision)
    limit = workload.constraints.max_usd
    if not is_profile:
        lines.append(limit_words(workload))
    if limit and not is_profile:
        where = f"constraints.max_usd: {limit:g}"
        promise = predicted_of(groups, decision)
        if catalog.usd_per_hour(groups) is None:
            fix = "give prices: constraints.prices_file, or --prices FILE"
            raise UsageError("a price is unknown", where=where, fix=fix)
        if promise and (promise.run_usd or 0) > limit:
            raise UsageError(
                f"the run is predicted to cost {usd(promise.run_usd or 0)}, above the limit",
                where=where,
                fix="train fewer steps, take a cheaper plan, or raise the limit: --max-usd",
            )
    say("\n".join(lines))
    ask("start it", assume_yes=assume_yes, refused=_DECLINED)


def confirm_run(workload: Workload, *, assume_yes: bool) -> None:
    """Asks before a pipeline's run, which decides on its cluster later; raises DeclinedError."""
    if workload.cluster:
        today = [Group.of_today(workload.cluster.dnn)]
        words = bill(workload, today, catalog=catalog_of(workload), decision=None)[0]
        say(f"profile on {words}")
    words = f"then the training, on the cluster that the run decides on: {limit_words(workload)}"
    say(words)
    ask("start it", assume_yes=assume_yes, refused=_DECLINED)


def limit_words(workload: Workload) -> str:
    """Returns at how many dollars or seconds a run is ended, or what to set for a limit."""
    if workload.constraints.max_usd:
        limit = usd(workload.constraints.max_usd)
        return f"the run is ended at {limit} (max_usd), retries included"
    if workload.max_run_seconds:
        return f"the run is ended after {duration(workload.max_run_seconds)} (max_run_seconds)"
    return f"the run has no limit: set {workload.platform}.max_run_seconds or constraints.max_usd"


def bill(
    workload: Workload, groups: Sequence[Group], *, catalog: Catalog, decision: Decision | None
) -> list[str]:
    """Returns the lines on the job's cost per hour and to start, its prediction, and break-even.

    Args:
        workload: Where it runs.
        groups: The hosts to pay.
        catalog: Prices.
        decision: The decision whose plan they are; None: without a prediction.
    """
    hosts = f"{workload.platform}: {groups_in_words(groups)}"
    price = catalog.usd_per_hour(groups)
    lines = [f"{hosts}, price unknown"]
    if price is not None:
        costs = ESTIMATE * bool(catalog.estimates(groups)) + usd(price)
        lines = [
            f"{hosts}, {costs} per hour in total",
            f"start-up: all hosts for about {START_UP_SECONDS / 60:.0f} min before the first step, "
            f"{usd(price * START_UP_SECONDS / 3600)} (an estimate)",
        ]
    promise = predicted_of(groups, decision)
    if decision is None or promise is None:
        return lines
    words = f"{step_time_words(promise, has_band=True)}, {as_fast(promise.speedup)}"
    if promise.total_hours is not None and promise.total_usd is not None:
        dollars = usd(promise.total_usd)
        words += f"; the whole training {promise.total_hours:.2f} h, {dollars}"
    lines.append(f"predicted: {words}")
    if decision.plan.action != "keep":
        if decision.verdict == "probable":
            lines.append("a gain is probable, not sure: it is within the error band")
        lines.append(f"break-even: {break_even_words(promise)}")
    return lines
