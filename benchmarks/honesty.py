"""Checks that stoker's advice is honest: trainings of a known bottleneck are advised and followed.

    python benchmarks/honesty.py [--quick] [--case NAME ...] [--busy VCPUS] [--resume] [--markdown]

Each case: `stoker profile`, `stoker decide`, then `stoker train` of today's cluster and of the plan
by turns. Three things are to hold: the verdict names the bottleneck, the advice is one of those
that are right, and what was measured lies inside the promised band: the ratio of the two steps, or,
where nothing is to be changed, the step itself. With `--busy` other programs burn so many vCPUs all
the while: then it may also say that it cannot tell, and nothing else.

The trainings on the CPU (`1 core trains` ...) are also to be explained by their parts within a
tenth. Under a CPU quota, as in a pod with a limit, the advice is to take the limit away: that is
tried, too. A stream is read by more workers only if its script says so: the plan that decide names
for that is followed by the script's own option. What the machine has too few cores, no control
groups or no torchdata for, is left out and said.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from prediction import Busy, machine, passes_per_millisecond, speed, stoker

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "honesty.json"
BUDGET_SECONDS = 20
PAIRS = 3
_RUN_SECONDS = 8.0
_LEAST_STEPS, _MOST_STEPS = 42, 402
# Of the disk's case: files of one sample each, and so many of them.
_FILE_BYTES, _NUM_FILES = 16 << 20, 48
_DUTY_SECONDS = 0.02
_GROUPS, _PERIOD_US = Path("/sys/fs/cgroup"), 100_000
# A tenth of one vCPU or two: from here on stoker itself says that others were there.
_BUSY_VCPUS = 0.15
# How far the parts of a training on the CPU may miss its step.
_MOST_UNEXPLAINED = 0.10
# More, between profile and trainings, and what was profiled is not the machine that trained.
_STEADY = 1.1
# How long a case waits for a machine that is quiet: as long as others use less than this.
_QUIET_VCPUS, _LOOK_SECONDS = 0.1, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case is a training and what is right to say of it. Milliseconds are of a batch or a step.

    Attributes:
        bottlenecks: That `decision.json` may name; unexplained: nobody could know.
        states: That the profile has to name one of; none: whatever.
        actions: That may be advised.
        today: `local.cN`, N cores.
        step_model: Training of a network on the CPU, on one core.
        quota: vCPUs that a control group allows the training, on all cores of the machine.
        is_stream: The dataset is a stream, which its workers divide.
        ranks: Trainer processes.
        has_slow_rank: The samples of the last rank cost twice as much.
        is_own: Batches come from a loader that the feed cannot reach, and the advice says so.
        busy: vCPUs that other programs burn all the while.
    """

    name: str
    about: str
    bottlenecks: tuple[str, ...]
    states: tuple[str, ...] = ()
    actions: tuple[str, ...]
    load_burn: float = 0.0
    load_slept: float = 0.0
    reads: bool = False
    step_burn: float = 0.0
    step_slept: float = 0.0
    step_python: float = 0.0
    workers: int = 1
    today: str = "local.c2"
    step_model: float = 0.0
    quota: float = 0.0
    is_stream: bool = False
    ranks: int = 1
    has_slow_rank: bool = False
    is_own: bool = False
    busy: float = 0.0

    @property
    def cores(self) -> int:
        """Returns the cores that the machine must have: a quota needs one more than it allows."""
        return int(self.today.removeprefix("local.c")) + (self.quota > 0)


def _trains(cores: int, *, has_quota: bool) -> Case:
    """Returns a training on the CPU; a data host takes its loading where a core is left for it."""
    has_room = (os.cpu_count() or 1) > cores
    words = "core trains" if cores == 1 else "cores train"
    about = f"a network trains on the CPU next to its workers, on {cores}"
    return Case(
        name=f"{cores} {words}{', quota' * has_quota}",
        about=about + (" of more cores, by a quota" if has_quota else ""),
        bottlenecks=("cpu",),
        states=("throttled",) if has_quota else ("cpu",),
        actions=("heterogeneous",) if has_room and not has_quota else ("keep",),
        load_burn=40 * cores,
        step_model=60 * cores,
        workers=cores,
        today=f"local.c{cores}",
        quota=cores if has_quota else 0,
    )


CASES: tuple[Case, ...] = (
    Case(
        name="compute",
        about="the step computes, loading is little",
        bottlenecks=("accelerator",),
        states=("accelerator",),
        actions=("keep",),
        load_burn=4,
        step_slept=40,
    ),
    Case(
        name="sleep",
        about="the loader waits for a service, one worker",
        bottlenecks=("latency",),
        states=("workers",),
        actions=("tune",),
        load_slept=60,
        step_slept=8,
    ),
    Case(
        name="image",
        about="one worker decodes on two cores",
        bottlenecks=("workers",),
        states=("workers",),
        actions=("tune",),
        load_burn=40,
        step_slept=8,
    ),
    Case(
        name="no workers",
        about="num_workers=0: loading and training take turns",
        bottlenecks=("workers",),
        states=("workers",),
        actions=("tune",),
        load_burn=30,
        step_slept=20,
        workers=0,
    ),
    Case(
        name="optimal",
        about="two workers load in half of a step",
        bottlenecks=("accelerator",),
        states=("accelerator",),
        actions=("keep",),
        load_burn=20,
        step_slept=30,
        workers=2,
    ),
    Case(
        name="gil",
        about="Python code in the trainer's main thread",
        bottlenecks=("accelerator",),
        states=("gil",),
        actions=("keep",),
        load_burn=5,
        step_python=40,
    ),
    Case(
        name="disk",
        about="128 MB a batch from one disk, page cache dropped",
        bottlenecks=("storage", "latency", "workers"),
        states=("storage", "workers"),
        actions=("keep", "tune"),
        reads=True,
        step_slept=5,
    ),
    Case(
        name="one core",
        about="loading and training share one core; a data host is available",
        bottlenecks=("cpu",),
        states=("cpu",),
        actions=("heterogeneous",),
        load_burn=40,
        step_burn=20,
        today="local.c1",
    ),
    Case(
        name="shared cores",
        about="two workers and the training on two cores, and no core is left for a data host",
        bottlenecks=("cpu",),
        states=("cpu",),
        actions=("keep",),
        load_burn=60,
        step_burn=15,
        workers=2,
    ),
    Case(
        name="stream",
        # No plan sets the workers of a stream: it would be read otherwise. The advice names them.
        about="one worker reads a stream from a service; a data host has no shard to read",
        bottlenecks=("latency", "workers"),
        states=("workers",),
        actions=("keep",),
        load_slept=60,
        step_slept=8,
        is_stream=True,
    ),
    Case(
        name="two ranks",
        about="two ranks; each waits for a service, with one worker",
        bottlenecks=("latency", "workers"),
        states=("workers",),
        actions=("tune",),
        load_slept=40,
        step_slept=8,
        ranks=2,
    ),
    Case(
        name="slow rank",
        about="one of two ranks waits for a service twice as long, and the other one for it",
        bottlenecks=("latency", "workers", "unexplained"),
        states=("straggler",),
        actions=("tune", "keep"),
        load_slept=40,
        step_slept=8,
        ranks=2,
        has_slow_rank=True,
    ),
    Case(
        name="own loader",
        about="one core, as above, but the loader is torchdata's, which no data host can feed",
        bottlenecks=("cpu", "workers", "unexplained"),
        actions=("keep",),
        load_burn=40,
        step_burn=20,
        workers=0,
        today="local.c1",
        is_own=True,
    ),
    Case(
        name="busy machine",
        about="one worker decodes on two cores, of which other programs have most",
        bottlenecks=("workers", "cpu"),
        actions=("tune", "keep"),
        load_burn=40,
        step_slept=8,
        busy=1.5,
    ),
    *(_trains(cores, has_quota=has_quota) for has_quota in (False, True) for cores in (1, 2, 4)),
)
QUICK = ("compute", "sleep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row shows one case. Seconds are of a step.

    Attributes:
        verdict: The bottleneck that was named; `cannot tell`: none.
        states: That the profile named.
        promised: Ratio to today's step, with its band; of `keep`: the step over the profiled one.
        measured: The median ratio of the pairs; of `keep`: today's step over the profiled one.
        is_right: Bottleneck, state and action are among those that are right.
        is_inside: The measured ratio is inside the promised band.
        busy_vcpus: That this benchmark kept busy beside, on purpose.
        others_vcpus: vCPUs that other programs, these among them, kept busy meanwhile.
        speed_change: Of the machine's cores meanwhile, the quickest look over the slowest.
        steps_today: Of the runs on today's cluster, one a pair.
        error: How far the parts of the profile miss its step, as a share of it.
        without_quota: Today's step without the quota over the one with it; 0: there is none.
    """

    case: str
    about: str
    verdict: str
    states: tuple[str, ...]
    action: str
    plan: str
    promised: float
    low: float
    high: float
    measured: float
    ratios: tuple[float, ...] = field(default=())
    can_tell: bool
    is_right: bool
    is_inside: bool
    profiled_step: float
    profiled_others: float
    busy_vcpus: float
    others_vcpus: float
    seconds: float
    when: str
    speed_change: float = 1.0
    steps_today: tuple[float, ...] = field(default=())
    error: float = 0.0
    without_quota: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Returns whether other programs, ours among them, had a part of the vCPUs."""
        return self.busy_vcpus > 0 or self.profiled_others > _BUSY_VCPUS

    @property
    def is_steady(self) -> bool:
        """Returns whether the machine was as quick all the while."""
        return self.speed_change <= _STEADY

    @property
    def is_honest(self) -> bool:
        """Returns whether it is right and inside; if busy, also if it cannot tell and buys nothing.

        So it is where other machines on the same cores change the speed of these.
        """
        if not self.can_tell:
            return (self.is_busy or not self.is_steady) and self.action in ("keep", "tune")
        return self.is_right and self.is_inside


def run_case(
    case: Case,
    *,
    per_ms: "Speeds",
    pairs: int,
    busy: float,
    keep: Path | None = None,
) -> Row:
    """Profiles, decides, follows the advice, and says what held.

    Raises:
        RuntimeError: If a command failed, with the end of what it wrote.
    """
    began, others, speeds = time.monotonic(), Busy(), [speed()]
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="honesty-", dir=os.environ.get("TMPDIR"))
        folder = Path(stack.enter_context(temporary))
        group = stack.enter_context(quota_group(case.quota)) if case.quota else None
        files = _files(folder / "files") if case.reads else None

        def write(file: str, *, steps: int | None = None, workers: int = case.workers) -> None:
            told = replace(case, workers=workers)
            text = _workload(told, per_ms, files=files, group=group, steps=steps)
            (folder / file).write_text(text)

        write("profiled.json")
        profile = stoker(folder, "profile", "profiled.json", "--out", "profile.json")
        speeds.append(speed())
        decide = ("decide", "profile.json", "--workload", "profiled.json")
        decision = stoker(folder, *decide, "--out", "decision.json")
        if keep is not None:
            for name in ("profile", "decision"):
                kept = keep / f"{case.name}{'-busy' if busy else ''}-{name}.json"
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes((folder / f"{name}.json").read_bytes())
        plan, today = advised(decision), profile["step"]["step_seconds"]
        groups = group_words(plan)
        steps = min(max(round(_RUN_SECONDS / today), _LEAST_STEPS), _MOST_STEPS)
        write("run.json", steps=steps)
        runs = {"today": ["run.json", f"--group=dnn={case.today}:1"]}
        if plan["action"] != "keep":
            runs["plan"] = ["run.json", *groups]
        if case.is_stream and plan["action"] == "tune":
            # Nothing but the script says how many shards there are.
            write("more.json", steps=steps, workers=plan["groups"][0]["workers_per_host"])
            runs["plan"] = ["more.json", *groups]
        found: dict[str, list[float]] = {which: [] for which in runs}
        for pair in range(pairs):
            for which, words in runs.items():
                out = f"{which}-{pair}.json"
                training = stoker(folder, "train", *words, "--out", out)
                found[which].append(training["measured"]["step_seconds"])
                speeds.append(speed())
        without_quota = 0.0
        if group is not None:
            set_quota(group, os.cpu_count() or 1)
            freed = stoker(folder, "train", *runs["today"], "--out", "freed.json")
            today_again = statistics.median(found["today"])
            without_quota = freed["measured"]["step_seconds"] / today_again
    predicted = plan["predicted"]
    base = found["today"] if "plan" in found else [today] * pairs
    target = found.get("plan", found["today"])
    ratios = tuple(new / old for new, old in zip(target, base, strict=True))
    low, high = (predicted[f"step_seconds_{end}"] / today for end in ("low", "high"))
    measured = statistics.median(ratios)
    states = tuple(state["id"] for state in profile.get("states", ()))
    can_tell = "unexplained" in case.bottlenecks or decision["bottleneck"] != "unexplained"
    is_named = not case.states or bool(set(case.states) & set(states))
    # Batches that only `timed` saw have no parts to hold against their step.
    error = profile.get("check", {}).get("error", 0.0)
    is_explained = not case.step_model or abs(error) <= _MOST_UNEXPLAINED
    return Row(
        case=case.name,
        about=case.about,
        verdict=decision["bottleneck"] if can_tell else "cannot tell",
        states=states,
        action=plan["action"],
        plan=" ".join(groups[1::2]),
        promised=predicted["step_seconds"] / today,
        low=low,
        high=high,
        measured=measured,
        ratios=ratios,
        can_tell=can_tell,
        is_right=decision["bottleneck"] in case.bottlenecks
        and is_named
        and plan["action"] in case.actions
        and is_explained
        and case.is_own == any(advice["id"] == "unfed" for advice in decision["advice"])
        # The limit was to be taken away: that has to help.
        and without_quota < 1,
        is_inside=low <= measured <= high,
        profiled_step=today,
        profiled_others=profile["observed"].get("others_vcpus") or 0.0,
        busy_vcpus=busy,
        others_vcpus=others.others_vcpus(),
        seconds=time.monotonic() - began,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        speed_change=max(speeds) / min(speeds),
        steps_today=tuple(found["today"]),
        error=error,
        without_quota=without_quota,
    )


def advised(decision: Mapping) -> Mapping:  # type: ignore[type-arg]
    """Returns the plan to follow: the chosen one, or first the free change of the script."""
    free = (
        plan
        for plan in decision["plans"]
        if plan["action"] == "tune" and not plan["feasible"] and "predicted" in plan
    )
    # A probable plan is a try, no advice that is judged here.
    kept = decision["plan"]
    if decision["verdict"] == "probable":
        kept = next(plan for plan in decision["plans"] if plan["action"] == "keep")
    return next(free, kept)


@contextlib.contextmanager
def quota_group(vcpus: float) -> Iterator[Path]:
    """Yields a control group that may use `vcpus`, before all others of the machine.

    Raises:
        OSError: If none can be made here: that takes root, and groups that can be written to.
    """
    is_v2 = (_GROUPS / "cgroup.controllers").exists()
    if is_v2 and "cpu" not in (_GROUPS / "cgroup.subtree_control").read_text().split():
        (_GROUPS / "cgroup.subtree_control").write_text("+cpu")
    folder = (_GROUPS if is_v2 else _GROUPS / "cpu") / f"honesty-{os.getpid()}"
    folder.mkdir()
    try:
        set_quota(folder, vcpus)
        name, most = ("cpu.weight", "10000") if is_v2 else ("cpu.shares", "262144")
        (folder / name).write_text(most)
        yield folder
    finally:
        # Processes that were killed leave it a moment later.
        until = time.monotonic() + _LOOK_SECONDS
        while (folder / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        folder.rmdir()


def set_quota(group: Path, vcpus: float) -> None:
    """Lets a control group use so many vCPUs."""
    quota = str(int(vcpus * _PERIOD_US))
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
    else:
        (group / "cpu.cfs_quota_us").write_text(quota)


def why_left_out(case: Case) -> str:
    """Says why a case cannot be tried on this machine; empty where it can."""
    has = os.cpu_count() or 1
    if case.cores > has:
        return f"it needs {case.cores} cores, and there are {has}"
    if case.is_own and importlib.util.find_spec("torchdata") is None:
        return "it needs torchdata: run it by .venv-libraries/bin/python (make test-libraries)"
    if case.quota:
        try:
            with quota_group(case.quota):
                pass
        except OSError as err:
            return f"it needs a control group: {err}"
    return ""


def wait_until_quiet(most_seconds: float) -> None:
    """Waits until other programs leave the machine, `most_seconds` at most."""
    until = time.monotonic() + most_seconds
    while time.monotonic() < until:
        busy = Busy()
        time.sleep(_LOOK_SECONDS)
        if busy.others_vcpus() < _QUIET_VCPUS:
            return


@contextlib.contextmanager
def burning(vcpus: float, *, most_seconds: float) -> Iterator[None]:
    """Keeps so many vCPUs busy meanwhile, and no longer than `most_seconds`."""
    until = time.monotonic() + most_seconds
    shares = [min(1.0, vcpus - number) for number in range(8) if vcpus > number]
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=_burn, args=(share, until), daemon=True) for share in shares]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.terminate()
            burner.join()


def _burn(share: float, until: float) -> None:
    while time.monotonic() < until:
        began = time.monotonic()
        while time.monotonic() - began < share * _DUTY_SECONDS:
            pass
        time.sleep((1 - share) * _DUTY_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What one core of this machine does in a CPU-millisecond.

    Attributes:
        blurs: Passes of the blur.
        turns: Turns of a Python loop.
        trainings: Passes of the network.
    """

    blurs: float
    turns: float
    trainings: float


def trainings_per_millisecond() -> float:
    """Returns the network's passes per CPU-millisecond here: the most of several tries."""
    import torch

    from honesty_trainer import Network

    torch.set_num_threads(1)
    network, best = Network(), 0.0
    for _ in range(6):
        began = time.thread_time()
        network.train(20)
        best = max(best, 20 / (time.thread_time() - began) / 1000)
    return best


def turns_per_millisecond() -> float:
    """Returns turns of a Python loop per CPU-millisecond here: the most of several tries."""
    from honesty_trainer import python_loop

    best = 0.0
    for _ in range(5):
        began = time.thread_time()
        python_loop(200_000)
        best = max(best, 200_000 / (time.thread_time() - began) / 1000)
    return best


def _files(folder: Path) -> Path:
    folder.mkdir()
    block = os.urandom(1 << 20)
    for number in range(_NUM_FILES):
        with (folder / f"{number:03}").open("wb") as file:
            for _ in range(_FILE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return folder


def group_words(plan: Mapping) -> list[str]:  # type: ignore[type-arg]
    """Returns the options of `stoker train` that follow a plan."""
    return [word for group in plan["groups"] for word in ("--group", _named(group))]


def _named(group: Mapping) -> str:  # type: ignore[type-arg]
    workers = group.get("workers_per_host")
    words = f"{group['role']}={group['instance_type']}:{group['count']}"
    return words if workers is None else f"{words}:{workers}"


def _workload(
    case: Case, speeds: Speeds, *, files: Path | None, group: Path | None, steps: int | None
) -> str:
    types = {case.today, "local.c1"} if case.step_model else {case.today}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    command = [sys.executable, *(launcher if case.ranks > 1 else [])]
    command += [str(HERE / "honesty_trainer.py")]
    # A batch is eight samples.
    command += ["--burn", str(round(case.load_burn * speeds.blurs / 8))]
    command += ["--slept", str(case.load_slept / 8 / 1000)]
    command += ["--read", str(files)] if files else []
    command += ["--step-burn", str(round(case.step_burn * speeds.blurs))]
    command += ["--step-slept", str(case.step_slept / 1000)]
    command += ["--step-python", str(round(case.step_python * speeds.turns))]
    command += ["--step-model", str(round(case.step_model * speeds.trainings))]
    command += ["--group", str(group)] if group else []
    command += ["--stream"] if case.is_stream else []
    command += ["--slow-rank", str(case.ranks - 1)] if case.has_slow_rank else []
    command += ["--own"] if case.is_own else []
    command += ["--workers", str(case.workers)]
    command += ["--steps", str(steps)] if steps else []
    return json.dumps(
        {
            "name": case.name.replace(",", "").replace(" ", "-"),
            "command": command,
            "cluster": {"dnn": {"instance_type": case.today, "count": 1}},
            "constraints": {
                "objective": "time",
                "max_data_hosts": 1,
                "allowed_instance_types": sorted(types),
            },
            "profile": {"budget_seconds": BUDGET_SECONDS},
        }
    )


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table of docs/method.md."""
    lines = [
        "| script | machine | verdict | advice | promised ratio (band) | measured | honest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        machine = f"others: {row.profiled_others:.1f} vCPUs" if row.is_busy else "quiet"
        if not row.is_steady:
            machine += f", its own speed changed by {row.speed_change - 1:.0%}"
        advice = f"{row.action}: {row.plan}" if row.action != "keep" else "keep"
        promised = f"{row.promised:.2f} ({row.low:.2f} to {row.high:.2f})"
        lines.append(
            f"| {row.case}: {row.about} | {machine} | {row.verdict} | {advice} "
            f"| {promised if row.can_tell else 'nothing'} | {row.measured:.2f} "
            f"| {'yes' if row.is_honest else '**no**'} |"
        )
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """Says how many held."""
    words = []
    for title, own in (
        ("quiet", [row for row in rows if not row.is_busy]),
        ("busy", [row for row in rows if row.is_busy]),
    ):
        if own:
            honest = sum(row.is_honest for row in own)
            silent = sum(not row.can_tell for row in own)
            words.append(
                f"{title} machine: {honest} of {len(own)} honest"
                + (f", {silent} of them by saying that it cannot tell" if silent else "")
            )
    return "; ".join(words) or "no case was run"


def text(row: Row) -> str:
    """Says the case in one line."""
    mark = "ok " if row.is_honest else "NOT"
    return (
        f"{mark} {row.case:<13} {row.verdict:<12} {row.action:<14} promised {row.promised:.2f} "
        f"({row.low:.2f}..{row.high:.2f}) measured {row.measured:.2f}  "
        f"others {row.profiled_others:.2f}, then {row.others_vcpus:.2f} vCPUs; "
        f"states {','.join(row.states) or '-'}; step {row.profiled_step * 1e3:.1f} ms profiled, "
        f"{statistics.median(row.steps_today) * 1e3:.1f} today, parts {row.error:+.0%}, "
        + (f"without the quota {row.without_quota:.2f}, " if row.without_quota else "")
        + f"speed within {row.speed_change - 1:.0%}; "
        f"{row.seconds:.0f} s"
    )


def _read(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    rows = json.loads(file.read_text())["rows"]
    lists = ("states", "ratios", "steps_today")
    return [Row(**{**row, **{name: tuple(row.get(name, ())) for name in lists}}) for row in rows]


def _write(file: Path, rows: Sequence[Row]) -> None:
    document = {
        "machine": machine(),
        "summary": summary(rows),
        "rows": [asdict(row) for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cases, one pair each")
    parser.add_argument("--case", nargs="+", choices=names, metavar="NAME", help="only these")
    parser.add_argument("--busy", type=float, default=0.0, metavar="VCPUS", help="kept busy beside")
    parser.add_argument(
        "--wait-minutes", type=float, default=0.0, metavar="N", help="for a machine that is quiet"
    )
    parser.add_argument("--resume", action="store_true", help="leaves out what FILE has")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"rows go to ({RESULTS.name})")
    parser.add_argument("--pairs", type=int, metavar="N", help="runs of each cluster")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="profiles and decisions go there")
    parser.add_argument("--markdown", action="store_true", help="only prints FILE's table")
    options = parser.parse_args()
    # A quick look does not take the place of a whole run.
    aside = Path(tempfile.gettempdir()) / "honesty-quick.json"
    file: Path = options.out or (aside if options.quick else RESULTS)
    kept = {(row.case, row.is_busy): row for row in _read(file)}
    if options.markdown:
        print(markdown([*kept.values()]))
        return 0
    wanted = options.case or (QUICK if options.quick else names)
    cases = [
        c
        for c in CASES
        if c.name in wanted and not (options.resume and (c.name, options.busy + c.busy > 0) in kept)
    ]
    speeds = Speeds(
        blurs=passes_per_millisecond(),
        turns=turns_per_millisecond(),
        trainings=trainings_per_millisecond(),
    )
    failed = 0
    made: list[Row] = []
    for case in cases:
        why = why_left_out(case)
        if why:
            print(f"{case.name}: left out: {why}", flush=True)
            continue
        pairs = options.pairs or (1 if options.quick else PAIRS)
        if options.wait_minutes:
            wait_until_quiet(60 * options.wait_minutes)
        try:
            busy = options.busy or case.busy
            with burning(busy, most_seconds=600):
                row = run_case(
                    case,
                    per_ms=speeds,
                    pairs=pairs,
                    busy=busy,
                    keep=options.keep,
                )
            print(text(row), flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as err:
            failed += 1
            print(f"{case.name}: FAILED: {err}", file=sys.stderr, flush=True)
            continue
        kept[case.name, row.is_busy] = row
        made.append(row)
        order = [
            kept[name, busy] for busy in (False, True) for name in names if (name, busy) in kept
        ]
        _write(file, order)
    print(summary([*kept.values()]))
    print(f"rows: {file}")
    return 1 if failed or not all(row.is_honest for row in made) else 0


if __name__ == "__main__":
    sys.exit(main())
