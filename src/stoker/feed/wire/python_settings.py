"""Settings of Python and of its standard library that forked workers inherit."""

import csv
import decimal
import faulthandler
import functools
import gc
import locale
import logging
import mimetypes
import os
import re
import resource
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypedDict, cast

from stoker.feed.wire.inherited import InheritedObjects, InheritedSetting, setting

_CSV_DIALECTS = ("excel", "excel-tab", "unix")
_CSV_OPTIONS = (
    *("delimiter", "quotechar", "escapechar", "doublequote", "skipinitialspace"),
    *("lineterminator", "quoting", "strict"),
)
_CATEGORIES = ("LC_COLLATE", "LC_NUMERIC", "LC_TIME", "LC_MONETARY", "LC_MESSAGES", "LC_CTYPE")
_STREAMS = ("stderr", "stdout")
_STYLES: Mapping[str, Literal["%", "{", "$"]] = {
    "PercentStyle": "%",
    "StrFormatStyle": "{",
    "StringTemplateStyle": "$",
}
_DECIMAL = {
    "prec": 28,
    "rounding": "ROUND_HALF_EVEN",
    "Emin": -999999,
    "Emax": 999999,
    "capitals": 1,
    "clamp": 0,
    "traps": ["DivisionByZero", "InvalidOperation", "Overflow"],
}
# Compiled here, and not in each process that is forked (1 ms).
_UMASK = re.compile(r"^Umask:\s*([0-7]+)", re.MULTILINE)
_FILTER_ACTIONS = ("default", "error", "ignore", "always", "all", "module", "once")


# A filter's text; of a compiled pattern with its flags.
PackedPattern = tuple[str, int] | str | None


class LoggerLevels(TypedDict):
    """Levels of loggers by name; `disable` is that of all, `names` those of the levels."""

    disable: int
    root: int
    levels: dict[str, int]
    disabled: list[str]
    names: dict[str, int]


class RootHandler(TypedDict):
    """A handler of the root logger that writes to a standard stream."""

    stream: str
    level: int
    format: str | None
    date: str | None
    style: Literal["%", "{", "$"]


def _stack_size() -> object:
    # Without a size it returns the last one, and sets the default.
    nbytes = threading.stack_size()
    threading.stack_size(nbytes)
    return nbytes


def _csv_dialects() -> object:
    names = sorted(set(csv.list_dialects()) - {*_CSV_DIALECTS})
    dialects: dict[str, dict[str, object]] = {}
    for name in names:
        dialect = csv.get_dialect(name)
        dialects[name] = {option: getattr(dialect, option) for option in _CSV_OPTIONS}
    return dialects


def _set_csv_dialects(dialects: dict[str, dict[str, object]]) -> None:
    for name, options in dialects.items():
        csv.register_dialect(name, **options)  # type: ignore[arg-type]


def _context_values(context: decimal.Context) -> dict[str, object]:
    traps = sorted(kind.__name__ for kind, is_on in context.traps.items() if is_on)
    return {
        "prec": context.prec,
        "rounding": context.rounding,
        "Emin": context.Emin,
        "Emax": context.Emax,
        "capitals": context.capitals,
        "clamp": context.clamp,
        "traps": traps,
    }


def _change_context(context: decimal.Context, values: dict[str, object]) -> None:
    traps = cast("list[str]", values["traps"])
    for name in values.keys() - {"traps"}:
        setattr(context, name, values[name])
    for kind in context.traps:
        context.traps[kind] = kind.__name__ in traps


def _change_default_context(values: dict[str, object]) -> None:
    _change_context(decimal.DefaultContext, values)


def _change_this_context(values: dict[str, object]) -> None:
    _change_context(decimal.getcontext(), values)


def _time_zone() -> object:
    return [os.environ.get("TZ"), list(time.tzname), time.timezone, time.altzone]


def _set_time_zone(value: tuple[str | None, list[str], int, int]) -> None:
    zone, *names_and_offsets = value
    # The same zone already, perhaps by another name.
    if [list(time.tzname), time.timezone, time.altzone] == names_and_offsets:
        return
    before = os.environ.get("TZ")
    # The variable itself is among those of the environment, which have their own rules.
    _set_variable("TZ", zone)
    time.tzset()
    # The C library keeps the zone: the variable is needed by `tzset` alone.
    _set_variable("TZ", before)
    if [list(time.tzname), time.timezone, time.altzone] != names_and_offsets:
        raise ValueError(f"no such time zone here: {zone or '/etc/localtime of the trainer'}")


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _locales() -> object:
    named = {name: locale.setlocale(getattr(locale, name)) for name in _CATEGORIES}
    changed = {name: value for name, value in named.items() if value != "C"}
    # The character set alone is the environment's, which Python reads as it starts.
    return changed if changed.keys() - {"LC_CTYPE"} else {}


def _set_locales(locales: dict[str, str]) -> None:
    for name, chosen in locales.items():
        locale.setlocale(getattr(locale, name), chosen)


def _garbage_collection() -> object:
    return [gc.isenabled(), list(gc.get_threshold())]


def _set_garbage_collection(value: tuple[bool, tuple[int, int, int]]) -> None:
    is_on, thresholds = value
    gc.set_threshold(*thresholds)
    (gc.enable if is_on else gc.disable)()


def _umask() -> object:
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    line = _UMASK.search(status)
    # Read from /proc: os.umask() would have to change it to read it.
    return int(line[1], 8) if line else 0o022


def _open_files() -> object:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _raise_open_files(limit: int) -> None:
    # Above the hard limit only root may go.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    # Only up: this process may have more open than the script.
    if possible > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))


def _mime_types() -> object:
    if not mimetypes.inited:
        return {}
    usual = _usual_mime_types()
    now = mimetypes.types_map
    return {ending: kind for ending, kind in now.items() if usual.get(ending) != kind}


@functools.cache
def _usual_mime_types() -> Mapping[str, str]:
    fresh = mimetypes.MimeTypes()
    for file in filter(os.path.isfile, mimetypes.knownfiles):
        fresh.read(file)
    return fresh.types_map[True]


def _add_mime_types(types: dict[str, str]) -> None:
    for ending, kind in types.items():
        mimetypes.add_type(kind, ending)


def _logger_levels() -> "LoggerLevels":
    manager = logging.root.manager
    # A list: another thread may make a logger during this.
    loggers = {
        name: logger
        for name, logger in sorted(manager.loggerDict.copy().items())
        if isinstance(logger, logging.Logger)
    }
    levels = {logger.level for logger in loggers.values()}
    levels.add(logging.root.level)
    return {
        "disable": manager.disable,
        "root": logging.root.level,
        "levels": {name: logger.level for name, logger in loggers.items() if logger.level},
        "disabled": [name for name, logger in loggers.items() if logger.disabled],
        "names": {logging.getLevelName(level): level for level in sorted(levels)},
    }


def _set_logger_levels(value: "LoggerLevels") -> None:
    for name, number in value["names"].items():
        logging.addLevelName(number, name)
    # Only what differs: each call goes through all loggers.
    if logging.root.manager.disable != value["disable"]:
        logging.disable(value["disable"])
    loggers: dict[logging.Logger, int] = {logging.root: value["root"]}
    loggers |= {logging.getLogger(name): level for name, level in value["levels"].items()}
    for logger, level in loggers.items():
        if logger.level != level:
            logger.setLevel(level)
    for name in value["disabled"]:
        logging.getLogger(name).disabled = True


def _root_handlers() -> list[RootHandler]:
    """Returns the handlers that write to a standard stream; others are the script's own."""
    handlers: list[RootHandler] = []
    for handler in logging.root.handlers:
        # Subclasses and filters are the script's code, which is not sent here.
        if type(handler) is not logging.StreamHandler or handler.filters:
            continue
        stream = next((name for name in _STREAMS if handler.stream is getattr(sys, name)), "")
        form = handler.formatter or logging.Formatter()
        style = _STYLES.get(type(form._style).__name__)
        if stream and style and type(form) is logging.Formatter:
            handlers.append(
                {
                    "stream": stream,
                    "level": handler.level,
                    "format": form._fmt,
                    "date": form.datefmt,
                    "style": style,
                }
            )
    return handlers


def unsent_handlers() -> list[str]:
    """Returns the classes of the root logger's handlers that cannot be made on a data host."""
    num_sent = len(_root_handlers())
    kinds = [f"logging.{type(handler).__name__}" for handler in logging.root.handlers]
    return [] if num_sent == len(kinds) else sorted(set(kinds))


def _set_root_handlers(handlers: list[RootHandler]) -> None:
    for described in handlers:
        handler = logging.StreamHandler(getattr(sys, described["stream"]))
        handler.setLevel(described["level"])
        handler.setFormatter(
            logging.Formatter(described["format"], described["date"], described["style"])
        )
        logging.root.addHandler(handler)


def _warning_filters() -> object:
    return [_packed_filter(*entry) for entry in warnings.filters]


def _packed_filter(
    action: str,
    message: object,
    category: type[Warning] | tuple[type[Warning], ...],
    module: object,
    line: int,
) -> list[object]:
    kinds = category if isinstance(category, tuple) else (category,)
    names = [f"{kind.__module__}:{kind.__qualname__}" for kind in kinds]
    return [action, _packed_pattern(message), names, _packed_pattern(module), line]


def _packed_pattern(pattern: object) -> object:
    """Returns a filter's text: from -W it is a text, else a compiled pattern."""
    if isinstance(pattern, re.Pattern):
        return [pattern.pattern, pattern.flags]
    return pattern


def _read_pattern(pattern: PackedPattern) -> re.Pattern[str] | str | None:
    if isinstance(pattern, str) or pattern is None:
        return pattern
    text, flags = pattern
    return re.compile(text, flags)


def _set_warning_filters(
    filters: list[tuple[str, PackedPattern, list[str], PackedPattern, int]],
) -> None:
    kept = []
    for action, message, names, module, line in filters:
        # A class that is not imported here is not warned of.
        kinds = tuple(filter(None, map(_class_named, names)))
        if kinds and action in _FILTER_ACTIONS:
            category = kinds if len(kinds) > 1 else kinds[0]
            kept.append((action, _read_pattern(message), category, _read_pattern(module), line))
    warnings.filters[:] = kept  # type: ignore[index]
    # Counts the changes, for what modules remember of warnings that they gave.
    getattr(warnings, "_filters_mutated", getattr(warnings, "_filters_mutated_lock_held", int))()


def _class_named(name: str) -> type | None:
    module, _, path = name.partition(":")
    part_of_module: object = sys.modules.get(module)
    for part in path.split("."):
        part_of_module = getattr(part_of_module, part, None)
    return part_of_module if isinstance(part_of_module, type) else None


def _copyreg() -> object:
    import copyreg

    from stoker.feed.wire.imported_code import INSTALLED

    def is_users(function: object) -> bool:
        module = sys.modules.get(str(getattr(function, "__module__", "")))
        file = getattr(module, "__file__", None)
        return bool(file) and not INSTALLED.search(str(file))

    table = list(copyreg.dispatch_table.items())
    return [(kind, function) for kind, function in table if is_users(function)]


def _add_copyreg(value: object) -> None:
    import copyreg

    for kind, function in cast("list[tuple[type[object], Callable[[object], str]]]", value):
        copyreg.pickle(kind, function)


def _set_faulthandler(is_on: bool) -> None:
    (faulthandler.enable if is_on else faulthandler.disable)()


PYTHON_SETTINGS: tuple[InheritedSetting, ...] = (
    setting("sys.setrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit, default=1000),
    setting(
        "sys.set_int_max_str_digits",
        sys.get_int_max_str_digits,
        sys.set_int_max_str_digits,
        default=4300,
    ),
    setting("sys.setswitchinterval", sys.getswitchinterval, sys.setswitchinterval, default=0.005),
    setting("threading.stack_size", _stack_size, threading.stack_size, default=0),
    setting(
        "socket.setdefaulttimeout",
        socket.getdefaulttimeout,
        socket.setdefaulttimeout,
        default=None,
    ),
    setting("csv.field_size_limit", csv.field_size_limit, csv.field_size_limit, default=131072),
    setting("csv.register_dialect", _csv_dialects, _set_csv_dialects, default={}),
    setting(
        "decimal.DefaultContext",
        lambda: _context_values(decimal.DefaultContext),
        _change_default_context,
        default=_DECIMAL,
    ),
    setting(
        "decimal.getcontext",
        lambda: _context_values(decimal.getcontext()),
        _change_this_context,
        default=_DECIMAL,
    ),
    setting(
        "time.tzset",
        _time_zone,
        _set_time_zone,
        default=[None, ["UTC", "UTC"], 0, 0],
    ),
    setting("locale.setlocale", _locales, _set_locales, default={}),
    setting(
        "gc.disable, gc.set_threshold",
        _garbage_collection,
        _set_garbage_collection,
    ),
    setting("os.umask", _umask, os.umask, default=0o022),
    setting("mimetypes.add_type", _mime_types, _add_mime_types, default={}),
    setting("resource.RLIMIT_NOFILE", _open_files, _raise_open_files, differs_by_rank=True),
    setting(
        "faulthandler.enable",
        faulthandler.is_enabled,
        _set_faulthandler,
        default=False,
        differs_by_rank=True,
    ),
    setting(
        "logging levels",
        _logger_levels,
        _set_logger_levels,
        differs_by_rank=True,
        is_compared=False,
    ),
    setting(
        "logging handlers", _root_handlers, _set_root_handlers, default=[], differs_by_rank=True
    ),
    setting("warnings filters", _warning_filters, _set_warning_filters, differs_by_rank=True),
)
PYTHON_OBJECTS = (
    InheritedObjects(name="copyreg.pickle", module="sys", read=_copyreg, write=_add_copyreg),
)


def started_otherwise(flags: Mapping[str, int] | None = None) -> list[str]:
    """Returns the options of this interpreter that a data host's has not, as one writes them."""
    now = flags or {name: int(getattr(sys.flags, name)) for name in ("optimize", "dev_mode")}
    return [f"python -{letters}" for letters in _options_of(now)]


def _options_of(flags: Mapping[str, int]) -> Iterator[str]:
    if flags.get("optimize"):
        yield "O" * flags["optimize"]
    if flags.get("dev_mode"):
        yield "X dev"
