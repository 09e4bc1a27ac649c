"""The reason of a failure, in lines as hosts leave them: a script's, stoker's own, and cut ones."""

import base64
import io
import json
import traceback
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from stoker.failure_reasons import cause_of, reason_of_failure, said_in
from stoker.feed.engine.raised import pack_error, unpack_error
from stoker.launch import failures
from stoker.launch.process import Ending
from stoker.logs import Log

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
        (("error: no disk", *TRACE), 1, "ended with exit code 1: KeyError: 'x'"),
        ((*TRACE, "error: no disk"), 1, "ended with exit code 1: no disk"),
        ((*TRACE, METER), 1, "ended with exit code 1: KeyError: 'x'"),
        (("cp: no such file", ROLE), 3, "ended with exit code 3; its last line: cp: no such file"),
        ((METER, PART), 137, "ended with signal 9 (SIGKILL), perhaps out of memory"),
    ],
)
def test_the_reason_is_the_error_or_the_traceback_or_the_code(lines, code, found):
    assert reason(*lines, code=code) == found


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
    packed = pack_error(raised(err), where="index 37 of data worker 0 on host algo-2")
    return raised(unpack_error(packed))


def failure_of(err: Exception, output: Path) -> str:
    """Returns the first line of a rank's failure, with what startup/sitecustomize.py keeps."""
    more = {"py_callstack": "".join(traceback.format_exception(err)), "rank": 0}
    said = {"message": f"{type(err).__name__}: {err}", "extraInfo": more}
    (output / failures.ERROR_FILE).write_text(json.dumps({"message": said}))
    return cause_of(failures.failure_of(Ending(exit_code=1), host="algo-1", output=output))


IN_FEED = " (index 37 of data worker 0 on host algo-2)"
IN_TORCH = " (DataLoader worker process 0)"


@pytest.mark.parametrize(
    ("err", "text", "where"),
    [
        (by_the_feed(RuntimeError("bad JPEG: x.jpg")), "RuntimeError: bad JPEG: x.jpg", IN_FEED),
        (by_torch(raised(KeyError("label"))), "KeyError: 'label'", IN_TORCH),
        (raised(ValueError("the script's own")), "ValueError: the script's own", ""),
    ],
)
def test_the_error_of_a_data_worker_is_told_with_its_own_text_and_where(tmp_path, err, text, where):
    assert failure_of(err, tmp_path) == f"rank 0 on algo-1: {text}{where}"
    # As the end of a script's output, where no hook could keep it.
    assert said_in("".join(traceback.format_exception(err)).splitlines()) == f"{text}{where}"


# The line that names the cause, in what scripts printed that start ranks or processes themselves.
# The outputs are real ones, of torch 2.13, Lightning 2.6, Accelerate 1.15 and Open MPI 5, without
# most frames of libraries.


OUTPUTS = Path(__file__).parents[1] / "data" / "failed_outputs"
LABEL = "KeyError: 'label 7 is not in the table'"
SHARD = "LookupError: no shard 3"
SPACE = "OSError: no space on /data"
OF_CHILD = {
    "accelerate": LABEL,
    "lightning_spawn": LABEL,
    "process": SHARD,
    "spawn_raise": SHARD,
    "subprocess": SPACE,
    "torchrun_raise": LABEL,
}


def lines_of(name: str) -> list[str]:
    # As the launcher does: a bar of tqdm's ends with a carriage return, too.
    return (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", sorted(OF_CHILD))
def test_a_child_that_failed_is_told_and_not_those_that_it_took_along(name):
    assert said_in(lines_of(name)) == OF_CHILD[name]
