"""The phases after the script's last step: what needs its loader or its batches, not its model."""

from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from stoker.logs import Log
from stoker.profile.drain import shut_down
from stoker.profile.findings import Findings
from stoker.profile.loading import measure_loading, worker_counts
from stoker.profile.receive import try_receive

_LOADING_SHARE = 0.30
_RECEIVE_SHARE = 0.03


def measure_afterwards(
    findings: Findings,
    loader: "DataLoader[object]",
    *,
    inner: Iterator[object] | None,
    batch: object,
    budget_seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
    log: Log,
) -> None:
    """Loader only, then what the feed costs; each is written before the next begins.

    All ranks come here at the same step and stay together, so that their workers share the vCPUs as
    they do in the training.

    Args:
        findings: Of this rank.
        loader: The main one.
        inner: Its iterator, whose workers are ended first.
        batch: A cached one.
        budget_seconds: Of the whole profile.
        iterate: Torch's own `DataLoader.__iter__`.
        log: For one line a number of workers.
    """
    shut_down(inner)
    findings.meet("loader-only")
    drains, notes = measure_loading(
        loader,
        counts=worker_counts(
            script=loader.num_workers,
            vcpus=findings.result.vcpus,
            ranks_on_host=findings.result.ranks_on_host,
        ),
        seconds=_LOADING_SHARE * budget_seconds,
        is_stopped=findings.is_stopped,
        iterate=iterate,
        log=log,
    )
    findings.note(*notes)
    findings.learn(drains=tuple(drains))
    findings.write()
    # Further phases of the loader alone (cold reads, transforms) have their place here.
    if not findings.is_stopped():
        findings.meet("receive")
        receive, notes = try_receive(batch, seconds=min(1.0, _RECEIVE_SHARE * budget_seconds))
        findings.note(*notes)
        findings.learn(receive=receive)
        findings.write()
