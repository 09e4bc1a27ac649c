"""Counts what the memory guard does in a healthy run, and what that costs it.

    python benchmarks/memory_guard.py [--uses PERCENT ...] [--repetitions N] [--json FILE]

As root, where control groups of memory can be made. A run without a limit says what it takes at
most; the others have the same run in a group whose limit is as much above that as is asked for, by
turns with the guard and without it. A row: highest use of the limit, how often batches that wait
were lowered and raised again (trainer and data host together), the least share of them, steps that
waited for a batch, and the seconds of all waits. Ten minutes with two repetitions.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from stoker_hosts import run_under_stoker  # noqa: E402
from support.memory_limit import UNLIMITED, MemoryGroup, memory_limit  # noqa: E402

USES = (60, 85, 92)
STEPS = 500
BATCH_MB = 20
HELD_MB = 400
STEP_MS = 30
COST_MS = 40
WORKERS = 2
LOOK_SECONDS = 0.1


class PeakWatch:
    """The most that a group had in use, without files in the page cache."""

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.peak_bytes = 0

    def _look(self) -> None:
        while not self._has_ended.wait(LOOK_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self._group.held_bytes())

    def __enter__(self) -> "PeakWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._thread.join()


def measured(limit_bytes: int, *, is_guarded: bool, held_mb: int) -> dict[str, float]:
    """Returns the row of one run.

    Args:
        limit_bytes: Of the group of all its processes.
        is_guarded: Whether the guard may lower what waits.
        held_mb: What the trainer holds besides.
    """
    with tempfile.TemporaryDirectory() as name, memory_limit(limit_bytes) as group:
        folder = Path(name)
        notes = folder / "notes"
        (folder / "run").mkdir()
        os.environ["STOKER_BENCHMARK_GUARD"] = f"{'' if is_guarded else 'off:'}{folder}"

        def join(pids: Mapping[str, int]) -> None:
            for pid in pids.values():
                (group.folder / "cgroup.procs").write_text(str(pid))

        words = [notes, STEPS, BATCH_MB, held_mb, STEP_MS, COST_MS]
        with PeakWatch(group) as watch:
            run_under_stoker(
                ["python", str(HERE / "memory_guard_trainer.py"), *map(str, words)],
                folder=folder / "run",
                hosts=1,
                workers_each=WORKERS,
                seconds=300,
                modules=[HERE / "memory_guard_hook"],
                feed={"max_bytes": 600 << 20},
                meanwhile=join,
            )
        changes = [line.split() for file in folder.glob("guard-*") for line in file.open()]
        row = json.loads(notes.read_text())
        shares = [float(after) for _, _, after in changes]
        lowered = sum(float(after) < float(before) for _, before, after in changes)
        return {
            "peak_bytes": watch.peak_bytes,
            "use": watch.peak_bytes / limit_bytes,
            "lowered": lowered,
            "raised": len(changes) - lowered,
            "least_share": min(shares, default=1.0),
            "waited_steps": row["waited_steps"],
            "waited_seconds": row["waited_seconds"],
            "seconds": row["seconds"],
            "kills": group.num_kills(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uses", type=int, nargs="+", default=USES)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--held-mb", type=int, default=HELD_MB)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    usual = measured(UNLIMITED, is_guarded=True, held_mb=options.held_mb)
    peak = int(usual["peak_bytes"])
    print(f"without a limit: at most {peak / 1e6:.0f} MB")
    rows = []
    for repetition in range(options.repetitions):
        for use in options.uses:
            for is_guarded in (True, False) if repetition % 2 else (False, True):
                row = measured(
                    int(100 * peak / use), is_guarded=is_guarded, held_mb=options.held_mb
                )
                rows.append({"asked": use, "guarded": is_guarded, **row})
                print(
                    f"{use} % {'guard' if is_guarded else 'no guard':8}: highest use "
                    f"{100 * row['use']:.0f} %, lowered {row['lowered']:.0f}, raised "
                    f"{row['raised']:.0f}, least share {row['least_share']:.2f}, "
                    f"{row['waited_steps']:.0f} of {STEPS} steps waited "
                    f"{row['waited_seconds']:.2f} s, killed {row['kills']:.0f}, "
                    f"{row['seconds']:.1f} s",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"unlimited": usual, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
