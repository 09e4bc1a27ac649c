"""This module asks a data host for the facts of a dataset that is built there.

It asks as an epoch of one batch over a dataset that holds nothing but the facts: what befalls hosts
and connections meanwhile is dealt with as for any batch, and what the factory raises comes back.
"""

from torch.utils.data import get_worker_info

from stoker.errors import ProtocolError
from stoker.feed.process import LoaderBooks, this_process
from stoker.feed.remote import Facts, FactsOf, Remote, facts_of
from stoker.feed.seeding import Numbered
from stoker.feed.wire.dataset import DatasetSpec, pack_spec


def ask_facts(remote: Remote) -> Facts:
    """Returns the facts of `remote`, from the first data host that knows them.

    Without a data group, and in a data worker, the dataset is built here.

    Raises:
        FeedLostError: If no data host came in time.
        Exception: What the factory raised.
    """
    process = this_process()
    settings = process.settings
    if not (settings.has_data_group and settings.coordinator) or get_worker_info() is not None:
        return facts_of(remote.build())
    from stoker.feed.trainer.client import feed_of

    spec = DatasetSpec(dataset=FactsOf(remote), collate_fn=_as_it_is, auto_collation=False)
    packed = pack_spec(spec, max_bytes=settings.feed.max_dataset_bytes)
    # Of no loader, and so not among the timeline's; the session ends with them.
    books = LoaderBooks(-1)
    session = feed_of(process).session_for(books)
    try:
        pass_number = session.begin(
            epoch=0,
            spec=packed,
            seeding="torch",
            local=None,
            indices=iter([Numbered((0, 0, 0, 0), 0)]),
            is_eager=True,
            pins_on=None,
        )
        found = session.next(pass_number, timeout_seconds=0)
    finally:
        session.stop(session.pass_number)
    match found:
        case (bool(is_iterable), int() | None as length):
            return Facts(is_iterable, length)
    raise ProtocolError(f"expected the facts of {remote!r}, found a {type(found).__name__}")


def _as_it_is(sample: object) -> object:
    return sample
