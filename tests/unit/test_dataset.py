import functools
import pickle
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset, default_collate

from stoker.errors import FeedLostError, ShippingError, UsageError
from stoker.feed.remote import remote
from stoker.feed.wire import dataset as shipping
from stoker.feed.wire.dataset import (
    DatasetSpec,
    built,
    pack_error,
    pack_spec,
    unpack_error,
    unpack_spec,
    why_unshippable,
)
from stoker.feed.wire.pickling import factories_in


class Numbers:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __getitem__(self, index: int) -> int:
        return index


def spec(dataset: object = None, **kwargs: object) -> DatasetSpec:
    options = {"dataset": dataset or Numbers(), "collate_fn": default_collate} | kwargs
    return DatasetSpec(**options)


def test_a_spec_comes_back_and_equal_ones_have_one_name():
    packed = pack_spec(spec(Numbers(a=3)), max_bytes=1 << 20)
    assert unpack_spec(packed.data).dataset.a == 3
    assert pack_spec(spec(Numbers(a=3)), max_bytes=1 << 20).digest == packed.digest
    assert pack_spec(spec(Numbers(a=4)), max_bytes=1 << 20).digest != packed.digest


def test_a_spec_takes_its_host_to_the_scripts_folder_if_that_is_there(tmp_path, monkeypatch):
    for name in ("script", "host", "gone"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "script")
    packed = pack_spec(spec(), max_bytes=1 << 20)
    monkeypatch.chdir(tmp_path / "gone")
    lost = pack_spec(spec(), max_bytes=1 << 20)
    monkeypatch.chdir(tmp_path / "host")
    (tmp_path / "gone").rmdir()
    unpack_spec(lost.data)
    assert Path.cwd() == tmp_path / "host"
    unpack_spec(packed.data)
    assert Path.cwd() == tmp_path / "script"


def test_a_spec_travels_from_a_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    packed = pack_spec(spec(Numbers(a=3)), max_bytes=1 << 20)
    monkeypatch.chdir(tmp_path)
    assert unpack_spec(packed.data).dataset.a == 3
    assert Path.cwd() == tmp_path


LOCK = threading.Lock()


def unshippable() -> dict[str, DatasetSpec]:
    lock = threading.Lock()

    class WithGlobal:
        def __getitem__(self, index: int) -> int:
            with LOCK:
                return index

    class WithShared:
        lock = LOCK

    class Cached:
        @functools.cached_property
        def value(self) -> int:
            return 1

    return {
        "dataset.lock (_thread.lock)": spec(Numbers(lock=lock)),
        "dataset.inner.files['a'][0] (_thread.lock)": spec(
            Numbers(ok=1, inner=Numbers(files={"a": [lock]}))
        ),
        "collate_fn variable lock (_thread.lock)": spec(collate_fn=lambda batch: (lock, batch)),
        "dataset.lock (_thread.lock) cannot": spec(Numbers(cached=Cached(), lock=lock)),
        "dataset.__getitem__ global LOCK (_thread.lock)": spec(WithGlobal()),
        "dataset.lock (_thread.lock) cannot travel": spec(WithShared()),
        "dataset.g (builtins.generator)": spec(Numbers(g=(i for i in ()))),
    }


@pytest.mark.parametrize("name", unshippable())
def test_what_cannot_travel_is_named(name):
    with pytest.raises(ShippingError, match=re.escape(name)):
        pack_spec(unshippable()[name], max_bytes=1 << 20)


def test_a_lost_feed_is_what_torch_calls_a_lost_worker():
    assert issubclass(FeedLostError, RuntimeError)


def test_a_tensor_on_an_accelerator_is_named(monkeypatch):
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

    Elsewhere.__module__ = "torch"
    tensor = torch.ones(2, 3).as_subclass(Elsewhere)
    with pytest.raises(ShippingError, match=r"tensor on cuda:0 \(shape \(2, 3\), torch.float32\)"):
        pack_spec(spec(Numbers(a=[tensor])), max_bytes=1 << 20)


def test_a_dataset_above_the_bound_is_refused_with_its_largest_part():
    big = Numbers(small=1, images=b"x" * (3 << 20))
    with pytest.raises(ShippingError, match=r"dataset\.images with 3 MiB"):
        pack_spec(spec(big), max_bytes=1 << 20)


def test_a_large_dataset_is_reported(monkeypatch):
    monkeypatch.setattr(shipping, "LARGE_SPEC_BYTES", 1 << 20)
    packed = pack_spec(spec(Numbers(images=b"x" * (3 << 20))), max_bytes=1 << 30)
    assert len(packed.warnings) == 1
    assert "dataset.images with 3 MiB" in packed.warnings[0]
    assert pack_spec(spec(), max_bytes=1 << 30).warnings == ()


def test_a_remote_dataset_is_built_when_it_is_asked_for():
    dataset = remote("builtins:dict", a=1, b=2)
    assert len(pack_spec(spec(dataset), max_bytes=1 << 20).data) < 15_000
    assert dataset["a"] == 1
    assert len(dataset) == 2
    assert built(spec(dataset)).dataset == {"a": 1, "b": 2}
    assert unpack_spec(pack_spec(spec(dataset), max_bytes=1 << 20).data).dataset == {"a": 1, "b": 2}


def test_a_remote_dataset_within_others_is_built_with_the_spec():
    numbers = remote("builtins:list")
    parts = Numbers(datasets=[Subset(numbers, []), Numbers(datasets={"a": numbers})])
    packed = pack_spec(spec(parts), max_bytes=1 << 20)
    assert not numbers._is_built
    here = list(factories_in(unpack_spec(packed.data).dataset))
    assert [each._is_built for each in here] == [True, True]
    assert not list(factories_in(Subset([1], [0])))


@pytest.mark.parametrize("name", ["nonsense", "a:", ":b", "a:b.c", ""])
def test_a_factory_of_another_form_is_refused(name):
    with pytest.raises(UsageError, match=r"package\.module:function"):
        remote(name)


def test_a_missing_factory_is_named():
    with pytest.raises(UsageError, match="no_such_thing"):
        len(remote("builtins:no_such_thing"))


class OddError(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_odd, (self.code,))


def _odd(code: int) -> OddError:
    return OddError(code, reason="again")


class HopelessError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("hopeless")


def raised(err: Exception) -> Exception:
    try:
        raise err
    except Exception as caught:
        return unpack_error(pack_error(caught, host="data-3", where="index 7 of data worker 1"))


def test_an_error_comes_back_with_its_type_and_where_it_happened():
    for kind in (ValueError, KeyError, OSError, ZeroDivisionError, AssertionError, RuntimeError):
        back = raised(kind("bad sample"))
        assert type(back) is kind
        for words in ("index 7", "data-3", "bad sample", "in raised"):
            assert words in str(back)
        assert str(back).count("\n") > 3


def test_an_error_with_an_odd_constructor_keeps_its_facts_or_becomes_a_runtime_error():
    back = raised(OddError(5, reason="x"))
    assert isinstance(back, OddError)
    assert back.code == 5
    assert "data-3" in "".join(back.__notes__)
    hopeless = raised(HopelessError(1, 2))
    assert type(hopeless) is RuntimeError
    assert "HopelessError" in str(hopeless)


def test_an_error_whose_class_is_unknown_here_becomes_a_runtime_error():
    class LocalError(Exception):
        pass

    packed = pack_error(LocalError("x"), host="h", where="w")
    broken = pickle.loads(packed)
    data = pickle.dumps(type(broken)(b"cno_such_module\nX\n.", "LocalError", broken.message, None))
    assert type(unpack_error(data)) is RuntimeError
    assert type(unpack_error(packed)).__name__ == "LocalError"


def test_an_error_of_stoker_keeps_its_three_facts():
    back = raised(FeedLostError("gone", where="host a", fix="wait"))
    assert isinstance(back, FeedLostError)
    assert (back.what, back.where, back.fix) == ("gone", "host a", "wait")


def test_bytes_that_are_no_error_are_refused():
    for data in (b"", b"junk", pickle.dumps(3)):
        with pytest.raises(ShippingError):
            unpack_error(data)


def test_an_error_that_holds_much_travels_without_it():
    packed = pack_error(ValueError("too dark", bytes(5 << 20)), host="h", where="worker 0")
    assert len(packed) < 2 << 20
    back = unpack_error(packed)
    assert isinstance(back, ValueError)
    assert "too dark" in str(back)


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"numbers": [1, 2]}, ""),
        ({"inner": {"deep": [threading.Lock()]}}, "dataset.inner['deep'][0] (_thread.lock)"),
        ({"file": sys.stderr}, "dataset.file"),
    ],
)
def test_what_cannot_travel_is_said_beforehand(attributes, found):
    why = why_unshippable(spec(Numbers(**attributes)), max_bytes=1 << 20, max_seconds=60)
    assert why.startswith(found)
    assert bool(why) is bool(found)


@pytest.mark.parametrize(("max_bytes", "max_seconds"), [(1000, 60.0), (1 << 20, -1.0)])
def test_a_look_at_what_cannot_travel_is_bounded(max_bytes, max_seconds):
    dataset = Numbers(large=bytes(100_000), lock=threading.Lock())
    assert not why_unshippable(spec(dataset), max_bytes=max_bytes, max_seconds=max_seconds)
