"""Why a command gave no profile, and what could be observed of it all the same. Mostly pure."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.errors import UsageError
from stoker.logs import parse_line
from stoker.profile.grown_files import words_of
from stoker.profile.raw import RankResult
from stoker.records import Observed, Profile, ProfiledHost, TodaysGroup
from stoker.records.base import Value

# Packages with loaders of their own, in the words of their users.
_OTHER_LOADERS = {
    "tensorflow": "tf.data",
    "jax": "jax",
    "nvidia.dali": "DALI",
    "ffcv": "FFCV",
    "ray": "Ray Data",
    "torchdata.nodes": "torchdata's nodes",
    "fastai": "fastai's DataLoader",
    "litdata": "litdata's StreamingDataLoader",
    "mxnet": "MXNet",
    "xgboost": "XGBoost",
    "sklearn": "scikit-learn",
}
_NOTEBOOK_PROGRAMS = ("jupyter", "jupyter-nbconvert", "jupyter-execute", "papermill", "ipython")
_LONGER = "profile a command that trains longer: more epochs, or more data"
# Of other loaders the step can be known, and its wait.
_TIMED = (
    "have the script iterate over stoker.timed(batches), or stoker.keras.timed in model.fit: then "
    "the step, its wait and the CPU are measured, though not what loading alone costs"
)
_AS_SCRIPT = "jupyter nbconvert --to script NOTEBOOK, then: stoker profile -- python SCRIPT"


class UnmeasuredError(UsageError):
    """No profile could be made.

    Attributes:
        observed: What is known all the same; None if nothing is.
    """

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", observed: Profile | None = None
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.observed = observed


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of the command said of itself at its end.

    Attributes:
        packages: That it had imported.
        problem: Why the profiler could not be put in; empty where it could, or had no reason to.
    """

    packages: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What the command and all below it used, all hosts together.

    Attributes:
        wall_seconds: Of the host that took longest.
        vcpus: That it may use of one host.
    """

    wall_seconds: float
    cpu_seconds: float
    vcpus: float
    hosts: int

    @property
    def utilization(self) -> float:
        """Share of all vCPUs."""
        return min(1.0, self.cpu_seconds / max(1e-9, self.wall_seconds * self.vcpus * self.hosts))


class Heard:
    """Takes from log lines what each host says of its command's end, and that measuring began.

    Attributes:
        has_begun: A rank has read from a loader that can be measured.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._hosts: dict[str, tuple[float, float, float]] = {}

    def line(self, text: str) -> None:
        """One line of the log."""
        if "profile_begins" in text and not self.has_begun:
            event = parse_line(text)
            self.has_begun = event is not None and event.event == "profile_begins"
        if "command_ended" not in text:
            return
        event = parse_line(text)
        if event is None or event.event != "command_ended":
            return
        values = event.values
        with contextlib.suppress(KeyError, ValueError):
            wall, cpu = float(values["wall_seconds"]), float(values["cpu_seconds"])
            self._hosts[event.host] = (wall, cpu, float(values["vcpus"]))

    @property
    def used(self) -> Used | None:
        """What is known so far; None if nothing is."""
        if not self._hosts:
            return None
        own = list(self._hosts.values())
        return Used(
            wall_seconds=max(wall for wall, _, _ in own),
            cpu_seconds=sum(cpu for _, cpu, _ in own),
            vcpus=own[0][2],
            hosts=len(own),
        )


def read_seen(folder: Path) -> list[Seen]:
    """What the processes left in `folder`."""
    seen = []
    for file in sorted(folder.glob("seen-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            seen.append(msgspec.json.decode(file.read_bytes(), type=Seen))
    return seen


def notebook_refusal(command: Sequence[str], *, where: str) -> UsageError | None:
    """Why a notebook that is given as a script cannot be run at all; None if none is."""
    names = [word for word in command[1:] if word.endswith(".ipynb")]
    program = os.path.basename(command[0])
    if not names or not program.startswith("python") or "-m" in command:
        return None
    return UsageError(
        f"{names[0]} is a notebook, which Python cannot run as a script",
        where=where,
        fix=_AS_SCRIPT.replace("NOTEBOOK", names[0]).replace("SCRIPT", names[0][:-6] + ".py"),
    )


def unmeasured(
    ranks: Sequence[RankResult],
    *,
    seen: Sequence[Seen],
    used: Used | None,
    command: Sequence[str],
    group: TodaysGroup,
    what: dict[str, Value],
    timed: str = "",
    cut_off_seconds: float | None = None,
) -> UnmeasuredError | None:
    """Why there is no profile of a command; None if there is one.

    Args:
        ranks: What they left.
        seen: What its processes said of themselves.
        used: By the command.
        command: As it was given.
        group: Today's.
        what: Of the record.
        timed: Why what `stoker.timed` saw does not do; empty where it saw nothing.
        cut_off_seconds: After how long it was stopped, because no loader was read by then; None:
            it ended by itself.
    """
    if ranks and all(rank.accelerator for rank in ranks):
        return None
    packages = {name for process in seen for name in process.packages}
    notes = [*_observations(ranks, used)]
    if cut_off_seconds is None:
        problem, fix = _problem(ranks, seen=seen, packages=packages, command=command)
    else:
        problem, fix = _cut_off(packages, seconds=cut_off_seconds)
    if timed and not ranks:
        problem, fix = timed, _LONGER
    where = "; ".join(notes)
    return UnmeasuredError(
        problem,
        where=f"what was observed: {where}" if where else "",
        fix=fix,
        observed=_observed(problem, notes, used=used, group=group, what=what),
    )


def _cut_off(packages: set[str], *, seconds: float) -> tuple[str, str]:
    others = [title for name, title in _OTHER_LOADERS.items() if name in packages]
    uses = f"; it uses {', '.join(others)}" if others else ""
    return (
        f"no DataLoader of torch was read within {seconds:.0f} s of the start, so that the command "
        f"was stopped{uses}",
        f"where it trains, on batches of another loader: {_TIMED}; where it still prepared its "
        "data: raise profile.budget_seconds (--budget)",
    )


def _problem(
    ranks: Sequence[RankResult], *, seen: Sequence[Seen], packages: set[str], command: Sequence[str]
) -> tuple[str, str]:
    is_notebook = "ipykernel" in packages or (
        os.path.basename(command[0]) in _NOTEBOOK_PROGRAMS
        or any(word.endswith(".ipynb") for word in command)
    )
    if is_notebook:
        if ranks:
            return (f"a notebook ran, and ended too soon: {_too_soon(ranks)}", _AS_SCRIPT)
        return ("a notebook ran, in which no DataLoader of torch was read", _AS_SCRIPT)
    if ranks:
        return (
            f"the script ended too soon: {_too_soon(ranks)}",
            _LONGER,
        )
    problems = [process.problem for process in seen if process.problem]
    if problems:
        return (
            f"the profiler could not be put into the script: {problems[0]}",
            "install stoker for the Python that runs the script, or name the Python that has it",
        )
    if not seen:
        return (
            "no Python process of the command could be looked into",
            "name a Python script, without -I, -S and -E; the script must not clear PYTHONPATH",
        )
    others = [title for name, title in _OTHER_LOADERS.items() if name in packages]
    if "torch" not in packages:
        reads = f"; it uses {', '.join(others)}" if others else ""
        return (
            f"the script never imported torch{reads}",
            f"{_TIMED}; of a job on SageMaker --training-job NAME reads the load",
        )
    reads = f", but uses {', '.join(others)}" if others else ""
    return (
        f"the script imported torch and never read from a DataLoader of it{reads}",
        _TIMED
        if others
        else "profile a script that trains with a DataLoader of torch or stoker; a loop over a "
        "dataset gets one with DataLoader(dataset, batch_size=..., num_workers=...)",
    )


def _too_soon(ranks: Sequence[RankResult]) -> str:
    missing = [rank for rank in ranks if not rank.accelerator]
    first = missing[0] if missing else ranks[0]
    of = f" (rank {first.rank})" if first.world_size > 1 else ""
    words = first.missing.removeprefix("the script ended ") or "it was cut off"
    return f"{words}{of}"


def _observations(ranks: Sequence[RankResult], used: Used | None) -> list[str]:
    found = []
    if used:
        on = f"{used.hosts} hosts of {used.vcpus:g}" if used.hosts > 1 else f"{used.vcpus:g}"
        found.append(
            f"it ran {used.wall_seconds:.1f} s and used {used.cpu_seconds:.1f} CPU-seconds: "
            f"{used.utilization:.0%} of {on} vCPUs"
        )
    for rank in ranks[:1]:
        if rank.as_is:
            step, wait = rank.as_is.step_seconds.median, rank.as_is.wait_seconds.median
            found.append(f"a step took {step * 1e3:.1f} ms, {wait / step:.0%} of it waiting")
        if rank.loader:
            found.append(f"num_workers={rank.loader.num_workers}")
        grown = words_of(rank.grown_files, cwd=Path.cwd())
        if grown:
            found.append(grown)
    return found


def _observed(
    problem: str,
    notes: Sequence[str],
    *,
    used: Used | None,
    group: TodaysGroup,
    what: dict[str, Value],
) -> Profile | None:
    if used is None:
        return None
    return Profile(
        host=ProfiledHost(
            instance_type=group.instance_type, count=group.count, vcpus=max(1, int(used.vcpus))
        ),
        observed=Observed(cpu_utilization=used.utilization, hosts=used.hosts),
        what={
            **what,
            "source": "process tree",
            "wall_seconds": round(used.wall_seconds, 3),
            "cpu_seconds": round(used.cpu_seconds, 3),
            "notes": [problem, *notes],
        },
    )
