"""The training script as a module: `__main__` and `__mp_main__`, in a trainer and on a data host.

A data host never runs the script. A *stand-in* takes the place of `__main__` there, and holds what
the script defines, so that `__main__.Entry` in a file is the class that the dataset's pickle holds
by value. Functions that are sent have its names as their globals. Children of a trainer have the
script itself.
"""

import builtins
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import NewType, cast

# The second one in processes that multiprocessing spawned, also ranks.
SCRIPT_NAMES = ("__main__", "__mp_main__")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """What a script's module says of itself.

    Attributes:
        package: For relative imports, with `python -m package.module`.
        run_as: `package.module` then.
        sources: Texts of the script or a notebook's cells, for `inspect` and tracebacks.
    """

    name: str = "__main__"
    file: str | None = None
    package: str | None = None
    run_as: str = ""
    sources: Mapping[str, str]

    @classmethod
    def of_this_process(cls, sources: Mapping[str, str]) -> "ScriptFacts":
        main = vars(script())
        file, package, spec = (main.get(f"__{name}__") for name in ("file", "package", "spec"))
        return cls(
            name=str(main.get("__name__", "__main__")),
            file=file if isinstance(file, str) else None,
            package=package if isinstance(package, str) else None,
            run_as=spec.name if isinstance(spec, ModuleSpec) else "",
            sources=sources,
        )

    def enter(self) -> ModuleType:
        """Returns this process's module of the script; on a data host a new stand-in for it."""
        main = script()
        if vars(main).get("__file__") == self.file:
            # A child of the trainer.
            return main
        stand_in = StandIn(self.name)
        names: dict[str, object] = {"__builtins__": builtins, "__package__": self.package}
        if self.file is not None:
            names["__file__"] = self.file
        if self.run_as:
            names["__spec__"] = ModuleSpec(self.run_as, None, origin=self.file)
        vars(stand_in).update(names)
        sys.modules.update(dict.fromkeys(SCRIPT_NAMES, stand_in))
        for file, text in self.sources.items():
            # Without a time, so that a file of that name here does not replace it.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        return stand_in


def script() -> ModuleType:
    return sys.modules["__main__"]


def is_of_script(obj: object) -> bool:
    """Returns whether a class or function is the script's own: it is sent by value."""
    return getattr(obj, "__module__", None) in SCRIPT_NAMES


def name_in_script(obj: object) -> str:
    """Returns the name by which the script has its own class or function; empty: none."""
    name = getattr(obj, "__qualname__", "")
    return name if is_of_script(obj) and vars(script()).get(name) is obj else ""


def are_scripts_globals(names: Mapping[str, object]) -> bool:
    """Returns whether a function with these globals is of the script's own file or notebook."""
    main = vars(script())
    if names is main:
        return True
    # In a spawned process the functions have globals that are not those of `__main__`, which has
    # copies.
    is_named = names.get("__name__") in SCRIPT_NAMES
    return is_named and names.get("__file__", "") == main.get("__file__")


class StandIn(ModuleType):
    """The script's module on a data host."""


def path_in_script(obj: object) -> str:
    """Returns the path by which the trainer, too, has a class or function of its script.

    Empty on a data host, whose stand-in for the script may lack what the script has.
    """
    main = script()
    if not is_of_script(obj) or isinstance(main, StandIn):
        return ""
    path = str(getattr(obj, "__qualname__", ""))
    try:
        return path if attrgetter(path)(main) is obj else ""
    except AttributeError:
        # Of a function's own, or replaced since.
        return ""


class ScriptGlobals:
    """In a pickle, the globals of the script's functions: those of the module where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return (script_globals, ())


def script_globals() -> dict[str, object]:
    return vars(script())


def made_in_script(
    make: "Callable[[*tuple[object, ...]], object]",
    arguments: tuple[object, ...],
    name: str,
    qualname: str,
) -> object:
    """Rebuilds a class or function of a script from its pickle.

    Args:
        make: Of cloudpickle; for a class that this process has already, it returns that.
        name: Under which the script's module has it; empty: it has not.
        qualname: cloudpickle loses that of a class.
    """
    defined = make(*arguments)
    if isinstance(defined, type | FunctionType):
        defined.__qualname__ = qualname
    if name:
        vars(script())[name] = defined
    return defined


def new_type(name: str, supertype: object, module: str) -> object:
    """Rebuilds a `typing.NewType` of the script."""
    defined: object = cast("Callable[[str, object], object]", NewType)(name, supertype)
    setattr(defined, "__module__", module)  # noqa: B010
    vars(script())[name] = defined
    return defined
