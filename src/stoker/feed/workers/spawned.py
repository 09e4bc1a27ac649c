"""A data worker in a fresh interpreter, as multiprocessing's spawn starts one.

`python -m stoker.feed.workers.spawned SOCKET SPEC FACTS`: descriptors of its channel and of a file
with the pickled spec, and the other arguments of `worker_main` as JSON.
"""

import faulthandler
import json
import socket
import sys

from stoker.feed.wire.dataset import reopened_spec
from stoker.feed.workers.worker import worker_main


def main() -> None:
    """Makes batches until the other end of the channel is closed."""
    # As a forked one inherits it: where native code crashes, the host's log has the stack.
    faulthandler.enable()
    channel, memory, facts = sys.argv[1:]
    sock = socket.socket(fileno=int(channel))
    worker_main(sock, reopened_spec(int(memory)), **json.loads(facts))


if __name__ == "__main__":
    main()
