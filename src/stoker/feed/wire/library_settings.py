"""Settings of libraries that forked workers inherit."""

import importlib
import json
import os
from types import ModuleType
from typing import cast

from stoker.feed.wire.inherited import InheritedObjects, InheritedSetting, setting

# Values in modules that their documentation has scripts set, and what they are in a fresh process.
_ATTRIBUTES: tuple[tuple[str, str, object], ...] = (
    ("PIL.Image", "MAX_IMAGE_PIXELS", 89478485),
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
    ("PIL.ImageFile", "MAXBLOCK", 65536),
    ("PIL.PngImagePlugin", "MAX_TEXT_CHUNK", 1048576),
    ("PIL.PngImagePlugin", "MAX_TEXT_MEMORY", 67108864),
    ("torchvision", "_image_backend", "PIL"),
    ("datasets.fingerprint", "_CACHING_ENABLED", True),
)


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _attribute(module: str, name: str, default: object) -> InheritedSetting:
    def write(value: object) -> None:
        setattr(_module(module), name, value)

    return setting(
        f"{module}.{name}",
        lambda: getattr(_module(module), name),
        write,
        module=module,
        default=default,
    )


def _numpy_errors() -> object:
    errors: object = _module("numpy").geterr()
    return errors


def _set_numpy_errors(errors: dict[str, str]) -> None:
    _module("numpy").seterr(**errors)


def _numpy_print_options() -> object:
    options = _module("numpy").get_printoptions()
    return {name: value for name, value in options.items() if _is_json(value)}


def _set_numpy_print_options(options: dict[str, object]) -> None:
    unusual = {name: option for name, option in options.items() if option is not None}
    _module("numpy").set_printoptions(**unusual)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _pandas_options() -> object:
    registered = _module("pandas._config.config")._registered_options
    get = _module("pandas").get_option
    values = {name: get(name) for name, option in registered.items() if not _is_deprecated(name)}
    return {
        name: value
        for name, value in values.items()
        if _is_json(value) and value != registered[name].defval
    }


def _is_deprecated(name: str) -> bool:
    return name in _module("pandas._config.config")._deprecated_options


def _set_pandas_options(options: dict[str, object]) -> None:
    for name, value in options.items():
        _module("pandas").set_option(name, value)


def _opencv() -> object:
    cv2 = _module("cv2")
    threads = cv2.getNumThreads()
    # Without a call it is the host's number of cores.
    is_set = threads not in (cv2.getNumberOfCPUs(), os.cpu_count())
    # On by default only where there is any.
    uses_opencl = cv2.ocl.useOpenCL() or not cv2.ocl.haveOpenCL()
    return [threads if is_set else None, cv2.useOptimized(), uses_opencl]


def _set_opencv(value: tuple[int | None, bool, bool]) -> None:
    cv2 = _module("cv2")
    threads, is_optimized, uses_opencl = value
    if threads is not None:
        cv2.setNumThreads(threads)
    cv2.setUseOptimized(is_optimized)
    if not uses_opencl:
        cv2.ocl.setUseOpenCL(False)


def _arrow_threads() -> object:
    pyarrow = _module("pyarrow")
    threads = pyarrow.cpu_count()
    # What pyarrow takes by default: the cores of the host, of this process, or OpenMP's variable.
    usual = {os.cpu_count(), len(os.sched_getaffinity(0))}
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit():
        usual.add(int(variable))
    return [None if threads in usual else threads, pyarrow.io_thread_count()]


def _set_arrow_threads(value: tuple[int | None, int]) -> None:
    pyarrow = _module("pyarrow")
    threads, io_threads = value
    if threads is not None:
        pyarrow.set_cpu_count(threads)
    pyarrow.set_io_thread_count(io_threads)


def _sklearn() -> object:
    config = _module("sklearn").get_config()
    # Each thread has a copy of it, which alone is changed.
    usual = _module("sklearn._config")._global_config
    return {
        name: value for name, value in config.items() if _is_json(value) and value != usual[name]
    }


def _set_sklearn(config: dict[str, object]) -> None:
    _module("sklearn").set_config(**config)


LIBRARY_SETTINGS: tuple[InheritedSetting, ...] = (
    *(_attribute(module, name, default) for module, name, default in _ATTRIBUTES),
    setting(
        "numpy.seterr",
        _numpy_errors,
        _set_numpy_errors,
        module="numpy",
        default={"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
    setting(
        "numpy.set_printoptions",
        _numpy_print_options,
        _set_numpy_print_options,
        module="numpy",
        differs_by_rank=True,
    ),
    setting(
        "pandas.set_option",
        _pandas_options,
        _set_pandas_options,
        module="pandas",
        default={},
    ),
    setting(
        "cv2.setNumThreads, setUseOptimized, ocl.setUseOpenCL",
        _opencv,
        _set_opencv,
        module="cv2",
        default=[None, True, True],
    ),
    setting(
        "pyarrow.set_cpu_count, set_io_thread_count",
        _arrow_threads,
        _set_arrow_threads,
        module="pyarrow",
        default=[None, 8],
    ),
    setting(
        "sklearn.set_config",
        _sklearn,
        _set_sklearn,
        module="sklearn",
        default={},
    ),
)


def _image_openers() -> object:
    """Returns what others than Pillow have registered: pillow_heif's formats, a script's."""
    image = _module("PIL.Image")
    openers = {
        name: functions for name, functions in image.OPEN.items() if not _is_pillows(functions[0])
    }
    extensions = {end: name for end, name in image.EXTENSION.items() if name in openers}
    savers = {
        name: functions for name, functions in image.SAVE.items() if not _is_pillows(functions)
    }
    return [openers, extensions, savers] if openers or savers else []


def _is_pillows(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "PIL"


def _add_image_openers(value: object) -> None:
    image = _module("PIL.Image")
    openers, extensions, savers = cast("list[dict[str, object]]", value)
    for name, functions in openers.items():
        image.register_open(name, *cast("tuple[object, object]", functions))
    image.EXTENSION.update(extensions)
    image.SAVE.update(savers)


LIBRARY_OBJECTS = (
    InheritedObjects(
        name="PIL.Image.register_open, register_save",
        module="PIL.Image",
        read=_image_openers,
        write=_add_image_openers,
    ),
)
