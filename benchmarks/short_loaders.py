"""Times 40 loaders of 20 batches each, read in turn: with a data host, next to torch alone.

    python benchmarks/short_loaders.py [--repetitions N] [--clients N] [--batches N]

Loaders so short that a data host costs more than it gives are made where the script runs
(feed/short_loaders.py). Paired: torch, an unchanged script and one with stoker's class take turns,
the medians count. A row is the time of the whole script, from its first iter() to its last step;
goal: at most 1.1 times torch's.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.cluster import Cluster, run_script  # noqa: E402

SCRIPT = str(HERE / "short_loaders_trainer.py")
# Workers, and milliseconds that a batch takes to make.
CASES = [(workers, made_ms) for made_ms in (0.0, 26.0) for workers in (0, 2)]
# As the audit has it: steps of 1.6 ms.
STEP_SECONDS = 0.0016
KINDS = ("torch", "unchanged", "stoker")


def seconds_of(kind: str, cluster: Cluster, **given: object) -> float:
    if kind != "torch":
        trainer = cluster.train(script=SCRIPT, kind=kind, workers=0, **given)
    else:
        trainer = run_script({"kind": kind, **given}, script=SCRIPT)
    *_, last = trainer.finish()
    return float(str(last["seconds"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--batches", type=int, default=20)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    found: dict[str, list[dict[str, float]]] = {}
    with Cluster(agents=1, workers=2, feed={"until_ready": "make"}) as cluster:
        cluster.wait_for_agents()
        for workers, made_ms in CASES:
            given = {
                "clients": asked.clients,
                "batches": asked.batches,
                "num_workers": workers,
                "batch_seconds": made_ms / 1e3,
                "step_seconds": STEP_SECONDS,
            }
            runs = found.setdefault(f"num_workers={workers}, {made_ms:g} ms a batch", [])
            for _ in range(asked.repetitions):
                runs.append({kind: seconds_of(kind, cluster, **given) for kind in KINDS})
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after")
    print("| loaders | torch, s | unchanged, s | times | stoker's class, s | times |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, runs in found.items():
        torch, *others = (statistics.median(run[kind] for run in runs) for kind in KINDS)
        columns = [f"{seconds:.2f} | {seconds / torch:.2f}" for seconds in others]
        print(f"| {name} | {torch:.2f} | {' | '.join(columns)} |")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
