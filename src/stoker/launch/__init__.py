"""The launcher is one program that runs on every host of a run."""

from stoker.launch.launcher import launch

__all__ = ["launch"]
