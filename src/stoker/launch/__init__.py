"""The launcher, a program on every host of a run.

`launcher.launch` finds out which host it is on, and serves batches (`feed_host`), runs an engine
(`engines`) or trains (`trainer_host`).
"""

from stoker.launch.launcher import launch

__all__ = ["launch"]
