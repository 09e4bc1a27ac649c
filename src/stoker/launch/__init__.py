"""The launcher, a program on every host of a run. The way through it, top down:

`launcher.launch` finds out which host it is on (`topology`), unpacks the code (`code`), and serves
batches or an engine (`data_host`, `engine`) or trains (`trainer`). What it returns is the host's
exit code. A command runs in `process`, with the variables of `job_environment`.

All hosts talk with one thread of the leader's launcher (`run_server`, `host_client`): each says all
that is so about it, and hears all that is so about the run.

Who ends the training command: `limits` (a hang, the budget), a host that is lost, or a signal.
`failures` finds the first failure, `record` writes what the run did.
"""

from stoker.launch.launcher import launch

__all__ = ["launch"]
