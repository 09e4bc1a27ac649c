"""The profiler runs a workload's command until it is known what a step waits for."""

from stoker.profile.profiled_job import profile
from stoker.profile.words import explain

__all__ = ["explain", "profile"]
