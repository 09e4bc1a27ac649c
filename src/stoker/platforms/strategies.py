"""How a job trains, checked before anything is billed: one strategy, of the one dnn group."""

from collections.abc import Sequence

from stoker.errors import UsageError
from stoker.records import Group, StrategySettings


def check_strategy(strategy: StrategySettings, groups: Sequence[Group]) -> None:
    """Refuses what cannot train so.

    Raises:
        UsageError: If more than one group would train, or the hosts of the dnn group are not such
            as the strategy needs.
    """
    trainers = [group for group in groups if group.role == "dnn"]
    if len(trainers) > 1:
        names = ", ".join(group.name for group in trainers)
        raise UsageError(
            f"a strategy is of one group, and here train: {names}",
            where="the plan's groups",
            fix="make one of them the dnn group, the others data groups",
        )
    for group in trainers:
        refusal = strategy.refusal(
            instance_type=group.instance_type, processes_per_host=group.processes_per_host or 1
        )
        if refusal is not None:
            what, fix = refusal
            raise UsageError(what, where=f"key strategy, group {group.name}", fix=fix)
