"""Environment steps a second of the reinforcement learning example, with and without a data group.

    python benchmarks/rl_simulators.py [--python ENV/bin/python] [--json FILE]

Pairs of runs by `stoker train` on the local platform: homogeneous, where the learner simulates by
itself on one core, and heterogeneous, where a data host with a core of its own simulates. What a
run reaches is what its script says: steps of all environments over the seconds since it began.
The data group's core is one more: weigh the gain against what it costs. Needs gymnasium, and two
cores that nothing else uses.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import can_import, environment, rotated, say, spread

REPO = Path(__file__).resolve().parents[1]
EXAMPLE = REPO / "examples" / "rl_simulators"
ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1")
GROUPS = {
    "homogeneous": ("dnn=local.c1:1",),
    "heterogeneous": ("dnn=local.c1:1", "data=local.c1:1"),
}
RUN_SECONDS = 300.0


def steps_per_second(kind: str, name: str, *, python: str, updates: int) -> float:
    """What one run reaches.

    Raises:
        RuntimeError: If it failed.
    """
    learner = ["python", str(EXAMPLE / "learner.py"), "--environment", name]
    learner += ["--updates", str(updates)]
    simulator = ["python", str(EXAMPLE / "simulator.py"), "--listen={address:simulator}"]
    simulator += ["--secret-file={secret_file}", "--processes={workers}"]
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as folder:
        record = Path(folder) / "training.json"
        command = [python, "-P", "-m", "stoker.cli", "train"]
        command += [str(REPO / "configs" / "rl-simulators.yaml"), "--yes", "--out", str(record)]
        command += ["--name", "rl", "--set", f"command={json.dumps(learner)}"]
        command += ["--set", f"engine.data.command={json.dumps(simulator)}"]
        for group in GROUPS[kind]:
            command += ["--group", group]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS
        )
        if done.returncode != 0:
            raise RuntimeError(f"{kind} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return float(json.loads(record.read_text())["metrics"]["env_steps_per_second"])


def main() -> int:
    """Measures, prints a table, and writes all values where asked to; 2 without gymnasium."""
    parser = argparse.ArgumentParser(description="Simulators on a data group.")
    parser.add_argument("--python", default=sys.executable, help="that has gymnasium and stoker")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write all values there")
    options = parser.parse_args()
    if not can_import("gymnasium", options.python):
        print(f"{options.python} has no gymnasium: pip install gymnasium", file=sys.stderr)
        return 2
    rows = []
    for name in ENVIRONMENTS:
        found: dict[str, list[float]] = {kind: [] for kind in GROUPS}
        for turn in range(options.repetitions):
            for kind in rotated(tuple(GROUPS), turn):
                reached = steps_per_second(
                    kind, name, python=options.python, updates=options.updates
                )
                found[kind].append(reached)
                say(f"{name} {kind}: {reached:.0f} steps/s")
        pairs = zip(found["heterogeneous"], found["homogeneous"], strict=True)
        times = spread([there / here for there, here in pairs])
        rows.append({"environment": name, **{k: spread(v) for k, v in found.items()}, "x": times})
    print("| environment | homogeneous steps/s | heterogeneous steps/s | x, of pairs |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        cells = [row["environment"]]
        for key, digits in (("homogeneous", 0), ("heterogeneous", 0), ("x", 2)):
            value = row[key]
            texts = [f"{value[part]:.{digits}f}" for part in ("median", "min", "max")]
            cells.append("{} ({}..{})".format(*texts))
        print("| " + " | ".join(cells) + " |")
    if options.json:
        document = {"schema": "stoker.rl-simulators/v1", **environment(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
