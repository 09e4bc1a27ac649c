"""Errors with code of their own come to the trainer without what hangs there, or ends it."""

import dataclasses
import errno
import functools
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from stoker.errors import FeedLostError
from stoker.feed.wire import dataset as shipping
from stoker.feed.wire.dataset import pack_error, unpack_error

# A forked process may start threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class OddError(Exception):
    def __init__(self, code, *, reason):
        super().__init__(code, reason)
        self.code = code

    def __reduce__(self):
        return (functools.partial(OddError, reason="again"), (self.code,))


class HopelessError(Exception):
    def __init__(self, a, b):
        super().__init__("hopeless")
        self.lock = threading.Lock()


class DecodeError(ValueError):
    """As many are: its constructor takes facts, and its arguments are a text of them."""

    def __init__(self, path, *, line):
        super().__init__(f"{path}, line {line}")
        self.path, self.line = path, line


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    path: str
    line: int


class CodecError(UnicodeDecodeError):
    """What a class of Python's keeps besides is kept, too."""

    def __init__(self, where):
        super().__init__("utf-8", b"ab", where, where + 1, "the words")
        self.where = where


class SlottedError(Exception):
    __slots__ = ("line",)

    def __init__(self, path, line):
        super().__init__(path, line)
        self.line = line


class LeavingError(Exception):
    """Its own code ends the process that looks at it."""

    def __str__(self):
        sys.exit("no words")

    def __reduce__(self):
        sys.exit("not to be pickled")


def hang() -> None:
    time.sleep(3600)


def recurse() -> None:
    recurse()


def be_interrupted() -> None:
    raise KeyboardInterrupt


OWN_CODE = MappingProxyType(
    {
        "hangs": hang,
        "ends the process": lambda: os._exit(0),
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "recurses": recurse,
        "leaves": sys.exit,
        "is interrupted": be_interrupted,
    }
)


class ActingError(Exception):
    """Its own code does something where it is looked at, pickled or unpickled."""

    def __init__(self, text="acting", where="", what=""):
        super().__init__(text)
        self.where, self.what = where, what

    def act(self, where):
        if where == self.where:
            OWN_CODE[self.what]()

    def __str__(self):
        self.act("__str__")
        return super().__str__()

    def __reduce__(self):
        self.act("__reduce__")
        return super().__reduce__()

    def __setstate__(self, state):
        vars(self).update(state)
        self.act("__setstate__")


class BuildingError(Exception):
    """Its constructor does something where it is made again."""

    what = ""

    def __init__(self, text):
        if self.what and "Caught" in text:
            OWN_CODE[self.what]()
        super().__init__(text)


def raised(err):
    try:
        raise err
    except Exception as caught:
        return unpack_error(pack_error(caught, host="data-3", where="index 7 of data worker 1"))


def test_an_error_with_an_odd_constructor_keeps_its_facts_or_becomes_a_runtime_error():
    back = raised(OddError(5, reason="x"))
    assert isinstance(back, OddError)
    assert back.code == 5
    assert "data-3" in "".join(back.__notes__)
    many = ExceptionGroup("the words", [ValueError("one")])
    for err in (UnicodeDecodeError("utf-8", b"ab", 1, 2, "the words"), many):
        back = raised(err)
        assert (type(back), repr(back.args)) == (type(err), repr(err.args))
    hopeless = raised(HopelessError(1, 2))
    assert type(hopeless) is RuntimeError
    assert "HopelessError" in str(hopeless)
    leaving = raised(LeavingError())
    assert type(leaving) is RuntimeError
    assert "Caught LeavingError in index 7" in str(leaving)


def test_an_error_whose_constructor_takes_facts_is_the_same_one_with_its_facts():
    noted = DecodeError("a.txt", line=3)
    noted.add_note("of shard 7")
    back = raised(noted)
    assert (type(back), str(back)) == (DecodeError, "a.txt, line 3")
    assert (back.path, back.line, back.args) == ("a.txt", 3, ("a.txt, line 3",))
    first, second = back.__notes__
    assert first == "of shard 7"
    assert "Caught DecodeError in index 7 of data worker 1 on host data-3" in second
    assert raised(FrozenError("a.txt", 3)) == FrozenError("a.txt", 3)
    codec = raised(CodecError(1))
    assert (type(codec), codec.where, codec.start, codec.object) == (CodecError, 1, 1, b"ab")
    assert raised(SlottedError("a.txt", 3)).line == 3


def test_errors_in_a_group_and_in_attributes_keep_their_facts():
    def matches(err):
        return isinstance(err, DecodeError) and err.line == 4

    group = ExceptionGroup("two", [ValueError("one"), DecodeError("b.txt", line=4)])
    assert raised(group).subgroup(matches).exceptions[0].path == "b.txt"
    holding = DecodeError("a.txt", line=3)
    vars(holding).update(first=DecodeError("b.txt", line=4), own=holding)
    back = raised(holding)
    assert matches(vars(back)["first"])
    assert vars(back)["own"] is back


@pytest.mark.parametrize("what", OWN_CODE)
@pytest.mark.parametrize("where", ["__str__", "__reduce__", "__setstate__"])
def test_an_error_whose_own_code_hangs_or_ends_its_process_comes_without_it(
    what, where, monkeypatch
):
    monkeypatch.setattr(shipping, "_ERROR_SECONDS", 1.0)
    # Those of other tests may be among them, and may go meanwhile.
    before = set(os.listdir("/proc/self/fd"))
    children = set(psutil.Process().children())
    back = raised(ActingError("broken", where, what))
    assert isinstance(back, ActingError | RuntimeError)
    for words in ("ActingError", "index 7", "data-3", "test_errors_with_own_code.py"):
        assert words in str(back)
    assert ("broken" in str(back)) == (where != "__str__")
    assert set(psutil.Process().children()) <= children
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("what", OWN_CODE)
def test_an_error_whose_constructor_does_so_becomes_a_runtime_error(what, monkeypatch):
    monkeypatch.setattr(shipping, "_ERROR_SECONDS", 1.0)
    monkeypatch.setattr(BuildingError, "what", what)
    back = raised(BuildingError("broken"))
    for words in ("BuildingError: broken", "index 7", "data-3"):
        assert words in str([back, *getattr(back, "__notes__", ())])


def test_an_error_that_hangs_behind_a_plain_one_comes_without_its_text(monkeypatch):
    monkeypatch.setattr(shipping, "_ERROR_SECONDS", 1.0)
    err = ValueError("plain")
    err.__cause__ = ActingError("broken", "__str__", "hangs")
    assert "ValueError, which cannot be shown, in raised (test_errors_with_own_code.py" in str(
        raised(err)
    )


def test_an_error_is_shown_where_no_child_can_be_forked(monkeypatch):
    def fork():
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(os, "fork", fork)
    back = raised(OddError(5, reason="x"))
    assert isinstance(back, OddError)
    assert back.code == 5


@pytest.mark.parametrize(
    ("err", "is_plain"),
    [
        (ValueError("text", 3, b"x"), True),
        (FileNotFoundError(2, "gone", "path"), True),
        (FeedLostError("gone", where="host a"), True),
        (ValueError(["a list"]), False),
        (FileNotFoundError(2, "gone", Path("path")), False),
        (OddError(5, reason="x"), False),
        (AttributeError("no such attribute"), False),
        (ExceptionGroup("two", [ValueError("one")]), False),
    ],
)
def test_no_child_is_forked_for_an_error_without_code_of_its_own(err, is_plain, monkeypatch):
    forks = []
    monkeypatch.setattr(shipping, "last_made", lambda *_, **__: forks.append(1))
    raised(err)
    assert (not forks) == is_plain


def test_an_error_whose_class_is_unknown_here_becomes_a_runtime_error():
    class LocalError(Exception):
        pass

    sent = pack_error(LocalError("x"), host="h", where="w")
    broken = pickle.loads(sent)
    data = pickle.dumps(type(broken)(b"cno_such_module\nX\n.", "LocalError", broken.message, None))
    assert type(unpack_error(data)) is RuntimeError
    assert type(unpack_error(sent)).__name__ == "LocalError"
