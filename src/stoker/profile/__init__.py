"""The profiler: it runs a workload's command until it knows what a step waits for.

`profiled_job` submits the job and fetches its profile. The job's `leader` launches the command and
writes the profile; within each trainer the `session` leads through the steps as they are (timed by
`steps`, beside which `evidence` watches), steps on `stock`, and the `loader_alone`. `combine` makes
the profile of it; `states` and `fixes` say what a step waits for and what is free to do;
`unmeasured` says why there is no profile.
"""

from stoker.profile.explain import explain
from stoker.profile.profiled_job import profile

__all__ = ["explain", "profile"]
