"""All that crosses the wire is pinned: a change of it without a new PROTOCOL_VERSION fails here."""

import dataclasses
import hashlib
import io
import json

import msgspec
import numpy as np
import torch

from stoker.feed import remote
from stoker.feed.wire import (
    codec,
    dataset,
    definitions,
    import_path,
    pickling,
    process_settings,
    protocol,
    script_module,
)
from stoker.feed.wire.codec import Tag

# After a change that an older stoker would misread: a new PROTOCOL_VERSION, and the new digests.
# After one that it would not (a limit that grew, say): the new digests alone.
PINNED = {
    "version": 13,
    "messages": "c3826d727d19e64b",
    "trees": "e632da7597c2c7e2",
    "pickles": "ee391fe0584ddb68",
}

UNIONS = {
    "to coordinator": protocol.ToCoordinator,
    "from coordinator": protocol.FromCoordinator,
    "to agent": protocol.ToAgent,
    "from agent": protocol.FromAgent,
    "batches": protocol.ToTrainer,
}


def bare(schema):
    if isinstance(schema, dict):
        words = ("description", "title")
        return {key: bare(part) for key, part in schema.items() if key not in words}
    return [bare(part) for part in schema] if isinstance(schema, list) else schema


def values():
    image = torch.arange(120, dtype=torch.uint8).reshape(2, 3, 4, 5)
    leaf = torch.zeros(2, 3, requires_grad=True)
    array = np.arange(24.0).reshape(4, 6)
    return {
        "list": [None, True, 1, -1.5, "text"],
        "tuple": (1, (2,)),
        "dict": {"a": 1, 2: [3]},
        "tensor": image,
        "tensor in another order": image.permute(0, 3, 1, 2),
        "tensor with a gradient": torch.zeros(2, requires_grad=True),
        "tensor in another order with a gradient": torch.zeros(2, 3).t().requires_grad_(),
        "tensors of one memory": [image[0], image[0, 1:, 1:3, 2]],
        "tensor with gaps": image[..., 1:4],
        "tensor with gaps and a gradient": torch.zeros(2, 6)[:, 1::2].requires_grad_(),
        "tensor at an odd place": image.view(-1)[3:],
        "tensor of one row": image[0, 0, :, :1].t(),
        "array with gaps": array[1:, ::-2],
        "rows that repeat": image[0, 0, 0].expand(3, 5),
        "views with a gradient": [leaf, leaf.t()],
        "arrays of one memory": [array, array[::-1, ::2]],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "array in another order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(2.5),
        "short bytes": b"abc",
        "long bytes": bytes(2000),
        "integer": 1 << 80,
        "complex": 1 + 2j,
        "text": "ä\udc80",
        "pickle": range(3),
    }


def trees():
    return {
        name: msgspec.msgpack.decode(
            codec.encode(value, allow_pickle=True, shares_arrays=True).tree
        )
        for name, value in values().items()
    }


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def name_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def test_what_crosses_the_wire_is_that_of_its_version():
    records = (
        dataset.DatasetPlace,
        import_path.ImportPath,
        definitions.Definition,
        definitions.Script,
        script_module.ScriptFacts,
        dataset.DatasetSpec,
        process_settings.InheritedSettings,
        dataset._PackedError,
    )
    named = remote.remote("builtins:dict", a=1)
    pickles = {
        **{name_of(kind): [f.name for f in dataclasses.fields(kind)] for kind in records},
        name_of(type(named)): named.__reduce__()[1],
        name_of(remote.FactsOf): sorted(vars(remote.FactsOf(named))),
        "storages": [each.__qualname__ for each in (pickling._typed, pickling._untyped)],
        "sets": [pickling.SpecPickler(io.BytesIO()).persistent_id({"b", "a"})],
    }
    schemas = {name: bare(msgspec.json.schema(kinds)) for name, kinds in UNIONS.items()}
    found = {
        "version": protocol.PROTOCOL_VERSION,
        "messages": digest(schemas),
        "trees": digest({name: repr(tree) for name, tree in trees().items()}),
        "pickles": digest(pickles),
    }
    assert found == PINNED, "raise protocol.PROTOCOL_VERSION, or see the comment at PINNED"


def tags(tree):
    """Tags of a tree and of its parts, but for the parts of leaves."""
    if isinstance(tree, list):
        yield tree[0]
        for part in tree[1:] if tree[0] in (Tag.LIST, Tag.TUPLE, Tag.DICT) else ():
            yield from tags(part)


def test_every_kind_of_node_is_among_the_pinned_ones():
    found = {tag for tree in trees().values() for tag in tags(tree)}
    assert found == set(map(int, Tag))
