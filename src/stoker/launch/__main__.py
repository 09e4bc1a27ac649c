"""`python -m stoker.launch -- CMD` is `stoker launch`, for hosts on this machine."""

import os
import sys

from stoker.errors import StokerError
from stoker.launch.launcher import launch


def main(arguments: list[str]) -> int:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    try:
        return launch(command, os.environ)
    except StokerError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
