"""The logs of all hosts of a training job are merged, each line behind its group and host.

CloudWatch has one stream a host (JOB/algo-1-1234567890) and says nothing of groups, and which host
is in which group is new in every job. So the groups are learnt from the lines that the launcher
writes at each host's start; lines that a host wrote before them wait until its group is known.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.logs import LogEvent, parse_line
from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.base import LogLine
from stoker.records import Json

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# A host's launcher names its group with its first line. One that does not within this time is not
# started by our launcher: its lines are shown without a group.
HOLD_SECONDS = 30.0
UNKNOWN = "unknown"
# Once there is a stream for each host, new ones (a restarted host) are looked for this often.
FIND_SECONDS = 60.0
# A page has up to 1 MB: after so many of one stream, the job and other hosts get their turn.
MAX_PAGES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One line as it stands in a host's log; its time is in milliseconds."""

    millis: int
    host: str
    text: str


class JobLogs:
    """Reads what was added to the log of a job: each line once, none left out.

    Args:
        aws: The account.
        job_name: As in the names of the streams.
        num_hosts: Absent: not known.
        log_group: Of training jobs; other jobs have one of their own.
    """

    def __init__(
        self,
        aws: Aws,
        *,
        job_name: str,
        num_hosts: int | None = None,
        log_group: str = LOG_GROUP,
    ) -> None:
        self._aws = aws
        self._log_group = log_group
        self._job_name = job_name
        self._num_hosts = num_hosts
        self._streams: dict[str, _Stream] = {}
        self._found_at: float | None = None

    @property
    def is_behind(self) -> bool:
        """Tells whether there is more to read at once."""
        return any(stream.is_behind for stream in self._streams.values())

    def read(self) -> list[LogEntry]:
        """Returns the new lines of all hosts, the earliest first; none while there is no log yet.

        Raises:
            AwsError: If the log may not be read.
        """
        self._find_streams()
        new = [entry for stream in self._streams.values() for entry in stream.read()]
        return sorted(new, key=lambda entry: entry.millis)

    def _find_streams(self) -> None:
        now = self._aws.clock()
        hosts = {stream.host for stream in self._streams.values()}
        is_complete = self._num_hosts is not None and len(hosts) >= self._num_hosts
        if is_complete and self._found_at is not None and now < self._found_at + FIND_SECONDS:
            return
        try:
            for item in self._aws.pages(
                "logs",
                "DescribeLogStreams",
                items="logStreams",
                logGroupName=self._log_group,
                logStreamNamePrefix=f"{self._job_name}/",
            ):
                name = item.get("logStreamName")
                if isinstance(name, str) and name not in self._streams:
                    self._streams[name] = _Stream(self._aws, name, self._log_group)
        except AwsError as err:
            # The first job of an account makes the log group, and its first line the stream.
            if not err.is_missing:
                raise
        self._found_at = now


class _Stream:
    """One stream, read from its beginning on."""

    def __init__(self, aws: Aws, name: str, log_group: str) -> None:
        found = re.fullmatch(r".*/(algo-\d+)(?:-\d+)?", name)
        self.host = found.group(1) if found else name.rpartition("/")[2]
        self.is_behind = False
        self._aws = aws
        self._name = name
        self._log_group = log_group
        self._token: str | None = None
        # Of the last event: its time, and how many had it. For a token that is no longer valid.
        self._last_millis = 0
        self._num_at_last = 0

    def read(self) -> Iterator[LogEntry]:
        self.is_behind = False
        for _ in range(MAX_PAGES):
            events, token = self._page()
            for event in events:
                yield from self._entries(event)
            if token is None or token == self._token:
                return
            self._token = token
        self.is_behind = True

    def _page(self) -> tuple[list[Mapping[str, Json]], str | None]:
        asked: dict[str, object] = {"nextToken": self._token} if self._token else {}
        known = 0
        try:
            answer = self._get(**asked)
        except AwsError as err:
            if err.is_missing:
                return [], None
            if not self._token or not err.code.startswith("InvalidParameter"):
                raise
            # Tokens are valid for a day; a host may be silent for longer.
            self._token, known = None, self._num_at_last
            answer = self._get(startTime=self._last_millis)
        listed = answer.get("events")
        items = listed if isinstance(listed, list) else []
        events = [item for item in items if isinstance(item, Mapping)]
        token = answer.get("nextForwardToken")
        return events[known:], token if isinstance(token, str) else None

    def _get(self, **asked: object) -> Mapping[str, Json]:
        return self._aws.call(
            "logs",
            "GetLogEvents",
            logGroupName=self._log_group,
            logStreamName=self._name,
            startFromHead=True,
            **asked,
        )

    def _entries(self, event: Mapping[str, Json]) -> Iterator[LogEntry]:
        millis = event.get("timestamp")
        at = millis if isinstance(millis, int) else self._last_millis
        self._num_at_last = self._num_at_last + 1 if at == self._last_millis else 1
        self._last_millis = at
        message = str(event.get("message") or "")
        for text in message.rstrip("\r\n").split("\n"):
            yield LogEntry(millis=at, host=self.host, text=text.rstrip("\r"))


class Labels:
    """Puts the group in front of lines; holds back those of a host whose group is not known yet.

    Args:
        groups: Names of the job's groups; where there is one only, all hosts are in it.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self._only = groups[0] if len(groups) == 1 else None
        self._groups: dict[str, str] = {}
        self._held: dict[str, deque[tuple[float, LogEntry]]] = {}

    @property
    def roster(self) -> Mapping[str, str]:
        """Maps host to group, as far as it is known."""
        return dict(self._groups)

    def label(self, entries: Iterable[LogEntry], *, now: float) -> Iterator[LogLine]:
        """Yields lines of a known group, in order for each host, and those that waited too long.

        Args:
            entries: New ones.
            now: Monotonic seconds.
        """
        for entry in entries:
            self._learn(entry)
            self._held.setdefault(entry.host, deque()).append((now, entry))
            yield from self._release()
        for host, held in self._held.items():
            if held and now >= held[0][0] + HOLD_SECONDS:
                self._groups.setdefault(host, UNKNOWN)
        yield from self._release()

    def flush(self) -> Iterator[LogLine]:
        """Returns all that is held: nothing more will come."""
        for host, held in self._held.items():
            while held:
                yield _line(self._groups.get(host, UNKNOWN), held.popleft()[1])

    def _release(self) -> Iterator[LogLine]:
        for host, held in self._held.items():
            group = self._groups.get(host)
            while group and held:
                yield _line(group, held.popleft()[1])

    def _learn(self, entry: LogEntry) -> None:
        if self._only:
            self._groups[entry.host] = self._only
            return
        event = parse_line(entry.text) if entry.text.startswith("stoker ") else None
        if event is None:
            return
        if event.event == "host_has_role" and event.host == entry.host:
            self._groups[entry.host] = event.values.get("group") or UNKNOWN
        elif event.event == "roster":
            for host, group in _roster(event).items():
                if self._groups.get(host, UNKNOWN) == UNKNOWN:
                    self._groups[host] = group


def _line(group: str, entry: LogEntry) -> LogLine:
    return LogLine(group=group, host=entry.host, text=entry.text)


def _roster(event: LogEvent) -> Mapping[str, str]:
    """Maps host to group from the leader's groups={"NAME": {"hosts": ["HOST", ...], ...}, ...}."""
    try:
        groups: Json = json.loads(event.values.get("groups", ""))
    except ValueError:
        return {}
    found: dict[str, str] = {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        hosts = group.get("hosts") if isinstance(group, Mapping) else None
        found.update(
            (host, name)
            for host in (hosts if isinstance(hosts, list) else ())
            if isinstance(host, str)
        )
    return found
