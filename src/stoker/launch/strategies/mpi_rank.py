"""mpirun starts this script as each rank: `mpi_rank.py COMMAND...`, which becomes COMMAND.

It runs as a script, in between: it gives the rank what torchrun would (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR ...) from what Open MPI says, and asks to end with the daemon that started
it. What this host's launcher has to say is in STOKER_MPI: JSON {master_addr, master_port, folder,
tmpdir}.
"""

import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127
# Open MPI's variable for torchrun's.
VARIABLES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def rank_variables(environ: dict[str, str]) -> dict[str, str]:
    """Returns the environment of the rank."""
    told = json.loads(environ["STOKER_MPI"])
    kept = {name: value for name, value in environ.items() if name not in ("STOKER_MPI", "TMPDIR")}
    for name, theirs in VARIABLES.items():
        kept[name] = environ[theirs]
    kept["MASTER_ADDR"], kept["MASTER_PORT"] = told["master_addr"], str(told["master_port"])
    if told["tmpdir"]:
        kept["TMPDIR"] = told["tmpdir"]
    return kept


def _end_with_parent() -> None:
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def main(command: list[str]) -> int:
    """Becomes the command; returns only if it cannot."""
    folder = json.loads(os.environ["STOKER_MPI"])["folder"]
    _end_with_parent()
    try:
        if folder:
            os.chdir(folder)
        os.execvpe(command[0], command, rank_variables(dict(os.environ)))
    except OSError as err:
        sys.stderr.write(f"error: cannot start {command[0]}: {err.strerror}\n")
    return _CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
