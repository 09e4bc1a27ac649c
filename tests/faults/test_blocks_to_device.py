"""stoker.to_device takes batches of data hosts as blocks, and gives what the loader gives."""

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

NUM_BATCHES = 20


def epochs(host, **given):
    *lines, end = host.train(script="blocks_script.py", **given).finish()
    assert [line["labels"] for line in lines] == [
        list(range(first, first + 4)) for first in range(0, 80, 4)
    ] * 3
    found = [lines[first : first + NUM_BATCHES] for first in range(0, 60, NUM_BATCHES)]
    return found, end["blocks"]


@pytest.mark.parametrize("kind", ["dict", "tuple", "nested", "array"])
def test_batches_are_the_loaders_in_type_and_value(host, kind):
    (first, plain, last), blocks = epochs(host, kind=kind)
    for moved in (first, last):
        for there, here in zip(moved, plain, strict=True):
            assert (there["kind"], there["pixels"]) == (here["kind"], here["pixels"])
    # Those of the first epoch that came before it was known, and arrays, are moved each alone.
    assert blocks == 0 if kind == "array" else blocks > NUM_BATCHES
    if kind != "array":
        assert {line["memories"] for line in last} == {1}


@pytest.mark.parametrize(
    "loader",
    [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}],
    ids=["local worker", "persistent workers"],
)
def test_local_workers_batches_too_and_a_kept_iterator_forgets_it_at_the_epochs_end(host, loader):
    (_, plain, last), blocks = epochs(host, loader=loader)
    assert blocks > NUM_BATCHES
    assert [line["kind"] for line in plain] == [line["kind"] for line in last]


def test_pixels_are_normalised_and_labels_are_not(host):
    (first, plain, _), _ = epochs(host, mean=[0.5, 0.4, 0.3])
    for there, here in zip(first, plain, strict=True):
        expected = [pixel / 255 - 0.5 for pixel in here["pixels"]]
        assert there["pixels"] == pytest.approx(expected, abs=1e-6)
