"""The iterator of a loader over an iterable dataset, under a data group."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _get_distributed_settings,
    _sharding_worker_init_fn,
    _share_dist_seed,
)

from stoker.feed.client import Feed
from stoker.feed.feed_iterator import FeedIterator, log_death
from stoker.feed.local import LocalWorkers
from stoker.feed.local_streams import LocalStreams
from stoker.feed.process import Process
from stoker.feed.seeding import Seeding
from stoker.feed.session import Session, StreamSource
from stoker.feed.shipping import Globals, Spec
from stoker.feed.streams import Streams
from stoker.feed.wire import pack_value


class StreamIterator(FeedIterator):
    """One pass (with persistent workers: one after the other) over the shards of the dataset."""

    def __init__(self, loader: "DataLoader[object]", process: Process, feed: Feed) -> None:
        super().__init__(loader, process, feed)
        if isinstance(loader.dataset, IterDataPipe) and loader.num_workers > 0:
            # Torch's iterator with workers draws a second one, for the pass that it "resets" to.
            _share_dist_seed(loader.generator, self._pg)  # type: ignore[no-untyped-call]

    def _unnamed_next(self) -> object:
        # torch's warns of more samples than the dataset said.
        return _BaseDataLoaderIter.__next__(self)

    def _own_seeding(self, process: Process) -> Seeding:
        # A stream is seeded once, as one of torch's workers is; batches follow from it.
        return "torch"

    def _own_spec(self, loader: "DataLoader[object]") -> Spec:
        init = loader.worker_init_fn
        if isinstance(loader.dataset, IterDataPipe):
            # As torch's loader does it: a data pipe is sharded by rank and worker.
            world_size, rank = _get_distributed_settings()  # type: ignore[no-untyped-call]
            init = partial(_sharding_worker_init_fn, init, world_size, rank)
        return Spec(
            dataset=loader.dataset,
            collate_fn=cast("Callable[[object], object]", loader.collate_fn),
            worker_init_fn=init,
            auto_collation=loader._auto_collation,
            globals=Globals.of_this_process(),
            is_iterable=True,
            drop_last=loader.drop_last,
        )

    def _own_session(self, feed: Feed, process: Process, loader: "DataLoader[object]") -> Session:
        def streams(max_bytes: int) -> Streams:
            return Streams(
                num_shards=max(1, loader.num_workers),
                prefetch=loader.prefetch_factor or 2,
                max_bytes=max_bytes,
                persists=loader.persistent_workers,
            )

        return feed.session_for(process.books(loader), new_streams=streams)

    def _begin(self) -> None:
        # The same for every batch: torch's sampler of an iterable dataset says how many samples.
        self._index: object = next(self._sampler_iter)
        self._pass.pass_number = self._session.begin(
            epoch=self._pass.epoch,
            spec=self._packed,
            seeding=self._seeding,
            local=self._local_workers(self._session),
            indices=iter(()),
            is_eager=False,
            pins_on=torch.accelerator.current_device_index() if self._pin_memory else None,
            source=StreamSource(
                pack_value(self._index, allow_pickle=True), int(self._base_seed), self._shared_seed
            ),
        )

    def _next_data(self) -> object:  # type: ignore[override]
        self._pass.number(int(self._base_seed), self._index)
        return super()._next_data()

    def _num_taken(self) -> int:
        streams = self._session.schedule
        assert isinstance(streams, Streams)
        return streams.num_taken

    def _start_local(self, count: int) -> LocalWorkers | LocalStreams:
        settings = self._process.settings
        return LocalStreams(
            self._packed,
            num_workers=count,
            credits_each=settings.feed.credits,
            context=self._loader.multiprocessing_context,
            host=settings.host,
            wake=self._feed.shared.wake,
            on_death=partial(log_death, self._feed.shared.log),
        )
