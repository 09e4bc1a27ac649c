"""The folders of runs: runs/NAME-DATE-TIME, with records, logs and the report."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import UsageError
from stoker.platforms.base import check_run_name
from stoker.records import (
    Workload,
    read_json,
)
from stoker.records.workload import refuse_foreign

RUNS = Path("runs")


def _made(name: str, *, may_exist: bool) -> Path:
    """Makes runs/NAME, in a temporary folder where this folder cannot be written.

    A pipeline's step may not run as the image's user.
    """
    runs = RUNS
    existing = RUNS if RUNS.exists() else Path()
    if not os.access(existing, os.W_OK):
        runs = Path(tempfile.gettempdir()) / RUNS
    try:
        (runs / name).mkdir(parents=True, exist_ok=may_exist)
    except OSError as err:
        if isinstance(err, FileExistsError) and not may_exist:
            raise
        raise UsageError(
            f"cannot make a run folder: {err}", where=str(runs), fix="check its permissions"
        ) from None
    if runs is not RUNS:
        kept_in = f"note: {existing.absolute()} cannot be written: this run is kept in {runs}"
        print(kept_in, file=sys.stderr)
    return runs / name


def named_run_dir(name: str) -> Path:
    """Makes runs/NAME, or uses the one of an earlier attempt."""
    check_run_name(name, most=63)
    return _made(name, may_exist=True)


def run_base(workload: Workload, *, kind: str = "") -> str:
    """Returns how the names of a workload's runs begin, for `new_run_dir`.

    Args:
        workload: Its name comes first, then its platform's `name_end`.
        kind: What follows, such as profile; empty: nothing.
    """
    begin = f"{workload.name}{workload.platform_info.name_end}{kind}"
    # `new_run_dir` adds a dash.
    if kind:
        return begin
    return begin.removesuffix("-")


def new_run_dir(name: str) -> Path:
    """Makes the new folder runs/NAME-DATE-TIME."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # `mkdir` is atomic: two runs that begin in the same second get two folders.
    for suffix in ["", *(f"-{n}" for n in range(2, 100))]:
        with contextlib.suppress(FileExistsError):
            return _made(f"{name}-{stamp}{suffix}", may_exist=False)
    raise UsageError(
        "too many runs of one name were started within one second",
        where=str(RUNS.absolute()),
        fix="start this one again, or give it another --name",
    )


def latest_run_dir(workload: Workload, *, needs: Sequence[str]) -> Path:
    """Returns the newest run of the same workload that has the files in `needs`.

    If there is none, the UsageError says what differs from the newest run of that name.
    """
    begin = f"{workload.name}-"
    # Runs of this name first, as a workload may have been renamed; then the newest.
    files = sorted(
        RUNS.glob("*/workload.json"),
        key=lambda file: (not file.parent.name.startswith(begin), -file.stat().st_mtime),
    )
    foreign: UsageError | None = None
    for file in files:
        if not all((file.parent / name).is_file() for name in needs):
            continue
        try:
            ran = read_json(file, Workload)
            refuse_foreign(
                "profile",
                keys=ran.profile_keys(),
                digest=ran.digest(),
                workload=workload,
                where=str(file.parent),
                fix="leave --from out: what was changed needs a new profile",
            )
        except UsageError as err:
            foreign = foreign or err
        else:
            return file.parent
    raise foreign or UsageError(
        f"no earlier run of this workload has {', '.join(needs)}",
        where=f"folder {RUNS.resolve()}, workload {workload.name}",
        fix="leave --from out",
    )
