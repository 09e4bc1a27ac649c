"""A loader that loads a state it gave goes on with the same bytes as a new loader does from it."""

import pytest

from support.cluster import reference

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STARTS = ["start of epoch 2", "start of epoch 0", "start of epoch 1"]
PLACES = ["middle of epoch 2", "middle of epoch 0", *STARTS, "middle of epoch 1"]
LOADERS = {
    "no local workers": ({}, 0),
    "a local worker": ({"num_workers": 1}, 1),
    "workers that persist": ({"num_workers": 2, "persistent_workers": True}, 1),
}


def rolled_back(host, places, **given):
    lines = host.train(script="rollback_script.py", to=places, **given).finish()
    assert [line["to"] for line in lines] == places
    for line in lines:
        assert line["again"] == line["fresh"], line["to"]
    return lines


@pytest.mark.parametrize(
    ("name", "is_under_way"), [("no local workers", False), *((name, True) for name in LOADERS)]
)
def test_a_loader_rolls_back_to_any_of_its_own_checkpoints(host, name, is_under_way):
    options, local = LOADERS[name]
    given = {"loader": options, "stream": False, "is_under_way": is_under_way}
    lines = rolled_back(host, PLACES, workers=local, **given)
    assert len({tuple(line["again"]) for line in lines}) == len(PLACES)


@pytest.mark.parametrize("seeding", ["stretch", "place", "batch"])
def test_on_data_hosts_a_state_resumes_with_the_seeding_that_it_was_saved_with(host, seeding):
    # Of 48 samples two each draw in a row, in this version.
    given = {"loader": {}, "stream": False, "is_under_way": False, "batch": 48, "seeding": seeding}
    lines = rolled_back(host, ["middle of epoch 0"], workers=0, **given)
    assert lines == reference(script="rollback_script.py", to=["middle of epoch 0"], **given)


@pytest.mark.parametrize(("local", "persists"), [(0, False), (1, True)])
def test_a_loader_of_an_iterable_dataset_rolls_back_to_a_checkpoint(host, local, persists):
    options = {"num_workers": 2, "persistent_workers": persists}
    rolled_back(host, STARTS, loader=options, stream=True, workers=local, is_under_way=False)
