"""The reason of a failure, in lines as hosts leave them: a script's, stoker's own, and cut ones."""

import base64
import io
import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch._utils import ExceptionWrapper

from stoker.errors import FeedError, FeedLostError, MissingExtraError, UsageError
from stoker.failure_reasons import cause_of, reason_of_failure, said_in
from stoker.feed.wire import dataset
from stoker.feed.wire.dataset import pack_error, unpack_error
from stoker.launch import finish
from stoker.launch.supervise import STDERR_TAIL_BYTES, OutputTail
from stoker.logs import Log
from support import builders

WHO = "dnn host s7a-dnn-0-0"


def event(name: str, **values: str) -> str:
    stream = io.StringIO()
    Log(run="s7a", host="s7a-dnn-0-0", stream=stream).event(name, **values)
    return stream.getvalue().rstrip("\n")


METER = event(
    "feed",
    rows="start_seconds,seconds,kind,name,batches_per_second,wait_share\n"
    "25.9493,2.01478,rank,0,1.49478,,\n25.9493,2.01478,host,s7a-data-0-0,1.49478,,",
)
PART = event("output_part", file="stoker/a.csv", data=base64.b64encode(bytes(range(256))).decode())
ROLE = event("host_role", role="dnn", leader="s7a-dnn-0-0")
TRACE = [
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 3, in <module>',
    "    raise KeyError('x')",
    "KeyError: 'x'",
]


def reason(*lines: str, code: int = 1, out_of_memory: str = "") -> str:
    found = reason_of_failure(lines, who=WHO, exit_code=code, out_of_memory=out_of_memory)
    return found.removeprefix(f"{WHO} ")


@pytest.mark.parametrize(
    ("lines", "code", "found"),
    [
        # An error counts before a traceback, and the last one with its own advice alone.
        (("error: first", "try: this", "error: second"), 1, "ended with exit code 1: second"),
        (("error: no disk", *TRACE), 1, "ended with exit code 1: no disk"),
        ((*TRACE, METER), 1, "ended with exit code 1: KeyError: 'x'"),
        # Without words the code is the reason, and never a line of the meter.
        ((METER, PART, ROLE), 3, "ended with exit code 3"),
        (("cp: no such file", ROLE), 3, "ended with exit code 3; its last line: cp: no such file"),
        ((METER, PART), 137, "ended with signal 9 (SIGKILL), perhaps out of memory"),
        (("epoch 1",), -11, "ended with signal 11 (SIGSEGV)"),
        (("epoch 1",), 255, "ended with exit code 255; its last line: epoch 1"),
    ],
)
def test_the_reason_is_the_error_or_the_traceback_or_the_code(lines, code, found):
    assert reason(*lines, code=code) == found


def test_memory_is_told_next_to_a_traceback_and_alone_without_one():
    memory = "took more memory than its limit, 28Gi"
    found = reason(*TRACE, out_of_memory=memory)
    assert found == f"ended with exit code 1: KeyError: 'x'; it {memory}"
    assert reason("epoch 1", code=137, out_of_memory=memory) == memory


STATE = "RuntimeError: Error(s) in loading state_dict for Net:"
CUDA = "RuntimeError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (TRACE, "KeyError: 'x'"),
        ([*TRACE, "", "During handling of the exception:", "", *TRACE[:3], "OSError"], "OSError"),
        (TRACE[1:], "KeyError: 'x'"),
        ([f"[rank0]: {line}" for line in TRACE], "rank 0: KeyError: 'x'"),
        ([f"[1,3]<stderr>:{line}" for line in TRACE], "rank 3: KeyError: 'x'"),
        ([*TRACE[:3], ROLE, "queue.Empty", METER], "queue.Empty"),
        ([*TRACE[:3], STATE, "\tMissing: w"], f"{STATE} Missing: w"),
        ([*TRACE[:3], CUDA, "CUDA kernel errors might be"], CUDA),
        (
            [
                "  + Exception Group Traceback (most recent call last):",
                '  |   File "a.py", line 1, in <module>',
                "  | ExceptionGroup: two (2 sub-exceptions)",
            ],
            "ExceptionGroup: two (2 sub-exceptions)",
        ),
        (["train.py: error: unrecognized arguments: --lr"], "unrecognized arguments: --lr"),
        (["epoch 1", "loss: 0.2", "ValueError: said in passing"], ""),
    ],
)
def test_what_was_raised_is_found_in_a_traceback_however_it_is_printed(lines, said):
    assert said_in(lines) == said


_WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)
_PLAIN = st.builds("{} {}".format, _WORDS, _WORDS).filter(
    lambda line: "error:" not in line and "Traceback" not in line and "try: " not in line
)
_OWN = st.sampled_from([METER, PART, ROLE])
_LINES = st.lists(st.one_of(_PLAIN, _OWN, st.sampled_from([*TRACE, f"{ROLE}{ROLE}"])), max_size=12)


@given(lines=_LINES, code=st.integers(1, 255))
def test_the_reason_is_never_a_line_of_the_meter_or_an_event(lines, code):
    found = reason(*lines, code=code)
    own = ("stoker 2", "host=", ",rank,0,", "rows=", "data=")
    assert [word for word in own if word in found] == []


@example(before=[], after=["    try:"], error="0", code=1)
@given(before=_LINES, after=_LINES, error=_WORDS.filter(str.strip), code=st.integers(1, 255))
def test_the_reason_is_the_error_wherever_there_is_one(before, after, error, code):
    found = reason(*before, f"error: {error}", *after, "try:   more", code=code)
    assert found.endswith(f": {error}; more")


class TwoArguments(Exception):
    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}, line {line}")


def by_torch(err: Exception) -> Exception:
    try:
        ExceptionWrapper(
            (type(err), err, err.__traceback__), where="in DataLoader worker process 0"
        ).reraise()
    except Exception as again:
        return again
    raise AssertionError


def raised(err: Exception) -> Exception:
    try:
        raise err
    except Exception as again:
        return again


def by_the_feed(err: Exception) -> Exception:
    packed = pack_error(raised(err), host="algo-2", where="index 37 of data worker 0")
    return raised(unpack_error(packed))


def failure_of(err: Exception) -> str:
    """Returns the first line of a rank's failure, with what startup/sitecustomize.py keeps."""
    failure = finish.RankFailure(
        rank=0,
        host="algo-1",
        type=type(err).__name__,
        message=str(err),
        traceback="".join(traceback.format_exception(err)),
    )
    return cause_of(failure.text())


IN_FEED = " (sample 37, data worker 0 on host algo-2)"
IN_TORCH = " (DataLoader worker process 0)"


@pytest.mark.parametrize(
    ("err", "text", "where"),
    [
        (by_the_feed(RuntimeError("bad JPEG: x.jpg")), "RuntimeError: bad JPEG: x.jpg", IN_FEED),
        (by_torch(raised(KeyError("label"))), "KeyError: 'label'", IN_TORCH),
        (by_the_feed(by_torch(raised(OSError("a.tar")))), "OSError: a.tar", IN_FEED),
        (
            by_the_feed(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")),
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start "
            "byte",
            IN_FEED,
        ),
        (by_the_feed(ValueError()), "ValueError", IN_FEED),
        (
            by_the_feed(ValueError("bad sizes:\n  3 and 4\nValueError: not this")),
            "ValueError: bad sizes: 3 and 4",
            IN_FEED,
        ),
        (raised(ValueError("the script's own")), "ValueError: the script's own", ""),
    ],
)
def test_the_error_of_a_data_worker_is_told_with_its_own_text_and_where(err, text, where):
    assert failure_of(err) == f"rank 0 on algo-1: {text}{where}"
    # As the end of a script's output, where no hook could keep it.
    assert said_in("".join(traceback.format_exception(err)).splitlines()) == f"{text}{where}"


def test_an_error_that_was_wrapped_twice_and_cannot_be_made_again_keeps_its_own_text(monkeypatch):
    # In this process: its own code is harmless.
    monkeypatch.setattr(dataset, "last_made", lambda *_, **__: None)
    err = TwoArguments("a.tar", 3)
    err.__context__ = OSError("an earlier one")
    found = failure_of(by_torch(by_the_feed(err)))
    assert "TwoArguments: a.tar, line 3" in found
    assert "Caught" not in found


@pytest.mark.parametrize("kind", [UsageError, MissingExtraError, FeedError, FeedLostError])
def test_what_stoker_refuses_in_a_rank_is_told_with_what_to_do(kind):
    err = raised(kind("bad samples of D cannot be left out", where="feed.on_error", fix="catch it"))
    words = f"rank 0 on algo-1: {kind.__name__}: bad samples of D cannot be left out; catch it"
    assert failure_of(err) == words


def test_the_launcher_leaves_its_failure_in_the_pod_s_status_as_an_error(tmp_path, monkeypatch):
    status = tmp_path / "termination-log"
    status.touch()
    monkeypatch.setattr(finish, "TERMINATION_LOG", status)
    finish.write_failure(tmp_path, "rank 0 on a: KeyError: 'x'\n" + "\n".join(TRACE))
    finish.leave_in_pod(
        base_dir=tmp_path,
        output=tmp_path,
        topology=builders.topology("a", dnn=("dnn", ("a",))),
        exit_code=1,
        log=Log(run="r", host="a"),
    )
    found = reason(*status.read_text().splitlines())
    assert found == "ended with exit code 1: rank 0 on a: KeyError: 'x'"


def test_the_end_of_a_stream_that_is_cut_begins_with_a_whole_line():
    tail = OutputTail()
    for number in range(STDERR_TAIL_BYTES // 10):
        tail.add(b"line %06d end\n" % number)
    assert tail.text().startswith("line ")
    assert len(tail.text()) > STDERR_TAIL_BYTES - 20


KILLED = "RuntimeError: DataLoader worker (pid 71) is killed by signal: "
BUS_ERROR = (
    f"{KILLED}Bus error. It is possible that dataloader's workers are out of shared memory. Please "
    "try to raise your shared memory limit."
)
# As torch raises it: by a signal's handler, while the loader waits for a batch.
EXITED = [
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 9, in <module>',
    "    for batch in loader:",
    "RuntimeError: DataLoader worker (pid(s) 71) exited unexpectedly",
]


@pytest.mark.parametrize(
    "lines",
    [
        (*TRACE[:3], BUS_ERROR, "", *EXITED),
        (
            *TRACE[:3],
            "RuntimeError: unable to write to file </torch_7_8_9>: No space left on device (28)",
        ),
        (
            *TRACE[:3],
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_7_8_9>: Success",
        ),
    ],
    ids=["killed", "write", "allocate"],
)
def test_workers_that_have_no_room_in_shared_memory_are_told_what_to_do(lines):
    found = reason(*lines)
    assert "/dev/shm is full, through which torch's workers pass batches" in found
    assert "--shm-size=2g" in found


def test_a_worker_that_was_killed_is_said_with_its_signal():
    found = reason(*TRACE[:3], f"{KILLED}Killed. ", "", *EXITED)
    assert found.startswith(f"ended with exit code 1: {KILLED}Killed.")
    assert "shm" not in found


def test_a_rank_whose_worker_had_no_room_in_shared_memory_is_told_what_to_do():
    full = "unable to allocate shared memory(shm) for file </torch_7_8_9>: No space left (28)"
    found = failure_of(by_torch(RuntimeError(full)))
    assert full in found
    assert "/dev/shm is full, through which torch's workers pass batches" in found


def test_a_rank_whose_worker_was_killed_is_told_by_what():
    killed = RuntimeError(BUS_ERROR.removeprefix("RuntimeError: "))
    exited = RuntimeError("DataLoader worker (pid(s) 71) exited unexpectedly")
    exited.__cause__ = killed
    found = failure_of(exited)
    assert "killed by signal: Bus error" in found
    assert "--shm-size=2g" in found
