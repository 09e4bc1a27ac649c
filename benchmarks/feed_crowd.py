"""Runs a crowd on one machine: 4 data hosts of 25 cheap workers each feed 4 ranks.

What is shown is above all that nothing grows out of hand: order, threads, connections, memory.
Speed is measured in the second quarter of the batches: the workers start in the first one. This
file is also the script of each rank, under torchrun: it writes at-0-RANK and at-1-RANK (its pid)
where it waits for go-0 and go-1, in the middle and at the end, and rank-RANK.json.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from torch.utils.data import Dataset, default_collate

from measuring import Row, say, spread
from stoker import DataLoader
from stoker_hosts import run_under_stoker

HOSTS, WORKERS_EACH, RANKS = 4, 25, 4
BATCH_SIZE = 8
SAMPLE_BYTES = 8192
# What a batch costs its worker, slept: a hundred workers on two cores.
COST_SECONDS = 0.02
_SECONDS = 100.0
_LOOK_SECONDS = 120.0
_MB = 1e6

Look = dict[str, list[dict[str, float]]]


def rows(*, is_quick: bool) -> Iterator[Row]:
    """Returns the rows of one run: one of the order, and one of each kind of process."""
    num_batches = 2400 if is_quick else 6000
    looks: list[Look] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as name:
        folder = Path(name)
        (folder / "hosts").mkdir()
        run_under_stoker(
            [sys.executable, __file__, str(folder), str(num_batches)],
            folder=folder / "hosts",
            hosts=HOSTS,
            workers_each=WORKERS_EACH,
            seconds=_SECONDS,
            ranks=RANKS,
            meanwhile=partial(_look_twice, folder, looks),
        )
        wall = time.monotonic() - started
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    num_right = sum(rank["num_right"] for rank in ranks)
    num_all = sum(rank["num_batches"] for rank in ranks)
    speed = sum(rank["batches_per_second"] for rank in ranks)
    warm_up = max(rank["warm_up_seconds"] for rank in ranks)
    say(
        f"crowd: {num_right} of {num_all} batches right, {speed:.0f} batches/s after "
        f"{warm_up:.1f} s of warm-up, {wall:.0f} s"
    )
    case = f"{HOSTS} data hosts x {WORKERS_EACH} workers, {RANKS} ranks"
    yield Row(
        part="crowd",
        case=case,
        loader="stoker encrypted",
        figure="batches/s, all ranks",
        value=spread([speed]),
        details={
            "wall_seconds": round(wall, 1),
            "warm_up_seconds": round(warm_up, 1),
            "num_right": num_right,
            "num_batches": num_all,
        },
        note=f"in the second quarter of the batches; the first one, in which the workers start, "
        f"took {warm_up:.1f} s; {num_right} of {num_all} batches were the right ones at the right "
        f"place; {wall:.0f} s with start and end",
    )
    early, late = looks
    for kind in [kind for kind in early if early[kind] and late[kind]]:
        yield _row(case, kind, early[kind], late[kind])


def _row(case: str, kind: str, early: list[dict[str, float]], late: list[dict[str, float]]) -> Row:
    def largest(figure: str) -> float:
        return max(each[figure] for each in late)

    # Of an idle worker little is its own: what counts for a host is what is not shared.
    figure = "MB private" if kind == "worker" else "MB PSS"
    kinds = f"{kind}es" if kind.endswith("s") else f"{kind}s"
    key = "private_bytes" if kind == "worker" else "pss_bytes"
    before = spread([each[key] / _MB for each in early])
    return Row(
        part="crowd",
        case=f"{case}: each of {len(late)} {kinds}",
        loader="stoker encrypted",
        figure=figure,
        value=spread([each[key] / _MB for each in late]),
        details={"early": early, "late": late},
        note=f"{before['median']:.1f} MB in the middle of the run; at most: RSS "
        f"{largest('rss_bytes') / _MB:.0f} MB, threads {largest('threads'):.0f}, "
        f"connections {largest('connections'):.0f}, descriptors {largest('descriptors'):.0f}",
    )


def _look_twice(folder: Path, looks: list[Look], launchers: Mapping[str, int]) -> None:
    for turn in range(2):
        deadline = time.monotonic() + _LOOK_SECONDS
        marks = [folder / f"at-{turn}-{rank}" for rank in range(RANKS)]
        while not all(mark.exists() and mark.read_text() for mark in marks):
            trainer = psutil.Process(launchers["dnn-1"])
            if time.monotonic() > deadline or trainer.status() == psutil.STATUS_ZOMBIE:
                # run_under_stoker says how it ended, or that it did not.
                return
            time.sleep(0.05)
        looks.append(_look(launchers, [int(mark.read_text()) for mark in marks]))
        (folder / f"go-{turn}").touch()


def _look(launchers: Mapping[str, int], ranks: list[int]) -> Look:
    """Looks at every process of the run, by kind."""
    kinds: dict[str, list[psutil.Process]] = {
        "agent": [],
        "fork server": [],
        "dataset process": [],
        "worker": [],
        "rank": [psutil.Process(pid) for pid in ranks],
    }
    for name, pid in launchers.items():
        launcher = psutil.Process(pid)
        if name.startswith("dnn"):
            kinds["coordinator"] = [launcher]
            continue
        kinds["agent"].append(launcher)
        # The agent's child has imported torch, its children have a dataset each, and theirs work.
        kinds["fork server"] += launcher.children()
    kinds["dataset process"] = [each for found in kinds["fork server"] for each in found.children()]
    kinds["worker"] = [each for found in kinds["dataset process"] for each in found.children()]
    return {kind: [_measured(each) for each in found] for kind, found in kinds.items()}


def _measured(process: psutil.Process) -> dict[str, float]:
    memory = {}
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        memory[name] = 1024 * int(value.split()[0])
    return {
        "rss_bytes": memory["Rss"],
        "pss_bytes": memory["Pss"],
        "private_bytes": memory["Private_Clean"] + memory["Private_Dirty"],
        "threads": process.num_threads(),
        "connections": sum(
            each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp")
        ),
        "descriptors": process.num_fds(),
    }


# ---- a rank


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Holds as sample n the number n, and 8 kB that follow from it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((SAMPLE_BYTES,), index % 251, dtype=torch.uint8)


def slept(samples: Sequence[tuple[int, torch.Tensor]]) -> object:
    time.sleep(COST_SECONDS)
    return default_collate(list(samples))


def train(folder: Path, num_batches: int) -> None:
    """Is one rank, which checks each batch and stops twice to be looked at."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # More batches than are taken, so that the epoch is under way when it is looked at.
    spare = 200
    length = (num_batches + spare) * BATCH_SIZE * world_size
    mine = range(rank, length, world_size)
    loader = DataLoader(
        Numbers(length), batch_size=BATCH_SIZE, sampler=mine, collate_fn=slept, num_workers=0
    )
    batches = iter(loader)
    num_right = 0
    began, warm, first_look = time.monotonic(), num_batches // 4, num_batches // 2
    warm_at = looked_at = 0.0
    for number in range(num_batches):
        indices, pixels = next(batches)
        if number == warm:
            warm_at = time.monotonic()
        expected = torch.tensor(mine[number * BATCH_SIZE : (number + 1) * BATCH_SIZE])
        is_right = bool((indices == expected).all())
        is_right = is_right and bool((pixels[:, ::512] == (expected % 251)[:, None]).all())
        num_right += is_right
        if number == first_look:
            # Later ones were made while all stood still: they say nothing about speed.
            looked_at = time.monotonic()
            _be_looked_at(folder, 0, rank)
    _be_looked_at(folder, 1, rank)
    seen = {
        "num_batches": num_batches,
        "num_right": num_right,
        "warm_up_seconds": warm_at - began,
        "batches_per_second": (first_look - warm) / (looked_at - warm_at),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))


def _be_looked_at(folder: Path, turn: int, rank: int) -> None:
    (folder / f"at-{turn}-{rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + _LOOK_SECONDS
    while not (folder / f"go-{turn}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody looked within {_LOOK_SECONDS:.0f} s")
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]))
