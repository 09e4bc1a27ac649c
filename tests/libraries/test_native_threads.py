"""Libraries with native threads are read on data hosts without a hang, however workers start.

As a script it makes many runs, and prints a table: `python tests/libraries/test_native_threads.py
--runs 200 --at-once 6` makes 200 of each library under fork and 200 under spawn, each a loader with
fresh workers, in one cluster and one process of a library and start method.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cluster import Cluster

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "scripts" / "native_threads.py"
# Its name in the script: what is imported.
LIBRARIES = {
    name: name
    for name in ("polars", "lance", "pyarrow", "duckdb", "h5py", "av", "grpc", "boto3", "fsspec")
}
ROWS = 16
QUIET = {"LANCE_LOG": "error", "GRPC_VERBOSITY": "none"}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=1, workers=2, feed={"start_deadline_seconds": 180.0}) as made:
        made.wait_for_agents()
        yield made


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_run_hangs(cluster, tmp_path, library, start):
    if importlib.util.find_spec(LIBRARIES[library]) is None:
        pytest.skip(f"no {library} here")
    assert (
        totals(cluster, tmp_path, library=library, start=start, runs=2) == [expected(library)] * 2
    )


def expected(library: str) -> int:
    rows = range(ROWS)
    return sum(64 + row for row in rows) if library == "av" else 3 * sum(rows)


def totals(cluster: Cluster, folder: Path, **given: object) -> list[int]:
    given = {"folder": str(folder), **given}
    trainer = cluster.train(script=str(SCRIPT), workers=0, env=QUIET, **given)
    return [int(str(line["total"])) for line in trainer.finish()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--starts", default="fork,spawn")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="loaders that are read together")
    given = parser.parse_args()
    with Cluster(agents=1, workers=given.workers) as cluster:
        cluster.wait_for_agents()
        for start in given.starts.split(","):
            for library in given.libraries.split(","):
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    found = totals(
                        cluster,
                        Path(folder),
                        library=library,
                        start=start,
                        runs=given.runs,
                        at_once=given.at_once,
                    )
                good = found.count(expected(library))
                seconds = time.monotonic() - began
                print(
                    f"{start:10} {library:8} {good} of {given.runs} runs, {seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
