"""stoker.to_device takes batches of data hosts as blocks, and gives what the loader gives."""

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

NUM_BATCHES = 100
# The first two of a host, and of the local workers, tell how its batches are laid out.
LEARNING = 2 * 2


def epochs(host, **given):
    *lines, end = host.train(script="blocks_script.py", **given).finish()
    assert [line["labels"] for line in lines] == [
        list(range(first, first + 4)) for first in range(0, 400, 4)
    ] * 3
    found = [lines[first : first + NUM_BATCHES] for first in range(0, 300, NUM_BATCHES)]
    return found, end["blocks"]


@pytest.mark.parametrize("kind", ["dict", "tuple", "nested", "array"])
def test_batches_are_the_loaders_in_type_and_value(host, kind):
    (first, plain, last), blocks = epochs(host, kind=kind)
    for moved in (first, last):
        for there, here in zip(moved, plain, strict=True):
            assert (there["kind"], there["pixels"]) == (here["kind"], here["pixels"])
    # Those that tell how batches are laid out, and arrays, are moved each alone.
    assert not blocks if kind == "array" else len(blocks) >= 2 * NUM_BATCHES - LEARNING
    if kind != "array":
        assert {line["memories"] for line in last} == {1}


@pytest.mark.parametrize(
    ("loader", "stalls"),
    [
        ({"num_workers": 1}, 0.0),
        ({"num_workers": 1, "persistent_workers": True}, 0.0),
        # Long enough for a whole epoch to come meanwhile.
        ({"num_workers": 1}, 0.5),
    ],
    ids=["local worker", "persistent workers", "a script that stands still"],
)
def test_local_workers_batches_too_and_a_kept_iterator_forgets_it_at_the_epochs_end(
    host, loader, stalls
):
    (_, plain, last), blocks = epochs(host, loader=loader, stalls=stalls)
    moved = [[epoch, 4 * batch] for epoch in (0, 2) for batch in range(NUM_BATCHES)]
    assert len([batch for batch in moved if batch not in blocks]) <= LEARNING
    assert [line["kind"] for line in plain] == [line["kind"] for line in last]


def test_pixels_are_normalised_and_labels_are_not(host):
    (first, plain, _), _ = epochs(host, mean=[0.5, 0.4, 0.3])
    for there, here in zip(first, plain, strict=True):
        expected = [pixel / 255 - 0.5 for pixel in here["pixels"]]
        assert there["pixels"] == pytest.approx(expected, abs=1e-6)
