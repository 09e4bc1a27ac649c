"""When a plan has paid for its hosts."""

from stoker.records import Predicted

# Hosts are billed from their start; images and data come before the first step. An estimate: it
# depends on the image's size, the data and the type.
START_UP_SECONDS = 300.0


def break_even_speedup(usd_per_hour: float, *, today_usd_per_hour: float) -> float | None:
    """The speedup from which a cluster costs no more a step than today's; None: today's is free."""
    return usd_per_hour / today_usd_per_hour if today_usd_per_hour else None


def break_even_steps(promise: Predicted, keep: Predicted) -> float | None:
    """Steps after which the dearer start is paid back; None where it never is."""
    saved = (keep.usd_per_1000_steps - promise.usd_per_1000_steps) / 1000
    if saved <= 0:
        return None
    extra = (promise.usd_per_hour - keep.usd_per_hour) * START_UP_SECONDS / 3600
    return max(0.0, extra) / saved


def break_even_words(promise: Predicted, keep: Predicted) -> str:
    """From which speedup the plan pays for its hosts, and after how many steps for their start."""
    ratio = break_even_speedup(promise.usd_per_hour, today_usd_per_hour=keep.usd_per_hour)
    if ratio is None:
        return "break-even: today's price is not known"
    if ratio <= 1:
        return "break-even: it costs no more an hour than today's cluster"
    steps = break_even_steps(promise, keep)
    if steps is None:
        return f"break-even: {ratio:.2f} times as fast; this plan buys time, not money"
    return (
        f"break-even: {ratio:.2f} times as fast; the dearer start is paid back after "
        f"{steps:,.0f} steps"
    )
