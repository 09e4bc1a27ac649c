"""Times the first batch of each loader of a script: on a data host, next to torch's own workers.

    python benchmarks/loaders.py [--repetitions N]

Three loaders of one script (train, valid, test), read one after the other; each has a dataset of
its own, which holds an object of scikit-learn's, imported where batches are made. Paired: torch and
stoker take turns, the medians count. A row is the time from iter() to the first batch; `later` is a
fourth loader, made and read after 3 s, as one that is made each epoch.
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

SCRIPT = HERE / "loaders_trainer.py"
NAMES = ("train", "valid", "test", "later")


def torchs() -> dict[str, float]:
    return seconds_of(run_script({"kind": "torch"}, script=str(SCRIPT)).finish())


def stokers() -> dict[str, float]:
    with Cluster(agents=1, workers=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(script=str(SCRIPT), kind="stoker", workers=0)
        return seconds_of(trainer.finish())


def seconds_of(lines: list[dict[str, object]]) -> dict[str, float]:
    return {str(line["loader"]): float(str(line["seconds"])) for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"torch": [], "stoker": []}
    before = os.getloadavg()[0]
    for _ in range(given.repetitions):
        found["torch"].append(torchs())
        found["stoker"].append(stokers())
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after")
    print("| loader | torch, ms | stoker, ms | times |\n| --- | --- | --- | --- |")
    for name in NAMES:
        torch, stoker = (
            statistics.median(run[name] for run in found[kind]) for kind in ("torch", "stoker")
        )
        print(f"| {name} | {torch * 1e3:.0f} | {stoker * 1e3:.0f} | {stoker / torch:.2f} |")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
