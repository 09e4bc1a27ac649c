"""Where in a pod's log its reader is, so that nothing is lost or shown twice when it comes back.

A log is asked for from a time on, in whole seconds, and lines of several writers come a little out
of the order of their times: so the lines of the last seconds are kept, and left out when they come
again.
"""

import re
from collections import Counter, deque
from datetime import UTC, datetime, timedelta

# A line may be that much older than one that came before it.
OVERLAP_SECONDS = 2

_TIME = re.compile(
    r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?", re.ASCII
)


class LogPosition:
    """What of a log has been read.

    The lines are those that Kubernetes gives with `timestamps=true`: a time, a blank, the text.
    """

    def __init__(self) -> None:
        self._latest: datetime | None = None
        self._recent: deque[tuple[datetime, str]] = deque()
        self._again: Counter[str] = Counter()

    def query(self) -> dict[str, str]:
        """What to ask for next; called before each reading."""
        self._again = Counter(line for _, line in self._recent)
        if self._latest is None:
            return {}
        since = self._latest - timedelta(seconds=OVERLAP_SECONDS - 1)
        return {"sinceTime": since.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def take(self, line: str) -> str | None:
        """The text of a line; None if it has been read before."""
        when, text = split_time(line)
        if self._again[line] > 0:
            self._again[line] -= 1
            return None
        if when is None:
            return text
        if self._latest is None or when > self._latest:
            self._latest = when
        self._recent.append((when, line))
        oldest = self._latest - timedelta(seconds=OVERLAP_SECONDS)
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return text


def split_time(line: str) -> tuple[datetime | None, str]:
    """Time (to the second, in UTC) and text of a line; no time where it has none."""
    found = _TIME.match(line)
    if not found:
        return None, line
    zone = "+00:00" if found.group(3) == "Z" else found.group(3)
    try:
        when = datetime.fromisoformat(found.group(1) + zone).astimezone(UTC)
    except ValueError:
        return None, line
    return when, line[found.end() :]
