"""The launcher: one program on every host of a run."""

from stoker.launch.run import launch

__all__ = ["launch"]
