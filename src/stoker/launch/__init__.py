"""The launcher is one program that runs on every host of a run."""

from stoker.launch.run import launch

__all__ = ["launch"]
