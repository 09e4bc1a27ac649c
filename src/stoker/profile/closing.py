"""The last part of a profile in one process: no script runs any more, and none will."""

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.optim.lr_scheduler import LRScheduler

from stoker.logs import Log
from stoker.profile.ending import end_process
from stoker.profile.findings import Findings


def close_profile(
    findings: Findings,
    *,
    measure: Callable[[], None],
    look_at_files: Callable[[], None],
    folder: Path,
    launcher_pid: int | None,
    log: Log,
) -> NoReturn:
    """Measures the rest, hands the findings over and ends the process, whatever goes wrong.

    Args:
        findings: With what is known so far already written.
        measure: The phases that are left.
        look_at_files: Learns what the script wrote.
        folder: STOKER_OUTPUT.
        launcher_pid: As `end_process`; used by the first rank of a host.
        log: For the last word.
    """
    try:
        measure()
        if findings.is_stopped():
            findings.note("stopped early: the verdict is the one so far")
        look_at_files()
        findings.learn(has_ended=True)
        findings.write()
        findings.hand_over()
        log.event("profile_ends", rank=findings.result.rank)
    except BaseException as err:
        # A process edge: the script must not catch it, and save what is no end of a training.
        words = f"{type(err).__name__}: {err}"[:300]
        log.event("profile_failed", error=words)
        traceback.print_exc()
        with contextlib.suppress(BaseException):
            findings.note(f"the phases without the model failed: {words}")
            findings.write()
    finally:
        end_process(folder=folder, launcher_pid=launcher_pid if findings.is_first_of_host else None)


def hold_learning_rate() -> None:
    """Stops the schedulers of this process, which ends with the profile.

    One that was made for the steps of the script raises at the first that is more.
    """

    def stay(self: LRScheduler, epoch: int | None = None) -> None:
        return None

    LRScheduler.step = stay  # type: ignore[method-assign]
