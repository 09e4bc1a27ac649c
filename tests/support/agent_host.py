"""A data host in small: agent and membership, without a launcher. Arguments: one JSON object."""

import json
import os
import resource
import secrets
import signal
import sys
from pathlib import Path

from stoker.feed.agent.agent import Agent
from stoker.feed.wire.crypto import Keys, read_token
from stoker.feed.wire.protocol import PROTOCOL_VERSION, Join
from stoker.launch.membership import Membership
from stoker.logs import Log
from stoker.records import FeedSettings


def main() -> None:
    given = json.loads(sys.argv[1])
    # Held from the start, so that what is opened later has higher numbers.
    held = os.open(os.devnull, os.O_RDONLY)
    for _ in range(given.get("held_files", 0)):
        os.dup(held)
    if "max_files" in given:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (given["max_files"], hard))
    keys = Keys.from_token(read_token(Path(given["token_file"])))
    log = Log(run=given["run"], host=given["host"])
    feed = FeedSettings(**given["feed"])
    agent = Agent(
        keys=keys,
        workers=given["workers"],
        feed=feed,
        log=log,
        host=given["host"],
        run_id=given["run"],
        bind="127.0.0.1",
        port=given["port"],
    )
    agent.open()
    signal.signal(signal.SIGTERM, lambda *_: agent.drain())
    membership = Membership(
        join=Join(
            protocol=PROTOCOL_VERSION,
            run_id=given["run"],
            kind="agent",
            host=given["host"],
            group="data",
            address="localhost",
            # Proxies before its ports, if the test has them.
            port=given.get("advertised_port", agent.port),
            batch_port=given.get("advertised_batch_port", agent.batch_port),
            workers=given["workers"],
            incarnation=secrets.token_hex(4),
        ),
        keys=keys,
        address="127.0.0.1",
        port=given["coordinator_port"],
        feed=feed,
        log=log,
        on_verdict=lambda _: agent.stop(),
        trainers_heard_at=lambda: agent.trainers_heard_at,
    )
    membership.start()
    try:
        agent.run()
    finally:
        membership.leave(exit_code=0)
        membership.close()


if __name__ == "__main__":
    main()
