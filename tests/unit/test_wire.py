import collections
import contextlib
import dataclasses
import math
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stoker.errors import ProtocolError, ShippingError
from stoker.feed.wire import codec, protocol
from stoker.feed.workers.pipe import MAX_MESSAGE_BYTES, Pipe, channel_pair
from support.property_tests import examples

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


def encoded(value, *, allow_pickle=True):
    made = codec.encode(value, allow_pickle=allow_pickle)
    payload = np.zeros(made.nbytes, dtype=np.uint8)
    if made.nbytes:
        made.write_into(memoryview(payload))
    return made.tree, payload


def travel(value, *, allow_pickle=True):
    return codec.decode(*encoded(value, allow_pickle=allow_pickle), allow_pickle=allow_pickle)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def raw(tensor):
    rare = codec.RARE_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if rare is not None:
        tensor = tensor.view(getattr(torch, rare))
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# torch warns of complex32 once a process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

tensor_dtypes = st.sampled_from(
    [getattr(torch, name) for name in sorted(codec.TENSOR_DTYPES) if hasattr(torch, name)]
)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    dtype, shape = draw(tensor_dtypes), draw(shapes)
    count = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8).copy()
    if dtype is torch.bool:
        data &= 1
    tensor = (
        torch.from_numpy(data).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    )
    return tensor.movedim(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.floating_dtypes()
    | hnp.complex_number_dtypes()
    | hnp.unicode_string_dtypes(min_len=1, max_len=4)
    | hnp.byte_string_dtypes(min_len=1, max_len=4)
    | hnp.datetime64_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4),
)
common = st.none() | st.booleans() | st.integers() | st.binary(max_size=5) | st.text(max_size=5)
scalars = (
    common
    | st.integers(min_value=1 << 64, max_value=1 << 200)
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(), max_size=5)
    | st.binary(min_size=1100, max_size=1200)
)
values = st.recursive(
    scalars | tensors() | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(common, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=examples(150))
def test_a_batch_and_a_packed_value_come_back_as_they_were_without_a_pickle(value):
    assert same(travel(value, allow_pickle=False), value)
    packed = codec.pack_value(value, allow_pickle=False)
    assert same(codec.unpack_value(packed, allow_pickle=False), value)


@pytest.mark.parametrize("length", range(16))
def test_complex_tensors_are_packed_wherever_the_payload_begins(length):
    # torch copies complex128 in words of 16 bytes: the process dies where these are not aligned.
    value = {"x" * length: torch.zeros(1, 3, dtype=torch.complex128)}
    packed = codec.pack_value(value, allow_pickle=False)
    assert same(codec.unpack_value(packed, allow_pickle=False), value)


def test_requires_grad_is_kept_and_a_graph_is_dropped():
    leaf = torch.ones(2, 3, requires_grad=True)
    for value in (leaf, leaf * 2, (leaf * 2).t()):
        back = travel(value, allow_pickle=False)
        assert (back.requires_grad, back.is_leaf) == (True, True)
        assert torch.equal(back, value)


def test_tensors_and_arrays_are_writable_views_of_the_payload():
    batch = [torch.ones(3), np.ones((2, 2)), {"x": torch.ones(3, 4, dtype=torch.bfloat16)}]
    tree, payload = encoded(batch, allow_pickle=False)
    # As where a batch is received into a tensor.
    payload = torch.from_numpy(payload).numpy()
    tensor, array, inner = codec.decode(tree, payload, allow_pickle=False)
    for each in (tensor, inner["x"]):
        assert each.untyped_storage().data_ptr() == payload.ctypes.data
    tensor[0] = 7
    array[0, 0] = 8
    assert array.base is payload
    assert payload[:4].view("<f4")[0] == 7
    assert payload[64:72].view("<f8")[0] == 8


def test_what_is_pickled_keeps_its_type_and_its_tensors_travel_raw():
    image = torch.arange(100_000, dtype=torch.uint8)
    for value in [
        Point(image, 3),
        Sample(image, "a"),
        {"x": collections.OrderedDict(a=image)},
        np.array([1, "a"], dtype=object),
    ]:
        made = codec.encode(value, allow_pickle=True)
        assert len(made.tree) < 1000
        assert type(travel(value)) is type(value)
    assert torch.equal(travel(Sample(image, "a")).image, image)
    assert torch.equal(travel(Point(image, 3)).x, image)


@pytest.mark.parametrize(
    ("value", "allow_pickle", "name"),
    [
        ([1, {"meta": Point(1, 2)}], False, r"batch\[1\]\['meta'\] is a .*Point"),
        ([(i for i in range(3))], True, r"batch\[0\] is a builtins.generator"),
    ],
)
def test_a_part_that_must_not_or_cannot_be_pickled_is_named(value, allow_pickle, name):
    with pytest.raises(ShippingError, match=name):
        codec.encode(value, allow_pickle=allow_pickle)


@pytest.mark.parametrize(
    ("value", "name"),
    [({1}, "a set"), (Sample(1, ""), f"a {__name__}.Sample"), ([range(3)], "a builtins.range")],
)
def test_a_pickle_that_is_not_accepted_is_an_error_that_names_setting_and_type(value, name):
    with pytest.raises(ProtocolError) as caught:
        codec.decode(*encoded(value), allow_pickle=False)
    assert name in caught.value.what
    assert "feed.accept_pickles is false" in caught.value.what
    assert "feed.accept_pickles: true" in caught.value.fix


def test_naming_the_type_of_a_pickle_runs_nothing_of_it():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was run",))

    with pytest.raises(ProtocolError, match="is pickled"):
        codec.decode(*encoded(Bomb()), allow_pickle=False)


def test_a_deep_batch_is_bounded():
    deep = []
    for _ in range(codec.MAX_DEPTH + 5):
        deep = [deep]
    with pytest.raises(ShippingError):
        codec.encode(deep, allow_pickle=False)
    assert travel(deep) == deep
    bomb = b"\x92\x00" * 100_000 + b"\x90"
    with pytest.raises(ProtocolError):
        codec.decode(bomb, None, allow_pickle=False)


SIZES = [[101], [2, 1 << 40], [1 << 40, 1 << 40], [-1], [0] * 65, [0, 1 << 47, 1 << 47]]
ENDS = [[[0]], [[0, 0]], [[1, 2]], [[-1, 0]], [[True, False]], [1], [[], False], [[0, 1], True, 1]]
LIES = [
    *([3, "float32", [1, 2], 0, *end] for end in ENDS),
    # A gradient of whole numbers.
    [3, "int64", [1], 0, [], True],
    *([3, "uint8", size, 0] for size in SIZES),
    *([3, "float32", [1], offset] for offset in (-64, 2)),
    *([3, dtype, [1], 0] for dtype in ("load", "quint8")),
    *([4, dtype, [1], 0] for dtype in ("|O", "(9,9)i4", "<i3", "<f9")),
    *([4, "<i4", [26], 0], [4, "|S0", [1 << 40], 0], [5, "<i4", [1], 0], [6, 64, 100]),
    *([0, [6, 0, 60], [6, 0, 60]], [2, 1], [2, [0], 1], [10, [6, 0, 4], []]),
    # Views beyond the payload, in front of it, at odd places, or of other dimensions.
    *([11, "uint8", [10, 10], [10, 1], place] for place in (1, -1, 1 << 60)),
    *([11, "float32", [2], step, 0] for step in ([25], [-1], [1 << 50], [True], [1, 1], [])),
    *([11, dtype, [2], [1], 2] for dtype in ("int32", "load")),
    *([11, "uint8", [2], [1], 0, flag] for flag in (True, False, 1)),
    [11, "uint8", [0, 2], [2, 1], 0],
    *([12, "<i4", [2], step, 0] for step in ([97], [-4], [1 << 50], [4, 4], [])),
    *([12, dtype, [2], [4], 0] for dtype in ("|O", "<i3")),
    [12, "<i4", [26, 1], [4, 4], 0],
    *([99], [], ["a"], {"a": 1}),
]


@pytest.mark.parametrize("lie", LIES, ids=repr)
def test_a_description_that_lies_is_refused(lie):
    with pytest.raises(ProtocolError):
        codec.decode(msgspec.msgpack.encode(lie), np.zeros(100, np.uint8), allow_pickle=False)


INDICES = [[3, 1, 2], [0], [-5], list(range(300)), [(1 << 64) - 1], [-(1 << 63)], [1 << 70, 1]]


@pytest.mark.parametrize("index", [*INDICES, [True, 1]])
def test_a_list_of_whole_numbers_is_packed_the_short_way_alike(index):
    tree = codec.encode(index, allow_pickle=True).tree
    packed = codec.pack_value(index, allow_pickle=True)
    assert packed == len(tree).to_bytes(8, "little") + tree
    assert codec.unpack_value(packed, allow_pickle=False) == index


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_a_long_double_is_refused_elsewhere_than_on_x86(dtype, monkeypatch):
    value = [np.ones(3, dtype=dtype)]
    monkeypatch.setattr(codec, "LONG_DOUBLE_IS_X86", True)
    tree, payload = encoded(value, allow_pickle=False)
    monkeypatch.setattr(codec, "LONG_DOUBLE_IS_X86", False)
    with pytest.raises(ShippingError, match="has different bits on x86"):
        codec.encode(value, allow_pickle=True)
    with pytest.raises(ProtocolError, match="long double"):
        codec.decode(tree, payload, allow_pickle=False)


# What judging bytes may take in addition to a few times their own number: objects, errors, caches.
MAX_EXTRA_BYTES = 2 << 20

DIRECTIONS = [
    protocol.ToCoordinator,
    protocol.FromCoordinator,
    protocol.ToAgent,
    protocol.FromAgent,
    protocol.Made,
]
MEMBER = protocol.Member(
    host="d1", group="data", address="d1", port=1, batch_port=2, workers=3, incarnation="x"
)
VALID: list[protocol.Message] = [
    protocol.Attend(protocol=1, run_id="run", rank=0, host="a"),
    protocol.Heartbeat(host="d1", incarnation="x"),
    protocol.Leave(host="d1", incarnation="x", exit_code=3, reason="why"),
    protocol.Roster(agents=(MEMBER,) * 3, expected=4, lost=(MEMBER,), awaited=("d4",)),
    protocol.Roster(agents=(), expected=1, left={"d4": "failed: no memory"}),
    protocol.State(outcome="failed", exit_code=1, reason="x"),
    protocol.Open(protocol=1, session="s", rank=0, spec="d", spec_bytes=3, versions={"torch": "2"}),
    protocol.Ship(spec="d", offset=3),
    protocol.Make(session="s", epoch_id=1, batch_number=2, index=b"4", seed_words=(1, 2, 3)),
    protocol.Made(
        session="s",
        epoch_id=1,
        batch_number=2,
        tree=b"xyz",
        cpu_seconds=1.0,
        wall_seconds=2.0,
        worker=0,
    ),
    protocol.Declined(session="s", epoch_id=1, batch_number=2, reason="r", is_lost=True),
    protocol.Progress(rank=0, steps=1, samples=2, wait_seconds=0.5, compute_seconds=1.5),
]
VALUE = {"x": torch.arange(10), "y": [np.ones(3), "é", 1.5, b"z" * 2000], 3: (1 << 70, 2j, None)}


@contextlib.contextmanager
def little_memory(num_bytes):
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 20 * num_bytes + MAX_EXTRA_BYTES


def judged(read, data):
    with little_memory(len(data)), contextlib.suppress(ProtocolError):
        return read(data)


@st.composite
def mutated(draw, sources):
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "graft", "length"])):
            case "flip" if data:
                data[place] ^= draw(st.integers(1, 255))
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=20))
            case "double" if len(data) < 10_000:
                data += data[place:]
            case "graft":
                other = draw(st.sampled_from(sources))
                data[place:] = other[draw(st.integers(0, len(other))) :]
            case "length":
                # MessagePack's str, bin, array, map and ext of up to 4 GiB.
                head = draw(st.sampled_from([0xDB, 0xC6, 0xDD, 0xDF, 0xC9]))
                size = draw(st.sampled_from([0xFFFFFFFF, 0x7FFFFFFF, 1 << 24, 70_000]))
                data[place : place + 5] = bytes([head]) + struct.pack(">I", size)
    return bytes(data)


@pytest.mark.parametrize("kinds", DIRECTIONS)
@given(st.one_of(st.binary(max_size=300), mutated([protocol.pack(message) for message in VALID])))
@settings(max_examples=examples(150))
def test_bytes_are_a_message_or_a_protocol_error(kinds, data):
    message = judged(protocol.Unpacker(kinds), data)
    assert message is None or isinstance(message, protocol.Message)


@pytest.mark.parametrize("message", VALID, ids=lambda message: type(message).__name__)
def test_every_cut_of_a_message_and_another_direction_is_refused(message):
    packed = protocol.pack(message)
    right = [kinds for kinds in DIRECTIONS if isinstance(message, kinds)]
    assert protocol.Unpacker(right[0])(packed) == message
    cuts = [(right[0], packed[:end]) for end in range(len(packed))]
    for kinds, data in cuts + [(kinds, packed) for kinds in DIRECTIONS if kinds not in right]:
        with pytest.raises(ProtocolError):
            protocol.Unpacker(kinds)(data)


@given(st.one_of(st.binary(max_size=200), mutated([codec.pack_value(VALUE, allow_pickle=False)])))
@example(b"")
@settings(max_examples=examples(500))
def test_any_bytes_are_refused_or_values(data):
    judged(lambda packed: codec.unpack_value(packed, allow_pickle=False), data)


@given(mutated([codec.pack_value({1, 2}, allow_pickle=True)]))
@settings(max_examples=examples(150))
def test_no_mutation_smuggles_a_pickle_in(data):
    value = judged(lambda packed: codec.unpack_value(packed, allow_pickle=False), data)
    assert not isinstance(value, set)


TREE = codec.encode(VALUE, allow_pickle=False)


@given(mutated([TREE.tree]), st.integers(0, 4000))
@settings(max_examples=examples(300))
def test_mutated_trees_fit_the_payload_or_are_refused(tree, num_bytes):
    payload = np.zeros(num_bytes, dtype=np.uint8)
    with little_memory(len(tree) + num_bytes), contextlib.suppress(ProtocolError):
        codec.decode(tree, payload, allow_pickle=False)


HEADS = st.builds(
    struct.Struct("<8sIB").pack,
    st.just(b"\xf5stoker\xff"),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 255),
)


@given(st.binary(max_size=100) | st.builds(bytes.__add__, HEADS, st.binary(max_size=50)))
@settings(max_examples=examples(150))
def test_channel_takes_no_memory_for_a_length_that_is_only_claimed(data):
    ours, theirs = channel_pair()
    channel = Pipe(ours, blocking=False)
    with theirs:
        theirs.sendall(data)
        with little_memory(len(data)), contextlib.suppress(ProtocolError):
            for received, descriptors in channel.receive():
                assert len(received) <= len(data)
                assert descriptors == ()
    channel.close()
    assert MAX_MESSAGE_BYTES < 1 << 32
