"""Runs the examples that newcomers recognise: what stoker says of them, and what data hosts gain.

    python benchmarks/shows.py [--only NAME ...] [--pairs N] [--tiny] [--keep DIR] [--json FILE]

Of each example: `stoker profile` and `stoker decide`, then whole training runs by turns: the script
by itself, under `stoker train` with one data host, and with two. Trainer and data hosts are pinned
to a quarter of the machine's cores each, at least one. On two cores the second data host shares the
trainer's core: it gets what the trainer leaves of it, and the table says so. That table is for the
example's page in docs/examples. About ten minutes on two quiet cores. gpu.py runs the same on a
GPU.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_figures import Figure
from gpu_machine import Bench, CommandError, python_path
from honesty import group_words
from measuring import environment
from prediction import Busy

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
HOSTS = (0, 1, 2)
PAIRS = 3
# Of a profile: longer than it can last, as it ends the training itself.
_ENDLESS = 100_000
_PROFILE_START_SECONDS, _TRAIN_SECONDS = 120.0, 240.0
# Of loading a sample: smaller parts are not shown.
_MIN_SHARE = 0.01
# Of one case: a profile, and three trainings.
_CASE_SECONDS = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """An example, and how long it trains in a measurement.

    Attributes:
        name: Of the case.
        script: Folder of examples/.
        modules: Python packages that it needs besides torch, NumPy and Pillow.
        length: Option that says how long it trains.
        cpu: Options on a CPU; the others are the script's defaults.
        cpu_length: Of a training run that is measured there.
        gpu: Options on a GPU.
        gpu_length: Of a training run that is measured there.
        tiny: Options of a dry run.
        tiny_length: Of its trainings.
    """

    name: str
    script: str
    modules: tuple[str, ...] = ()
    length: str = "--epochs"
    cpu: tuple[str, ...]
    cpu_length: int
    gpu: tuple[str, ...]
    gpu_length: int
    tiny: tuple[str, ...]
    tiny_length: int


SHOWS: tuple[Show, ...] = (
    Show(
        name="images",
        script="images",
        cpu=("--pictures", "640"),
        cpu_length=4,
        # gpu.py has pictures of its own.
        gpu=(),
        gpu_length=3,
        tiny=("--pictures", "16", "--batch-size", "4", "--side", "32"),
        tiny_length=2,
    ),
    Show(
        name="robot episodes",
        script="robot_episodes",
        modules=("av", "pyarrow"),
        length="--steps",
        cpu=("--episodes", "8", "--frames", "60"),
        cpu_length=180,
        gpu=("--episodes", "16", "--frames", "120"),
        gpu_length=120,
        tiny=("--episodes", "2", "--frames", "8", "--batch-size", "4"),
        tiny_length=8,
    ),
    Show(
        name="vision language",
        script="vision_language",
        cpu=("--documents", "320"),
        cpu_length=3,
        gpu=("--documents", "480"),
        gpu_length=6,
        tiny=("--documents", "8", "--batch-size", "4"),
        tiny_length=2,
    ),
)


class Trial:
    """One example on one machine."""

    def __init__(self, show: Show, bench: Bench) -> None:
        self.show = show
        self.bench = bench
        self.kind = f"local.c{bench.quarter}"

    @property
    def script(self) -> Path:
        return EXAMPLES / self.show.script / "train.py"

    def words(self, *, length: int | None = None) -> list[str]:
        """Returns the script's options; `length` in place of a measurement's."""
        show, bench = self.show, self.bench
        options, wanted = show.cpu, show.cpu_length
        if bench.device == "cuda":
            options, wanted = show.gpu, show.gpu_length
        if bench.is_tiny:
            options, wanted = show.tiny, show.tiny_length
        words = [*options, "--device", bench.device, "--workers", str(bench.quarter)]
        pictures = bench.pictures / "train"
        if show.name == "images" and pictures.is_dir():
            words += ["--data", str(pictures)]
        return [*words, show.length, str(length or wanted)]

    def workload(self, name: str, words: Sequence[str]) -> str:
        """Writes the workload; returns its file's name."""
        document = {
            "name": self.show.script.replace("_", "-"),
            "command": [sys.executable, str(self.script), *words],
            "cluster": {"dnn": {"instance_type": self.kind, "count": 1}},
            "constraints": {
                "objective": "time",
                "max_data_hosts": self.bench.data_hosts,
                "allowed_instance_types": [self.kind],
            },
            "profile": {"budget_seconds": self.bench.budget_seconds},
        }
        (self.bench.folder / name).write_text(json.dumps(document))
        return name

    def advice(self) -> str:
        """Says what the profile names, and what the decision is."""
        bench = self.bench
        file = self.workload("shows-profiled.json", self.words(length=_ENDLESS))
        seconds = bench.budget_seconds + _PROFILE_START_SECONDS
        profile = bench.stoker("profile", file, "--out", "shows-profile.json", seconds=seconds)
        words = ("decide", "shows-profile.json", "--workload", file)
        decision = bench.stoker(*words, "--out", "shows-decision.json", seconds=60)
        if bench.keep is not None:
            self._keep(bench.keep)
        return advice_words(profile, decision)

    def _keep(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        logs = ("stoker-profile.log", "stoker-decide.log")
        for name in ("shows-profile.json", "shows-decision.json", *logs):
            shutil.copyfile(self.bench.folder / name, folder / f"{self.show.script}-{name}")

    def trained(self, hosts: int) -> dict[str, object]:
        """Trains once, and returns what the script recorded; without data hosts by itself."""
        bench = self.bench
        if hosts == 0:
            script = os.path.relpath(self.script, HERE)
            cores = bench.cores[: bench.quarter]
            return bench.python(script, *self.words(), seconds=_TRAIN_SECONDS, cores=cores)
        record = bench.folder / "shows-record.json"
        record.unlink(missing_ok=True)
        file = self.workload("shows-run.json", [*self.words(), "--record", str(record)])
        groups = (f"--group=dnn={self.kind}:1", f"--group=data={self.kind}:{hosts}")
        out = ("--out", "shows-training.json")
        bench.stoker("train", file, *groups, *out, seconds=_TRAIN_SECONDS)
        seen: dict[str, object] = json.loads(record.read_text())
        return seen


def advice_words(profile: dict[str, object], decision: dict[str, object]) -> str:
    """Says the states of a profile and the decision on it in one line."""
    states = [state["text"] for state in profile.get("states") or ()]  # type: ignore[attr-defined]
    plan = decision["plan"]
    action, groups = plan["action"], " ".join(group_words(plan)[1::2])  # type: ignore[index, arg-type]
    fixes = [str(each["text"]) for each in profile.get("fixes") or ()]  # type: ignore[attr-defined]
    costs = profile.get("transforms") or ()
    large = [cost for cost in costs if cost["share"] >= _MIN_SHARE]  # type: ignore[attr-defined]
    shares = [f"{cost['name']} {cost['share']:.0%}" for cost in large]
    parts = [
        f"found: {'; '.join(states) or 'nothing that is named'}",
        f"loading a sample: {', '.join(shares)}" if shares else "",
        f"decision: {action} {groups} ({decision.get('verdict') or 'no verdict'})",
        f"free: {fixes[0]}" if fixes else "",
    ]
    return ". ".join(part for part in parts if part)


def figures(bench: Bench, name: str, *, pairs: int = 1) -> Iterator[Figure]:
    """Yields an example's gain by one data host and by two, each beside the script by itself.

    Args:
        bench: Machine and folder.
        name: Of SHOWS.
        pairs: How often each is trained, by turns.

    Raises:
        LookupError: If the example's library is not installed.
        NoTimeError: If too little of the whole run's time is left.
    """
    show = next(each for each in SHOWS if each.name == name)
    for module in show.modules:
        if importlib.util.find_spec(module) is None:
            raise LookupError(f"{module} is not installed")
    bench.need(_CASE_SECONDS if not bench.is_tiny else 20)
    began = time.monotonic()
    trial = Trial(show, bench)
    try:
        advice = trial.advice()
    except CommandError as err:
        # A tiny training may be too short to be measured: that is said, and trained all the same.
        if not bench.is_tiny:
            raise
        advice = str(err)[-200:]
    busy = Busy()
    rates: dict[int, list[float]] = {hosts: [] for hosts in HOSTS}
    losses: dict[int, set[str]] = {hosts: set() for hosts in HOSTS}
    for pair in range(pairs):
        for hosts in HOSTS[:: -1 if pair % 2 else 1]:
            seen = trial.trained(hosts)
            rates[hosts].append(float(seen["steps"]) / float(seen["seconds"]))  # type: ignore[arg-type]
            losses[hosts].add(json.dumps(seen["losses"]))
    others = busy.others_vcpus()
    same = losses_words(losses)
    for hosts in HOSTS[1:]:
        gains = [fed / alone for fed, alone in zip(rates[hosts], rates[0], strict=True)]
        cores = cores_words(bench, hosts)
        note = f"{gain_words(gains)}; {cores}; {same}; others used {others:.1f} vCPUs"
        yield Figure(
            group="shows",
            case=f"{show.name}, {hosts} data host{'s' * (hosts > 1)}",
            figure="steps/s of the whole run",
            stoker=statistics.median(rates[hosts]),
            torch=statistics.median(rates[0]),
            seconds=time.monotonic() - began if hosts == 1 else 0.0,
            note=f"{note}. {advice}" if hosts == 1 else note,
        )


def losses_words(losses: Mapping[int, set[str]]) -> str:
    """Says whether all trainings had the same losses, to the last bit.

    Random numbers of a loader worker depend on stoker's seeds under stoker, and on torch's without.
    """
    if len(losses[1] | losses[2]) > 1:
        return "losses DIFFER"
    if len(losses[0] | losses[1]) == 1:
        return "losses equal with none, one and two"
    return "losses equal with one and two"


def cores_words(bench: Bench, hosts: int) -> str:
    """Says what each host of a run is pinned to, and whether hosts share it."""
    size, num_cores = bench.quarter, len(bench.cores)
    each = f"{size} core{'s' * (size > 1)} each of {num_cores}"
    if (1 + hosts) * size <= num_cores:
        return each
    return f"{each}: the last data host shares the trainer's"


def page_table(rows: Sequence[Figure]) -> str:
    """Returns an example's rows as its page has them."""
    lines = ["| data hosts | steps/s of the whole run | gain | |", "| --- | --- | --- | --- |"]
    lines.append(f"| none | {rows[0].torch:.2f} | | |")
    for words, row in zip(("one", "two"), rows, strict=True):
        gain, cores, _ = row.note.split("; ", 2)
        lines.append(f"| {words} | {row.stoker:.2f} | {gain} | {cores} |")
    return "\n".join(lines)


def gain_words(gains: Sequence[float]) -> str:
    """Says how many times as fast it is, with the spread of the pairs."""
    middle = statistics.median(gains)
    spread = f" ({min(gains):.2f}..{max(gains):.2f})" if len(gains) > 1 else ""
    return f"{middle:.2f}{spread} times as fast"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [show.name for show in SHOWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--tiny", action="store_true", help="a dry run: the figures mean nothing")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a profile")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="profiles and decisions go there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows go there, too")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    os.environ.update(python_path(os.environ))
    # Ends as by Ctrl-C, so that commands go with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[Figure] = []
    print(f"{environment()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="stoker-shows-") as folder:
        bench = Bench(
            folder=Path(folder),
            device="cpu",
            is_tiny=options.tiny,
            cores=tuple(sorted(os.sched_getaffinity(0))),
            deadline=time.monotonic() + 7200,
            budget_seconds=5.0 if options.tiny else options.budget,
            keep=options.keep.absolute() if options.keep else None,
        )
        for name in options.only:
            try:
                of_example = list(figures(bench, name, pairs=options.pairs))
            except LookupError as err:
                print(f"{name}: left out: {err}", flush=True)
                continue
            rows += of_example
            for row in of_example:
                print(f"{row.case}: stoker {row.stoker:.3g}, torch {row.torch:.3g} {row.figure}")
                print(f"  {row.note}")
            print(f"\n{page_table(of_example)}\n", flush=True)
    if options.json:
        document = {"measured": environment(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
