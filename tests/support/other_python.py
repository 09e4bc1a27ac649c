"""Other Pythons than the one that runs stoker: with its packages but without stoker, or older."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

_PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
_LEFT_OUT = ("stoker", "_editable_impl_stoker", "__pycache__", "_virtualenv")


def python_without(folder: Path, *left_out: str) -> Path:
    """Makes a Python like this one without the packages that begin so; returns its interpreter."""
    base = os.path.realpath(sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith((*_LEFT_OUT, *left_out)):
            (target / path.name).symlink_to(path)
    return folder / "bin" / "python"


def with_stoker(python: Path) -> Path:
    """Puts stoker's own folder on a Python's path, without what it needs."""
    import stoker

    (target,) = python.parent.parent.glob("lib/python*/site-packages")
    (target / "stoker_here.pth").write_text(str(Path(stoker.__file__).parent.parent))
    return python


def with_version(python: Path, package: str, version: str) -> Path:
    """Gives a package of a Python another version; its files stay."""
    (target,) = python.parent.parent.glob("lib/python*/site-packages")
    (info,) = target.glob(f"{package}-*.dist-info")
    text = (info / "METADATA").read_text()
    real = info.resolve()
    info.unlink()
    shutil.copytree(real, info)
    lines = [
        f"Version: {version}" if line.startswith("Version:") else line for line in text.splitlines()
    ]
    (info / "METADATA").write_text("\n".join(lines))
    return python


def other_version(version: str) -> Path:
    """Returns a pyenv Python of that version, which has no stoker; skips where there is none."""
    found = sorted(_PYENV.glob(f"{version}*/bin/python"))
    if not found or sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip(f"pyenv has no Python {version} other than this one")
    return found[-1]
