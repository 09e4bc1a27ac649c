"""The phases after the script's last step: what needs its loader or its batches, not its model."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import msgspec
from torch.utils.data import DataLoader

from stoker.feed.batch_bytes import num_bytes
from stoker.feed.shipping import Spec, why_unshippable
from stoker.logs import Log
from stoker.profile.costs import measure_costs
from stoker.profile.drain import shut_down
from stoker.profile.findings import Findings
from stoker.profile.inventory import take_inventory
from stoker.profile.loading import measure_loading, worker_counts
from stoker.profile.raw import quartiles
from stoker.profile.reads import measure_reads
from stoker.profile.receive import try_receive

_LOADING_SHARE = 0.30
_RECEIVE_SHARE = 0.03
# Of the parts of loading: each also starts workers, which takes a moment.
_READS_SHARE = 0.03
_COSTS_SHARE = 0.03
_MOST_SECONDS = 6.0
# Of the look at what could not travel: what is larger is too dear to look at.
_MAX_PICKLE_BYTES, _MAX_PICKLE_SECONDS = 256 << 20, 2.0
# Shorter than that they say nothing.
_LEAST_SECONDS = 0.2

_FoundT = TypeVar("_FoundT")


def measure_afterwards(
    findings: Findings,
    loader: "DataLoader[object]",
    *,
    inner: Iterator[object] | None,
    cached: Sequence[object],
    budget_seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
    log: Log,
    instance_type: str | None = None,
) -> None:
    """Loader only, what the feed costs, storage, parts; each is written before the next begins.

    All ranks come here at the same step and stay together, so that their workers share the vCPUs as
    they do in the training.

    Args:
        findings: Of this rank.
        loader: The main one.
        inner: Its iterator, whose workers are ended first.
        cached: Batches; at least one.
        budget_seconds: Of the whole profile.
        iterate: Torch's own `DataLoader.__iter__`.
        log: For one line a number of workers.
        instance_type: What the user calls this host; `auto`: to be found out.
    """
    shut_down(inner)
    if findings.result.rank == 0:
        findings.note(*_what_stays_here(loader))
    findings.meet("loader-only")
    drains, notes = measure_loading(
        loader,
        counts=worker_counts(
            script=loader.num_workers,
            vcpus=round(findings.result.vcpus),
            ranks_on_host=findings.result.ranks_on_host,
        ),
        seconds=_LOADING_SHARE * budget_seconds,
        is_stopped=findings.is_stopped,
        iterate=iterate,
        log=log,
    )
    findings.note(*notes)
    findings.learn(drains=tuple(drains))
    facts = findings.result.batch
    if facts is not None:
        sizes = quartiles([num_bytes(batch) for batch in cached])
        findings.learn(batch=msgspec.structs.replace(facts, sizes=sizes))
    findings.write()
    if not findings.is_stopped():
        findings.meet("receive")
        receive, notes = try_receive(cached[0], seconds=min(1.0, _RECEIVE_SHARE * budget_seconds))
        findings.note(*notes)
        findings.learn(receive=receive)
        findings.write()
    _look_closer(findings, loader, budget_seconds=budget_seconds, iterate=iterate)
    # All hosts are of one type: the first one is looked over.
    if not findings.is_stopped() and findings.result.rank == 0:
        findings.learn(inventory=take_inventory(given=instance_type))
        findings.write()


def _look_closer(
    findings: Findings,
    loader: "DataLoader[object]",
    *,
    budget_seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> None:
    """Cold against warm reads, and what loading a sample is made of, where there is time."""
    reading = min(_MOST_SECONDS, _READS_SHARE * budget_seconds)
    if reading < _LEAST_SECONDS:
        findings.note(
            "the storage and the parts of loading were not looked at: the budget is too short"
        )
        return
    if not findings.is_stopped():
        findings.meet("reads")
        reads = _tried(
            findings,
            "the storage",
            lambda: measure_reads(loader, seconds=reading, iterate=iterate),
        )
        findings.learn(reads=reads)
        findings.write()
    # All ranks load alike: one says what it is made of.
    if not findings.is_stopped() and findings.result.rank == 0:
        seconds = min(_MOST_SECONDS, _COSTS_SHARE * budget_seconds)
        costs = _tried(
            findings,
            "the parts of loading",
            lambda: measure_costs(loader, seconds=seconds, iterate=iterate),
        )
        findings.learn(costs=costs or ())
        findings.write()


def _tried(
    findings: Findings, what: str, measure: Callable[[], tuple[_FoundT, list[str]]]
) -> _FoundT | None:
    """What `measure` found; None with a note where it failed."""
    try:
        found, notes = measure()
    except Exception as err:
        # A process edge: the dataset is the user's.
        summary = " ".join(str(err).split())[:200]
        findings.note(f"{what} could not be looked at: {type(err).__name__}: {summary}")
        return None
    findings.note(*notes)
    return found


def _what_stays_here(loader: "DataLoader[object]") -> list[str]:
    """What of the loader could not travel to data hosts; no error of it ends the profile."""
    try:
        why = why_unshippable(
            Spec(
                dataset=loader.dataset,
                collate_fn=cast("Callable[[object], object]", loader.collate_fn),
                worker_init_fn=loader.worker_init_fn,
            ),
            max_bytes=_MAX_PICKLE_BYTES,
            max_seconds=_MAX_PICKLE_SECONDS,
        )
    except Exception as err:
        why = f"it is not known whether the dataset can travel: {type(err).__name__}: {err}"
    if not why:
        return []
    then = "is an error there" if loader.num_workers else "gets no help from them"
    return [f"{why}; with data hosts, this loader {then} (see feed.unshippable)"]
