"""How a data host ends, whatever it made data with."""

from collections.abc import Sequence

from stoker.errors import FeedLostError, StokerError
from stoker.launch.hostrun import HostRun
from stoker.launch.membership import Verdict

NEVER_CAME = FeedLostError.exit_code
ASKED_TO_STOP = 143


def exit_code_of(run: HostRun, verdicts: Sequence[Verdict], *, is_asked: bool) -> int:
    """The code of a data host: 0 whenever the dnn group decided, or was there and fell silent.

    Args:
        run: This host's part of the run.
        verdicts: Why it ends; none: it was asked to.
        is_asked: Whether it was asked to.
    """
    comes_back = run.settings.comes_back
    # A pod that is evicted as the run ends, or is moved with all others, must not count as done.
    if not verdicts or (comes_back and is_asked):
        return ASKED_TO_STOP
    verdict = verdicts[0]
    match verdict.kind:
        case "lost" if comes_back:
            # Perhaps only this host cannot reach the leader: started again, it joins again.
            run.log.event("data_host_comes_back", reason=verdict.reason)
            return NEVER_CAME
        case "decided" | "lost":
            return 0
        case "never":
            error: StokerError = FeedLostError(
                f"no trainer came: {verdict.reason}",
                where=f"data host {run.topology.host}",
                fix="look at the dnn group's logs, or raise feed.start_deadline_seconds",
            )
        case "refused":
            error = FeedLostError(
                f"the leader refused this host: {verdict.reason}",
                where=f"data host {run.topology.host}",
                fix="use the same image, run id and token on all hosts",
            )
    run.log.event("data_host_failed", reason=error.what)
    return NEVER_CAME
