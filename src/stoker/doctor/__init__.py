"""What this host is and has, and what it lacks to play its part in a run."""

from stoker.doctor.body import examine
from stoker.doctor.check import Check

__all__ = ["Check", "examine"]
