"""torch 2.13 to 2.15 have all private names that stoker uses, each with what breaks without."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import collate, pin_memory, worker

# These ran with the suite, or a part of it: docs/status.md.
TORCH = ("2.13.", "2.14.", "2.15.")


NAMES = [
    (DataLoader, "_get_iterator", "the one method that stoker.DataLoader and the replacement put"),
    (DataLoader, "_auto_collation", "whether an index is a sample or a batch"),
    (DataLoader, "_index_sampler", "what gives the indices; resume counts its draws"),
    (dataloader, "_BaseDataLoaderIter", "the base of the iterator under a data group"),
    (dataloader, "_SingleProcessDataLoaderIter", "no data group, no workers"),
    (dataloader, "_MultiProcessingDataLoaderIter", "no data group, with workers"),
    (torch._C._autograd, "_profiler_enabled", "whether torch's own way to the batch is taken"),
    (dataloader, "_DatasetKind", "map-style or iterable; makes the fetchers of workers"),
    (dataloader._BaseDataLoaderIter, "_reset", "persistent workers: a new epoch"),
    (dataloader._BaseDataLoaderIter, "_next_data", "where batches of the feed come in"),
    (dataloader._BaseDataLoaderIter, "_next_index", "where indices are numbered and seeded"),
    (worker, "WorkerInfo", "get_worker_info() in data workers"),
    (worker, "_worker_info", "get_worker_info() in data workers"),
    (worker, "_generate_state", "seeding: torch, NumPy's state of a worker"),
    (collate, "default_collate_fn_map", "batches built in shared memory; the script's own types"),
    (collate, "collate_tensor_fn", "batches built in shared memory"),
    (pin_memory, "pin_memory", "objects with a pin_memory of their own"),
    (torch, "default_generator", "seeding without a visit to each backend"),
    (torch._C, "_AutoDispatchBelowADInplaceOrView", "tensors of a block have no common version"),
    (torch._C, "_set_grad_enabled", "the script's grad mode in data workers"),
]


def test_torch_is_the_one_that_was_looked_into():
    assert torch.__version__.startswith(TORCH)


def test_the_names_are_there():
    gone = {name: use for owner, name, use in NAMES if not hasattr(owner, name)}
    assert gone == {}


FETCHER = ["kind", "dataset", "auto_collation", "collate_fn", "drop_last"]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (dataloader._BaseDataLoaderIter._reset, ["self", "loader", "first_iter"]),
        (dataloader._BaseDataLoaderIter.__init__, ["self", "loader"]),
        (dataloader._DatasetKind.create_fetcher, FETCHER),
        (worker._generate_state, ["base_seed", "worker_id"]),
        (pin_memory.pin_memory, ["data", "device"]),
        (collate.collate_tensor_fn, ["batch", "collate_fn_map"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_the_function_takes_what_it_is_given(method, arguments):
    assert callable(method)
    assert list(inspect.signature(method).parameters) == arguments


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_has_the_attributes_that_are_read_or_set(num_workers):
    iterator = iter(DataLoader(range(4), num_workers=num_workers))
    names = {
        "_base_seed": "the base seed of an epoch",
        "_sampler_iter": "what gives the indices",
        "_index_sampler": "replaced by a sampler that counts",
        "_timeout": "the loader's timeout",
        "_pin_memory": "whether batches land in pinned memory",
        "_num_workers": "seen by the tests",
    }
    if num_workers:
        names |= {
            "_rcvd_idx": "resume: batches that the script got",
            "_in_order": "resume: whether that number says which",
            "_worker_init_fn": "the place where a worker is made to seed",
        }
    else:
        names |= {"_dataset_fetcher": "wrapped by one that seeds"}
    assert {name: use for name, use in names.items() if not hasattr(iterator, name)} == {}


def test_loaders_have_the_attributes_that_are_read():
    for name in ("_dataset_kind", "_iterator"):
        assert hasattr(DataLoader(range(4)), name)


def test_constructor_has_the_arguments_that_are_known():
    # A new argument needs a claim in support/dropin_claims.py, and a word in the docs.
    known = (
        "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory "
        "drop_last timeout worker_init_fn multiprocessing_context generator prefetch_factor "
        "persistent_workers pin_memory_device in_order"
    )
    assert list(inspect.signature(DataLoader.__init__).parameters)[1:] == known.split()
