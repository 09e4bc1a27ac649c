"""The profiler: it runs a workload's command until it knows what a step waits for."""

from stoker.profile.explain import explain
from stoker.profile.profiled_job import profile

__all__ = ["explain", "profile"]
