import importlib
import io
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.data import default_collate

from stoker.feed.wire import script as module_values
from stoker.feed.wire.dataset import DatasetSpec, PackedSpec, pack_spec
from stoker.feed.wire.script import (
    ValuesThere,
    difference,
    names_read_by,
    source_of,
    text_of,
    values_here,
    values_of,
    were_set,
)
from stoker.logs import Log

CFG = """\
SIZE = 3
NAME = "small"
SCALE: float = 1 / 255
SHAPE = SIDE, _ = (32, 32), 0
OPTIONS = {"crop": True}
CACHE = {}
COMPUTED = len("host")
EITHER = 1
if COMPUTED:
    EITHER = 2
DONE = False
UNUSED = 1
"""

DATA = """\
import functools
import cfg
import numpy as np
from cfg import SIZE as OWN_SIZE

READ_IN_INIT = 1
FACTOR = 2
DEEP = 1
LAZY = None

def scaled(value):
    return value * FACTOR

def lazy():
    global LAZY
    LAZY = LAZY or 7
    return LAZY

class Helper:
    def __init__(self):
        self.deep = DEEP

class Base:
    def __getitem__(self, index):
        return np.full(cfg.SIZE, cfg.SCALE * scaled(index)), cfg.NAME, cfg.OPTIONS, OWN_SIZE

class Data(Base):
    def __init__(self):
        self.size = READ_IN_INIT

    @functools.cached_property
    def helper(self):
        return Helper(), lazy(), cfg.CACHE, cfg.COMPUTED, cfg.EITHER

    def __len__(self):
        return sum(1 for _ in range(cfg.SIDE[0]))
"""

NAMES = ("cfg.EITHER", "cfg.NAME", "cfg.OPTIONS", "cfg.SCALE", "cfg.SIDE", "cfg.SIZE")

Import = Callable[..., types.ModuleType]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports a module of the user, of the given text."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []
    known = set(sys.modules)

    def make(name: str, text: str) -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    module_values._source.cache_clear()
    yield make
    for name in set(sys.modules) - known:
        if name in made:
            del sys.modules[name]


def packed(dataset: object, **more: object) -> PackedSpec:
    options = {"dataset": dataset, "collate_fn": default_collate} | more
    return pack_spec(DatasetSpec(**options), max_bytes=1 << 20)  # type: ignore[arg-type]


def names_in(spec: PackedSpec) -> tuple[str, ...]:
    """Names that matter: read by the spec's code, and given literals by the source."""
    return tuple(were_set(dict.fromkeys(sorted(names_read_by(spec.living_code())), "another")))


def set_in(spec: PackedSpec) -> dict[str, str]:
    return were_set(values_of(sorted(names_read_by(spec.living_code()))))


def test_the_names_of_literals_that_a_spec_reads_on_a_data_host_matter(make: Import) -> None:
    make("cfg", CFG)
    data = make("data", DATA)
    spec = packed(data.Data())
    # Not what __init__ read in the trainer, nor what is set there, computed, or a cache.
    own = ("data.DEEP", "data.FACTOR", "data.OWN_SIZE")
    assert names_in(spec) == (*NAMES, *own)
    assert set_in(spec) == {}


def test_a_data_host_tells_of_all_plain_values_in_the_users_modules(make: Import) -> None:
    make("cfg", CFG)
    make("data", DATA)
    found = values_here({"cfg", "data", "json", "numpy", "no_such_module", "__main__"})
    assert found.items() >= {"cfg.SIZE": "3", "cfg.UNUSED": "1", "data.OWN_SIZE": "3"}.items()
    assert {name.partition(".")[0] for name in found} == {"cfg", "data"}
    assert "data.np" not in found
    assert values_of(found) == found


def test_what_the_script_has_set_is_told_and_strings_are_not_shown(make: Import) -> None:
    cfg = make("cfg", CFG)
    data = make("data", DATA)
    dataset = data.Data()
    before = packed(dataset)
    there = values_here({"cfg", "data"})
    cfg.SIZE, cfg.NAME, cfg.UNUSED, cfg.COMPUTED = 5, "secret", 9, 9
    cfg.OPTIONS["crop"] = False
    data.FACTOR, data.READ_IN_INIT = 0.5, 9
    spec = packed(dataset)
    assert spec.digest == before.digest
    warning = difference(set_in(spec), there)
    assert (
        "cfg.NAME, cfg.OPTIONS, cfg.SIZE (5 here, 3 there), data.FACTOR (0.5 here, 2 there);"
        in warning
    )
    assert "secret" not in warning + str(values_here({"cfg", "data"}))
    assert difference(values_of(there), values_of(there)) == ""


def test_what_was_imported_after_it_was_set_is_told(make: Import) -> None:
    make("cfg", CFG).SIZE = 5
    data = make("data", DATA)
    assert set_in(packed(data.Data())) == {"cfg.SIZE": "5", "data.OWN_SIZE": "5"}


def test_one_of_several_literals_is_the_modules_own_choice(make: Import) -> None:
    cfg = make("cfg", CFG)
    data = make("data", DATA)
    cfg.EITHER = 1
    assert set_in(packed(data.Data())) == {}
    cfg.EITHER = 3
    assert set_in(packed(data.Data())) == {"cfg.EITHER": "3"}


def test_what_the_spec_itself_sets_is_not_asked_for(make: Import) -> None:
    make("cfg", CFG)
    data = make("data", DATA)
    more = make(
        "more",
        """
        import cfg
        def one(worker):
            cfg.SIZE = 5
        def all_(worker, **values):
            for name, value in values.items():
                setattr(cfg, name, value)
        """,
    )
    names = names_in(packed(data.Data(), worker_init_fn=more.one))
    assert "cfg.SIZE" not in names
    assert "cfg.NAME" in names
    names = names_in(packed(data.Data(), worker_init_fn=more.all_))
    assert not any(name.startswith("cfg.") for name in names)


def test_functions_of_the_script_are_followed_into_modules_and_take_their_own_globals_along(
    make: Import, tmp_path: Path
) -> None:
    make("cfg", CFG)
    make("data", DATA)
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import cfg, data
        from stoker.feed.wire.script import names_read_by, values_of, were_set
        from stoker.feed.wire.dataset import Spec, pack_spec
        SIZE = 1
        class Own:
            def __init__(self):
                cfg.UNUSED
            def __getitem__(self, index):
                return index * SIZE * cfg.SIZE
        cfg.SIZE = data.FACTOR = SIZE = 9
        collate = lambda items: [data.scaled(item) for item in items]
        spec = pack_spec(Spec(dataset=Own(), collate_fn=collate), max_bytes=1 << 20)
        print(spec.digest, were_set(values_of(sorted(names_read_by(spec.living_code())))))
        """)
    )
    said = {
        subprocess.run(
            [sys.executable, tmp_path / "script.py"], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 1
    assert said.pop().split(" ", 1)[1] == "{'cfg.SIZE': '9', 'data.FACTOR': '9'}\n"


def test_packages_are_followed_by_their_parts(make: Import, tmp_path: Path) -> None:
    package = tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cfg.py").write_text("SIZE = 3\n")
    (package / "data.py").write_text(
        "import parts.cfg\nfrom . import cfg as near\nfrom .cfg import SIZE\n"
        "def far(items):\n    return parts.cfg.SIZE\n"
        "def close(items):\n    return near.SIZE\n"
        "def copied(items):\n    return SIZE\n"
    )
    data = importlib.import_module("parts.data")
    try:
        sys.modules["parts.cfg"].SIZE = 5  # type: ignore[attr-defined]
        for collate in (data.far, data.close):
            assert set_in(packed([1], collate_fn=collate)) == {"parts.cfg.SIZE": "5"}
        assert names_in(packed([1], collate_fn=data.copied)) == ("parts.data.SIZE",)
    finally:
        for name in ("parts", "parts.cfg", "parts.data"):
            del sys.modules[name]


def test_nothing_odd_in_a_module_is_touched_or_keeps_a_spec_from_travelling(
    make: Import,
) -> None:
    odd = make(
        "odd",
        """
        import functools, sys, types
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise LookupError(name)
        class Touchy:
            def __getattribute__(self, name):
                raise LookupError(name)
            __eq__ = __hash__ = __repr__ = __bool__ = property(lambda self: 1 / 0)
        lazy, touchy, again = Lazy("lazy"), Touchy(), []
        again.append(again)
        sys.modules["odd_lazy"] = lazy
        PLAIN = 1
        LIST = [1]
        partial = functools.partial(print, touchy)
        class Data:
            touchy = touchy
            @functools.lru_cache
            def __getitem__(self, index):
                return lazy.SIZE, touchy.SIZE, again, PLAIN, partial, LIST
        """,
    )
    odd.LIST = odd.again
    odd.PLAIN = 2
    assert set_in(packed(odd.Data())) == {"odd.PLAIN": "2"}
    odd.PLAIN = odd.touchy
    assert set_in(packed(odd.Data())) == {}
    assert names_read_by([odd.touchy, odd.lazy, None]) == frozenset()
    del sys.modules["odd_lazy"]


def test_a_file_that_cannot_be_parsed_says_nothing(make: Import, tmp_path: Path) -> None:
    cfg = make("cfg", CFG)
    data = make("data", DATA)
    (tmp_path / "cfg.py").write_text("SIZE = (\n")
    cfg.SIZE = 5
    assert names_in(packed(data.Data())) == ("data.DEEP", "data.FACTOR")
    (tmp_path / "cfg.py").unlink()
    assert source_of(str(tmp_path / "cfg.py"), package="").literals == {}


def test_modules_of_others_are_not_the_users() -> None:
    names = ("json.decoder", "torch.utils.data.dataset", "stoker.feed.wire.dataset", "__main__")
    assert not any(module_values.is_users(sys.modules[name]) for name in names)
    assert module_values.is_users(sys.modules[__name__])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A = 2 * 3 + 1 << 4\nB = -1.5", {"A": [112], "B": [-1.5]}),
        ("A = [1, (2, None)]\nB = {'a': {1, 2}}", {"A": [[1, (2, None)]], "B": [{"a": {1, 2}}]}),
        ("A = B = 3", {"A": [3], "B": [3]}),
        ("A: int = 3\nB: int", {"A": [3]}),
        ("A, (B, C) = 1, (2, f())", {"A": [1], "B": [2]}),
        ("try:\n    A = True\nexcept ImportError:\n    A = False", {"A": [False, True]}),
        ("A = 1\nA += 1\nfor B in (): pass\nB = 1", {}),
        ("A = 1\ndef A(): pass\nB = 1\nimport B.c\nC = 1\nfrom d import C", {}),
        ("def f():\n    A = 1\nclass C:\n    A = 2", {}),
        ("A = 1 / 0\nB = 'a' * 3\nC = []\nD = {}\nE = f'{1}'", {}),
    ],
)
def test_literals_of_the_top_level_are_found(
    tmp_path: Path, source: str, expected: dict[str, list[object]]
) -> None:
    (tmp_path / "module.py").write_text(source)
    found = source_of(str(tmp_path / "module.py"), package="").literals
    assert {name: sorted(each) for name, each in found.items()} == expected  # type: ignore[type-var]


def test_equal_values_have_one_text_whatever_their_order() -> None:
    pairs = [
        ({"a": 1, "b": (2,)}, {"b": (2,), "a": 1}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (float("nan"), float("nan")),
    ]
    for one, other in pairs:
        assert text_of(one) == text_of(other) != ""
    different = [1, 1.0, True, "1", b"1", [1], (1,), {1}, {1: 1}, None, "", [[1]]]
    assert len({text_of(each) for each in different}) == len(different)
    assert [text_of(each) for each in (None, True, 3, 0.5)] == ["None", "True", "3", "0.5"]
    assert text_of(10**50).startswith("#")


def test_what_is_large_deep_or_an_object_is_no_plain_value() -> None:
    deep: list[object] = [1]
    for _ in range(5):
        deep = [deep]
    others = ["x" * 1001, list(range(1001)), deep, object(), {1: object()}, 10**5000]
    assert [text_of(each) for each in others] == [""] * len(others)


def test_of_many_differences_the_first_eight_are_named() -> None:
    here = {f"cfg.N{number:02}": "1" for number in range(12)}
    warning = difference(here, dict.fromkeys(here, "2"))
    assert warning.count("(1 here, 2 there)") == 8
    assert ", and 4 more; data hosts" in warning
    assert difference(here, {}) == ""


def test_a_difference_is_told_once_and_a_new_one_at_the_next_pass(make: Import) -> None:
    cfg = make("cfg", CFG)
    code = packed(make("data", DATA).Data()).living_code()
    stream = io.StringIO()
    values = ValuesThere(Log(run="r", host="h", stream=stream))
    there = values_here({"cfg", "data"})
    cfg.SIZE = 5
    values.compare("spec", code)
    cfg.SIZE, cfg.UNUSED = 3, 9
    values.take("spec", "algo-1", there)
    values.compare("spec", code)
    assert stream.getvalue() == ""
    for size in (5, 5, 7, 5):
        cfg.SIZE = size
        values.take("spec", "algo-2", there)
        values.compare("spec", code)
    lines = stream.getvalue().splitlines()
    assert ["5 here" in lines[0], "7 here" in lines[1], len(lines)] == [True, True, 2]
    assert "module_values_differ agent=algo-2" in lines[0]
