"""Plans, limits and times are put into words."""

from collections.abc import Mapping

from stoker.records import Bottleneck, Limit, Plan, Predicted
from stoker.text import ms

_LIMITS: Mapping[Limit, str] = {
    "cpu": "the CPU",
    "accelerator": "the accelerator",
    "latency": "the loader's own time",
    "network": "the network",
    "receive": "receiving",
    "storage": "the storage",
}


_BOTTLENECKS: Mapping[Bottleneck, str] = {
    "cpu": "the CPU",
    "workers": "too few loader workers",
    "latency": "what each loader worker waits for (latency)",
    "accelerator": "the accelerator",
    "storage": "the storage or network, which all workers share",
    "network": "the network",
    "none": "the training itself: loading costs nothing",
    "unexplained": "not explained",
}


def limit_words(bottleneck: Bottleneck) -> str:
    """Says what sets today's pace."""
    return _BOTTLENECKS[bottleneck]


def cluster(plan: Plan) -> str:
    """Returns the plan's hosts in a few words."""
    return " + ".join(f"{group.count} {group.instance_type}" for group in plan.groups)


def limits(outcome: Predicted) -> str:
    """Names the binding limit and the next one: `the CPU, then the accelerator, at 64 ms`."""
    next_seconds = outcome.second_limit_seconds
    if next_seconds is None:
        return f"{_LIMITS[outcome.limit]}, then {_LIMITS[outcome.second_limit]}"
    if next_seconds < 1e-3 * outcome.step_seconds:
        return f"{_LIMITS[outcome.limit]}, and no other is near"
    return f"{_LIMITS[outcome.limit]}, then {_LIMITS[outcome.second_limit]}, at {ms(next_seconds)}"


def pays(outcome: Predicted) -> str:
    """Says from which speedup the plan pays for its hosts."""
    ratio = outcome.break_even_speedup
    if ratio is None:
        return "today's hosts cost nothing"
    if ratio <= 1:
        return "it costs no more per hour than today's hosts"
    verdict = "it is" if outcome.speedup >= ratio else "it is only"
    return f"it pays for its hosts from {ratio:.2f}x on, {verdict} {outcome.speedup:.2f}x"
