"""The command line: thin verbs over the bodies of the components."""

from stoker.cli.main import main

__all__ = ["main"]
