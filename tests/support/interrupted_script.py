"""A script whose signal handler raises within next(), at one place after the other; it goes on.

Each call of `next` is interrupted one place later than the call before, until one returns before
that; then it begins again with the first. A place is where Python looks for signals: what is raised
there looks as if a signal had come at that moment.
"""

import dis
import functools
import itertools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stoker

given = json.loads(sys.argv[1])
BELOW = (str(Path(stoker.__file__).parent), str(Path(torch.utils.data.__file__).parent))
ERRORS: dict[str, type[BaseException]] = {"own": RuntimeError, "Ctrl-C": KeyboardInterrupt}
Trace = Callable[[FrameType, str, object], object]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return int(given["samples"])

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, given["samples"], step))


def fail(number: int, frame: object) -> None:
    raise ERRORS[given["error"]]("the handler's")


class Preemption:
    def seen(self, number: int, frame: object) -> None:
        fail(number, frame)

    __call__ = seen


HANDLERS = {
    "function": fail,
    "method": Preemption().seen,
    "object": Preemption(),
    "partial": functools.partial(functools.partial(fail)),
    "lambda": lambda number, frame: fail(number, frame),
}


@functools.cache
def checks(code: CodeType) -> frozenset[int]:
    """Returns where Python looks for signals: after calls, at beginnings and at jumps back."""
    return frozenset(
        later.offset
        for earlier, later in itertools.pairwise(dis.get_instructions(code))
        if earlier.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
    )


def is_drawing(frame: FrameType | None) -> bool:
    """Returns whether the sampler is being asked."""
    while frame is not None:
        if frame.f_code.co_name == "_draw":
            return True
        frame = frame.f_back
    return False


def interrupted(at: int) -> Trace:
    """Returns a trace function that raises the signal at a place of the feed or of torch's data."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if event == "call":
            frame.f_trace_opcodes = True
            return trace if frame.f_code.co_filename.startswith(BELOW) else None
        is_check = event == "opcode" and frame.f_lasti in checks(frame.f_code)
        if is_check and is_drawing(frame) == given["in_draws"]:
            left -= 1
            if left < 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return trace

    return trace


def epoch() -> dict[str, object]:
    taken: list[list[int]] = []
    num_raised = at = 0
    iterator = iter(loader)
    while True:
        sys.settrace(interrupted(at) if given["error"] else None)
        try:
            batch = next(iterator)
            sys.settrace(None)
            taken.append(torch.as_tensor(batch).flatten().tolist())
            at = 0
        except StopIteration:
            sys.settrace(None)
            return {"taken": taken, "ending": "", "num_raised": num_raised}
        except BaseException as err:
            sys.settrace(None)
            if "the handler's" not in str(err):
                return {"taken": taken, "ending": str(err), "num_raised": num_raised}
            num_raised, at = num_raised + 1, at + 1


torch.manual_seed(0)
dataset = Stream() if given["is_stream"] else Numbers()
loader = stoker.DataLoader(
    dataset, batch_size=2, shuffle=None if given["is_stream"] else True, **given["options"]
)
signal.signal(signal.SIGUSR1, HANDLERS[given["handler"]])
for _ in range(given["epochs"]):
    print(json.dumps(epoch()))
