"""Trainings whose every batch is compared with the one of a training without data hosts."""

import json
from pathlib import Path

from support.keel import SUPPORT, Alone, Job, Line, Run

FEED, STREAM = "feed_script.py", "stream_script.py"
# What costs only time, or stops and goes on.
_OF_TIME = {"sample_seconds", "heavy", "heavy_seconds"}
_OF_TIME |= {"pause_at", "pause_epoch", "pause_epochs", "pause_before"}
_OF_TIME |= {"save", "save_at", "save_epoch"}


def begun(run: Run, script: str = FEED, *, rank: int = 0, world: int = 1, **given: object) -> Job:
    words = json.dumps({"rank": rank, "world": world, **given})
    env = {"RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_RANK": f"{rank}"}
    return run.start(str(SUPPORT / script), words, env=env)


def paused(run: Run, script: str = FEED, **given: object) -> Job:
    job = begun(run, script, **given)  # type: ignore[arg-type]
    job.pause()
    return job


def expected(alone: Alone, script: str = FEED, *, rank: int = 0, **given: object) -> list[Line]:
    """Returns what a training prints without data hosts: of streams, with torch's own loader."""
    quick = {"rank": rank, **{key: each for key, each in given.items() if key not in _OF_TIME}}
    is_stream = script == STREAM
    words = json.dumps(quick | ({"torch": True} if is_stream else {}), sort_keys=True)
    return (alone.torchs if is_stream else alone.stokers)(script, words, rank)


def rest(lines: list[Line], epoch: int, batch: int) -> list[Line]:
    """Returns what a script prints from that batch on."""

    def is_before(line: Line) -> bool:
        return "epoch" in line and (line["epoch"], line["batch"]) < (epoch, batch)

    return [line for line in lines if not is_before(line)]


def saved(job: Job, path: Path) -> None:
    job.finish()
    assert path.exists()
