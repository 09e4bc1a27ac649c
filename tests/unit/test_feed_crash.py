"""What an error that ended the feed's thread means for its user."""

import errno

import pytest
import zmq

from stoker.feed.trainer.client import fix_of_crash


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (zmq.ZMQError(errno.EMFILE), "ulimit -n"),
        (OSError(errno.ENFILE, "File table overflow"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "limit of tasks"),
        (OSError(errno.ENOSPC, "No space left on device"), "bug"),
        (KeyError("x"), "bug"),
    ],
)
def test_a_limit_of_the_machine_is_not_called_a_bug(error, words):
    assert words in fix_of_crash(error)
