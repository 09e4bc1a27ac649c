"""Changes settings of its process, and prints what a dataset finds where its batches are made.

Argument: {"local": workers, "names": settings, "context": start method, "persistent": bool}.
"""

import csv
import decimal
import gc
import json
import locale
import logging
import mimetypes
import os
import signal
import socket
import sys
import threading
import time
import warnings

import numpy as np
import settings_values
import torch
from settings_values import options
from torch.utils.data import DataLoader as TorchLoader

from stoker import DataLoader


class Entry:
    pass


class Dialect(csv.Dialect):
    delimiter = ";"
    quotechar = "'"
    lineterminator = "\n"
    quoting = csv.QUOTE_ALL


def faster(text):
    return f"faster {text}"


def set_decimal():
    decimal.getcontext().prec = 7
    decimal.getcontext().traps[decimal.Inexact] = True


def set_context():
    decimal.DefaultContext.prec = 5


def set_zone():
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def set_deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)


def set_logging():
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    logging.getLogger("of.library").setLevel(logging.DEBUG)
    logging.getLogger("of.another").disabled = True
    logging.disable(5)


def root_format():
    return [each.formatter._fmt for each in logging.root.handlers if each.formatter]


def set_pandas():
    import pandas as pd

    pd.set_option("mode.copy_on_write", True)
    pd.set_option("display.precision", 3)
    pd.options.display.max_rows = 7


def set_pil():
    from PIL import Image, ImageFile

    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = True


def opener(file, name):
    raise NotImplementedError


def set_opener():
    from PIL import Image

    Image.register_open("MINE", opener, lambda head: head[:4] == b"mine")


def set_cv2():
    import cv2

    cv2.setNumThreads(3)
    cv2.setUseOptimized(False)


def set_arrow():
    import pyarrow

    pyarrow.set_cpu_count(3)
    pyarrow.set_io_thread_count(5)


def set_sklearn():
    import sklearn

    sklearn.set_config(assume_finite=True)


def set_late():
    import settings_late

    settings_late.DEPTH = 4


def set_values():
    settings_values.SIZE = (5, 7)
    settings_values.Limits.most = 9
    settings_values.join = faster
    options.depth = 3
    options.nested.name = "deep"
    settings_values.TABLE["width"] = 11


def cut_warnings():
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", message="of no .* use", category=FutureWarning)


def caught(kind, text):
    try:
        warnings.warn(text, kind, stacklevel=1)
    except Warning as err:
        return type(err).__name__
    return "none"


def stack_size():
    nbytes = threading.stack_size()
    threading.stack_size(nbytes)
    return nbytes


def module(name):
    __import__(name)
    return sys.modules[name]


# Each setting: how it is set, and what a dataset sees of it.
TABLE = {
    "recursion": (lambda: sys.setrecursionlimit(3123), sys.getrecursionlimit),
    "digits": (lambda: sys.set_int_max_str_digits(9000), sys.get_int_max_str_digits),
    "switch": (lambda: sys.setswitchinterval(0.25), sys.getswitchinterval),
    "stack": (lambda: threading.stack_size(1 << 20), stack_size),
    "socket": (lambda: socket.setdefaulttimeout(7.5), socket.getdefaulttimeout),
    "csv": (lambda: csv.field_size_limit(1 << 30), csv.field_size_limit),
    "dialect": (
        lambda: csv.register_dialect("mine", Dialect),
        lambda: next(csv.reader(["'a';'b'"], "mine")),
    ),
    "decimal": (set_decimal, lambda: repr(decimal.getcontext().copy())),
    "decimal default": (set_context, lambda: decimal.Context().prec),
    "zone": (set_zone, lambda: [time.tzname[0], time.localtime(0).tm_hour]),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
        lambda: [locale.setlocale(locale.LC_COLLATE), locale.setlocale(locale.LC_NUMERIC)],
    ),
    "collection": (
        lambda: (gc.disable(), gc.set_threshold(9, 8, 7)),
        lambda: [gc.isenabled(), gc.get_threshold()],
    ),
    "umask": (lambda: os.umask(0o077), lambda: f"{os.umask(0o077):o}"),
    "mime": (
        lambda: mimetypes.add_type("image/mine", ".mine"),
        lambda: mimetypes.guess_type("a.mine")[0],
    ),
    "logging": (
        set_logging,
        lambda: [
            logging.root.level,
            logging.getLogger("of.library").level,
            logging.getLogger("of.another").disabled,
            logging.root.manager.disable,
            root_format(),
        ],
    ),
    # Torch's workers have it, data hosts do not, and a line says so.
    "unsent": (lambda: logging.root.addHandler(logging.FileHandler(os.devnull)), lambda: None),
    "warnings": (
        cut_warnings,
        lambda: [caught(UserWarning, "a"), caught(FutureWarning, "of no great use")],
    ),
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: str(torch.tensor(1.5).dtype),
    ),
    "deterministic": (
        set_deterministic,
        lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
    ),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "inference": (
        lambda: torch.inference_mode().__enter__(),
        lambda: [torch.is_inference_mode_enabled(), torch.zeros(1).is_inference()],
    ),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16).__enter__(),
        lambda: str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "mkldnn": (
        lambda: torch._C._set_mkldnn_enabled(False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "denormal": (
        lambda: torch.set_flush_denormal(True),
        lambda: (torch.full((1,), 1e-310, dtype=torch.float64) * 0.5).item() == 0,
    ),
    "torch warns": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "torch prints": (
        lambda: torch.set_printoptions(precision=2, sci_mode=False),
        lambda: str(torch.tensor(1 / 3, dtype=torch.float32)),
    ),
    "safe": (
        lambda: torch.serialization.add_safe_globals([Entry]),
        lambda: [
            each.__name__
            for each in torch.serialization.get_safe_globals()
            if each.__name__ == "Entry"
        ],
    ),
    "numpy errors": (
        lambda: np.seterr(divide="raise", over="ignore"),
        lambda: dict(np.geterr()),
    ),
    "numpy prints": (
        lambda: np.set_printoptions(precision=2, suppress=True),
        lambda: str(np.array([1 / 3])),
    ),
    "values": (
        set_values,
        lambda: [
            settings_values.SIZE,
            settings_values.Limits.most,
            settings_values.join("x"),
            options.depth,
            settings_values.options.nested.name,
            settings_values.TABLE,
        ],
    ),
    # Data hosts import it with the first sample.
    "late": (set_late, lambda: [module("settings_late").DEPTH, module("settings_late").WIDTH]),
    "pil": (
        set_pil,
        lambda: [
            module("PIL.Image").MAX_IMAGE_PIXELS,
            module("PIL.ImageFile").LOAD_TRUNCATED_IMAGES,
        ],
    ),
    "pil opener": (set_opener, lambda: sorted(module("PIL.Image").OPEN).count("MINE")),
    "pandas": (
        set_pandas,
        lambda: [
            module("pandas").get_option(name) for name in ("display.precision", "display.max_rows")
        ],
    ),
    "pyarrow": (
        set_arrow,
        lambda: [module("pyarrow").cpu_count(), module("pyarrow").io_thread_count()],
    ),
    "cv2": (set_cv2, lambda: [module("cv2").getNumThreads(), module("cv2").useOptimized()]),
    "sklearn": (set_sklearn, lambda: module("sklearn").get_config()["assume_finite"]),
}


def seen(name):
    return json.loads(json.dumps(TABLE[name][1](), default=str))


class Seeing(torch.utils.data.Dataset):
    def __init__(self, names, kills):
        self.names = names
        self.kills = kills

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and self.kills and not os.path.exists(self.kills):
            open(self.kills, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return [index, os.getppid(), os.getpid(), {name: seen(name) for name in self.names}]


def main():
    given = json.loads(sys.argv[1])
    for name in given.get("sets", given["names"]):
        TABLE[name][0]()
    kind = TorchLoader if given.get("torch") else DataLoader
    loader = kind(
        Seeing(given["names"], given.get("kills", "")),
        batch_size=None,
        num_workers=given.get("local", 0) or 2,
        multiprocessing_context=given.get("context"),
        persistent_workers=given.get("persistent", False),
    )
    for _ in range(given.get("epochs", 1)):
        for index, parent, pid, found in loader:
            where = "here" if os.getpid() in (parent, pid) else "there"
            print(json.dumps({"index": index, "at": where, "pid": pid, "seen": found}), flush=True)


if __name__ == "__main__":
    main()
