"""The profiler: it runs a workload's command until it knows what a step waits for.

`profiled_job` submits the job and reads its results. On its hosts, `entrypoint` launches the
command; within each trainer `phases` leads through `script_phases` and `loader_phases`, whose steps
`steps` times. `combine` makes the profile of it, `states` says what a step waits for, and `memory`
what takes the memory.
"""

from stoker.profile.explain import explain
from stoker.profile.profiled_job import profile

__all__ = ["explain", "profile"]
