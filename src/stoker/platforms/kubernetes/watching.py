"""Watching objects: a list, then what changes, for as long as it takes.

A watch breaks off all the time: servers end it after minutes, proxies sooner, and a version that is
too old (410 Gone) means to list anew. Whoever is told learns of all that only what has changed.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads

from stoker.platforms.kubernetes.api import Cluster
from stoker.platforms.kubernetes.api_errors import Action, ApiError, failed
from stoker.platforms.kubernetes.reading import Document, mapping, text
from stoker.platforms.kubernetes.resources import Resource
from stoker.platforms.kubernetes.stream_slot import StreamSlot

# After it the server ends a watch, and a connection that has died without a word is found out.
WATCH_SECONDS = 60
SILENT_SECONDS = WATCH_SECONDS + 15.0
# Between attempts, doubling, back to the first with the first thing that comes.
MIN_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 15.0
# A cluster may be out of reach for so long: control planes are upgraded while jobs run.
UNREACHABLE_SECONDS = 900.0

_TOO_OLD = 410


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects that there are now; what was there and is not among them is gone."""

    resource: Resource
    items: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """An object is new, or is not what it was."""

    resource: Resource
    item: Document


@dataclass(frozen=True, slots=True)
class Gone:
    """An object was deleted; `item` is what it was last."""

    resource: Resource
    item: Document


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing more can be learned of these objects."""

    resource: Resource
    error: ApiError


@dataclass(frozen=True, slots=True)
class Disturbed:
    """The cluster does not answer; it is asked again."""

    resource: Resource
    error: ApiError


News = Listed | Changed | Gone | Lost | Disturbed


class ObjectWatch(threading.Thread):
    """Tells what becomes of the objects that `query` selects, from a thread of its own.

    Args:
        cluster: That has them.
        resource: Their kind.
        query: Selectors.
        tell: Is called with each piece of news; may block.
    """

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        *,
        query: Mapping[str, str],
        tell: Callable[[News], None],
    ) -> None:
        super().__init__(name=f"watch {resource.plural}", daemon=True)
        self._cluster = cluster
        self._resource = resource
        self._query = dict(query)
        self._tell = tell
        self._is_closed = threading.Event()
        self._slot = StreamSlot()
        self._has_news = False

    def close(self) -> None:
        """Ends the watch; may be called twice, by any thread."""
        self._is_closed.set()
        self._slot.close()

    def run(self) -> None:
        """Watches until it is closed, or the cluster refuses."""
        version = ""
        delay = MIN_DELAY_SECONDS
        reached_at = self._cluster.clock()
        while not self._is_closed.is_set():
            self._has_news = False
            try:
                if not version:
                    items, version = self._cluster.list(self._resource, query=self._query)
                    self._tell(Listed(self._resource, tuple(items)))
                version = self._watch(version)
                reached_at = self._cluster.clock()
            except ApiError as err:
                if err.is_too_old:
                    version = ""
                elif not err.is_passing or self._is_lost(reached_at):
                    if not self._is_closed.is_set():
                        self._tell(Lost(self._resource, err))
                    return
                elif not self._is_closed.is_set():
                    self._tell(Disturbed(self._resource, err))
            delay = MIN_DELAY_SECONDS if self._has_news else min(delay * 2, MAX_DELAY_SECONDS)
            self._is_closed.wait(delay)

    def _is_lost(self, reached_at: float) -> bool:
        return self._cluster.clock() >= reached_at + UNREACHABLE_SECONDS

    def _watch(self, version: str) -> str:
        """Watches until the server ends it; gives the version to go on from."""
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        stream = self._cluster.open(self._resource, query=query, read_seconds=SILENT_SECONDS)
        try:
            with self._slot.reading(stream):
                for line, is_whole in stream.lines():
                    if not is_whole or not line:
                        continue
                    self._has_news = True
                    version = self._take(line) or version
        except ApiError as err:
            # Broken off: what came so far counts, and it goes on from there.
            if not err.is_passing:
                raise
        return version

    def _take(self, line: str) -> str:
        """Tells what a line of the watch says; gives its version."""
        try:
            event = loads(line)
        except JSONDecodeError:
            return ""
        item = mapping(event, "object")
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._tell(Changed(self._resource, item))
            case "DELETED":
                self._tell(Gone(self._resource, item))
            case "ERROR":
                raise _error(item, self._resource, self._cluster.namespace)
        return text(mapping(item, "metadata"), "resourceVersion")


def _error(status: Document, resource: Resource, namespace: str) -> ApiError:
    action = Action(
        verb="watch", group=resource.group, resource=resource.plural, namespace=namespace
    )
    # Whatever the server says of it: a watch that it cannot go on with is begun anew.
    return failed(text(status, "message"), action, code=_TOO_OLD)
