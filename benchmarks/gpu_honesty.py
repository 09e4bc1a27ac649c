"""Advice on trainings of a GPU: profiled, decided on, followed, and held against whole epochs."""

import contextlib
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpu_machine import TRAINER, Bench, CommandError
from honesty import advised, group_words

Json = Mapping[str, object]
_PROFILE_START_SECONDS, _RUN_SECONDS = 90.0, 120.0
# Of a training of three epochs; today's and the advised one.
_WANTED_SECONDS = 10.0
# Of the first epoch, in which everything starts, and which does not count.
_FIRST_STEPS = 12
_STEPS_AN_EPOCH = 42
LONGER = "needs a longer budget"
# Of a profile's error where it measured too little.
_ASKS_FOR_TIME = ("not enough was measured", "longer budget")
# More than this, and stoker itself says that others were there.
_BUSY_VCPUS = 0.15
# A step that is to stay may differ so much from run to run.
_SAME = 0.06


def run_name(case: str) -> str:
    """Returns the name of a case as a workload's may be: `torch-compile`."""
    return re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training, and what is right to say of it.

    Attributes:
        options: Of gpu_trainer.py.
        bottlenecks: That the decision may name.
        states: That the profile has to name one of; none: whatever.
        actions: That may be advised.
        is_whole: It has all cores of the machine, not a quarter.
        workers: "quarter", "all", "rest" (all but two) or a number.
        seconds: Start-up, profile and two training runs, with one H100 and 16 cores, about.
        budget: Of its profile, in times of the other cases'.
        fix: The fix that has to be named, and which option of the script follows it.
    """

    name: str
    about: str
    options: tuple[str, ...]
    bottlenecks: tuple[str, ...]
    states: tuple[str, ...] = ()
    actions: tuple[str, ...]
    is_whole: bool = False
    workers: str = "quarter"
    fix: tuple[str, str] | None = None
    seconds: float = 75.0
    budget: float = 1.0


_LIGHT = ("--augment", "light")
CASES: tuple[Case, ...] = (
    Case(
        name="starved",
        about="ResNet-50, RandAugment, 4 workers on 4 cores",
        options=("--model", "resnet50"),
        bottlenecks=("cpu",),
        states=("cpu",),
        actions=("heterogeneous",),
    ),
    Case(
        name="GPU-bound",
        about="ResNet-152, light augmentation, all cores but two are workers",
        options=("--model", "resnet152", *_LIGHT),
        bottlenecks=("accelerator",),
        states=("accelerator",),
        actions=("keep",),
        is_whole=True,
        workers="rest",
        seconds=65.0,
    ),
    Case(
        name="no workers",
        about="ResNet-50, RandAugment, num_workers=0 on 4 cores",
        options=("--model", "resnet50"),
        bottlenecks=("workers",),
        states=("workers",),
        actions=("tune", "heterogeneous"),
        workers="0",
        seconds=100.0,
    ),
    Case(
        name="too few workers",
        about="ResNet-50, RandAugment, 4 workers beside idle cores",
        options=("--model", "resnet50"),
        bottlenecks=("workers",),
        states=("workers",),
        actions=("tune",),
        is_whole=True,
        seconds=70.0,
    ),
    Case(
        name="torch.compile",
        about="the starved one, compiled",
        options=("--model", "resnet50", "--compile"),
        seconds=105.0,
        bottlenecks=("cpu",),
        states=("cpu",),
        actions=("heterogeneous",),
    ),
    Case(
        name="transfer",
        about="154 MB of float32 a batch, ready at once, not pinned, small network",
        options=("--model", "small", "--ready", "--batch", "256", "--no-pin"),
        bottlenecks=("accelerator", "transfer"),
        states=("transfer",),
        actions=("keep", "tune"),
        is_whole=True,
        workers="half",
        fix=("pin", "--no-pin"),
        seconds=65.0,
    ),
    Case(
        name="neighbour",
        about="MobileNet-v3-small, as many loaders as cores, which keep all of them busy",
        options=("--model", "mobilenet_v3_small", "--batch", "64", *_LIGHT),
        bottlenecks=("cpu", "accelerator", "neighbour"),
        states=("neighbour",),
        actions=("keep", "tune"),
        is_whole=True,
        workers="all",
        # Beside as many busy workers as cores, its variants take longer to begin.
        seconds=105.0,
        budget=2.0,
    ),
    Case(
        name="CUDA graphs",
        about="ResNet-50, torch.compile, reduce-overhead, 4 workers on 4 cores",
        options=("--model", "resnet50", "--compile", "--compile-mode=reduce-overhead"),
        bottlenecks=("cpu",),
        states=("cpu",),
        actions=("heterogeneous",),
        seconds=100.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One case. Ratios are of seconds over whole epochs, the advised training's over today's.

    Attributes:
        verdict: Bottleneck that the decision names; LONGER: the profile asks for more time.
        kind: sure, probable, none or unknown, as the decision has it.
        promised: Ratio, with its band; of `keep` 1: nothing is to be gained.
        measured: Ratio of the two trainings; of `keep` today's whole step over the profiled one.
        today_ms: A step of torch's own training, over whole epochs.
        advised_ms: The same where the advice was followed; None: nothing to follow.
        is_right: Bottleneck, states and action are among those that are right.
        is_inside: The measured ratio is inside the band.
        others_vcpus: vCPUs that other programs used during the profile.
    """

    case: str
    about: str
    verdict: str
    kind: str = ""
    states: tuple[str, ...]
    action: str
    plan: str
    promised: float
    low: float
    high: float
    measured: float
    today_ms: float
    advised_ms: float | None
    profiled_ms: float
    predicted_ms: float
    explained: bool | None
    is_right: bool
    is_inside: bool
    seconds: float
    note: str = ""
    others_vcpus: float = 0.0
    is_carried_over: bool = False

    @property
    def is_honest(self) -> bool:
        """Whether it is right and inside; beside other programs also if it says it cannot tell.

        Then it may advise nothing that takes another host, and promise nothing of a fix.
        """
        is_silent = self.kind == "unknown" and self.advised_ms is None
        if is_silent and self.others_vcpus > _BUSY_VCPUS:
            return self.action in ("keep", "tune")
        return self.is_right and self.is_inside


def judge(case: Case, bench: Bench) -> Judged:
    """Profiles, decides, trains as today and as advised.

    Raises:
        NoTimeError: If too little of the whole run's time is left.
        CommandError: If a command failed.
    """
    bench.need(case.seconds if not bench.is_tiny else 20)
    began = time.monotonic()
    trial = _Trial(case, bench)
    try:
        with trial.part("advice"):
            profile, decision = trial.advice()
    except CommandError as err:
        if not any(words in str(err) for words in _ASKS_FOR_TIME):
            raise
        return _longer(case, str(err), seconds=time.monotonic() - began)
    plan = followed_plan(decision)
    with trial.part("today"):
        today = trial.trained_as_today(profile["step"]["step_seconds"])  # type: ignore[index]
    with trial.part("followed"):
        followed = trial.followed(plan, profile)
    return _row(trial, profile, decision, plan, today, followed, seconds=time.monotonic() - began)


def followed_plan(decision: Mapping) -> Mapping:  # type: ignore[type-arg]
    """Returns the plan to follow: a free change, the chosen plan, or else the probable one."""
    plan = advised(decision)
    probable = decision.get("probable")
    return probable if plan["action"] == "keep" and probable else plan


def _longer(case: Case, words: str, *, seconds: float) -> Judged:
    """Returns the row of a profile that says that its budget is too short: honest, and no more."""
    return Judged(
        case=case.name,
        about=case.about,
        verdict=LONGER,
        states=(),
        action="keep",
        plan="",
        promised=1.0,
        low=1.0,
        high=1.0,
        measured=1.0,
        today_ms=0.0,
        advised_ms=None,
        profiled_ms=0.0,
        predicted_ms=0.0,
        explained=None,
        is_right=True,
        is_inside=True,
        seconds=seconds,
        note=words[-300:],
    )


class _Trial:
    """One case on this machine: its workload, and its trainings."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self.case = case
        self.bench = bench
        self.cores = len(bench.cores) if case.is_whole else bench.quarter
        self.today = f"local.c{self.cores}"
        self.epochs = 3
        # Seconds of each part, in words.
        self.lasted: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Notes how long a part of the case lasts."""
        began = time.monotonic()
        yield
        self.lasted.append(f"{name} {time.monotonic() - began:.0f} s")

    @property
    def budget_seconds(self) -> float:
        """Of the profile."""
        return self.case.budget * self.bench.budget_seconds

    @property
    def workers(self) -> int:
        cores = len(self.bench.cores)
        named = {
            "quarter": self.bench.quarter,
            "all": cores,
            "rest": max(1, cores - 2),
            "half": max(1, cores // 2),
        }
        return named[self.case.workers] if self.case.workers in named else int(self.case.workers)

    def words(self, *, epochs: int, without: str = "") -> list[str]:
        """Returns the script's options, less one of them."""
        bench = self.bench
        words = [*self.case.options, "--data", str(bench.pictures), "--device", bench.device]
        words += ["--workers", str(self.workers), "--epochs", str(epochs)]
        if bench.is_tiny:
            # Later options win.
            # Inductor takes a minute on two cores.
            words += ["--compile-backend", "eager"]
            words += ["--model", "tiny", "--side", "32", "--batch", "8", "--ready-batches", "40"]
        return [word for word in words if word != without]

    def workload(self, name: str, *, epochs: int, record: str) -> str:
        """Writes the workload; returns its file's name."""
        bench = self.bench
        script = [sys.executable, str(TRAINER), *self.words(epochs=epochs)]
        if record:
            # Of a profile no epoch is shorter than the others.
            script += ["--first-steps", str(_FIRST_STEPS), "--record", str(bench.folder / record)]
        document = {
            "name": run_name(self.case.name),
            "command": script,
            "cluster": {"dnn": {"instance_type": self.today, "count": 1}},
            "constraints": {
                "max_data_hosts": bench.data_hosts,
                "allowed_instance_types": [self.today],
            },
            "profile": {"budget_seconds": self.budget_seconds},
        }
        (bench.folder / name).write_text(json.dumps(document))
        return name

    def advice(self) -> tuple[dict, dict]:  # type: ignore[type-arg]
        """Returns profile and decision."""
        bench = self.bench
        file = self.workload("profiled.json", epochs=10_000, record="")
        seconds = self.budget_seconds + _PROFILE_START_SECONDS
        profile = bench.stoker("profile", file, "--out", "profile.json", seconds=seconds)
        words = ("decide", "profile.json", "--workload", file, "--out", "decision.json")
        decision = bench.stoker(*words, seconds=30)
        if bench.keep is not None:
            for name in ("profile", "decision"):
                kept = bench.keep / f"{self.case.name.replace(' ', '-')}-{name}.json"
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(bench.folder / f"{name}.json", kept)
        return dict(profile), dict(decision)

    def trained_as_today(self, step_seconds: float) -> dict[str, object]:
        """Trains with torch alone, on today's cores."""
        epoch_seconds = _STEPS_AN_EPOCH * step_seconds
        # A slow training has two epochs: one to start up, one that counts.
        self.epochs = 2 if 3 * epoch_seconds > _WANTED_SECONDS else 3
        return self.train_with_torch(without="")

    def train_with_torch(self, *, without: str) -> dict[str, object]:
        """Trains with torch alone; returns what the script recorded."""
        words = self.words(epochs=self.epochs, without=without)
        words += ["--first-steps", str(_FIRST_STEPS)]
        cores = self.bench.cores[: self.cores]
        return self.bench.python("gpu_trainer.py", *words, seconds=_RUN_SECONDS, cores=cores)

    def followed(self, plan: Json, profile: Json) -> dict[str, object] | None:
        """Trains as advised; None: the advice is to change nothing."""
        if plan["action"] != "keep":
            self.workload("run.json", epochs=self.epochs, record="fed.json")
            groups = group_words(plan)
            self.bench.stoker(
                "train", "run.json", *groups, "--out", "trained.json", seconds=_RUN_SECONDS
            )
            seen: dict[str, object] = json.loads((self.bench.folder / "fed.json").read_text())
            return seen
        if self.case.fix is not None and self.fix(profile) is not None:
            return self.train_with_torch(without=self.case.fix[1])
        return None

    def fix(self, profile: Json) -> Json | None:
        """Returns the fix of the profile that the case is about."""
        if self.case.fix is None:
            return None
        fixes: Sequence[Json] = profile.get("fixes", ())  # type: ignore[assignment]
        matching = (fix for fix in fixes if self.case.fix[0] in str(fix["id"]))
        return next(matching, None)


def whole(predicted: Json, end: str = "") -> float:
    """Returns predicted seconds of a step over whole epochs, else of one within an epoch.

    Args:
        end: _low or _high: that end of the band.
    """
    seconds = predicted.get(f"whole_step_seconds{end}") or predicted[f"step_seconds{end}"]
    return float(seconds)  # type: ignore[arg-type]


def promise(trial: _Trial, profile: Json, decision: Json, plan: Json) -> tuple[float, float, float]:
    """Returns the promised ratio to today, and its band."""
    keep = next(
        (each for each in decision["plans"] if each["action"] == "keep" and "predicted" in each),  # type: ignore[attr-defined]
        plan,
    )
    predicted: Json = plan["predicted"]  # type: ignore[assignment]
    today = whole(keep["predicted"])
    ratio, low, high = (whole(predicted, end) / today for end in ("", "_low", "_high"))
    if plan["action"] != "keep":
        return ratio, low, high
    fix = trial.fix(profile)
    saved = float(fix.get("saves_seconds") or 0.0) / today if fix is not None else 0.0  # type: ignore[arg-type]
    return 1 - saved, min(low, 1 - _SAME) - saved, max(high, 1 + _SAME) - saved


def _row(
    trial: _Trial,
    profile: Mapping,  # type: ignore[type-arg]
    decision: Mapping,  # type: ignore[type-arg]
    plan: Mapping,  # type: ignore[type-arg]
    today: Json,
    followed: Json | None,
    *,
    seconds: float,
) -> Judged:
    case = trial.case
    ratio, low, high = promise(trial, profile, decision, plan)
    today_seconds = float(today["whole_step_seconds"])  # type: ignore[arg-type]
    advised_seconds = None if followed is None else float(followed["whole_step_seconds"])  # type: ignore[arg-type]
    base = today_seconds if followed is not None else whole(plan["predicted"])
    measured = (today_seconds if advised_seconds is None else advised_seconds) / base
    states = tuple(state["id"] for state in profile.get("states", ()))
    is_named = not case.states or bool(set(case.states) & set(states))
    is_right = (
        decision["bottleneck"] in case.bottlenecks and is_named and plan["action"] in case.actions
    )
    check = profile.get("check") or {}
    return Judged(
        case=case.name,
        about=case.about,
        verdict=decision["bottleneck"],
        kind=decision.get("verdict") or "",
        states=states,
        action=plan["action"],
        plan=" ".join(group_words(plan)[1::2]),
        promised=ratio,
        low=low,
        high=high,
        measured=measured,
        today_ms=1e3 * today_seconds,
        advised_ms=None if advised_seconds is None else 1e3 * advised_seconds,
        profiled_ms=1e3 * profile["step"]["step_seconds"],
        predicted_ms=1e3 * whole(plan["predicted"]),
        explained=check.get("explained"),
        is_right=is_right,
        is_inside=low <= measured <= high,
        seconds=seconds,
        note=", ".join(trial.lasted),
        others_vcpus=(profile.get("observed") or {}).get("others_vcpus") or 0.0,
    )


def text(row: Judged) -> str:
    """Says the case in one line."""
    mark = "ok " if row.is_honest else "NOT"
    advised_words = "-" if row.advised_ms is None else f"{row.advised_ms:.1f} ms"
    promised = f"promised {row.promised:.2f} ({row.low:.2f}..{row.high:.2f})"
    parts = (
        f"{mark} {row.case:<16} {row.verdict:<12} {row.kind} {row.action:<14} {promised} "
        f"measured {row.measured:.2f}",
        f"states {','.join(row.states) or '-'}",
        f"profiled {row.profiled_ms:.1f} ms, torch's whole epochs {row.today_ms:.1f} ms, "
        f"advised {row.predicted_ms:.1f} ms predicted, {advised_words} measured",
        row.plan,
        row.note,
        f"{row.seconds:.0f} s",
    )
    return "; ".join(part for part in parts if part)
