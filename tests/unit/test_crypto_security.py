import pytest

from stoker.errors import UsageError
from stoker.feed.engine import crypto
from stoker.feed.engine.crypto import Keys

OURS = Keys.from_token(b"\x01" * 32)
FOREIGN = Keys.from_token(b"\x02" * 32)


def test_all_keys_of_all_tokens_differ():
    fields = [getattr(k, name) for k in (OURS, FOREIGN) for name in Keys.__slots__]
    assert len(set(fields)) == 10


def test_keys_are_not_shown():
    assert OURS.server_secret.decode() not in repr(OURS)


@pytest.mark.parametrize("text", ["", "12", "z" * 64, "a" * 63, "é" * 64])
def test_what_is_no_token_is_refused_and_not_repeated(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError) as caught:
        crypto.read_token(path)
    assert caught.value.where == str(path)
    assert len(text) < 3 or text not in str(caught.value)


def test_a_token_is_read_from_its_file_and_a_missing_file_is_named(tmp_path):
    (tmp_path / "token").write_text("ab" * 32 + "\n")
    assert crypto.read_token(tmp_path / "token") == bytes.fromhex("ab" * 32)
    with pytest.raises(UsageError, match="No such file"):
        crypto.read_token(tmp_path / "none")
