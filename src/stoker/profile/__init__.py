"""Profile: runs a workload's command until it is known what a step waits for."""

from stoker.profile.body import profile
from stoker.profile.explain import explain

__all__ = ["explain", "profile"]
