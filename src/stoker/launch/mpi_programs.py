"""Programs that mpirun starts: its ssh, and each rank.

A script without stoker's modules. `mpi_programs.py agent FOLDER HOST DAEMON ARGUMENTS` replaces
ssh: it leaves the daemon's arguments in the folder of the leader's launcher, and ends; the launcher
of that host then starts the daemon.

`mpi_programs.py rank COMMAND...` becomes COMMAND, with torchrun's variables (RANK, WORLD_SIZE,
LOCAL_RANK) from Open MPI's, in the launcher's folder, and ends with the daemon that started it.
"""

import json
import os
import signal
import sys
from runpy import run_path

_CANNOT_START = 127
VARIABLES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def ask_for_daemon(folder: str, host: str, *line: str) -> int:
    import shlex

    # A line for a shell, as for ssh: quoted, in any number of pieces. The first word is the daemon.
    arguments = shlex.split(" ".join(line))[1:]
    path = os.path.join(folder, f"{host}.daemon")
    # Renamed when complete: the launcher may read it at any time.
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(arguments, file)
    os.replace(f"{path}.new", path)
    return 0


def become_rank(*command: str) -> int:
    # By its path: this script runs without stoker's modules.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    run_path(os.path.join(package, "host", "spawn.py"))["end_with_parent"](signal.SIGKILL)
    for name, theirs in VARIABLES.items():
        os.environ[name] = os.environ[theirs]
    try:
        os.chdir(os.environ["STOKER_MPI_FOLDER"])
        os.execvp(command[0], command)
    except OSError as err:
        sys.stderr.write(f"error: cannot start {command[0]}: {err.strerror}\n")
    return _CANNOT_START


def main(program: str, *arguments: str) -> int:
    return ask_for_daemon(*arguments) if program == "agent" else become_rank(*arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
