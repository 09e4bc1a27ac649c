"""What a Python has installed, where pipelines and components are, and how the feed is imported."""

import gc
import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parents[1]
# Pipelines and components: a wheel carries the project's files, an editable installation has its
# checkout.
CARRIED = (_PACKAGE / "project", _PACKAGE.parents[1])
# Stands for the installed directories in the entries of a path.
INSTALLED = ""
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
# Files of the standard library and of installed packages. (sysconfig would read 0.6 MB.)
INSTALLED_FILE = re.compile(
    rf"^{re.escape(_STANDARD_LIBRARY)}{os.sep}|{os.sep}(site|dist)-packages{os.sep}"
)
_STANDARD_ARCHIVE = f"python{sys.version_info.major}{sys.version_info.minor}.zip"


def is_installed(path: str) -> bool:
    """Returns whether a path entry belongs to this Python: its library, or its site-packages."""
    if path == _STANDARD_LIBRARY or path.startswith(_STANDARD_LIBRARY + os.sep):
        return True
    name = os.path.basename(path)
    if name == _STANDARD_ARCHIVE:
        return True
    if name not in ("site-packages", "dist-packages"):
        # A folder of that name elsewhere is the user's: `pip install --target`.
        return False
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    of_user = getattr(sys.modules.get("site"), "USER_SITE", None)
    return path == of_user or any(path.startswith(prefix + os.sep) for prefix in prefixes)


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
