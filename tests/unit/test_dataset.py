import functools
import io
import os
import pickle
import random
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset, default_collate

from stoker.errors import (
    FeedLostError,
    ProtocolError,
    RebuildingError,
    ShippingError,
    UsageError,
)
from stoker.feed.agent.dataset_process import HostedSpec
from stoker.feed.remote import remote
from stoker.feed.wire import dataset as shipping
from stoker.feed.wire.dataset import (
    ARGUMENT_BYTES,
    Arrival,
    DatasetSpec,
    ScriptEnvironment,
    arguments_of,
    built,
    changes_between,
    digest,
    may_travel,
    pack_error,
    pack_spec,
    read_place,
    refusal_of,
    unpack_error,
    unpack_spec,
)
from stoker.feed.wire.pickling import factories_in
from stoker.feed.wire.process_settings import RANK_SETTINGS_BYTES


class Numbers:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getitem__(self, index):
        return index


def spec(dataset=None, *, collate_fn=default_collate):
    return DatasetSpec(dataset=dataset or Numbers(), collate_fn=collate_fn)


def packed(*args, max_bytes=1 << 20, **kwargs):
    return pack_spec(spec(*args, **kwargs), max_bytes=max_bytes)


@pytest.mark.parametrize("can_start", [True, False])
def test_a_processs_first_spec_is_the_same_as_later_ones(can_start, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    if not can_start:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(shipping, "_scripts", {})
    dataset = Numbers(large=torch.zeros(1 << 18))
    first, second = (packed(dataset, max_bytes=1 << 22) for _ in range(2))
    assert first == second
    assert first.digest == digest(first.data)
    assert [*shipping._scripts] == [first.digest]


def test_a_spec_comes_back_and_equal_ones_have_one_name():
    first = packed(Numbers(a=3))
    assert unpack_spec(first.data).dataset.a == 3
    assert packed(Numbers(a=3)).digest == first.digest
    assert packed(Numbers(a=4)).digest != first.digest


def test_a_spec_takes_its_host_to_the_scripts_folder_if_that_is_there(tmp_path, monkeypatch):
    specs = {}
    for name in ("script", "gone"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        specs[name] = packed().data
    (tmp_path / "gone").rmdir()
    specs["removed"] = packed().data
    monkeypatch.chdir(tmp_path)
    for name, folder in (("gone", ""), ("removed", ""), ("script", "script")):
        unpack_spec(specs[name])
        assert Path.cwd() == tmp_path / folder


LOCK = threading.Lock()
# One that nobody holds is sent.
LOCK.acquire()


def unshippable():
    class WithGlobal:
        def __getitem__(self, index):
            with LOCK:
                return index

    class WithShared:
        lock = LOCK

    class Cached:
        @functools.cached_property
        def value(self):
            return 1

    return {
        "dataset.lock (_thread.lock)": Numbers(lock=LOCK),
        "dataset.inner.files['a'][0] (_thread.lock)": Numbers(inner=Numbers(files={"a": [LOCK]})),
        "send dataset.lock (_thread.lock) to": Numbers(cached=Cached(), lock=LOCK),
        "dataset.__getitem__ global LOCK (_thread.lock)": WithGlobal(),
        "cannot send dataset.lock (_thread.lock)": WithShared(),
        "dataset.g (builtins.generator)": Numbers(g=(i for i in ())),
    }


@pytest.mark.parametrize("name", unshippable())
def test_what_cannot_travel_is_named(name):
    with pytest.raises(ShippingError, match=re.escape(name)):
        packed(unshippable()[name])


def test_what_cannot_travel_of_a_collate_function_is_named():
    lock = LOCK
    with pytest.raises(ShippingError, match=r"collate_fn variable lock \(_thread\.lock\)"):
        packed(collate_fn=lambda batch: (lock, batch))


def test_a_tensor_on_an_accelerator_is_named(monkeypatch):
    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda", 0)

    Elsewhere.__module__ = "torch"
    tensor = torch.ones(2, 3).as_subclass(Elsewhere)
    with pytest.raises(ShippingError, match=r"tensor on cuda:0 \(shape \(2, 3\), torch.float32\)"):
        packed(Numbers(a=[tensor]))


def test_a_dataset_above_its_bound_is_refused_by_its_largest_part_and_a_large_one_told(monkeypatch):
    big = Numbers(small=1, images=b"x" * (3 << 20))
    with pytest.raises(ShippingError, match=r"dataset\.images with 3 MiB"):
        packed(big)
    monkeypatch.setattr(shipping, "LARGE_SPEC_BYTES", 1 << 20)
    (warning,) = packed(big, max_bytes=1 << 30).warnings
    assert "dataset.images with 3 MiB" in warning
    assert packed(max_bytes=1 << 30).warnings == ()


def test_a_remote_dataset_is_built_when_it_is_asked_for():
    dataset = remote("builtins:dict", a=1, b=2)
    # Besides the two parts of a fixed size.
    assert len(packed(dataset).data) < ARGUMENT_BYTES + RANK_SETTINGS_BYTES + 6000
    assert dataset["a"] == 1
    assert len(dataset) == 2
    assert built(spec(dataset)).dataset == {"a": 1, "b": 2}
    assert unpack_spec(packed(dataset).data).dataset == {"a": 1, "b": 2}


def test_a_remote_dataset_within_others_is_built_with_the_spec():
    numbers = remote("builtins:list")
    sent = packed(Numbers(datasets=[Subset(numbers, []), Numbers(datasets={"a": numbers})]))
    assert not numbers._is_built
    here = list(factories_in(unpack_spec(sent.data).dataset))
    assert [each._is_built for each in here] == [True, True]
    assert not list(factories_in(Subset([1], [0])))


def test_a_factory_of_another_form_is_refused_and_a_missing_one_is_named():
    for name in ("nonsense", "a:", ":b", "a:b.c", ""):
        with pytest.raises(UsageError, match=r"package\.module:function"):
            remote(name)
    with pytest.raises(UsageError, match="no_such_thing"):
        len(remote("builtins:no_such_thing"))


def raised(err):
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


def test_an_error_of_stoker_keeps_its_three_facts():
    back = raised(FeedLostError("gone", where="host a", fix="wait"))
    assert isinstance(back, FeedLostError)
    assert (back.what, back.where, back.fix) == ("gone", "host a", "wait")
    # As torch's error of a lost worker is.
    assert isinstance(back, RuntimeError)


def test_bytes_that_are_no_error_are_refused():
    for data in (b"", b"junk", pickle.dumps(3)):
        with pytest.raises(ShippingError):
            unpack_error(data)


def test_an_error_that_holds_much_travels_without_it():
    sent = pack_error(ValueError("too dark", bytes(5 << 20)), host="h", where="worker 0")
    assert len(sent) < 2 << 20
    back = unpack_error(sent)
    assert isinstance(back, ValueError)
    assert "too dark" in str(back)


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"numbers": [1, 2]}, ""),
        ({"inner": {"deep": [LOCK]}}, "dataset.inner['deep'][0] (_thread.lock)"),
        ({"file": sys.stderr}, "dataset.file"),
    ],
)
def test_what_cannot_travel_is_said_beforehand(attributes, found):
    why = refusal_of(spec(Numbers(**attributes)), max_bytes=1 << 20, max_seconds=60).what
    assert why.startswith(f"cannot send {found}" if found else "")
    assert bool(why) is bool(found)


@pytest.mark.parametrize(("max_bytes", "max_seconds"), [(1000, 60.0), (1 << 20, -1.0)])
def test_a_look_at_what_cannot_travel_is_bounded(max_bytes, max_seconds):
    dataset = Numbers(large=bytes(100_000), lock=LOCK)
    assert not refusal_of(spec(dataset), max_bytes=max_bytes, max_seconds=max_seconds).what


class NeedsSeed(random.Random):
    """Is made again without its argument as it is read back."""

    def __init__(self, seed):
        super().__init__(seed)


def test_that_a_dataset_cannot_be_read_back_is_told_from_what_a_host_lacks():
    with pytest.raises(RebuildingError, match="missing 1 required positional argument: 'seed'"):
        unpack_spec(packed(Numbers(rng=NeedsSeed(3))).data)
    # With the class that the trainer looks for.
    back = raised(RebuildingError("its own code", where="host a", fix="see there"))
    assert (type(back), back.what) == (RebuildingError, "its own code")


WHOLE = bytes(range(256)) * 200


@pytest.fixture
def arrival():
    made = Arrival(digest(WHOLE), nbytes=len(WHOLE))
    yield made
    made.close()


def test_pieces_in_order_are_the_whole(arrival):
    pieces = [(offset, WHOLE[offset : offset + 3000]) for offset in range(0, len(WHOLE), 3000)]
    ends = [arrival.take(piece, offset=offset) for offset, piece in pieces]
    assert ends == [False] * (len(pieces) - 1) + [True]
    assert arrival.is_right()
    assert os.pread(arrival.descriptor, len(WHOLE) + 1, 0) == WHOLE


def test_other_bytes_are_not_the_spec(arrival):
    assert arrival.take(bytes(len(WHOLE)), offset=0)
    assert not arrival.is_right()


@pytest.mark.parametrize("offset", [0, 999, 1001])
def test_a_piece_out_of_order_is_refused(arrival, offset):
    arrival.take(WHOLE[:1000], offset=0)
    with pytest.raises(ProtocolError, match="expected 1000"):
        arrival.take(WHOLE[1000:2000], offset=offset)


@pytest.mark.parametrize("piece", [b"", WHOLE + b"x"], ids=["empty", "more"])
def test_an_empty_piece_and_more_than_was_said_are_refused(arrival, piece):
    with pytest.raises(ProtocolError):
        arrival.take(piece, offset=0)
    assert os.fstat(arrival.descriptor).st_size == 0


def test_closing_frees_the_memory_and_may_be_done_twice():
    arrival = Arrival("a", nbytes=1)
    descriptor = arrival.descriptor
    arrival.close()
    arrival.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_was_set_changed_and_deleted_travels():
    start = {"KEPT": "1", "CHANGED": "1", "DELETED": "1"}
    now = {"KEPT": "1", "CHANGED": "2", "SET": "ä\udc80"}
    assert changes_between(start, now) == (("CHANGED", "2"), ("DELETED", None), ("SET", "ä\udc80"))


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "aws_secret_access_key", "DB_PASSWORD", "GITHUBTOKEN", "GOOGLE_CREDENTIALS"),
        *("AWS_ACCESS_KEY_ID", "MY_KEYS", "NETRC_AUTH", "STOKER_FEED", "SM_HOSTS", "RANK"),
        *("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MY_RANK", "CUDA_VISIBLE_DEVICES", "PATH"),
        *("https_proxy", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "TORCHELASTIC_RUN_ID", "TMPDIR"),
    ],
)
def test_secrets_and_what_is_of_one_rank_or_host_stay(name):
    assert not may_travel(name, "x")
    assert not may_travel(name, None)


def test_what_code_is_steered_by_travels():
    names = ["TOKENIZERS_PARALLELISM", "HF_HOME", "HF_DATASETS_CACHE", "MYVAR", "KEYBOARD"]
    assert all(may_travel(name, value) for name in names for value in ("x", None))


def test_an_address_with_a_password_stays():
    assert not may_travel("DATABASE_URL", "postgres://me:secret@host/db")
    assert may_travel("DATABASE_URL", "postgres://host:5432/db")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["s.py", "--local-rank=1", "a"], ("s.py", "a")),
        (["s.py", "--local_rank", "1", "a"], ("s.py", "a")),
        (["s.py", "--local_rank"], ("s.py",)),
        (["s.py", "--rank", "1"], ("s.py", "--rank", "1")),
    ],
)
def test_the_rank_among_the_arguments_stays(given, kept):
    assert arguments_of(given) == kept


def test_it_comes_as_it_went():
    sent = ScriptEnvironment((("A", "ä\udc80"), ("B", None)), ("s.py", "-x"))
    packed = (sent.packed_changes(), sent.packed_arguments())
    assert ScriptEnvironment.unpacked(*packed) == sent


def test_arguments_take_the_same_room_whatever_they_are():
    some = [ScriptEnvironment((), ("s.py",) * times) for times in (0, 1, 100, 10_000)]
    assert {len(each.packed_arguments()) for each in some} == {ARGUMENT_BYTES}
    assert ScriptEnvironment.unpacked(b"[]", some[-1].packed_arguments()).arguments == ()


def test_another_rank_sends_a_spec_whose_script_defines_more():
    hosted = HostedSpec("digest", "expected", 0.0, nbytes=4)
    assert not hosted.take_piece(memoryview(b"ab"), offset=0, nbytes=4, shipper=b"first", now=1.0)
    # The first one was lost: the next has the same spec, with other definitions behind it.
    hosted.arrival.close()
    hosted.arrival = None
    assert not hosted.take_piece(memoryview(b"abc"), offset=0, nbytes=5, shipper=b"next", now=2.0)
    assert hosted.take_piece(memoryview(b"de"), offset=3, nbytes=5, shipper=b"next", now=3.0)
    assert hosted.nbytes == 5
    hosted.arrival.close()


def test_what_a_script_defines_is_not_part_of_a_specs_name():
    data = packed(Numbers(a=3)).data
    place = read_place(io.BytesIO(data))
    other = data[: len(data) - place.script_bytes] + b"x" * place.script_bytes
    assert digest(other) == digest(data)
    assert digest(data[:-1]) != digest(data)
