"""Imports modules that take seconds only when used, not in each process that collects all tests.

`sagemaker = WhenUsed("stoker.sagemaker")`; the same import below TYPE_CHECKING tells its types.
"""

import importlib
import importlib.util

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where the package is not installed, which is found out without importing it."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"needs {package}")


class WhenUsed:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        if name.startswith(("_", "pytest")):
            # pytest asks whether it is a test, a fixture, marked.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
