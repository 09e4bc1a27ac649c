"""Runs the examples that newcomers recognise: what stoker says of them, and what data hosts gain.

    python benchmarks/shows.py [--only NAME ...] [--pairs N] [--tiny] [--keep DIR] [--json FILE]

Of each example: `stoker profile` and `stoker decide`, then whole training runs by turns: the script
by itself, under `stoker train` with one data host, and with two. Trainer and data hosts are pinned
to a quarter of the machine's cores each, at least one. On two cores the second data host shares the
trainer's core: it gets what the trainer leaves of it, and the table says so. The table is printed
as the example's page in docs/examples has it. About ten minutes on two quiet cores, nine with
`--budget 20`. gpu.py runs the same on a GPU.
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
from stoker.decide.ranking import error_band
from stoker.records import Decision, read_json
from stoker.units import numbered, percentage

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
HOSTS = (0, 1, 2)
PAIRS = 3
# Of a profile: longer than it can last, as it ends the training itself.
_ENDLESS = 100_000
_PROFILE_START_SECONDS, _TRAIN_SECONDS = 120.0, 240.0
# Of loading a sample: smaller parts are not shown.
_MIN_SHARE = 0.01
SHARED = "the last data host shares the trainer's"
# Of one case: a profile, and three trainings.
CASE_SECONDS = 150.0


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

    @property
    def page(self) -> str:
        """File of docs/ that has its table."""
        return f"docs/examples/{self.script.replace('_', '-')}.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """What stoker says of an example before it is trained.

    Attributes:
        words: What the profile names, and the decision.
        promise: How many times as fast a data host makes it: `1.79 ± 11%`.
    """

    words: str
    promise: str = "not asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Whole training runs of one example.

    Attributes:
        rates: Steps per second, of the runs with as many data hosts.
        cores: What each host of such a run is pinned to.
        losses: Whether they are the same numbers.
        others_vcpus: Load of other programs meanwhile.
        seconds: That all of it took, the profile, too.
    """

    show: Show
    advised: Advised
    rates: Mapping[int, Sequence[float]]
    cores: Mapping[int, str]
    losses: str
    others_vcpus: float
    seconds: float

    def gains(self, hosts: int) -> list[float]:
        """Returns how many times as fast as by itself each run was, turn by turn."""
        pairs = zip(self.rates[hosts], self.rates[0], strict=True)
        return [fed / alone for fed, alone in pairs]


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
        cpu_length=150,
        gpu=("--episodes", "16", "--frames", "120"),
        gpu_length=120,
        tiny=("--episodes", "2", "--frames", "8", "--batch-size", "4"),
        tiny_length=8,
    ),
    Show(
        name="vision language",
        script="vision_language",
        cpu=("--documents", "320"),
        cpu_length=2,
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

    def advice(self) -> Advised:
        """Returns what the profile names, and what the decision is."""
        bench = self.bench
        file = self.workload("shows-profiled.json", self.words(length=_ENDLESS))
        seconds = bench.budget_seconds + _PROFILE_START_SECONDS
        profile = bench.stoker("profile", file, "--out", "shows-profile.json", seconds=seconds)
        words = ("decide", "shows-profile.json", "--workload", file)
        decision = bench.stoker(*words, "--out", "shows-decision.json", seconds=60)
        if bench.keep is not None:
            self._keep(bench.keep)
        record = read_json(bench.folder / "shows-decision.json", Decision)
        return Advised(words=advice_words(profile, decision), promise=promise_words(record))

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


def promise_words(decision: Decision) -> str:
    """Returns how many times as fast a decision's plan is, with its error: `1.79 ± 11%`."""
    promise = decision.plan.predicted
    if decision.plan.action == "keep" or promise is None:
        return "keep today's cluster"
    return f"{promise.speedup:.2f} ± {percentage(error_band(promise))}"


def figures(bench: Bench, name: str) -> Iterator[Figure]:
    """Yields an example's gain by one data host and by two, each beside the script by itself.

    Raises:
        LookupError: If the example's library is not installed.
        NoTimeError: If too little of the whole run's time is left.
    """
    yield from figures_of(measure(bench, name))


def measure(bench: Bench, name: str, *, pairs: int = 1) -> Measured:
    """Profiles an example, decides, and trains it by turns: by itself, with one data host and two.

    Args:
        bench: Machine and folder.
        name: Of SHOWS.
        pairs: How often each is trained.

    Raises:
        LookupError: If the example's library is not installed.
        NoTimeError: If too little of the whole run's time is left.
    """
    show = next(each for each in SHOWS if each.name == name)
    for module in show.modules:
        if importlib.util.find_spec(module) is None:
            raise LookupError(f"{module} is not installed")
    bench.need(CASE_SECONDS if not bench.is_tiny else 20)
    began = time.monotonic()
    trial = Trial(show, bench)
    try:
        advised = trial.advice()
    except CommandError as err:
        # A tiny training may be too short to be measured: that is said, and trained all the same.
        if not bench.is_tiny:
            raise
        advised = Advised(words=str(err)[-200:])
    busy = Busy()
    rates: dict[int, list[float]] = {hosts: [] for hosts in HOSTS}
    losses: dict[int, set[str]] = {hosts: set() for hosts in HOSTS}
    for pair in range(pairs):
        for hosts in HOSTS[:: -1 if pair % 2 else 1]:
            seen = trial.trained(hosts)
            rates[hosts].append(float(seen["steps"]) / float(seen["seconds"]))  # type: ignore[arg-type]
            losses[hosts].add(json.dumps(seen["losses"]))
    return Measured(
        show=show,
        advised=advised,
        rates=rates,
        cores={hosts: cores_words(bench, hosts) for hosts in HOSTS},
        losses=losses_words(losses),
        others_vcpus=busy.others_vcpus(),
        seconds=time.monotonic() - began,
    )


def figures_of(measured: Measured) -> Iterator[Figure]:
    """Yields the gain by one data host and by two as rows of gpu.py."""
    for hosts in HOSTS[1:]:
        gain = f"{gain_words(measured.gains(hosts))} times as fast"
        others = f"others used {measured.others_vcpus:.1f} vCPUs"
        note = f"{gain}; {measured.cores[hosts]}; {measured.losses}; {others}"
        seconds = 0.0
        if hosts == 1:
            note += f". {measured.advised.words}"
            seconds = measured.seconds
        yield Figure(
            group="shows",
            case=f"{measured.show.name}, {numbered(hosts, 'data host')}",
            figure="steps/s of the whole run",
            stoker=statistics.median(measured.rates[hosts]),
            torch=statistics.median(measured.rates[0]),
            seconds=seconds,
            note=note,
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
    each = f"{numbered(size, 'core')} each of {num_cores}"
    if (1 + hosts) * size <= num_cores:
        return each
    return f"{each}: {SHARED}"


def page_table(measured: Measured) -> str:
    """Returns an example's figures as its page has them."""
    lines = [
        "| data hosts | steps/s of the whole run | times as fast | `stoker decide` had said |",
        "| --- | --- | --- | --- |",
        f"| none | {statistics.median(measured.rates[0]):.2f} | | |",
    ]
    for hosts, words in zip(HOSTS[1:], ("one", "two"), strict=True):
        rate = statistics.median(measured.rates[hosts])
        promise = measured.advised.promise if hosts == 1 else "not asked"
        if SHARED in measured.cores[hosts]:
            words += ", on the same two cores"
        gain = gain_words(measured.gains(hosts))
        lines.append(f"| {words} | {rate:.2f} | {gain} | {promise} |")
    return "\n".join(lines)


def gain_words(gains: Sequence[float]) -> str:
    """Returns how many times as fast it is, with the spread of the pairs: `1.86 (1.81..1.90)`."""
    middle = statistics.median(gains)
    if len(gains) == 1:
        return f"{middle:.2f}"
    return f"{middle:.2f} ({min(gains):.2f}..{max(gains):.2f})"


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
                measured = measure(bench, name, pairs=options.pairs)
            except LookupError as err:
                print(f"{name}: left out: {err}", flush=True)
                continue
            of_example = list(figures_of(measured))
            rows += of_example
            for row in of_example:
                print(f"{row.case}: stoker {row.stoker:.3g}, torch {row.torch:.3g} {row.figure}")
                print(f"  {row.note}")
            print(f"\n{measured.show.page}:\n\n{page_table(measured)}\n", flush=True)
    if options.json:
        document = {"measured": environment(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
