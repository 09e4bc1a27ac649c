"""The pump: the one thread of a trainer that owns the feed's sockets, so that the thread that
trains only takes finished batches."""

import os
import select
import time
import weakref
from collections.abc import Container, Sequence
from functools import partial

import zmq

from stoker.errors import FeedError, ProtocolError
from stoker.feed import messages as m
from stoker.feed.answers import Answers, forget_peer
from stoker.feed.asking import Asking
from stoker.feed.connection import GOODBYE_SECONDS, ZmqContext, send_uncopied_ahead
from stoker.feed.landing import Landing
from stoker.feed.links import AgentLink, Link
from stoker.feed.local_answers import LocalAnswers
from stoker.feed.observe import Observer, Standing
from stoker.feed.placing import Placing
from stoker.feed.schedule import Peer
from stoker.feed.security import Keys
from stoker.feed.session import Session
from stoker.feed.shared import Shared
from stoker.feed.shipping import PackedSpec
from stoker.settings import ProcessSettings

# Progress to the coordinator, and a look at what no event tells.
_TICK_SECONDS = 1.0
_IN, _OUT = select.POLLIN, select.POLLOUT

# Links, the descriptors of their connections, those of local workers with session and flags.
_Polled = tuple[list[Link], list[tuple[int, ...]], dict[int, tuple[Session, int]]]


class Pump:
    """Runs in a thread of its own, by `run`.

    Args:
        shared: What it has in common with the threads that iterate.
    """

    def __init__(self, shared: Shared, settings: ProcessSettings, keys: Keys) -> None:
        self._shared = shared
        self._settings = settings
        self._feed = settings.feed
        self._keys = keys
        self._context: ZmqContext = zmq.Context()
        self._unpack_coordinator = m.Unpacker(m.FromCoordinator)
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(shared)))
        now = time.monotonic()
        self._polled: _Polled = ([], [], {})
        self._poll = select.poll()
        self._link_of: dict[int, Link] = {}
        self._links: dict[str, AgentLink] = {}
        self._observer = Observer(own_host=settings.host, clock=time.monotonic)
        self._ended: list[Standing] = []
        self._has_begun = False
        landing = Landing()
        self._answers = Answers(shared, self._observer, landing, self._feed, on_lost=self._lost)
        self._local_answers = LocalAnswers(shared, self._observer, Placing(landing))
        self._asking = Asking(shared, settings, self._links)
        self._progress_at = now
        host, _, port = (settings.coordinator or "").rpartition(":")
        self._coordinator = Link(
            self._context,
            keys,
            name=host,
            port=int(port),
            now=now,
            post=shared.post,
        )

    def run(self) -> None:
        """Pumps until the feed is closed; a crash ends every session with its error."""
        shared = self._shared
        try:
            self._turn()
            send_uncopied_ahead()
            while not shared.is_closing:
                self._turn()
        except BaseException as err:
            failure = FeedError(
                f"the feed's thread failed: {type(err).__name__}: {err}",
                where=f"rank {self._settings.rank}, host {self._settings.host}",
                fix="this is a bug of stoker; its traceback is this error's cause",
            )
            failure.__cause__ = err
            shared.fail(failure)
        finally:
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        shared = self._shared
        links = [self._coordinator, *self._links.values()]
        seconds = _TICK_SECONDS
        served: set[Link] = set()
        for link in links:
            if not link.connection.is_open:
                wait = link.wait_seconds(now)
                if wait is not None and wait < seconds:
                    seconds = wait
            if link.has_input():
                served.add(link)
        children: dict[int, tuple[Session, int]] = {}
        with shared.lock:
            for session in shared.sessions.values():
                wait = session.schedule.next_check(now)
                if wait is not None and wait < seconds:
                    seconds = wait
                if session.local is not None:
                    for fileno, wants_write in session.local.sockets().items():
                        children[fileno] = (session, _IN | _OUT if wants_write else _IN)
        self._watch(links, children)
        milliseconds = int(seconds * 1000) + 1 if shared.sleeps() and not served else 0
        ready = {fileno for fileno, _ in self._poll.poll(milliseconds)}
        shared.is_up(is_rung=shared.wake_fd in ready)
        shared.run_posted()
        for fileno in ready:
            if fileno in self._link_of:
                served.add(self._link_of[fileno])
            elif fileno in children:
                self._local_answers.take(children[fileno][0], fileno)
        for link in links:
            if link in served:
                self._serve(link, ready)
        self._tick(time.monotonic())

    def _watch(self, links: list[Link], children: dict[int, tuple[Session, int]]) -> None:
        """Has `_poll` look at all that there is now."""
        filenos = [link.connection.filenos for link in links]
        polled = (links, filenos, children)
        if polled == self._polled:
            return
        self._poll, self._polled = select.poll(), polled
        self._poll.register(self._shared.wake_fd, _IN)
        self._link_of = {fileno: link for link in links for fileno in link.connection.filenos}
        for fileno in self._link_of:
            self._poll.register(fileno, _IN)
        for fileno, (_, flags) in children.items():
            self._poll.register(fileno, flags)

    def _serve(self, link: Link, ready: Container[int]) -> None:
        has_events = link.has_events(ready)
        # First what came, then what became of the connection: the last words count.
        if isinstance(link, AgentLink):
            link.receive(partial(self._answers.take, link), ready=ready)
        else:
            link.receive(self._take_roster, ready=ready)
        if not has_events or not link.watch(time.monotonic()):
            return
        if not isinstance(link, AgentLink):
            if link.is_up:
                link.send(
                    m.Attend(
                        protocol=m.PROTOCOL_VERSION,
                        run_id=self._settings.run_id,
                        rank=self._settings.rank,
                        host=self._settings.host,
                    )
                )
        elif link.is_up:
            link.attach()
            with self._shared.lock:
                for session in self._shared.sessions.values():
                    session.has_news = True
        else:
            self._lost(link)

    def _lost(self, link: AgentLink) -> None:
        """The connection to a data host is lost; it is dialled again."""
        self._shared.log.event("agent_connection_lost", agent=link.member.host)
        forget_peer(self._shared, link)
        if not any(other.is_up for other in self._links.values()):
            with self._shared.lock:
                self._asking.tell_alone()

    def _take_roster(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            message = self._unpack_coordinator(frames[0].buffer)
        except ProtocolError as err:
            self._shared.log.event("message_refused", coordinator=True, reason=err.what)
            return
        if isinstance(message, m.Refused):
            self._shared.fail(
                FeedError(
                    f"the coordinator refuses this rank: {message.reason}",
                    where=f"rank {self._settings.rank}, host {self._settings.host}",
                )
            )
        if not isinstance(message, m.Roster):
            return
        self._asking.take_roster(message, time.monotonic())
        listed = {member.host: member for member in message.agents}
        for host, link in list(self._links.items()):
            link.is_listed = host in listed
            if (host in listed and not link.is_same(listed[host])) or host in self._asking.lost:
                forget_peer(self._shared, link)
                self._remove(link)
            elif not link.is_listed and not link.is_up:
                # It left, and its last words are read.
                self._remove(link)
        for host, member in listed.items():
            if host not in self._links:
                self._links[host] = AgentLink(
                    self._context,
                    self._keys,
                    member,
                    now=time.monotonic(),
                    post=self._shared.post,
                )

    def _tick(self, now: float) -> None:
        for link in [self._coordinator, *self._links.values()]:
            if not link.connection.is_open:
                if isinstance(link, AgentLink) and not link.is_listed:
                    # It left, and its last words are read.
                    self._remove(link)
                else:
                    link.tick(now)
        if now >= self._progress_at:
            self._progress_at = now + _TICK_SECONDS
            self._report()
        begun: list[PackedSpec] = []
        with self._shared.lock:
            self._has_begun = self._has_begun or bool(self._shared.sessions)
            retired = self._shared.take_retired()
            self._ended += map(self._standing, retired)
            locals_ended = [s.local for s in retired if s.local is not None]
            for session in (*retired, *self._shared.sessions.values()):
                locals_ended += session.retired_locals
                session.retired_locals = []
            for session in self._shared.sessions.values():
                if session.has_news:
                    self._asking.tell_news(session)
                    if session.spec is not None and session.is_busy:
                        begun.append(session.spec)
                if session.is_busy:
                    self._asking.ask(session, now)
                    self._asking.judge(session, now)
                if session.is_due:
                    session.ring()
        for session in retired:
            for agent in self._links.values():
                agent.forget(session.name)
                agent.send(m.Close(session=session.name))
        for local in locals_ended:
            local.close()
        for spec in begun:
            # Set anew since the pass before, perhaps.
            self._shared.values_there.compare(spec.digest, spec.living_code())

    def _report(self) -> None:
        # A process that only made its loaders, and has children iterate, has nothing to say.
        if self._coordinator.is_up and self._has_begun:
            timeline = self._shared.timeline
            with self._shared.lock:
                standings = self._ended
                self._ended = []
                standings += [self._standing(each) for each in self._shared.sessions.values()]
                feed = self._observer.tell(standings)
            self._coordinator.send(
                m.Progress(
                    rank=self._settings.rank,
                    steps=timeline.steps,
                    samples=timeline.samples,
                    wait_seconds=timeline.wait_seconds,
                    compute_seconds=timeline.compute_seconds,
                    feed=feed,
                )
            )

    def _standing(self, session: Session) -> Standing:
        return session.schedule.observe(time.monotonic(), name=self._host_of)

    def _host_of(self, peer: Peer) -> str:
        return peer if isinstance(peer, str) else self._settings.host

    def _remove(self, link: AgentLink) -> None:
        link.close()
        if self._links.get(link.member.host) is link:
            del self._links[link.member.host]

    def _close(self) -> None:
        self._shared.fail(FeedError("the feed of this process is closed"))
        with self._shared.lock:
            sessions = [*self._shared.sessions.values(), *self._shared.take_retired()]
            self._ended += map(self._standing, sessions)
            self._shared.sessions.clear()
        for session in sessions:
            for agent in self._links.values():
                agent.send(m.Close(session=session.name))
            for local in [session.local, *session.retired_locals]:
                if local is not None:
                    local.close()
        self._report()
        for link in [self._coordinator, *self._links.values()]:
            link.close(linger_seconds=GOODBYE_SECONDS)
        for receiver in list(self._shared.receivers):
            receiver.join(GOODBYE_SECONDS)
        self._context.term()


def _let_go(shared: "weakref.ref[Shared]") -> None:
    """Closes the connections for batches in a forked child: agents are to see their end when the
    trainer ends."""
    found = shared()
    for receiver in list(found.receivers) if found else ():
        receiver.forget()
