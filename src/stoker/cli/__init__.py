"""The command line consists of thin verbs over the bodies of the components."""

from stoker.cli.main import main

__all__ = ["main"]
