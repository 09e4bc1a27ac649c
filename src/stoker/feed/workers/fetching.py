"""What torch's worker loop does before its first batch: seeds the process, makes a fetcher."""

from typing import Protocol, cast

import torch
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from stoker.feed import seeding
from stoker.feed.wire.dataset import DatasetSpec


class WorkerFetcher(Protocol):
    """A fetcher of torch, which makes a batch."""

    def fetch(self, index: object) -> object: ...


def seed_as_torch(dataset: object, worker_id: int, *, num_workers: int, base_seed: int) -> None:
    """Seeds this process and sets get_worker_info(); Seeder seeds batches."""
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id,
        num_workers=num_workers,
        seed=seeding.seed_as_torch(base_seed, worker_id),
        dataset=cast("torch.utils.data.Dataset[object]", dataset),
    )


def fetcher_of(spec: DatasetSpec, dataset: object, kind: int, *, drop_last: bool) -> WorkerFetcher:
    fetcher: WorkerFetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
        kind, dataset, spec.auto_collation, spec.collate_fn, drop_last
    )
    return fetcher
