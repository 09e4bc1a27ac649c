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

from stoker.feed import module_values
from stoker.feed.module_values import ValuesThere, difference, names_of, text_of, values_of
from stoker.feed.shipping import PackedSpec, Spec, pack_spec, read_names, read_spec
from stoker.feed.source_literals import source_of
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
    return pack_spec(Spec(**options), max_bytes=1 << 20)  # type: ignore[arg-type]


def names_in(spec: PackedSpec) -> tuple[str, ...]:
    file = io.BytesIO(spec.data)
    read_spec(file)
    return read_names(file)


def test_the_names_of_literals_that_a_spec_reads_on_a_data_host_travel_with_it(
    make: Import,
) -> None:
    make("cfg", CFG)
    data = make("data", DATA)
    spec = packed(data.Data())
    # Not what __init__ read in the trainer, nor what is set there, computed, or a cache.
    own = ("data.DEEP", "data.FACTOR", "data.OWN_SIZE")
    assert names_in(spec) == (*NAMES, *own)
    assert spec.module_values == {}


def test_what_the_script_has_set_is_told_and_strings_are_not_shown(make: Import) -> None:
    cfg = make("cfg", CFG)
    data = make("data", DATA)
    dataset = data.Data()
    before = packed(dataset)
    there = values_of(names_in(before))
    cfg.SIZE, cfg.NAME, cfg.UNUSED, cfg.COMPUTED = 5, "secret", 9, 9
    cfg.OPTIONS["crop"] = False
    data.FACTOR, data.READ_IN_INIT = 0.5, 9
    spec = packed(dataset)
    assert spec.digest == before.digest
    warning = difference(spec.module_values, there)
    assert (
        "cfg.NAME, cfg.OPTIONS, cfg.SIZE (5 here, 3 there), data.FACTOR (0.5 here, 2 there);"
        in warning
    )
    assert "secret" not in warning + str(spec.module_values) + str(there)
    assert difference(before.module_values, there) == ""


def test_what_was_imported_after_it_was_set_is_told(make: Import) -> None:
    make("cfg", CFG).SIZE = 5
    data = make("data", DATA)
    assert packed(data.Data()).module_values == {"cfg.SIZE": "5", "data.OWN_SIZE": "5"}


def test_one_of_several_literals_is_the_modules_own_choice(make: Import) -> None:
    cfg = make("cfg", CFG)
    data = make("data", DATA)
    cfg.EITHER = 1
    assert packed(data.Data()).module_values == {}
    cfg.EITHER = 3
    assert packed(data.Data()).module_values == {"cfg.EITHER": "3"}


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
        from stoker.feed.shipping import Spec, pack_spec
        SIZE = 1
        class Own:
            def __init__(self):
                cfg.UNUSED
            def __getitem__(self, index):
                return index * SIZE * cfg.SIZE
        cfg.SIZE = data.FACTOR = SIZE = 9
        collate = lambda items: [data.scaled(item) for item in items]
        spec = pack_spec(Spec(dataset=Own(), collate_fn=collate), max_bytes=1 << 20)
        print(spec.digest, dict(spec.module_values))
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
            assert packed([1], collate_fn=collate).module_values == {"parts.cfg.SIZE": "5"}
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
    assert packed(odd.Data()).module_values == {"odd.PLAIN": "2"}
    odd.PLAIN = odd.touchy
    assert packed(odd.Data()).module_values == {}
    assert names_of([odd.touchy, odd.lazy, None]) == ()
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
    names = ("json.decoder", "torch.utils.data.dataset", "stoker.feed.shipping", "__main__")
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


def test_a_difference_is_told_once_and_a_new_one_at_the_next_pass() -> None:
    stream = io.StringIO()
    values = ValuesThere(Log(run="r", host="h", stream=stream))
    values.compare("spec", {"cfg.SIZE": "5"})
    values.take("spec", "algo-1", {"cfg.SIZE": "3"})
    values.compare("spec", {})
    assert stream.getvalue() == ""
    for size in ("5", "5", "7", "5"):
        values.take("spec", "algo-2", {"cfg.SIZE": "3"})
        values.compare("spec", {"cfg.SIZE": size})
    lines = stream.getvalue().splitlines()
    assert ["5 here" in lines[0], "7 here" in lines[1], len(lines)] == [True, True, 2]
    assert "module_values_differ agent=algo-2" in lines[0]
