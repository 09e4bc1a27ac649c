"""Runs a data host in small: agent and membership, no launcher. Arguments: one JSON object."""

import json
import os
import secrets
import signal
import sys
from pathlib import Path

from stoker.feed.engine.agent import Agent
from stoker.feed.engine.crypto import Keys, read_token
from stoker.feed.engine.run_messages import PROTOCOL_VERSION, HostEnd, HostState
from stoker.launch.host_client import HostClient
from stoker.logs import Log
from stoker.records import FeedSettings


def main() -> None:
    given = json.loads(sys.argv[1])
    # What this data host can import and trainers cannot; its fork server inherits it.
    if "folder" in given:
        sys.path.insert(1, given["folder"])
        os.environ["PYTHONPATH"] = given["folder"]
    keys = Keys.from_token(read_token(Path(given["token_file"])))
    run, host, workers = given["run"], given["host"], given["workers"]
    log, feed = Log(run=run, host=host), FeedSettings(**given["feed"])

    agent = Agent(keys, log, host=host, bind="127.0.0.1", port=given["port"], workers=workers)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    client = HostClient(
        HostState(
            protocol=PROTOCOL_VERSION,
            run_id=run,
            role="data",
            host=host,
            group="data",
            address="localhost",
            # Proxies before its ports, if the test has them.
            port=given.get("advertised_port", agent.port),
            batch_port=given.get("advertised_batch_port", agent.batch_port),
            workers=workers,
            incarnation=secrets.token_hex(4),
        ),
        keys=keys,
        address="127.0.0.1",
        port=given["coordinator_port"],
        feed=feed,
        log=log,
        on_verdict=lambda _: agent.stop(),
    )
    client.start()
    try:
        agent.run()
    finally:
        client.tell(end=HostEnd(exit_code=0))
        client.close()


if __name__ == "__main__":
    main()
