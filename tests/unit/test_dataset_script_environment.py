"""Checks what of a script's environment travels with its dataset."""

import pytest

from stoker.feed.wire.dataset import (
    ARGUMENT_BYTES,
    ScriptEnvironment,
    arguments_of,
    changes_between,
    may_travel,
)


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
