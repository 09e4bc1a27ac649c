"""TensorFlow is imported here, where a command of an engine needs it, and nowhere else."""

import importlib
import os
import signal
import sys
import threading
from types import ModuleType

from stoker.errors import UsageError


def imported() -> ModuleType:
    """Returns the module tensorflow, which keeps to the CPU.

    Raises:
        UsageError: If it is not installed.
    """
    # Its servers hand out data and parameters: they must not take memory of the accelerators.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        return importlib.import_module("tensorflow")
    except ImportError as err:
        raise UsageError(
            f"this engine needs TensorFlow: {err}",
            where=f"Python {sys.executable}",
            fix="install tensorflow or tensorflow-cpu on all hosts: see docs/engines.md",
        ) from None


def until_asked() -> None:
    """Blocks until this process gets SIGTERM or SIGINT."""
    is_asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_asked.set())
    is_asked.wait()


def end() -> None:
    """Ends this process: TensorFlow's servers have threads that would not let it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
