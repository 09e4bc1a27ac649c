"""Every rank of a script gives its spec the same name, whatever differs between the processes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import cast

import pytest
import torch
from cloudpickle import cloudpickle

from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, pack_spec, unpack_spec
from support.record_classes import CLASSES
from support.warm_python import run_code

SCRIPT = """
    import abc, dataclasses, enum, json, sys
    from typing import Generic, NamedTuple, TypeVar

    import numpy as np
    import torch

    from stoker.feed.wire.dataset import DatasetSpec, pack_spec

    Item = TypeVar("Item")
    suffixes = {"jpg", "png", "gif", "bmp", "webp"}
    first, second, third = 1, 2.5, "three"

    class Kind(enum.Enum):
        CAT = 1
        DOG = 2

    @dataclasses.dataclass(frozen=True)
    class Options:
        size: int = 3
        names: tuple = ("x", "y")

    class Sample(NamedTuple):
        image: object
        label: int

    class Outer:
        class Inner:
            depth = 2

        @property
        def depth(self):
            return self.Inner.depth

        @staticmethod
        def of(word):
            return word in {"one", "two", "three", "four"}

    class Base(abc.ABC, Generic[Item]):
        @abc.abstractmethod
        def __getitem__(self, index): ...

    class Images(Base[int]):
        def __getitem__(self, index):
            return Sample(index, Outer().depth)

    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, value):
            return value * self.by

    class Transforms:
        def __init__(self):
            self.steps = [Scale(2.0), lambda value: value + first]
            self.suffixes = suffixes
            self.pairs = frozenset({("a", 1), ("b", 2), ("c", None)})

    class Tensors:
        def __init__(self):
            self.weights = torch.arange(100.0)
            self.view = self.weights[10:20]
            self.array = np.arange(4)

    def collate(items):
        return third, second, first, Kind.DOG, [item in suffixes for item in items]

    def make():
        class Local:
            value = 1
        return Local

    def closure():
        words = {"alpha", "beta", "gamma", "delta"}
        return lambda items: (words, len(items))

    specs = {
        "class": DatasetSpec(dataset=Images(), collate_fn=len),
        "nested": DatasetSpec(dataset=Outer.Inner(), collate_fn=Outer.of),
        "dataclass": DatasetSpec(dataset=[Options(), Kind.CAT], collate_fn=len),
        "function": DatasetSpec(dataset=[1], collate_fn=collate),
        "lambda": DatasetSpec(dataset=[1], collate_fn=lambda items: (second, third, first)),
        "closure": DatasetSpec(dataset=[1], collate_fn=closure()),
        "transforms": DatasetSpec(dataset=Transforms(), collate_fn=len),
        "tensors": DatasetSpec(dataset=Tensors(), collate_fn=len),
        "locals": DatasetSpec(
            dataset=[make(), make()], collate_fn=len, worker_init_fn=lambda _: Sample
        ),
    }
    packed = {name: pack_spec(spec, max_bytes=1 << 20) for name, spec in specs.items()}
    if len(sys.argv) > 1:
        with open(sys.argv[1], "wb") as file:
            file.write(packed[sys.argv[2]].data)
    print(json.dumps({name: each.digest for name, each in packed.items()}))
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tmp_path_factory.mktemp("pickling") / "spec"


@pytest.fixture(scope="module")
def said(spec):
    script = spec.with_name("script.py")
    script.write_text(textwrap.dedent(SCRIPT))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
        )
        for seed, arguments in enumerate([[str(spec), "locals"], []], start=1)
    ]
    return [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]


def test_all_processes_of_a_script_give_a_spec_one_name(said):
    assert said[0] == said[1]
    assert len(set(said[0].values())) == len(said[0])


@pytest.mark.usefixtures("said")
def test_classes_of_one_name_stay_two(spec):
    kinds = cast("list[type]", unpack_spec(spec.read_bytes()).dataset)
    first, second = kinds
    assert first is not second
    assert first.__name__ == second.__name__ == "Local"


def local(value: int) -> type:
    class Local:
        held = value

        def get(self) -> int:
            return self.held

    return Local


def again(dataset: list[object]) -> list[object]:
    packed = pack_spec(DatasetSpec(dataset=dataset, collate_fn=len), max_bytes=1 << 20)
    return cast("list[object]", unpack_spec(packed.data).dataset)


def test_a_class_comes_back_as_itself_where_it_was_made():
    kinds: list[object] = [local(1), local(2), local(1)]
    # Its batches were pickled by a worker that knows it by what the spec called it.
    assert again(kinds) == kinds
    assert cloudpickle.loads(cloudpickle.dumps(kinds)) == kinds
    # Another spec that has one of them calls it the same.
    names = [cloudpickle._get_or_create_tracker_id(kind) for kind in kinds]
    assert again([kinds[2]]) == [kinds[2]]
    assert names == [cloudpickle._get_or_create_tracker_id(kind) for kind in kinds]
    assert len(set(names)) == 3


def test_sets_come_back():
    shared = {"a", "b", None, ("c", 1)}
    numbers = {3, 1, 2}
    mixed = {"a", Path("b")}
    given: list[object] = [
        shared,
        shared,
        frozenset({"x", b"y"}),
        set(),
        numbers,
        mixed,
        {1.0, None},
    ]
    back = again(given)
    assert back == given
    assert [type(each) for each in back] == [type(each) for each in given]
    assert back[0] is back[1]


def test_tensors_come_back_and_share_what_they_shared():
    whole = torch.arange(20, dtype=torch.int16)
    given = [
        whole,
        whole[3:7],
        torch.zeros(0),
        torch.randn(3, 4).t(),
        torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        torch.nn.Parameter(torch.eye(2)),
        torch.empty(5, device="meta"),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]).to_sparse(),
    ]
    back = cast("list[torch.Tensor]", again(list(given)))
    for mine, theirs in zip(given, back, strict=True):
        assert type(mine) is type(theirs)
        assert (mine.dtype, mine.shape, mine.requires_grad) == (
            theirs.dtype,
            theirs.shape,
            theirs.requires_grad,
        )
        if mine.device.type != "meta":
            assert torch.equal(mine.to_dense(), theirs.to_dense())
    back[0][4] = -1
    assert back[1][1] == -1
    back[0].resize_(100)


def test_what_a_name_leans_on_is_in_cloudpickle():
    # Without the first, each rank's classes get names of their own; without the other, all classes
    # are looked at, importable ones too.
    assert callable(cloudpickle._lookup_class_or_track)
    assert callable(cloudpickle._should_pickle_by_reference)


def test_classes_of_modules_come_back_as_themselves_from_another_process():
    made = run_code(
        "import torch\n"
        "from stoker.feed.wire.codec import pack_value\n"
        "from support.record_classes import CLASSES\n"
        "batch = [each(torch.ones(2), 3) for each in CLASSES]\n"
        "print(pack_value(batch, allow_pickle=True).hex())\n"
    )
    batch = codec.unpack_value(bytes.fromhex(made), allow_pickle=True)
    assert isinstance(batch, list)
    assert [type(each) for each in batch] == CLASSES
    assert [each.y for each in batch] == [3] * len(CLASSES)
