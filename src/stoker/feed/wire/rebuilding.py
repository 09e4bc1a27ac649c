"""Why a pickle cannot be rebuilt: the cause of an error of unpickling, found by its facts."""

import importlib.util
import re
import sys
from collections.abc import Collection, Sequence

from stoker.feed import why_unfed
from stoker.feed.why_unfed import Side, WhyUnfed
from stoker.feed.wire.imported_code import CodeFacts, installed_version

# The training script's module, on a trainer and where a data host has none.
_SCRIPTS = ("__main__", "__mp_main__", "stoker.feed.agent.forkserver")
_ON_MODULE = re.compile(r"^Can't get attribute '([^']+)' on <module '([\w.]+)'")
_OF_MODULE = re.compile(r"^module '([\w.]+)' has no attribute '([^']+)'")
_LIBRARY = re.compile(r"^(\S+\.so[\w.]*|\S+\.dylib|\S+\.dll): cannot open shared object file")
_NEEDS_ACCELERATOR = re.compile(
    r"deserialize object on a \w+ device|No CUDA GPUs|Found no NVIDIA driver|not compiled with CUDA"
)


def why_not_rebuilt(
    err: BaseException,
    side: Side,
    *,
    code: CodeFacts | None = None,
    modules: Collection[str] = (),
) -> WhyUnfed:
    """Returns the cause of an error of unpickling.

    Args:
        err: What was raised.
        side: Where, in words.
        code: Files and versions that the sender has imported, if they are known.
        modules: The modules that the pickle names.
    """
    # A library's own error about a module that it cannot import.
    cause = err.__cause__ if isinstance(err.__cause__, ImportError) else err
    raised = f"{type(err).__name__}: {err}".rstrip(": ")
    facts = code or CodeFacts()
    match cause:
        case ModuleNotFoundError(name=str(name)) if name:
            return _of_module(name, side, raised=raised, code=facts, modules=modules)
        case ImportError():
            return _of_import(cause, side, raised=raised, code=facts)
        case MemoryError():
            return why_unfed.out_of_memory(side, raised=raised)
        case AttributeError():
            found = _of_attribute(str(cause), side, raised=raised, code=facts)
            if found is not None:
                return found
        case OSError(filename=str(path)) if path:
            return why_unfed.missing_file(path, side, raised=raised)
    if _NEEDS_ACCELERATOR.search(str(cause)):
        return why_unfed.needs_accelerator(side, raised=raised)
    differing = "; ".join(differing_versions(facts, side))
    return why_unfed.rebuilding_failed(side, raised=raised, differing=differing)


def differing_versions(code: CodeFacts, side: Side) -> Sequence[str]:
    """Returns in words the packages of the sender that have another version here."""
    pairs = [(name, installed_version(name), theirs) for name, theirs in code.versions.items()]
    return [
        f"{name} is {here} on {side.here}, {theirs} in {side.there}"
        for name, here, theirs in pairs
        if here and here != theirs
    ]


def _of_module(
    name: str, side: Side, *, raised: str, code: CodeFacts, modules: Collection[str]
) -> WhyUnfed:
    package = name.partition(".")[0]
    theirs = code.versions.get(package, "")
    if package in _SCRIPTS:
        return why_unfed.missing_name(name, name, side, raised=raised, is_script=True)
    if package != name and _is_there(package) and package not in code.files:
        return why_unfed.other_version(
            package,
            side,
            here=installed_version(package),
            there=theirs,
            raised=raised,
            lacks=name,
        )
    is_file = package in code.files or name in code.files
    if (code.files or code.versions) and name in modules and not (theirs or is_file):
        return why_unfed.module_in_memory(name, side, raised=raised)
    return why_unfed.missing_module(name, side, raised=raised, version=theirs, is_file=is_file)


def _of_import(err: ImportError, side: Side, *, raised: str, code: CodeFacts) -> WhyUnfed:
    library = _LIBRARY.match(str(err))
    if library:
        return why_unfed.missing_library(library[1], side, raised=raised)
    if err.name:
        name = getattr(err, "name_from", None) or "what is asked of it"
        return _of_name(str(name), err.name, side, raised=raised, code=code)
    differing = "; ".join(differing_versions(code, side))
    return why_unfed.rebuilding_failed(side, raised=raised, differing=differing)


def _of_attribute(text: str, side: Side, *, raised: str, code: CodeFacts) -> WhyUnfed | None:
    on_module, of_module = _ON_MODULE.match(text), _OF_MODULE.match(text)
    if on_module:
        return _of_name(on_module[1], on_module[2], side, raised=raised, code=code)
    if of_module:
        return _of_name(of_module[2], of_module[1], side, raised=raised, code=code)
    return None


def _of_name(name: str, module: str, side: Side, *, raised: str, code: CodeFacts) -> WhyUnfed:
    package = module.partition(".")[0]
    here, there = installed_version(package), code.versions.get(package, "")
    is_script = module in (*_SCRIPTS, _name_of_main())
    is_package = not is_script and module not in code.files
    if is_package and here and (there or not code.versions) and here != there:
        return why_unfed.other_version(
            package, side, here=here, there=there, raised=raised, lacks=f"{module}.{name}"
        )
    return why_unfed.missing_name(name, module, side, raised=raised, is_script=is_script)


def _name_of_main() -> str:
    """Returns the name that errors give to `__main__`: of `python -m`, the module's own."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return str(getattr(spec, "name", "__main__"))


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    # A module without a spec, or whatever a finder raises.
    except Exception:
        return False
