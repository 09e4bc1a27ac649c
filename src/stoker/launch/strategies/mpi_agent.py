"""mpirun starts this script in place of ssh: `mpi_agent.py SOCKET HOST DAEMON ARGUMENTS...`.

It runs as a script, without stoker's modules: it hands the daemon's command line to the leader's
launcher, through a socket that only this user may open, and ends; the launcher has the follower's
launcher start the daemon.
"""

import json
import shlex
import socket
import sys

# The launcher answers at once; the daemon is started when its host has come.
ANSWER_SECONDS = 30.0


def main(arguments: list[str]) -> int:
    """Asks the leader's launcher; returns 0 if it will be done."""
    path, host, *line = arguments
    # One line for a shell, as ssh would take it: quoted, in any number of pieces.
    request = {"host": host, "words": shlex.split(" ".join(line))}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.makefile("rb").readline().decode(errors="replace").strip()
    if answer != "ok":
        sys.stderr.write(f"stoker: the daemon of mpirun is not started on {host}: {answer}\n")
    return answer != "ok"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as err:
        sys.exit(f"stoker: the launcher cannot be reached: {err}")
