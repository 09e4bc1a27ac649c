"""Measures the timeline of a long training: its file, its writing, and its reading at the end.

    python benchmarks/timeline.py [--steps N] [--repetitions N] [--source DIR]

It is paired with a timeline that has a row for each step, as the other extreme: the same program
with LEVEL_BYTES so large that nothing is thinned. `DIR` is a folder with the package; another
checkout's can be measured by the same script. Each measurement is a process; their order rotates.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

KINDS = ("thinned", "every step")
SOURCE = Path(__file__).resolve().parents[1] / "src"


def measured(kind: str, steps: int) -> tuple[float, ...]:
    """Returns MiB of the file, seconds of writing and of reading, MiB of memory of reading."""
    from stoker.feed import timeline
    from stoker.feed.training_steps import read_timelines

    if kind == "every step":
        # Without effect on a version that has no levels.
        timeline.LEVEL_BYTES = timeline.MAX_READ_BYTES = 256 << 20
    with tempfile.TemporaryDirectory() as folder:
        now = 0.0

        def clock() -> float:
            return now

        path = Path(folder) / timeline.FILE.format(rank=0)
        written = timeline.Timeline(path, clock=clock)
        began = time.perf_counter()
        for epoch in range(100):
            recorded = written.epoch(loader=0, epoch=epoch)
            for step in range(steps // 100):
                recorded.ask()
                now += 0.01 + (step * 7919 % 100) * 1e-4
                recorded.got(32)
                now += 0.04
            recorded.end()
        written.close()
        writing = time.perf_counter() - began
        size = path.stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        ranks = read_timelines(Path(folder))
        timeline.typical_step(ranks[0])
        reading = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 2**20, writing, reading, (after - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_700_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--source", default=str(SOURCE))
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(*measured(given.one, given.steps))
        return
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for number in range(given.repetitions):
        for kind in KINDS[:: -1 if number % 2 else 1]:
            line = subprocess.run(
                [sys.executable, __file__, "--one", kind, "--steps", str(given.steps)],
                env={**os.environ, "PYTHONPATH": given.source},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            found[kind].append([float(word) for word in line.split()])
    print(f"{given.steps} steps of one rank, median (min..max) of {given.repetitions}")
    print("| | file, MiB | writing, us a step | reading, s | memory of reading, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for kind in KINDS:
        cells = []
        for index, values in enumerate(zip(*found[kind], strict=True)):
            scale = 1e6 / given.steps if index == 1 else 1.0
            low, middle, high = (scale * f(values) for f in (min, median, max))
            cells.append(f"{middle:.2f} ({low:.2f}..{high:.2f})")
        print(f"| {kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
