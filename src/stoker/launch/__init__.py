"""The launcher, a program on every host of a run; `roster` finds lost (silent) hosts.

`launcher.launch` finds out which host it is on, and serves batches (`feed_host`), runs an engine
(`engines`) or trains (`trainer_host`). What it returns is the host's exit code.

Who ends the training command: `run_guards` (a hang by `watchdog`, the budget by `spending`, a job
that nobody follows by `follower_lease`), `coordinator` (a host of the `roster` is lost), or a
signal; `supervise` sends it the signals. `finish` finds the first failure and its words.
"""

from stoker.launch.launcher import launch

__all__ = ["launch"]
