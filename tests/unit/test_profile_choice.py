import torch
from torch.utils.data import DataLoader, TensorDataset

import stoker
from stoker.profile.batches import MAX_BATCHES_WITHOUT_GRADIENTS, Choice
from stoker.profile.steps import WARM_UP_STEPS, AsIsSteps, Mark


def make(batch_size: int = 2) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=batch_size)


def after(batches: int) -> AsIsSteps:
    steps = AsIsSteps(workers=0, children_cpu=lambda: 0.0, machine_cpu=lambda: 0.0)
    for number in range(batches):
        mark = Mark(host_seconds=float(number))
        steps.got(asked=mark, got=mark, cpu=0.0, receive=0.0)
    return steps


MEASURED = WARM_UP_STEPS + 5


def test_the_first_loader_that_is_read_with_gradients_is_the_main_one():
    choice, check, train, other = Choice(), make(), make(), make()
    with torch.no_grad():
        assert not choice.is_main(check, delivered=3, steps=None)
    assert choice.is_main(train, delivered=0, steps=None)
    with torch.no_grad():
        assert not choice.is_main(check, delivered=60, steps=after(MEASURED))
        assert choice.is_main(train, delivered=1, steps=after(1))
    # One that is measured does not give way.
    assert not choice.is_main(other, delivered=500, steps=after(MEASURED))


def test_without_any_gradients_a_long_epoch_is_the_main_one():
    with torch.no_grad():
        assert Choice().is_main(make(), delivered=MAX_BATCHES_WITHOUT_GRADIENTS, steps=None)


def test_a_loader_that_was_only_looked_at_gives_way():
    choice, looked_at, train = Choice(), make(), make()
    assert choice.is_main(looked_at, delivered=0, steps=None)
    steps = after(1)
    assert not choice.is_main(train, delivered=1, steps=steps)
    assert choice.is_main(train, delivered=2, steps=steps)
    assert choice.has_changed


def test_a_new_loader_for_each_epoch_goes_on_where_the_last_one_ended_unless_of_another_kind():
    choice = Choice()
    assert choice.is_main(make(), delivered=0, steps=None)
    assert choice.loader is None  # the script has let go of it
    assert choice.is_main(make(), delivered=-1, steps=after(4))
    assert not choice.has_changed
    assert choice.is_main(DataLoader([1, 2, 3]), delivered=-1, steps=after(1))
    assert choice.has_changed


def test_a_loader_made_again_goes_on_though_something_holds_the_former_one():
    choice, data, held = Choice(), TensorDataset(torch.arange(8)), []
    for _ in range(3):
        held.append(stoker.DataLoader(data, batch_size=2))
        assert choice.is_main(held[-1], delivered=-1, steps=after(MEASURED))
        assert not choice.has_changed


def test_a_loader_that_was_there_before_the_main_one_was_read_is_another():
    choice, data = Choice(), TensorDataset(torch.arange(8))
    train, check = (stoker.DataLoader(data, batch_size=2) for _ in range(2))
    assert choice.is_main(train, delivered=0, steps=None)
    assert not choice.is_main(check, delivered=-1, steps=after(MEASURED))
