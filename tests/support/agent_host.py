"""Runs a data host in small: agent and membership, no launcher. Arguments: one JSON object."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from stoker.environment import ProcessSettings
from stoker.feed.engine.agent import Agent
from stoker.feed.engine.crypto import Keys, read_token
from stoker.feed.engine.run_messages import HostEnd
from stoker.launch.host_client import HostClient, HostRun
from stoker.launch.topology import HostGroup, Topology
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
    groups = (HostGroup(hosts=("leader",)), HostGroup(name="data", role="data", hosts=(host,)))
    topology = Topology(host=host, groups=groups)
    coordinator = f"127.0.0.1:{given['coordinator_port']}"
    settings = ProcessSettings(
        run_id=run, feed=feed, coordinator=coordinator, advertise="localhost"
    )
    client = HostClient(
        HostRun(
            settings=settings,
            topology=topology,
            environ={},
            output=Path(),
            log=log,
            # A verdict ends the agent.
            inbox=SimpleNamespace(put=lambda _: agent.stop()),
            keys=keys,
        ),
        # Proxies before its ports, if the test has them.
        port=given.get("advertised_port", agent.port),
        batch_port=given.get("advertised_batch_port", agent.batch_port),
        workers=workers,
    )
    client.start()
    try:
        agent.run()
    finally:
        client.tell(end=HostEnd(exit_code=0))
        client.close()


if __name__ == "__main__":
    main()
