"""Why a command left no profile: one sentence for each reason, and what to do."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec

from stoker.errors import StokerError, UsageError, WorkloadError
from stoker.launch.failures import read_failure
from stoker.profile.rank_results import RankResult
from stoker.records import write_text

# To start (imports, data sets, models) and to end, beside the profile's budget.
START_ALLOWANCE_SECONDS = 120.0
# For the process that submitted the job.
FAILURE_FILE = "profile-failure.json"
# Packages whose batches come from no loader that a class names.
_OTHERS = {"tensorflow": "tf.data", "jax": "jax"}


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a profiled command worked with, written at its end.

    `problem`: why the profiler could not be put in. `loaders`: those that data hosts cannot feed.
    """

    packages: tuple[str, ...] = ()
    problem: str = ""
    loaders: tuple[str, ...] = ()


def why_unmeasured(
    ranks: Sequence[RankResult],
    seen: Sequence[ProcessReport],
    *,
    seconds: float,
    has_passed: bool,
) -> StokerError:
    """Returns why the ranks of a command left no profile.

    Args:
        ranks: Results of the ranks.
        seen: What the command's processes worked with.
        seconds: That the command had.
        has_passed: It was stopped after them.
    """
    # The rank that lacks something tells more than rank 0, which may be complete.
    first = next((rank for rank in ranks if not rank.has_verdict), None)
    if first:
        words = first.missing.removeprefix("the script ended ") or "it was cut off"
        longer = "profile a command that trains longer"
        if has_passed:
            words += f", in {seconds:.0f} s"
            longer = f"--budget {2 * seconds:.0f} (profile.budget_seconds): its first steps, which "
            longer += "may compile, took all of the time"
        return UsageError(f"the script ended too soon: {words} (rank {first.rank})", fix=longer)
    if not seen or any(process.problem for process in seen):
        no_process = "no Python process of the command could be profiled"
        return UsageError(
            "the profiler could not be put into the script: "
            f"{max((process.problem for process in seen), default=no_process)}",
            fix="name a Python script, of a Python that has stoker, without -I, -S and -E; it must "
            "not clear PYTHONPATH",
        )
    packages = {*chain.from_iterable(process.packages for process in seen)}
    own = [title for name, title in _OTHERS.items() if name in packages]
    own += dict.fromkeys(chain.from_iterable(process.loaders for process in seen))
    within = f" within {seconds:.0f} s, so the command was stopped" if has_passed else ""
    return UsageError(
        f"no DataLoader of torch was read{within}{'; it uses ' * bool(own)}{', '.join(own)}",
        fix="profile a script that trains with a DataLoader of torch or stoker; else have it "
        "iterate over stoker.timed(batches): then the step, its wait and the CPU are measured, "
        "though not what loading alone costs; if it was still preparing its data: raise "
        "profile.budget_seconds (--budget)",
    )


def notebook_refusal(command: Sequence[str], *, where: str) -> UsageError | None:
    if not " ".join(command[:2]).endswith(".ipynb"):
        return None
    return UsageError(
        f"{command[1]} is a notebook, which Python cannot run as a script",
        where=where,
        fix=f"jupyter nbconvert --to script {command[1]}, then: stoker profile -- python SCRIPT",
    )


def why_failed(output: Path | None, *, exit_code: int | None, failure: str | None) -> WorkloadError:
    """Returns why a command failed, with its traceback as a note.

    Args:
        output: The ranks' results and records; None: there is no such folder.
        exit_code: Of the command; None: not known.
        failure: What the platform says.
    """
    what = f"the command failed with exit code {exit_code}" if exit_code else "the command failed"
    fix = "make the command run without stoker first"
    first = read_failure(output) if output else None
    if first is None or not first.raised:
        return WorkloadError(f"{what}: {failure}" if failure else what, fix=fix)
    place = [line.strip() for line in first.traceback.splitlines() if line.startswith("  File ")]
    error = WorkloadError(
        f"{what}: {first.raised}",
        where=", ".join([f"rank {first.rank}", *place[-1:]]),
        fix=fix,
    )
    error.add_note(first.traceback)
    return error


# From the leader to the process that submitted the job.


def write_reason(output: Path, err: StokerError) -> None:
    notes = getattr(err, "__notes__", [])
    told = [err.exit_code, err.what, err.where, err.fix, notes]
    write_text(output / FAILURE_FILE, json.dumps(told))


def read_reason(output: Path | None, *, exit_code: int | None, failure: str | None) -> StokerError:
    """Returns why a job left no profile: as its leader says, else as the platform does."""
    if output is None or not (output / FAILURE_FILE).is_file():
        return why_failed(output, exit_code=exit_code, failure=failure)
    code, what, where, fix, notes = json.loads((output / FAILURE_FILE).read_bytes())
    kind = WorkloadError if code == WorkloadError.exit_code else UsageError
    error = kind(what, where=where, fix=fix)
    for note in notes:
        error.add_note(note)
    return error
