"""This yardstick streams batches over gRPC: one server process per worker, its share in turn.

Two formats: raw bytes with an identity serializer, the cheapest that gRPC can do, and a protobuf
message with a bytes field, as most services would have it. It authenticates nobody and survives no
lost worker. Flat out only: worker w makes the batches w, w + k, ..., as fast as HTTP/2 takes them.

    python grpc_loader.py CASE      serves the workers of a case until their trainer hangs up
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

import torch

from cases import SAMPLE_SHAPE, Case, Images, SleptCollate

_METHODS = {False: "/feed/Raw", True: "/feed/Message"}
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# Batches of a worker that wait in the trainer, beside those that HTTP/2 holds.
_DEPTH = 2
_SECONDS = 60.0


class GrpcLoader:
    """Yields the batches 0..num_batches-1 in order, without a copy of what gRPC gave."""

    def __init__(self, ports: Sequence[int], case: Case, *, is_message: bool) -> None:
        self._ports = ports
        self._case = case
        self._is_message = is_message

    def __iter__(self) -> Iterator[torch.Tensor]:
        import grpc

        shape = (self._case.batch_size, *SAMPLE_SHAPE)
        # gRPC's bytes are read-only, and nobody writes to a batch here.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        decode = _message_type().FromString if self._is_message else None
        queues: list[queue.Queue[object]] = []
        calls = []
        for port in self._ports:
            channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
            call = channel.unary_stream(_METHODS[self._is_message], response_deserializer=decode)(
                b"", timeout=_SECONDS, wait_for_ready=True
            )
            made: queue.Queue[object] = queue.Queue(maxsize=_DEPTH)
            threading.Thread(target=_receive, args=(call, made), daemon=True).start()
            calls.append(call)
            queues.append(made)
        try:
            for number in range(self._case.num_batches):
                found = queues[number % len(queues)].get(timeout=_SECONDS)
                if isinstance(found, Exception):
                    raise found
                content = found.content if self._is_message else found  # type: ignore[attr-defined]
                yield torch.frombuffer(content, dtype=torch.uint8).view(shape)
        finally:
            for call in calls:
                call.cancel()


def _receive(call: Iterator[object], made: "queue.Queue[object]") -> None:
    try:
        for each in call:
            made.put(each)
    except Exception as err:
        made.put(err)


def _message_type() -> type:
    """Makes `message Batch { uint64 number = 1; bytes content = 2; }`, without a compiler."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="feed.proto", package="feed", syntax="proto3")
    batch = file.message_type.add(name="Batch")
    field = descriptor_pb2.FieldDescriptorProto
    single = field.LABEL_OPTIONAL
    batch.field.add(name="number", number=1, type=field.TYPE_UINT64, label=single)
    batch.field.add(name="content", number=2, type=field.TYPE_BYTES, label=single)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: type = message_factory.GetMessageClass(pool.FindMessageTypeByName("feed.Batch"))
    return made


def serve(case: Case) -> None:
    """Forks the workers, prints their ports as a JSON list, and returns when all have ended."""
    torch.set_num_threads(1)
    dataset = Images(case)
    ports, children = [], []
    for worker in range(case.workers):
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            try:
                _work(worker, dataset, case, theirs)
            finally:
                os._exit(0)
        theirs.close()
        children.append(pid)
        mine.settimeout(_SECONDS)
        ports.append(int(mine.recv(16)))
    print(json.dumps(ports), flush=True)

    def end(*_: object) -> None:
        for pid in children:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    for pid in children:
        os.waitpid(pid, 0)


def _work(worker: int, dataset: Images, case: Case, parent: socket.socket) -> None:
    # Here and not above: what is forked must not have gRPC's threads.
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    collate = SleptCollate(case)
    is_over = threading.Event()

    def batches() -> Iterator[tuple[int, bytes]]:
        for number in range(worker, case.num_batches, case.workers):
            first = number * case.batch_size
            samples = dataset.__getitems__(range(first, first + case.batch_size))
            yield number, collate(samples).numpy().tobytes()

    def raw(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(is_over.set)
        for _, content in batches():
            yield content

    def messages(_request: bytes, context: grpc.ServicerContext) -> Iterator[object]:
        context.add_callback(is_over.set)
        message = _message_type()
        for number, content in batches():
            yield message(number=number, content=content)

    handlers = {
        "Raw": grpc.unary_stream_rpc_method_handler(raw),
        "Message": grpc.unary_stream_rpc_method_handler(
            messages, response_serializer=lambda message: message.SerializeToString()
        ),
    }
    server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("feed", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    parent.send(str(port).encode())
    is_over.wait(_SECONDS)
    server.stop(0)


if __name__ == "__main__":
    serve(Case.from_json(sys.argv[1]))
