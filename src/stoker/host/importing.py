"""Imports of the feed in a training process, which has torch's objects in memory by then."""

import gc
import importlib
import sys
from types import ModuleType


def imported(name: str) -> ModuleType:
    """Returns the module `name`, imported without a look for garbage during it.

    An import makes thousands of objects, none of them garbage, and so begins a collection that
    visits every object of torch: half of what the feed's import takes in all.
    """
    module = sys.modules.get(name)
    if module is not None:
        return module
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if is_collecting:
            gc.enable()
