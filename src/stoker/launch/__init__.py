"""The launcher is one program that runs on every host of a run.

A container begins in `cli/main.py`; from there `launcher.launch` finds out which host it is on, and
serves batches (`data_host`) or trains (`trainer_host`).
"""

from stoker.launch.launcher import launch

__all__ = ["launch"]
