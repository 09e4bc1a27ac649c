"""The project folder has pipelines and components: its users edit them, they are loaded by path."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from stoker.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel carries the project's files; an editable installation has its checkout.
CARRIED = (_PACKAGE / "project", _PACKAGE.parents[1])

_PACKAGES = ("components", "pipelines")
_EXTRAS = {"kfp": "kubeflow", "sagemaker": "sagemaker"}


@contextlib.contextmanager
def project_pipeline(
    target: str, *, folder: Path, components: Path | None = None, carried: Sequence[Path] = CARRIED
) -> Iterator[ModuleType]:
    """Loads pipelines/TARGET.py, and while it is in use the components that it imports.

    Afterwards they are not imported any more: the next folder may have other files.

    Args:
        target: kubeflow or sagemaker.
        folder: Project folder. What it lacks comes from the installation.
        components: Folder with components in place of the project's: those that are there count.
        carried: The installation's own project folders.

    Raises:
        UsageError: If there is no such pipeline, a file is not Python, or the orchestrator's
            library is not installed.
    """
    roots = [root for root in (folder, *carried) if (root / "pipelines" / f"{target}.py").is_file()]
    if not roots:
        raise UsageError(
            f"there is no pipelines/{target}.py",
            where=f"folder {folder}",
            fix="stoker init DIR     makes a project folder; run stoker in it",
        )
    if components is not None and not components.is_dir():
        raise UsageError(f"no such folder: {components}", fix="check --components")
    places = {
        "components": [
            *([components] if components else []),
            *_folders("components", folder, *carried),
        ],
        "pipelines": [roots[0] / "pipelines"],
    }
    before = _forget()
    try:
        for name, paths in places.items():
            package = ModuleType(name)
            # Several folders: the project's own component is found before a carried one.
            package.__path__ = [str(path.resolve()) for path in paths]
            sys.modules[name] = package
        # Finders remember what a folder held, and files may have been written a moment ago.
        importlib.invalidate_caches()
        yield _imported(f"pipelines.{target}", target=target)
    finally:
        _forget()
        # The caller may have modules of these names, too.
        sys.modules.update(before)


def _imported(name: str, *, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as err:
        missing = (err.name or "").partition(".")[0]
        if missing in _EXTRAS:
            raise UsageError(
                f"the library {missing} is not installed, or too old: no module {err.name}",
                fix=f"pip install 'stoker[{_EXTRAS[missing]}]'",
            ) from err
        if missing in _PACKAGES:
            raise UsageError(
                f"there is no module {err.name}",
                where=f"pipelines/{target}.py and what it imports",
                fix="stoker init DIR     makes a folder that has all of them",
            ) from err
        raise
    except SyntaxError as err:
        raise UsageError(
            f"not Python: {err.msg}", where=f"{err.filename}:{err.lineno}", fix="correct the file"
        ) from err


def _folders(name: str, *roots: Path) -> Sequence[Path]:
    return [root / name for root in roots if (root / name).is_dir()]


def _forget() -> dict[str, ModuleType]:
    """Takes the project's modules out of those that are imported, and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    return {name: sys.modules.pop(name) for name in names}
