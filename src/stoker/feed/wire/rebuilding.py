"""Why a pickle cannot be rebuilt: the cause of an error of unpickling, found by its facts."""

import importlib.util
import re
import sys
from collections.abc import Collection, Sequence

from stoker.feed import why_unfed
from stoker.feed.why_unfed import Side, WhyUnfed
from stoker.feed.wire.host_errors import (
    cause_on_host,
    errors_behind,
    place_of,
    words_of_error,
)
from stoker.feed.wire.imported_code import CodeFacts, installed_version

# The training script's module, on a trainer and where a data host has none.
_SCRIPTS = ("__main__", "__mp_main__", "stoker.feed.agent.forkserver")
_ON_MODULE = re.compile(r"^Can't get attribute '([^']+)' on <module '([\w.]+)'")
_OF_MODULE = re.compile(r"^module '([\w.]+)' has no attribute '([^']+)'")


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
    raised = words_of_error(err)
    facts = code or CodeFacts()
    place = place_of(err)
    if not isinstance(err, Exception):
        return why_unfed.ended_itself(side, raised=raised, place=place)
    for cause in errors_behind(err):
        why = _of_error(cause, side, raised=raised, code=facts, modules=modules)
        if why is not None:
            return why
    differing = "; ".join(differing_versions(facts, side))
    return why_unfed.rebuilding_failed(side, raised=raised, place=place, differing=differing)


def why_not_made(err: BaseException, side: Side) -> WhyUnfed | None:
    """Returns what an error of a batch says of the host that made it; None: nothing.

    Args:
        err: What the dataset, the collate function or worker_init_fn raised.
        side: Where, in words.
    """
    raised = words_of_error(err)
    causes = (
        _of_error(cause, side, raised=raised, code=CodeFacts(), modules=())
        for cause in errors_behind(err)
    )
    return next((why for why in causes if why is not None), None)


def _of_error(
    err: BaseException, side: Side, *, raised: str, code: CodeFacts, modules: Collection[str]
) -> WhyUnfed | None:
    why: WhyUnfed | None = None
    match err:
        case ModuleNotFoundError(name=str(name)) if name:
            return _of_module(name, side, raised=raised, code=code, modules=modules)
        case AttributeError():
            why = _of_attribute(str(err), side, raised=raised, code=code)
    why = why or cause_on_host(err, side, raised=raised)
    if why is None and isinstance(err, ImportError) and err.name:
        # From Python 3.12 on an ImportError has what was to be imported from the module.
        name = getattr(err, "name_from", None) or "what is asked of it"
        return _of_name(str(name), err.name, side, raised=raised, code=code)
    return why


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
    # The package is here and lacks a part of it: another version.
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
    # The sender has it, with neither file nor version: its script made it in memory.
    if (code.files or code.versions) and name in modules and not (theirs or is_file):
        return why_unfed.module_in_memory(name, side, raised=raised)
    return why_unfed.missing_module(name, side, raised=raised, version=theirs, is_file=is_file)


def _of_attribute(text: str, side: Side, *, raised: str, code: CodeFacts) -> WhyUnfed | None:
    on_module = _ON_MODULE.match(text)
    of_module = _OF_MODULE.match(text)
    if on_module:
        return _of_name(on_module[1], on_module[2], side, raised=raised, code=code)
    if of_module:
        return _of_name(of_module[2], of_module[1], side, raised=raised, code=code)
    return None


def _of_name(name: str, module: str, side: Side, *, raised: str, code: CodeFacts) -> WhyUnfed:
    package = module.partition(".")[0]
    here = installed_version(package)
    there = code.versions.get(package, "")
    is_script = module in (*_SCRIPTS, _name_of_main())
    # Files of the sender's own have no version to compare.
    is_package = not is_script and module not in code.files
    if is_package and here and (there or not code.versions) and here != there:
        return why_unfed.other_version(
            package, side, here=here, there=there, raised=raised, lacks=f"{module}.{name}"
        )
    if is_script:
        raised = _reason_left_out(name) or raised
    return why_unfed.missing_name(name, module, side, raised=raised, is_script=is_script)


def _reason_left_out(name: str) -> str:
    """Returns why a name of the script was not sent here, as pickle's error does not say it.

    Empty: it is not known.
    """
    # That of `definitions.Rebuilding`, which knows what was left out.
    ask = vars(sys.modules["__main__"]).get("__getattr__")
    if ask is None:
        return ""
    try:
        ask(name)
    except AttributeError as err:
        return f"AttributeError: {err}"
    return ""


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
