"""Figures of the feed on a GPU, each next to torch's of the same run."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import measuring
from cases import SAMPLE_BYTES, Case
from gpu_machine import TRAINER, Bench

# Images of 0.15 MB a batch.
SIZES = {"0.6 MB": 4, "4.8 MB": 32, "19 MB": 128, "77 MB": 512}
# So many bytes are measured of each; more, and a batch of 0.6 MB takes too long.
_MEASURED_BYTES = {"0.6 MB": 2e9, "4.8 MB": 6e9, "19 MB": 7e9, "77 MB": 10e9}
_TINY_BYTES = 0.2e9
# The clusters of the audit of 2026-11-26: two agents of four workers, torch's four.
_AGENTS, _WORKERS = 2, 4
_LOSSES_EPOCHS = 2
_COMMAND_SECONDS = 150.0
# Of a case, about, with one H100 and 16 cores.
SECONDS = {"ingest": 20.0, "losses": 55.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, beside torch's of the same run.

    Attributes:
        group: Of gpu.py.
        figure: Name and unit.
        stoker: None: torch alone is measured.
        torch: None: there is nothing to compare with.
        seconds: That the case took.
        note: What else is to be known.
        is_carried_over: Copied from an earlier measurement, not made by this program.
    """

    group: str
    case: str
    figure: str
    stoker: float | None = None
    torch: float | None = None
    seconds: float = 0.0
    note: str = ""
    is_carried_over: bool = False


def ingest(bench: Bench, case: str) -> Iterator[Figure]:
    """Measures bytes into the device's memory, and CPU time of the trainer, at one batch size."""
    bench.need(SECONDS["ingest"] if not bench.is_tiny else 15)
    began = time.monotonic()
    size = SIZES[case]
    wanted = _TINY_BYTES if bench.is_tiny else _MEASURED_BYTES[case]
    steps = max(12, round(wanted / (size * SAMPLE_BYTES)))
    agents, workers = (1, 1) if bench.is_tiny else (_AGENTS, _WORKERS)
    base = {"batch_size": size, "steps": steps, "warmup": max(6, steps // 10)}
    base |= {"step_seconds": 0.0, "cost_seconds": 0.0, "device": bench.device}
    torch = measuring.trained("torch local", Case(workers=workers, **base))
    fed = Case(workers=agents * workers, **base)
    stoker = measuring.trained("stoker encrypted", fed, hosts=agents)
    seconds = time.monotonic() - began
    if not (torch["is_in_order"] and stoker["is_in_order"]):
        raise RuntimeError("the order of batches was lost")
    yield Figure(
        group="ingest",
        case=case,
        figure="GB/s into the device",
        stoker=stoker["megabytes_per_second"] / 1e3,
        torch=torch["megabytes_per_second"] / 1e3,
        seconds=seconds,
    )
    yield Figure(
        group="ingest",
        case=case,
        figure="CPU-s/GB of the trainer",
        stoker=stoker["cpu_seconds_per_gb"],
        torch=torch["cpu_seconds_per_gb"],
    )


def losses(bench: Bench, case: str) -> Iterator[Figure]:
    """Compares all losses and accuracies of a training alone and with data hosts, bit by bit."""
    bench.need(SECONDS["losses"] if not bench.is_tiny else 20)
    began = time.monotonic()
    words = [*_training_words(bench), "--deterministic", "--valid"]
    words += ["--epochs", str(_LOSSES_EPOCHS)]
    alone = trained_by_stoker(bench, words, hosts=0)
    fed = trained_by_stoker(bench, words, hosts=bench.data_hosts)
    pairs = list(zip(alone["losses"], fed["losses"], strict=True))  # type: ignore[call-overload]
    equal = sum(a == b for a, b in pairs)
    note = f"accuracies {'equal' if alone['accuracies'] == fed['accuracies'] else 'DIFFER'}"
    yield Figure(
        group="losses",
        case=f"{len(pairs)} steps, alone and with {bench.data_hosts} data hosts",
        figure="losses equal to the last bit",
        stoker=equal,
        torch=len(pairs),
        seconds=time.monotonic() - began,
        note=note,
    )


def trained_by_stoker(bench: Bench, words: list[str], *, hosts: int) -> dict[str, object]:
    """Trains by `stoker train` on a quarter of the cores, with data hosts on others."""
    record = bench.folder / "fed.json"
    record.unlink(missing_ok=True)
    kind = f"local.c{bench.quarter}"
    command = [sys.executable, str(TRAINER), *words, "--record", str(record)]
    document = {
        "name": "fed",
        "command": command,
        "cluster": {"dnn": {"instance_type": kind, "count": 1}},
    }
    (bench.folder / "fed-workload.json").write_text(json.dumps(document))
    groups = [f"--group=dnn={kind}:1"]
    groups += [f"--group=data={kind}:{hosts}"] if hosts else []
    out = ("--out", "fed-training.json")
    bench.stoker("train", "fed-workload.json", *groups, *out, seconds=_COMMAND_SECONDS)
    seen: dict[str, object] = json.loads(record.read_text())
    return seen


def _training_words(bench: Bench) -> list[str]:
    words = ["--data", str(bench.pictures), "--device", bench.device]
    words += ["--workers", str(bench.quarter)]
    if bench.is_tiny:
        return [*words, "--model", "tiny", "--side", "32", "--batch", "8"]
    return [*words, "--model", "resnet50", "--batch", "128"]


Maker = Callable[[Bench, str], Iterator[Figure]]
# Each group's function, and its cases.
FIGURES: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "ingest": (ingest, tuple(SIZES)),
    "losses": (losses, ("losses",)),
}
