"""Times the slowest rank's step where samples differ in length: torch, stoker, stoker balanced.

    python benchmarks/balance.py [--ranks N ...] [--batch N] [--repetitions N] [--json FILE]

Lengths are Pareto distributed and cut at ten times the shortest. A step sleeps as long as its
rank's batch has elements, then all ranks meet at a barrier. Paired: the three take turns. A row is
the mean over the steps of the second and third epoch (in the first no sample is measured yet):
the slowest rank's computing over the ranks' mean, in percent above it, and the seconds of a step
with its barrier. Goal: at most 5% above.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from stoker.records import FeedSettings  # noqa: E402
from support.local_job import LocalJob  # noqa: E402

KINDS = ("torch", "stoker", "stoker balanced")
ALPHAS = (1.5, 2.0)
EPOCHS = 3
GOAL_PERCENT = 5.0


def measured(kind: str, *, ranks: int, batch: int, alpha: float) -> tuple[float, float]:
    """Returns percent of the slowest rank above the mean, and seconds of a step."""
    feed = FeedSettings(lease_seconds=60, balance="cost" if kind == "stoker balanced" else None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["--epochs", EPOCHS, "--batch", batch, "--steps", 20, "--alpha", alpha]
        command = ("python", str(HERE / "balance_trainer.py"), str(folder), *map(str, words))
        if kind == "torch":
            command = (*command, "--torch")
        data = 0 if kind == "torch" else 1
        job = LocalJob(folder / "job", command, data=data, processes=ranks, feed=feed)
        with job:
            job.succeeds()
        by_rank = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    above: list[float] = []
    seconds: list[float] = []
    for step in zip(*by_rank, strict=True):
        if step[0][0] == 0:
            continue
        computing = [rank[1] for rank in step]
        above.append(max(computing) / statistics.fmean(computing) - 1)
        seconds.append(max(rank[2] for rank in step))
    return 100 * statistics.fmean(above), statistics.fmean(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    highest = 0.0
    print("| ranks | Pareto | loader | slowest rank above the mean, % | ms a step |")
    print("| --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        for alpha in ALPHAS:
            runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for _ in range(options.repetitions):
                for kind in KINDS:
                    figures = measured(kind, ranks=ranks, batch=options.batch, alpha=alpha)
                    runs[kind].append(figures)
            for kind, figures in runs.items():
                above = [percent for percent, _ in figures]
                step_ms = 1000 * statistics.median(step_seconds for _, step_seconds in figures)
                spread = f"{statistics.median(above):.1f} ({min(above):.1f}..{max(above):.1f})"
                print(f"| {ranks} | {alpha:g} | {kind} | {spread} | {step_ms:.1f} |", flush=True)
                if kind == "stoker balanced":
                    highest = max(highest, *above)
                rows.append({"ranks": ranks, "alpha": alpha, "loader": kind, "runs": figures})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"balanced: {highest:.1f}% at most, goal {GOAL_PERCENT:g}%")
    return 0 if highest <= GOAL_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
