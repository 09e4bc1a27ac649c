"""All that crosses the wire is pinned: a change of it without a new PROTOCOL_VERSION fails here."""

import dataclasses
import hashlib
import json

import msgspec
import torch

from stoker.feed import remote
from stoker.feed.engine import (
    batch_socket,
    codec,
    facts,
    loader_spec,
    messages,
    raised,
    run_messages,
)

# After a change that an older stoker would misread: a new PROTOCOL_VERSION, and the new digests.
# After one that it would not (a limit that grew, say): the new digests alone.
PINNED = {
    "version": 31,
    "messages": "e2df5617dfb61575",
    "batches": "b04931c603a0bcea",
    "pickles": "ebab5159b57d1553",
}

UNIONS = {
    "to the leader": run_messages.ToLeader,
    "from the leader": run_messages.RunState,
    "to agent": run_messages.ToAgent,
    "from agent": run_messages.FromAgent,
    "orders": messages.Make,
    "answers": messages.Answer,
    "errors": raised.PackedError,
    "facts": facts.WorkerFacts,
}


def bare(schema):
    if isinstance(schema, dict):
        words = ("description", "title")
        return {key: bare(part) for key, part in schema.items() if key not in words}
    return [bare(part) for part in schema] if isinstance(schema, list) else schema


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def name_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def test_what_crosses_the_wire_is_that_of_its_version():
    records = (loader_spec.LoaderSpec,)
    named = remote.remote("builtins:dict", a=1)
    pickles = {
        **{name_of(kind): [f.name for f in dataclasses.fields(kind)] for kind in records},
        name_of(type(named)): named.__reduce__()[1],
        name_of(remote.FactsOf): sorted(vars(remote.FactsOf(named))),
        "place": len(json.loads(loader_spec._place_of_script())),
        "settings": sorted([*facts._settings(), *facts._ATTRIBUTES]),
    }
    pickled, leaves = codec.encode({"pixels": torch.zeros(2, 3), "labels": [1, 2]})
    schemas = {name: bare(msgspec.json.schema(kinds)) for name, kinds in UNIONS.items()}
    found = {
        "version": run_messages.PROTOCOL_VERSION,
        "messages": digest(schemas),
        "batches": digest([b"tensor_of" in pickled, len(leaves), batch_socket.ALIGNMENT]),
        "pickles": digest(pickles),
    }
    assert found == PINNED, "raise run_messages.PROTOCOL_VERSION, or see the comment at PINNED"
