"""These cases are predicted by prediction.py and then run: what loading and training cost on each.

Milliseconds are of a batch. A cost that burns needs a core of its own, so that those cases end at
two cores: a host that trains and one that loads. A cost that is slept does not, so that those cases
go on to many workers and several hosts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case is a training, its cluster today, and the cluster that is asked about.

    Attributes:
        load_burn: CPU-milliseconds of loading.
        load_slept: Milliseconds that loading waits.
        step_burn: CPU-milliseconds of the step.
        step_slept: Milliseconds of the step on its accelerator.
        sample_bytes: What a sample weighs on its way.
        workers: `num_workers` of the script, a rank.
        today: `local.cN`, N cores.
        processes: Trainer processes of the host.
        target: As `stoker decide --group` and `stoker train --group` take it.
        own_core: Whether each host of the target has cores that it shares with no other.
    """

    name: str
    about: str
    load_burn: float = 0.0
    load_slept: float = 0.0
    step_burn: float = 0.0
    step_slept: float = 0.0
    batch: int = 16
    sample_bytes: int = 9216
    workers: int = 1
    today: str = "local.c1"
    processes: int = 1
    target: tuple[str, ...]
    own_core: bool = True


_BESIDE = ("dnn=1:1", "data=1:1")
_ALL_REMOTE = ("dnn=1:0", "data=1:1")

CASES: tuple[Case, ...] = (
    Case(
        name="beside",
        about="loader and step share a core; a second one joins",
        load_burn=40,
        step_burn=20,
        target=_BESIDE,
    ),
    Case(
        name="all-remote",
        about="the same, and the trainer's host loads nothing",
        load_burn=40,
        step_burn=20,
        target=_ALL_REMOTE,
    ),
    Case(
        name="heavy",
        about="a loader of six steps, an accelerator that waits",
        load_burn=60,
        step_slept=10,
        target=_BESIDE,
    ),
    Case(
        name="in-turns",
        about="no workers: loading and training take turns",
        load_burn=30,
        step_burn=15,
        workers=0,
        target=_BESIDE,
    ),
    Case(
        name="to-the-floor",
        about="the data host is faster than the accelerator",
        load_burn=20,
        step_burn=8,
        step_slept=20,
        target=_ALL_REMOTE,
    ),
    Case(
        name="no-need",
        about="the accelerator is the limit today: a data host does nothing",
        load_burn=8,
        step_slept=40,
        target=_BESIDE,
    ),
    Case(
        name="small-batches",
        about="four samples a batch, steps of a few milliseconds",
        load_burn=8,
        step_burn=3,
        batch=4,
        target=_BESIDE,
    ),
    Case(
        name="large-batches",
        about="9.4 MB a batch: receiving counts",
        load_burn=50,
        step_burn=15,
        batch=64,
        sample_bytes=147456,
        target=_ALL_REMOTE,
    ),
    Case(
        name="two-workers",
        about="two loader workers on each of the hosts",
        load_burn=50,
        step_slept=15,
        workers=2,
        target=("dnn=1:2", "data=1:2"),
    ),
    Case(
        name="larger-host",
        about="scale up: the same host with two cores",
        load_burn=40,
        step_burn=20,
        workers=2,
        target=("dnn=local.c2:1:2",),
    ),
    Case(
        name="more-workers",
        about="tune: a loader that waits gets four workers for one",
        load_slept=80,
        step_slept=10,
        batch=8,
        target=("dnn=1:4",),
    ),
    Case(
        name="waits-beside",
        about="the loader waits; four workers of a data host join two",
        load_slept=90,
        step_slept=8,
        batch=8,
        workers=2,
        target=("dnn=1:2", "data=1:4"),
    ),
    Case(
        name="three-hosts",
        about="the loader waits; six workers on three data hosts, none next to the trainer",
        load_slept=120,
        step_slept=8,
        batch=8,
        workers=2,
        target=("dnn=1:0", "data=3:2"),
        own_core=False,
    ),
    Case(
        name="waits-and-burns",
        about="a quarter of loading is CPU, the rest waits; three remote workers",
        load_burn=12,
        load_slept=48,
        step_slept=8,
        batch=8,
        target=("dnn=1:0", "data=1:3"),
    ),
    Case(
        name="two-ranks",
        about="two trainer processes with an all-reduce; the loader waits",
        load_slept=90,
        step_slept=8,
        batch=8,
        today="local.c2",
        processes=2,
        target=("dnn=1:0", "data=1:6"),
        own_core=False,
    ),
)
QUICK = ("beside", "no-need", "more-workers")
