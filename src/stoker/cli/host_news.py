"""News of data hosts while a training runs come in one line each: people read them at night.

The same loss is told by several: the trainer's connection ends at once, the platform or the host
itself says why within a moment, the leader gives it up by its lease. The first that knows why is
heard; a lost connection alone is said after SETTLE_SECONDS. Pure: time is that of the log.
"""

import json
from collections.abc import Iterator
from datetime import datetime

from stoker.logs import LogEvent

# From the end of a connection to the word of whoever knows why it ended.
SETTLE_SECONDS = 2.0
# After these of the leader hosts leave because the training is over.
_ENDS = ("command_ended", "signal_received", "training_failed", "training_ended")


def _time_of(when: str) -> datetime | None:
    """Returns an event's time, or None if it is none: anybody may write a line like ours."""
    try:
        found = datetime.fromisoformat(when)
    except ValueError:
        return None
    return found if found.tzinfo else None


class HostNews:
    """Turns a run's events into lines for people."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()
        self._gone: set[str] = set()
        self._unsure: dict[str, datetime] = {}
        self._leader = ""
        self._is_alone = False
        self._is_over = False

    def take(self, event: LogEvent) -> Iterator[str]:
        """Yields the lines that are due with one event."""
        now = _time_of(event.when)
        if now is None:
            return
        for host, since in list(self._unsure.items()):
            if (now - since).total_seconds() >= SETTLE_SECONDS:
                yield from self._loses(host, "answers no more: its connection was lost")
        values = event.values
        host = values.get("about") or values.get("agent") or event.host
        is_agent = values.get("kind") == "agent"
        match event.event:
            case _ if self._is_over:
                return
            case "roster":
                self._begin(event.host, values.get("groups", ""))
            case "agent_connection_lost" if host in self._hosts - self._gone:
                self._unsure.setdefault(host, now)
            case "host_ended" if host in self._hosts:
                yield from self._loses(host, f"ended with {values.get('how', '')}")
            case "host_lost" if is_agent:
                yield from self._loses(host, f"was lost: {values.get('reason', '')}")
            case "host_left" if is_agent:
                yield from self._loses(host, f"left: {values.get('reason', '')}")
            case "no_data_host_left" if not self._is_alone:
                self._is_alone = True
                yield f"no data host is left: {values.get('text', '')}"
            case "agent_ready" | "host_rejoined":
                yield from self._regains(host)
            case ended if ended in _ENDS and event.host == self._leader:
                self._is_over = True

    def _begin(self, leader: str, groups: str) -> None:
        self._leader = leader
        try:
            described = json.loads(groups)
            self._hosts = {
                str(host)
                for group in described.values()
                if group["role"] == "data"
                for host in group["hosts"]
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            # Another version's: hosts that nobody named have no news.
            return

    def _loses(self, host: str, fate: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone or host not in self._hosts:
            return
        self._gone.add(host)
        left = len(self._hosts - self._gone)
        others = f"the other {left} of {len(self._hosts)} data hosts" if left else ""
        goes_on = f"{others} go on" if left > 1 else f"{others} goes on" if left else ""
        yield f"data host {host} {fate}; {goes_on or 'no other data host is there'}"

    def _regains(self, host: str) -> Iterator[str]:
        self._unsure.pop(host, None)
        if host in self._gone:
            self._gone.discard(host)
            self._is_alone = False
            there = len(self._hosts - self._gone)
            yield f"data host {host} is back: {there} of {len(self._hosts)} data hosts make batches"
