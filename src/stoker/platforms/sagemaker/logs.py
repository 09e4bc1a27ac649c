"""CloudWatch's log of a training job.

It has one stream per host (JOB/algo-1-1234567890). A stream does not name its host's group: the
launcher does, in one of its first lines. Earlier lines are held back until then.
"""

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stoker.errors import ServiceError
from stoker.logs import EventName, parse_line
from stoker.platforms.aws import Aws
from stoker.platforms.base import LogLine
from stoker.records.base import Document, item_at, mapping, mappings, text
from stoker.repeat import Suppressed

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# After this time a host counts as not started by stoker: its lines are shown without a group.
HOLD_SECONDS = 30.0
UNKNOWN = "unknown"
# Between searches for streams of restarted hosts.
FIND_SECONDS = 60.0
# Pages of up to 1 MB per stream, before the job and other hosts are polled again.
MAX_PAGES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """A line of a host's log, with its time in milliseconds."""

    millis: int
    host: str
    text: str


class JobLogs:
    """Reader of a job's log: each line once, none left out."""

    def __init__(self, aws: Aws, *, job_name: str, num_hosts: int) -> None:
        self._aws = aws
        self._job_name = job_name
        self._num_hosts = num_hosts
        self._streams: dict[str, _Stream] = {}
        self._found_at: float | None = None

    @property
    def is_behind(self) -> bool:
        """Whether more lines are available now."""
        return any(stream.is_behind for stream in self._streams.values())

    def read(self) -> list[LogEntry]:
        """Returns the new lines of all hosts, the earliest first; none while there is no log."""
        self._find_streams()
        new = chain.from_iterable(stream.read() for stream in self._streams.values())
        return sorted(new, key=lambda entry: entry.millis)

    def _find_streams(self) -> None:
        now = self._aws.clock()
        hosts = {stream.host for stream in self._streams.values()}
        is_complete = len(hosts) >= self._num_hosts
        if is_complete and self._found_at is not None and now < self._found_at + FIND_SECONDS:
            return
        parameters = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{self._job_name}/"}
        # An account's first job creates the log group, a host's first line the stream.
        with Suppressed("missing"):
            for item in self._aws.pages(
                "logs", "DescribeLogStreams", items="logStreams", **parameters
            ):
                name = item.get("logStreamName")
                if isinstance(name, str) and name not in self._streams:
                    self._streams[name] = _Stream(self._aws, name)
        self._found_at = now


class _Stream:
    """Reader of one log stream."""

    def __init__(self, aws: Aws, name: str) -> None:
        match = re.fullmatch(r".*/(algo-\d+)(?:-\d+)?", name)
        self.host = match.group(1) if match else name.rpartition("/")[2]
        self.is_behind = False
        self._aws = aws
        self._name = name
        self._token: str | None = None
        # Time of the last event, and how many events have it: needed if the token expires.
        self._last_millis = 0
        self._num_at_last = 0

    def read(self) -> Iterator[LogEntry]:
        self.is_behind = False
        # Bounded: a stream that is written faster than it is read must not keep the caller.
        for _ in range(MAX_PAGES):
            events, token = self._page()
            for event in events:
                yield from self._entries(event)
            # At the end of a stream the answer has the request's token.
            if token is None or token == self._token:
                return
            self._token = token
        self.is_behind = True

    def _page(self) -> tuple[list[Document], str | None]:
        parameters: dict[str, object] = {"nextToken": self._token} if self._token else {}
        num_read = 0
        try:
            answer = self._get(**parameters)
        except ServiceError as err:
            if err.kind == "missing":
                return [], None
            if not self._token or not err.code.startswith("InvalidParameter"):
                raise
            # Tokens expire after a day. The start is inclusive: known events are skipped below.
            self._token = None
            num_read = self._num_at_last
            answer = self._get(startTime=self._last_millis)
        token = answer.get("nextForwardToken")
        return mappings(answer, "events")[num_read:], token if isinstance(token, str) else None

    def _get(self, **asked: object) -> Document:
        return self._aws.call(
            "logs",
            "GetLogEvents",
            logGroupName=LOG_GROUP,
            logStreamName=self._name,
            # The default is the newest page first. A forward token needs it, too.
            startFromHead=True,
            **asked,
        )

    def _entries(self, event: Document) -> Iterator[LogEntry]:
        millis = event.get("timestamp")
        at = millis if isinstance(millis, int) else self._last_millis
        # Events have no number: within one millisecond they are counted, to skip them after a new
        # start.
        self._num_at_last = self._num_at_last + 1 if at == self._last_millis else 1
        self._last_millis = at
        message = text(event, "message")
        for line in message.rstrip("\r\n").split("\n"):
            yield LogEntry(millis=at, host=self.host, text=line.rstrip("\r"))


class Labels:
    """Groups of log lines; a line waits until its host's group is known."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._only = groups[0] if len(groups) == 1 else None
        self._groups: dict[str, str] = {}
        self._held: dict[str, deque[tuple[float, LogEntry]]] = {}

    @property
    def roster(self) -> Mapping[str, str]:
        """Host to group, if known."""
        return dict(self._groups)

    def label(self, entries: Iterable[LogEntry], *, now: float) -> Iterator[LogLine]:
        """Yields lines of known groups, each host's in order, and lines that waited too long."""
        for entry in entries:
            self._learn(entry)
            self._held.setdefault(entry.host, deque()).append((now, entry))
            yield from self._release()
        for host, held in self._held.items():
            if held and now >= held[0][0] + HOLD_SECONDS:
                self._groups.setdefault(host, UNKNOWN)
        yield from self._release()

    def flush(self) -> Iterator[LogLine]:
        yield from self._release(UNKNOWN)

    def _release(self, default: str = "") -> Iterator[LogLine]:
        for host, held in self._held.items():
            group = self._groups.get(host, default)
            while group and held:
                yield LogLine(group=group, host=host, text=held.popleft()[1].text)

    def _learn(self, entry: LogEntry) -> None:
        if self._only:
            self._groups[entry.host] = self._only
            return
        event = parse_line(entry.text) if entry.text.startswith("stoker ") else None
        if event is None:
            return
        # A script may print another host's line.
        if event.event == EventName.HOST_ROLE and event.host == entry.host:
            self._groups[entry.host] = event.values.get("group") or UNKNOWN
        elif event.event == EventName.ROSTER:
            for host, group in _roster_in(event.values.get("groups", "")).items():
                if self._groups.get(host, UNKNOWN) == UNKNOWN:
                    self._groups[host] = group


def _roster_in(text: str) -> dict[str, str]:
    """Returns the group of each host in the leader's line `roster groups=JSON`."""
    groups: dict[str, str] = {}
    with contextlib.suppress(ValueError):
        for name, group in mapping(json.loads(text)).items():
            hosts = item_at(group, "hosts")
            for host in hosts if isinstance(hosts, list) else ():
                if isinstance(host, str):
                    groups.setdefault(host, name)
    return groups
