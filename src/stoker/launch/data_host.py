"""A data host: it serves batches, or runs an engine's command, until the run ends."""

import os
import threading

from stoker.errors import FeedLostError
from stoker.feed.engine.agent import Agent
from stoker.feed.engine.run_messages import HostEnd
from stoker.host import machine, spawn
from stoker.launch.engine import Engine, num_workers
from stoker.launch.host_client import HostClient, HostRun
from stoker.launch.process import SignalReceived, end_descendants
from stoker.logs import EventName

ASKED_TO_STOP_CODE = 143


def serve(run: HostRun) -> int:
    """Serves until the run ends; returns the exit code.

    It is 0 if the dnn group decided, or was there and fell silent, 5 if it never came, 143 if this
    host was asked to stop.

    Raises:
        StokerError: If this host failed before the leader knew it, or is started again.
    """
    if run.folder:
        # Data workers import and open the training's files: their Python starts in its folder.
        os.chdir(run.folder)
    if run.settings.engine.name == "feed":
        return _serve_batches(run)
    client = HostClient(run, workers=num_workers(run))
    engine = Engine(run)
    client.start()
    try:
        engine.serve(client)
    finally:
        engine.stop()
        _tell_end(client, engine.failure)
    failure = FeedLostError(engine.failure) if engine.failure else None
    return _exit_code(run, client, failure)


def _serve_batches(run: HostRun) -> int:
    spawn.adopt_orphans()
    workers = num_workers(run)
    # A run with a data group has a token, or `keys_of` has refused it.
    assert run.keys is not None
    try:
        agent = Agent(
            run.keys,
            run.log,
            host=run.topology.host,
            bind=run.listen_address,
            port=run.settings.port or run.settings.feed.port,
            workers=workers,
        )
    except OSError as err:
        where = f"host {run.topology.host}"
        raise FeedLostError(f"the agent cannot start: {err}", where=where) from err
    # After the first loader process's start: what a dataset's crash leaves is the user's.
    machine.turn_off_core_dumps()
    # Now that the agent listens: trainers connect as soon as the leader has accepted this host.
    client = HostClient(run, port=agent.port, batch_port=agent.batch_port, workers=workers)
    is_over = threading.Event()
    asked = list[SignalReceived]()

    def stop_on_event() -> None:
        event = run.inbox.get()
        if isinstance(event, SignalReceived):
            run.log.event(EventName.SIGNAL_RECEIVED, number=event.number)
            asked.append(event)
        if not is_over.is_set():
            agent.stop()

    threading.Thread(target=stop_on_event, daemon=True).start()
    client.start()
    failure: Exception | None = None
    try:
        agent.run()
    except Exception as err:
        failure = err
    is_over.set()
    _tell_end(client, str(failure or ""))
    end_descendants()
    return _exit_code(run, client, failure, is_asked=bool(asked))


def _tell_end(client: HostClient, failure: str) -> None:
    # "failed" is what trainers look for.
    client.tell(end=HostEnd(reason=f"failed: {failure}"[:4000] if failure else ""))
    # Behind its last words, which it sends.
    client.close()


def _exit_code(
    run: HostRun, client: HostClient, failure: Exception | None, *, is_asked: bool = False
) -> int:
    verdict = client.verdict
    comes_back = run.settings.comes_back
    if failure is not None and verdict is None:
        if comes_back or not client.welcome.is_set():
            raise failure
        # The leader knows why, and the dnn group decides the outcome.
        return 0
    # An evicted pod must not count as done.
    if verdict is None or (comes_back and is_asked):
        return ASKED_TO_STOP_CODE
    run.log.event(EventName.DATA_HOST_ENDED, reason=verdict.reason)
    # Perhaps only this host cannot reach the leader: restarted, it joins again.
    is_over = verdict.kind == "decided" or (verdict.kind == "lost" and not comes_back)
    return 0 if is_over else FeedLostError.exit_code
