"""What a loop keeps of each step: found by lengths, named as the script names it."""

import array
import functools
import gc
import io
import itertools
import logging
import logging.handlers
import queue
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from stoker.profile.memory.loop_growth import LoopWatch, _Look, grown_per_step
from stoker.profile.rank_results import LoopGrowth

MB = 1_000_000
STEPS = 40


class Epochs:
    """A trainer of a script, whose class is no library's."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.by_step: dict[int, np.ndarray] = {}


def watched(step: Callable[[torch.Tensor], object], *, grown: int = MB) -> list[Any]:
    """Returns what is kept by a loop that calls `step` with each loss."""
    used = iter(range(0, 10**12, grown)) if grown else iter([5] * 1000)
    watch = LoopWatch(used=lambda: next(used), clock=iter(range(10**6)).__next__)
    weight = torch.ones(3, requires_grad=True)
    for number in range(STEPS):
        watch.look(number)
        step((weight * number).sum())
    growth = watch.result(STEPS)
    assert growth is not None
    assert growth.grown_bytes_per_step == grown
    return list(growth.kept)


def test_a_list_of_losses_in_a_function_is_named_with_it():
    losses: list[torch.Tensor] = []
    (kept,) = watched(losses.append)
    assert kept.name.startswith("losses in test_a_list_of_losses")
    assert (kept.container, kept.element, kept.has_graph) == ("list", "Tensor", True)
    assert kept.count_per_step == pytest.approx(1)


def test_an_attribute_is_named_by_its_class():
    epochs = Epochs()
    (kept,) = watched(lambda loss: epochs.outputs.append(loss.detach()))
    assert kept.name == "Epochs.outputs"
    assert not kept.has_graph


def test_a_deque_that_is_not_full_says_what_it_holds_at_most():
    latest: deque[torch.Tensor] = deque(maxlen=1000)
    (kept,) = watched(lambda loss: latest.append(loss.detach()))
    assert (kept.container, kept.max_count) == ("deque", 1000)


def test_a_list_within_a_dict_is_named_by_its_key():
    history: dict[str, list[dict[str, torch.Tensor]]] = defaultdict(list)
    (kept,) = watched(lambda loss: history["train"].append({"loss": loss}))
    assert kept.name == "history['train'] in test_a_list_within_a_dict_is_named_by_its_key()"
    assert kept.has_graph


def test_a_sum_of_losses_is_named():
    total = torch.zeros(())

    def add(loss: torch.Tensor) -> None:
        nonlocal total
        total = total + loss

    (kept,) = watched(add)
    assert kept.container == "sum"
    assert kept.name.startswith("total in ")


def test_a_tensor_that_becomes_longer_is_named():
    joined = torch.zeros(0)

    def join(loss: torch.Tensor) -> None:
        nonlocal joined
        joined = torch.cat([joined, loss.detach().expand(100_000)])

    (kept,) = watched(join, grown=400_000)
    assert kept.name.startswith("joined in ")
    assert (kept.container, kept.element, kept.has_graph) == ("joined", "Tensor", False)


def test_an_array_of_an_object_whose_method_loops_is_named_by_its_class():
    class Trainer:
        def __init__(self) -> None:
            self.scores = np.zeros(0)

        def add(self, loss: torch.Tensor) -> None:
            self.scores = np.append(self.scores, np.zeros(50_000))

        def fit(self) -> list[Any]:
            return watched(self.add, grown=400_000)

    (kept,) = Trainer().fit()
    assert (kept.name, kept.element) == ("Trainer.scores", "ndarray")


def test_variables_are_not_kept_alive_by_a_look():
    held = torch.zeros(10)
    alive = weakref.ref(held)
    assert watched(lambda loss: None) == []
    del held
    assert alive() is None


@pytest.mark.parametrize(
    "keep",
    [
        lambda loss, kept: kept.append(loss.item()),
        lambda loss, kept: None,
    ],
    ids=["numbers", "nothing"],
)
def test_numbers_are_not_what_keeps_memory(keep):
    numbers: list[object] = []
    assert watched(lambda loss: keep(loss, numbers)) == []


def test_a_deque_with_a_limit_is_not_named():
    last: deque[torch.Tensor] = deque(maxlen=5)
    assert watched(last.append) == []


def test_where_memory_stays_as_it_is_nothing_is_searched():
    losses: list[torch.Tensor] = []
    assert watched(losses.append, grown=0) == []
    assert len(losses) == STEPS


def looks(*sizes: int) -> list[_Look]:
    return [_Look(steps, size) for steps, size in enumerate(sizes, start=1)]


def growth_of_all_steps(watch: LoopWatch) -> LoopGrowth:
    for number in range(STEPS):
        watch.look(number)
    growth = watch.result(STEPS)
    assert growth is not None
    return growth


def test_what_is_allocated_once_is_no_growth():
    assert grown_per_step(looks(*[MB] * 30, *[900 * MB] * 30)) == 0.0
    assert grown_per_step(looks(*(place * MB for place in range(60)))) == MB


def test_a_buffer_that_has_filled_up_is_no_growth():
    # As of 700 steps of a replay buffer, in a profile of 900.
    assert grown_per_step(looks(*(min(place, 70) * MB for place in range(90)))) == 0.0


@pytest.mark.parametrize(("freed", "grown"), [(39, 0), (5, MB)])
def test_what_is_freed_and_kept_by_glibc_is_no_growth(freed, grown):
    given_back: list[int] = []
    used = itertools.count(0, MB)
    watch = LoopWatch(
        used=lambda: next(used) - sum(given_back),
        # At the beginning, behind the first looks, and at the end.
        give_back=lambda: given_back.append(freed * MB if len(given_back) == 2 else 0),
        clock=iter(range(10**6)).__next__,
    )
    growth = growth_of_all_steps(watch)
    assert growth.grown_bytes_per_step == grown
    assert len(given_back) == 3


def test_what_the_search_itself_frees_hides_no_growth(monkeypatch):
    # As of a process of millions of objects, each list of which has 30 MB; glibc keeps them.
    walked: list[int] = []
    all_objects = gc.get_objects

    def get_objects():
        walked.append(30 * MB)
        return all_objects()

    monkeypatch.setattr(gc, "get_objects", get_objects)
    used = itertools.count(0, MB)
    watch = LoopWatch(
        used=lambda: next(used) + sum(walked),
        give_back=walked.clear,
        clock=iter(range(10**6)).__next__,
    )
    growth = growth_of_all_steps(watch)
    assert growth.grown_bytes_per_step == MB


def test_what_was_freed_before_the_first_step_hides_no_growth():
    # As of a dataset's index that was made in lists: glibc kept 100 MB of them.
    kept = [100 * MB]
    used = itertools.count(0, MB)
    watch = LoopWatch(
        used=lambda: next(used) + sum(kept),
        give_back=kept.clear,
        clock=iter(range(10**6)).__next__,
    )
    growth = growth_of_all_steps(watch)
    assert growth.grown_bytes_per_step == MB


def test_what_the_first_steps_take_is_no_growth_that_nothing_explains():
    # As of a model in bfloat16 on a CPU: 62 MB in 20 of 200 steps, and then a little up and down.
    used = itertools.chain(range(0, 10 * 6 * MB, 6 * MB), range(60 * MB, 10**9, 50_000))
    watch = LoopWatch(
        used=lambda: next(used), asked=iter([0, 10**9]).__next__, clock=iter(range(10**6)).__next__
    )
    growth = growth_of_all_steps(watch)
    assert growth.grown_bytes_per_step == 50_000
    assert growth.seen_bytes < 2 * MB


def test_an_allocators_lumps_are_growth():
    assert grown_per_step(looks(*(place // 4 * 4 * MB for place in range(80)))) == pytest.approx(
        MB, rel=0.2
    )


def test_few_looks_show_nothing():
    assert grown_per_step(looks(1, 2, 3, 4, 5)) is None


@pytest.mark.parametrize(
    ("keep", "container", "element", "count"),
    [
        (lambda kept, number: kept["all"].extend([number + 0.5] * 3000), "list", "float", 3000),
        (lambda kept, number: kept["all"].append([number + 0.5] * 10_000), "list", "list", 1),
        (lambda kept, number: kept["all"].append("x" * 100_000), "list", "str", 1),
        (lambda kept, number: kept["by_step"].update({number: bytes(100_000)}), "dict", "bytes", 1),
        (
            lambda kept, number: kept["ordered"].update({number: bytes(100_000)}),
            *("OrderedDict", "bytes", 1),
        ),
    ],
)
def test_what_is_kept_of_each_step_without_tensors_is_named(keep, container, element, count):
    kept: dict[str, Any] = {"all": [], "by_step": {}, "ordered": OrderedDict()}
    numbers = iter(range(10**6))
    (found,) = watched(lambda loss: keep(kept, next(numbers)), grown=100_000)
    assert (found.container, found.element) == (container, element)
    assert found.count_per_step == pytest.approx(count, rel=0.05)
    assert not found.has_graph


def test_a_dictionary_of_arrays_in_an_attribute_is_named():
    # The garbage collector of Python does not know it, as arrays refer to nothing.
    epochs = Epochs()
    numbers = iter(range(10**6))

    def keep(loss: torch.Tensor) -> None:
        epochs.by_step[next(numbers)] = np.full(1000, loss.item())

    (kept,) = watched(keep)
    assert not gc.is_tracked(epochs.by_step)
    assert (kept.name, kept.container, kept.element) == ("Epochs.by_step", "dict", "ndarray")


def test_numbers_that_are_little_of_what_a_step_adds_are_not_its_cause():
    scores: list[float] = []
    assert watched(lambda loss: scores.append(0.5), grown=100_000) == []


class SlottedHistory:
    __slots__ = ("outputs",)

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []


def hook_with_closure() -> Callable[[torch.Tensor], None]:
    activations: list[torch.Tensor] = []

    def hook(output: torch.Tensor) -> None:
        activations.append(output)

    return hook


# In the test: Python's garbage collector does not look at what was there as the tests were read.
def test_a_list_of_a_class_is_named_by_it():
    class ByClass:
        outputs: ClassVar[list[torch.Tensor]] = []

    (kept,) = watched(lambda loss: ByClass.outputs.append(loss))
    assert (kept.name, kept.has_graph) == ("ByClass.outputs", True)


def test_a_list_in_a_slot_is_named_by_its_class():
    history = SlottedHistory()
    (kept,) = watched(lambda loss: history.outputs.append(loss))
    assert kept.name == "SlottedHistory.outputs"


def test_what_a_hook_keeps_in_its_closure_is_named_by_it():
    (kept,) = watched(hook_with_closure())
    assert kept.name == "activations of hook()"


class Layers(torch.nn.Module):
    """A network of a script, as most are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("layer", "name"), [("", "Layers"), ("first", "Linear")])
def test_hooks_that_each_step_registers_are_named_by_their_layer(layer, name):
    network = Layers()

    def step(loss: torch.Tensor) -> None:
        activations = torch.zeros(1000)
        network.get_submodule(layer).register_forward_hook(lambda *_: activations.shape)

    (kept,) = watched(step)
    assert kept.name == f"{name}._forward_hooks"
    assert (kept.element, kept.has_graph) == ("function", False)


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue, queue.LifoQueue])
def test_a_queue_that_nothing_reads_is_named(kind):
    waiting = kind()
    (kept,) = watched(lambda loss: waiting.put((1, loss.detach())))
    assert kept.name == "waiting in test_a_queue_that_nothing_reads_is_named()"
    assert (kept.container, kept.element, kept.max_count) == (kind.__name__, "tuple", None)


def test_a_queue_that_is_not_full_says_what_it_holds_at_most():
    waiting = queue.Queue[torch.Tensor](maxsize=300)
    (kept,) = watched(lambda loss: waiting.put(loss.detach()))
    assert (kept.container, kept.max_count) == ("Queue", 300)


class ReplayBuffer:
    """Keeps the latest steps, as those of reinforcement learning do."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.steps: list[torch.Tensor] = []

    def add(self, step: torch.Tensor) -> None:
        self.steps.append(step)
        del self.steps[: -self.capacity]


@pytest.mark.parametrize(("capacity", "most"), [(10_000, 10_000), (20, None)])
def test_a_buffer_says_what_it_holds_at_most(capacity, most):
    buffer = ReplayBuffer(capacity)
    kept = watched(lambda loss: buffer.add(loss.detach()))
    assert [(one.name, one.max_count) for one in kept] == [("ReplayBuffer.steps", most)][
        : bool(most)
    ]


@pytest.mark.parametrize(("history_size", "most"), [(1000, 1000), (20, None)])
def test_an_optimizers_history_says_what_it_holds_at_most(history_size, most):
    weight = torch.nn.Parameter(3 * torch.randn(50, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.LBFGS(
        [weight], lr=0.01, max_iter=1, history_size=history_size, tolerance_change=0
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.cosh(weight).sum()
        loss.backward()
        return loss

    kept = watched(lambda _: optimizer.step(closure))
    assert [(one.name, one.max_count) for one in kept] == [("LBFGS.old_dirs", most)][: bool(most)]


class Reservoir:
    """Keeps steps at random, of all that there were."""

    def __init__(self, reservoir_size: int) -> None:
        self.reservoir_size = reservoir_size
        self.steps: list[torch.Tensor] = []

    def add(self, step: torch.Tensor) -> None:
        if len(self.steps) < self.reservoir_size:
            self.steps.append(step)
        else:
            self.steps[0] = step


@pytest.mark.parametrize(("size", "most"), [(10_000, 10_000), (20, None)])
def test_a_reservoir_says_what_it_holds_at_most(size, most):
    reservoir = Reservoir(size)
    kept = watched(lambda loss: reservoir.add(loss.detach()))
    assert [(one.name, one.max_count) for one in kept] == [("Reservoir.steps", most)][: bool(most)]


def test_numbers_by_a_number_are_no_limit():
    history: dict[object, object] = dict.fromkeys(range(20), 10**6)
    losses: list[torch.Tensor] = []
    history["losses"] = losses
    (kept,) = watched(losses.append)
    assert kept.max_count is None


@pytest.mark.parametrize(("num_bytes", "is_named"), [(8 * MB, True), (MB, False)])
def test_what_is_kept_in_few_steps_is_named_where_it_is_most_of_what_is_added(num_bytes, is_named):
    evaluated: list[torch.Tensor] = []
    steps = itertools.count()

    def step(loss: torch.Tensor) -> None:
        if next(steps) % 8 == 0:
            evaluated.append(torch.empty(num_bytes, dtype=torch.uint8))

    kept = watched(step)
    assert [one.count_per_step for one in kept] == pytest.approx([1 / 8] * is_named, rel=0.2)


def test_what_a_default_argument_keeps_is_named_by_its_function():
    def log_loss(loss: torch.Tensor, history: list[torch.Tensor] = []) -> None:  # noqa: B006
        history.append(loss)

    (kept,) = watched(log_loss)
    assert kept.name == "history of log_loss()"


def test_a_set_that_grows_is_named():
    seen: set[str] = set()
    numbers = iter(range(10**6))
    (kept,) = watched(
        lambda loss: seen.update(f"sample {next(numbers)}" for _ in range(500)), grown=40_000
    )
    assert kept.name.startswith("seen in ")
    assert (kept.container, kept.element) == ("set", "str")


def test_a_moving_mean_of_losses_is_a_sum_with_its_graph():
    mean = torch.zeros(())

    def smooth(loss: torch.Tensor) -> None:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss

    (kept,) = watched(smooth)
    assert (kept.container, kept.has_graph) == ("sum", True)
    assert kept.name.startswith("mean in ")


@pytest.mark.parametrize("how", ["attribute", "key"])
def test_a_sum_that_is_no_variable_is_named(how):
    class Meter:
        def __init__(self) -> None:
            self.total = torch.zeros(())

    meter, sums = Meter(), {"loss": torch.zeros(())}

    def add(loss: torch.Tensor) -> None:
        if how == "attribute":
            meter.total = meter.total + loss
        else:
            sums["loss"] = sums["loss"] + loss

    (kept,) = watched(add)
    assert kept.container == "sum"
    if how == "attribute":
        assert kept.name == "Meter.total"
    else:
        assert kept.name == "sums['loss'] in test_a_sum_that_is_no_variable_is_named()"


def test_a_handler_that_keeps_its_log_is_named():
    handler = logging.handlers.MemoryHandler(capacity=10**6)
    log = logging.Logger("of a training run")
    log.addHandler(handler)
    (kept,) = watched(lambda loss: log.info("loss %s", loss.item()), grown=1500)
    assert (kept.name, kept.element) == ("MemoryHandler.buffer", "LogRecord")
    handler.buffer.clear()


class Chained:
    """What a loop computes of itself, as it was in the step before."""

    def __init__(self) -> None:
        self.kept: Any = torch.zeros(())
        self.cell = torch.nn.GRUCell(1, 3)

    def hide(self, loss: torch.Tensor) -> None:
        state = self.kept if self.kept.dim() else torch.zeros(1, 3)
        self.kept = self.cell(loss.reshape(1, 1), state)

    def hide_detached(self, loss: torch.Tensor) -> None:
        self.hide(loss)
        self.kept = self.kept.detach()

    def hide_for_steps(self, loss: torch.Tensor) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        self.hide(loss)
        if self.steps % 6 == 0:
            self.kept = self.kept.detach()


@pytest.mark.parametrize(
    "compute",
    [
        lambda one, loss: setattr(one, "kept", torch.maximum(one.kept, loss)),
        lambda one, loss: setattr(one, "kept", torch.stack([one.kept, loss]).min()),
        lambda one, loss: setattr(one, "kept", one.kept * torch.sigmoid(loss)),
        lambda one, loss: setattr(one, "kept", (one.kept * 9 + loss) / 10),
        Chained.hide,
    ],
    ids=["maximum", "minimum", "product", "mean", "hidden state"],
)
def test_what_is_computed_from_itself_keeps_all_graphs(compute):
    one = Chained()
    (kept,) = watched(lambda loss: compute(one, loss))
    assert (kept.name, kept.container, kept.has_graph) == ("Chained.kept", "graph", True)


@pytest.mark.parametrize(
    "compute",
    [
        # Of these one tensor is there, with its graph.
        lambda one, loss: setattr(one, "kept", max(one.kept, loss)),
        lambda one, loss: setattr(one, "kept", loss),
        lambda one, loss: setattr(one, "kept", 0.9 * one.kept + 0.1 * loss.detach()),
        Chained.hide_detached,
        Chained.hide_for_steps,
    ],
    ids=["best", "latest", "mean", "detached", "detached after some steps"],
)
def test_what_lets_go_of_earlier_steps_keeps_no_graphs(compute):
    one = Chained()
    assert watched(lambda loss: compute(one, loss)) == []


@pytest.mark.timeout(120)
def test_a_look_at_a_long_graph_does_not_make_its_end_overflow_the_stack():
    # Torch would free 50,000 operations of which Python has seen each one within the other.
    weight, total = torch.ones(1, requires_grad=True), torch.zeros(1)
    for _ in range(50_000):
        total = total + weight
    watched(lambda loss: None)
    del total


def test_a_tuple_that_becomes_longer_is_named():
    history: tuple[torch.Tensor, ...] = ()

    def keep(loss: torch.Tensor) -> None:
        nonlocal history
        history += (loss,)

    (kept,) = watched(keep)
    assert kept.name.startswith("history in test_a_tuple_that_becomes_longer")
    assert (kept.container, kept.element, kept.has_graph) == ("tuple", "Tensor", True)


def test_a_linked_list_is_named_by_its_objects():
    class Node:
        def __init__(self, loss: torch.Tensor, before: Any) -> None:
            self.loss, self.before = loss, before

    latest = None

    def keep(loss: torch.Tensor) -> None:
        nonlocal latest
        latest = Node(loss, latest)

    (kept,) = watched(keep)
    assert (kept.name, kept.container) == ("Node.before", "objects")
    assert (kept.element, kept.has_graph) == ("Node", True)
    assert kept.count_per_step == pytest.approx(1, rel=0.1)


def test_a_list_that_each_step_makes_anew_keeps_nothing():
    # A step has more of them than there are steps, and something else grows.
    outputs: list[torch.Tensor] = []

    def step(loss: torch.Tensor) -> None:
        nonlocal outputs
        outputs = [loss * number for number in range(2 * STEPS)]

    assert watched(step) == []


def test_a_graph_that_is_as_long_in_each_step_is_no_sum():
    last = torch.zeros(())

    def two_terms(loss: torch.Tensor) -> None:
        nonlocal last
        last = loss
        for number in range(STEPS):
            last = last + number * loss

    assert watched(two_terms) == []


class Scores:
    def __init__(self) -> None:
        self.all = torch.zeros(0)
        self.by = {"loss": np.zeros(0)}

    def join(self) -> None:
        self.all = torch.cat([self.all, torch.zeros(25_000)])

    def join_by(self) -> None:
        self.by["loss"] = np.append(self.by["loss"], np.zeros(12_500))


class WithBuffer(torch.nn.Module):
    memory: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0))

    def join(self) -> None:
        self.memory = torch.cat([self.memory, torch.zeros(25_000)])


def joined_in(by: Any, key: Any) -> None:
    by[key] = np.append(by[key], np.zeros(12_500))


@pytest.mark.parametrize(
    ("kept", "join", "name", "element"),
    [
        ({"x": np.zeros(0)}, lambda kept: joined_in(kept, "x"), "kept['x'] in ", "ndarray"),
        ([np.zeros(0)], lambda kept: joined_in(kept, 0), "kept[0] in ", "ndarray"),
        (
            {"val": {"x": np.zeros(0)}},
            lambda kept: joined_in(kept["val"], "x"),
            *("kept['val']['x'] in ", "ndarray"),
        ),
        (Scores(), Scores.join, "Scores.all", "Tensor"),
        (Scores(), Scores.join_by, "Scores.by['loss']", "ndarray"),
        ({"val": Scores()}, lambda kept: kept["val"].join(), "Scores.all", "Tensor"),
        (WithBuffer(), WithBuffer.join, "WithBuffer.memory", "Tensor"),
        (bytearray(), lambda kept: kept.extend(bytes(100_000)), "kept in ", "bytearray"),
        (io.BytesIO(), lambda kept: kept.write(bytes(100_000)), "kept in ", "BytesIO"),
        (io.StringIO(), lambda kept: kept.write("x" * 25_000), "kept in ", "StringIO"),
        (array.array("d"), lambda kept: kept.extend([0.5] * 12_500), "kept in ", "array"),
    ],
    ids=[
        *("dict", "list", "dict of dicts", "attribute", "dict of an attribute", "dict of objects"),
        *("module", "bytearray", "bytes", "text", "numbers"),
    ],
)
def test_what_becomes_longer_is_named_wherever_it_is(kept, join, name, element):
    (found,) = watched(lambda loss: join(kept), grown=100_000)
    assert (found.container, found.element) == ("joined", element)
    assert found.name.startswith(name)


def test_a_table_that_rows_are_added_to_is_named():
    pandas = pytest.importorskip("pandas")
    tables = {"scores": pandas.DataFrame({"score": []})}

    def add(loss: torch.Tensor) -> None:
        rows = pandas.DataFrame({"score": np.zeros(12_500)})
        tables["scores"] = pandas.concat([tables["scores"], rows])

    (found,) = watched(add, grown=100_000)
    assert found.name == "tables['scores'] in test_a_table_that_rows_are_added_to_is_named()"


def test_the_latest_batch_is_no_array_that_becomes_longer():
    latest = {"batch": torch.zeros(0)}
    sizes = itertools.cycle([10, 30, 20, 50, 40, 60, 30])

    def keep(loss: torch.Tensor) -> None:
        latest["batch"] = torch.zeros(1000 * next(sizes))

    for _ in range(5):
        assert watched(keep) == []


def test_what_is_there_at_the_end_alone_has_not_become_longer():
    def end_of(watch: LoopWatch, batch: torch.Tensor) -> Any:
        return watch.result(STEPS)

    used = itertools.count(0, MB)
    watch = LoopWatch(used=lambda: next(used), clock=iter(range(10**6)).__next__)
    for number in range(STEPS):
        watch.look(number)
    assert end_of(watch, torch.zeros(10 * MB)).kept == ()


@dataclass
class StepResult:
    loss: torch.Tensor


class StepRow(NamedTuple):
    loss: torch.Tensor


class StepStruct(msgspec.Struct):
    loss: torch.Tensor


@pytest.mark.parametrize("kind", [StepResult, StepRow, StepStruct])
def test_a_list_of_objects_that_hold_a_loss_keeps_its_graph(kind):
    results: list[object] = []
    (kept,) = watched(lambda loss: results.append(kind(loss)))
    assert (kept.container, kept.element, kept.has_graph) == ("list", kind.__name__, True)


def test_what_a_function_keeps_as_its_attribute_is_named():
    def log(loss: torch.Tensor) -> None:
        vars(log)["history"].append(loss)

    vars(log)["history"] = []
    (kept,) = watched(log)
    assert kept.name == "log.history"


def test_results_that_a_function_keeps_are_named():
    @functools.lru_cache(maxsize=10**6)
    def masks(number: int) -> np.ndarray:
        return np.zeros(12_500)

    numbers = iter(range(10**6))
    (kept,) = watched(lambda loss: masks(next(numbers)), grown=100_000)
    assert kept.name == "masks in test_results_that_a_function_keeps_are_named()"
    assert (kept.container, kept.element, kept.max_count) == ("lru_cache", "ndarray", 10**6)


def test_lists_of_several_classes_are_named_together():
    scores: dict[int, list[np.ndarray]] = {label: [] for label in range(4)}
    numbers = iter(range(10**6))
    (kept,) = watched(
        lambda loss: scores[next(numbers) % 4].append(np.zeros(12_500)), grown=100_000
    )
    assert kept.name == "scores[...] in test_lists_of_several_classes_are_named_together()"
    assert (kept.container, kept.element) == ("list", "ndarray")


def test_a_sum_in_a_list_is_named_by_its_place():
    sums: list[Any] = [0]

    def add(loss: torch.Tensor) -> None:
        sums[0] = sums[0] + loss

    (kept,) = watched(add)
    assert (kept.name, kept.container) == (
        "sums[0] in test_a_sum_in_a_list_is_named_by_its_place()",
        "sum",
    )
