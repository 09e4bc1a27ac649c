"""Every rank of a script gives its spec the same name, whatever differs between the processes."""

import json
import keyword
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cloudpickle import cloudpickle

from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, pack_spec, unpack_spec
from support.record_classes import CLASSES
from support.warm_python import run_code

SCRIPT = """
    import abc, enum, json, sys
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

    def closure():
        class Local:
            words = {"alpha", "beta", "gamma", "delta"}
        return lambda items: Local, Local

    specs = {
        "class": (Images(), len),
        "nested": (Outer.Inner(), Outer.of),
        "function": ([1], collate),
        "lambda": ([Kind.CAT], lambda items: (second, third, first)),
        "closure": ([1], closure()[0]),
        "transforms": (Transforms(), len),
        "tensors": (Tensors(), len),
        "locals": ([closure()[1], closure()[1]], lambda _: Sample),
    }
    packed = {
        name: pack_spec(DatasetSpec(dataset=dataset, collate_fn=collate), max_bytes=1 << 20)
        for name, (dataset, collate) in specs.items()
    }
    with open(sys.argv[1], "wb") as file:
        file.write(packed["locals"].data)
    print(json.dumps({name: each.digest for name, each in packed.items()}))
"""

TWO_LOCALS = """
import sys
from pathlib import Path

from stoker.feed.wire.dataset import unpack_spec

first, second = unpack_spec(Path(sys.argv[1]).read_bytes()).dataset
assert first is not second
assert first.__name__ == second.__name__ == "Local"
"""


def test_all_processes_of_a_script_give_a_spec_one_name_and_classes_of_one_name_stay_two(tmp_path):
    script, spec = tmp_path / "script.py", tmp_path / "spec"
    script.write_text(textwrap.dedent(SCRIPT))
    words, environs = [sys.executable, script, spec], [{"PYTHONHASHSEED": seed} for seed in "12"]
    ranks = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | environ)
        for environ in environs
    ]
    said = [json.loads(rank.communicate(timeout=150)[0]) for rank in ranks]
    assert said[0] == said[1]
    assert len(set(said[0].values())) == len(said[0])
    # In a process of its own, as on a data host: this one would become the script's.
    words = [sys.executable, "-c", TWO_LOCALS, str(spec)]
    subprocess.run(words, check=True, timeout=150)


def local(value):
    class Local:
        held = value

        def get(self):
            return self.held

    return Local


def again(dataset, *, max_bytes=1 << 20):
    packed = pack_spec(DatasetSpec(dataset=dataset, collate_fn=len), max_bytes=max_bytes)
    return unpack_spec(packed.data).dataset


def test_a_class_comes_back_as_itself_where_it_was_made():
    kinds = [local(1), local(2), local(1)]
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
    mixed = {"a", Path("b")}
    given = [shared, shared, frozenset({"x", b"y"}), set(), {3, 1, 2}, mixed, {1.0, None}]
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
    back = again(list(given))
    for mine, theirs in zip(given, back, strict=True):
        for fact in (type, lambda t: t.dtype, lambda t: t.shape, lambda t: t.requires_grad):
            assert fact(mine) == fact(theirs)
        if mine.device.type != "meta":
            assert torch.equal(mine.to_dense(), theirs.to_dense())
    back[0][4] = -1
    assert back[1][1] == -1
    back[0].resize_(100)


VIEWS = {
    "end": lambda rows: rows[4:],
    "backwards": lambda rows: rows[::-1],
    "steps": lambda rows: rows[2:8:3],
    "columns": lambda rows: rows.reshape(3, 4).T,
    "other dtype": lambda rows: rows.view(np.uint8)[3:9],
    "view of a view": lambda rows: rows[2:][3:],
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_views_of_a_small_array_show_its_memory_on_a_host_as_well(view_of, is_first):
    rows = np.arange(12)
    view = view_of(rows)
    rows_there, view_there = again([rows, view] if is_first else [view, rows])
    if not is_first:
        rows_there, view_there = view_there, rows_there
    assert np.array_equal(view_there, view)
    assert (view_there.dtype, view_there.strides) == (view.dtype, view.strides)
    rows_there[...] = 7
    rows[...] = 7
    assert np.array_equal(view_there, view)


def test_a_view_of_a_large_array_is_sent_alone():
    large = np.zeros(1 << 20)
    spec = DatasetSpec(dataset=[large[3:5]], collate_fn=id)
    assert len(pack_spec(spec, max_bytes=1 << 20).data) < large.nbytes


def test_a_view_behind_its_large_array_shows_its_memory():
    large = np.zeros(1 << 18)
    # It is sent once.
    large_there, view_there = again([large, large[5:]], max_bytes=large.nbytes + (1 << 20))
    large_there[7] = 3
    assert view_there[2] == 3


def test_read_only_views_and_arrays_of_objects_come_back():
    texts = np.array(["a", [1]], dtype=object)
    rows = np.arange(12)
    frozen = rows[3:]
    frozen.flags.writeable = False
    texts_there, frozen_there, rows_there = again([texts[1:], frozen, rows])
    assert texts_there.tolist() == [[1]]
    assert frozen_there.tolist() == [*range(3, 12)]
    assert rows_there.flags.writeable


def test_what_a_name_leans_on_is_in_cloudpickle():
    # Without the first each rank names classes itself; without the other importable ones are, too.
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
    assert [type(each) for each in batch] == CLASSES
    assert [each.y for each in batch] == [3] * len(CLASSES)


# What a trainer may have imported of them, as `import torchvision` would.
PACKAGES = {
    "torch": ("torch.utils.data",),
    "numpy": ("numpy.random", "numpy.linalg"),
    "PIL": ("PIL.Image",),
    "xml": ("xml.etree.ElementTree",),
    "concurrent": ("concurrent.futures",),
    "torchvision": ("torchvision.transforms",),
    "transformers": ("transformers.models",),
    "lightning": ("lightning.pytorch",),
    "cv2": (),
    "pandas": ("pandas.api.types",),
}
DATASET_OF_NAMES = """\
import {package}

class Dataset:
    def __getitem__(self, index):
        return {package}, {attributes}
"""


def names_within(package: str) -> set[str]:
    names = set(dir(sys.modules[package]))
    for module in list(sys.modules):
        if module.startswith(f"{package}."):
            names.update(module.split(".")[1:])
    words = {name for name in names if name.isidentifier() and not keyword.iskeyword(name)}
    # Python gives those of a class another name.
    return {name for name in words if not name.startswith("__")}


@pytest.mark.parametrize("package", PACKAGES)
def test_attributes_of_a_dataset_may_be_named_as_whatever_a_package_has(package):
    for module in (package, *PACKAGES[package]):
        pytest.importorskip(module, exc_type=ImportError)
    names = sorted(names_within(package))
    attributes = ", ".join(f"self.{name}" for name in names)
    script: dict[str, object] = {"__name__": "__main__"}
    exec(DATASET_OF_NAMES.format(package=package, attributes=attributes), script)
    dataset = script["Dataset"]()
    for name in names:
        setattr(dataset, name, name)
    spec = DatasetSpec(dataset=dataset, collate_fn=list)
    made = unpack_spec(pack_spec(spec, max_bytes=1 << 30).data).dataset[0]
    assert made == (sys.modules[package], *names)


def test_a_module_that_an_object_took_the_place_of_goes_by_name(monkeypatch):
    class Settings:
        """An object with a lock, as a library may leave in its module's place."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

    settings = Settings()
    monkeypatch.setitem(sys.modules, "replaced_module", settings)
    spec = DatasetSpec(dataset=[settings], collate_fn=list)
    assert unpack_spec(pack_spec(spec, max_bytes=1 << 20).data).dataset == [settings]


def test_a_batch_with_objects_of_a_script_leaves_its_classes_as_they_are():
    done = run_code(
        "import enum, cloudpickle\n"
        "from stoker.feed.wire import codec\n"
        "from stoker.feed.wire.dataset import pack_error, unpack_error\n"
        "from stoker.feed.wire.pickling import name_class\n"
        "count = 1\n"
        "class Entry:\n"
        "    def value(self): return count\n"
        "class Color(enum.Enum):\n"
        "    RED = 1\n"
        "    def value_now(self): return count\n"
        "class OddError(Exception):\n"
        "    def value(self): return count\n"
        "for kind in (Entry, Color, OddError): name_class(kind)\n"
        "before = [Entry.value, Color.value_now, OddError.value]\n"
        "sent = codec.pack_value([Entry(), Color.RED], allow_pickle=True)\n"
        "entry, red = codec.unpack_value(sent, allow_pickle=True)\n"
        "error = unpack_error(pack_error(OddError(), host='h', where='w'))\n"
        "count = 2\n"
        "print([type(entry) is Entry, red is Color.RED, type(error) is OddError])\n"
        "print(entry.value(), red.value_now(), error.value())\n"
        "print(before == [Entry.value, Color.value_now, OddError.value])\n"
    )
    assert done.splitlines() == ["[True, True, True]", "2 2 2", "True"]
