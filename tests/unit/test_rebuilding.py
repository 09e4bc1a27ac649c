"""Why a dataset cannot be rebuilt on a data host, or a batch in the trainer: cause and remedy."""

import importlib
import pickle
import sys
from pathlib import Path

import numpy
import pytest

from stoker.errors import ShippingError
from stoker.feed.why_unfed import OF_TRAINER, Cause, of_data_host
from stoker.feed.wire.imported_code import CodeFacts
from stoker.feed.wire.rebuilding import why_not_rebuilt

HOST = of_data_host("algo-7")


def raised_by(run) -> Exception:
    try:
        run()
    except Exception as err:
        return err
    raise AssertionError("nothing was raised")


def imported(name):
    return lambda: importlib.import_module(name)


def unpickled(text: bytes):
    return lambda: pickle.loads(text)


def opened():
    Path("/no/such/file").read_bytes()


def wrapped():
    try:
        importlib.import_module("not_there")
    except ImportError as err:
        raise RuntimeError("please install the extra") from err


def raising(err: Exception):
    def run():
        raise err

    return run


LIBGL = "libGL.so.1: cannot open shared object file: No such file or directory"
CUDA = "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False"
FILES = CodeFacts(files={"helper": "abc", "stoker.units": "abc"})
OTHER_TORCH = CodeFacts(versions={"torch": "1.13.1", "numpy": numpy.__version__})
KNOWN = CodeFacts(versions={"not_there": "4.2"})

CASES = {
    "a package that the trainer has": (
        *(imported("not_there"), KNOWN, Cause.MISSING_MODULE),
        *("data host algo-7 has no module not_there", "install not_there 4.2"),
    ),
    "a part of it": (
        *(imported("not_there.part"), KNOWN, Cause.MISSING_MODULE),
        *("has no module not_there", "install not_there 4.2"),
    ),
    "a package that nothing is known of": (
        *(imported("not_there"), CodeFacts(), Cause.MISSING_MODULE),
        *("has no module not_there", "in the image of the data hosts"),
    ),
    "a file of the user's": (
        *(imported("helper"), FILES, Cause.MISSING_MODULE),
        *("has no module helper", "helper is a file of yours in the trainer"),
    ),
    "a library that says so itself": (
        *(wrapped, CodeFacts(), Cause.MISSING_MODULE),
        *("has no module not_there", "install not_there"),
    ),
    "a module of another version": (
        *(imported("numpy._core_of_3"), CodeFacts(), Cause.OTHER_VERSION),
        *(f"numpy {numpy.__version__} of data host algo-7 has no numpy._core_of_3", "same numpy"),
    ),
    "a class of another version": (
        *(unpickled(b"ctorch.utils.data\nNoSuchClass\n."), OTHER_TORCH, Cause.OTHER_VERSION),
        *(
            "torch.utils.data.NoSuchClass, which version 1.13.1 of the trainer",
            "torch for the trai",
        ),
    ),
    "a class that a file lacks": (
        *(unpickled(b"cstoker.units\nNoSuchClass\n."), FILES, Cause.MISSING_NAME),
        *("stoker.units of data host algo-7 has no NoSuchClass", "the same stoker.units"),
    ),
    "a class of the script": (
        *(unpickled(b"c__main__\nEntry\n."), CodeFacts(), Cause.MISSING_NAME),
        *("does not have Entry of the training script", "move Entry into a module"),
    ),
    "a library of the system": (
        *(raising(ImportError(LIBGL)), CodeFacts(), Cause.MISSING_LIBRARY),
        *("has no library libGL.so.1", "the system's package with libGL.so.1"),
    ),
    "a file": (
        *(opened, CodeFacts(), Cause.MISSING_FILE),
        *("cannot open /no/such/file", "at the same path"),
    ),
    "no memory": (
        *(raising(MemoryError()), CodeFacts(), Cause.OUT_OF_MEMORY),
        *("ran out of memory", "more memory, or fewer workers"),
    ),
    "no accelerator": (
        *(raising(RuntimeError(CUDA)), CodeFacts(), Cause.ON_ACCELERATOR),
        *("needs an accelerator", "keep it on the CPU"),
    ),
    "the script's own error": (
        *(raising(ValueError("my words")), CodeFacts(), Cause.REBUILDING_FAILED),
        *("rebuilt on data host algo-7: ValueError: my words", "see the traceback"),
    ),
    "an error under another torch": (
        *(raising(ValueError("bad state")), OTHER_TORCH, Cause.OTHER_VERSION),
        *("1.13.1 in the trainer", "install the same versions"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_and_what_to_do_are_named(name):
    run, code, cause, what, fix = CASES[name]
    err = raised_by(run)
    why = why_not_rebuilt(err, HOST, code=code)
    assert why.cause == cause
    assert what in why.what
    assert fix in why.fix
    assert type(err).__name__ in why.what
    # Only what is missing on the data hosts is to be installed there.
    installs = "image of the data hosts" in why.fix
    assert not installs or cause in (
        Cause.MISSING_MODULE,
        Cause.MISSING_LIBRARY,
        Cause.MISSING_NAME,
    )
    assert str(why.error(ShippingError)).startswith(why.what)
    assert why.words == f"{why.what}; {why.fix}"


@pytest.mark.parametrize("name", CASES)
def test_a_batch_that_the_trainer_cannot_rebuild_is_the_trainer_s(name):
    run, _, cause, _, _ = CASES[name]
    why = why_not_rebuilt(raised_by(run), OF_TRAINER)
    # Of a data host's files and versions the trainer knows nothing.
    assert "the trainer" in why.what
    assert "data host" not in why.what
    assert "image" not in why.fix
    assert why.cause in (cause, Cause.OTHER_VERSION, Cause.REBUILDING_FAILED)


def test_a_module_without_a_file_is_to_be_put_into_one():
    err = raised_by(imported("made_in_memory"))
    code = CodeFacts(versions={"torch": "2"})
    why = why_not_rebuilt(err, HOST, code=code, modules=["made_in_memory"])
    assert "neither a file nor a package" in why.what
    assert "put made_in_memory into a file" in why.fix


def test_a_module_whose_finder_fails_is_no_other_error(monkeypatch):
    # As tests and notebooks leave them: a module without a spec.
    module = type(sys)("half_made")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "half_made", module)
    why = why_not_rebuilt(raised_by(imported("half_made.part")), HOST)
    assert why.cause == Cause.MISSING_MODULE
