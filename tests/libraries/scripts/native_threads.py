"""Datasets over libraries that start native threads when they are unpickled; one loader a run.

Argument: {"library": ..., "runs": ..., "start": ..., "folder": ...}. Prints one JSON line a run:
the sum over its samples.
"""

import asyncio
import http.server
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

from stoker.feed.replace import install

DEFAULTS = {"library": "polars", "runs": 1, "start": "fork", "folder": "/tmp", "num_workers": 1}
# Loaders that are read at the same time, each by a thread: most of a run is waiting.
DEFAULTS |= {"at_once": 1}
ROWS = 16


class Opened(Dataset):
    """Opens its library where it is unpickled, and reads with it."""

    def __init__(self, place: str, salt: int) -> None:
        self.place = place
        self.salt = salt

    def __getstate__(self) -> dict:
        return {"place": self.place, "salt": self.salt}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.open()
        self.row(0)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return self.row(index)

    def open(self) -> None:
        raise NotImplementedError

    def row(self, index: int) -> int:
        raise NotImplementedError


class OfPolars(Opened):
    def open(self) -> None:
        import polars

        self.frame = polars.read_parquet(self.place)

    def row(self, index: int) -> int:
        import polars

        kept = self.frame.lazy().filter(polars.col("n") == index).group_by("n").agg(polars.sum("m"))
        return int(kept.collect()["m"][0])


class OfLance(Opened):
    def open(self) -> None:
        import lance

        self.table = lance.dataset(self.place)

    def row(self, index: int) -> int:
        return int(self.table.take([index])["m"][0].as_py())


class OfPyarrow(Opened):
    def open(self) -> None:
        import pyarrow.dataset

        self.table = pyarrow.dataset.dataset(self.place)

    def row(self, index: int) -> int:
        import pyarrow.compute

        kept = self.table.to_table(filter=pyarrow.compute.field("n") == index, use_threads=True)
        return int(kept["m"][0].as_py())


class OfDuckdb(Opened):
    def open(self) -> None:
        import duckdb

        self.base = duckdb.connect()
        self.base.execute("set threads = 4")

    def row(self, index: int) -> int:
        query = f"select sum(m) from read_parquet('{self.place}') where n = {index}"
        return int(self.base.execute(query).fetchone()[0])


class OfH5py(Opened):
    def open(self) -> None:
        import h5py

        self.rows = h5py.File(self.place)["m"]
        self.pool = futures.ThreadPoolExecutor(2)

    def row(self, index: int) -> int:
        return int(self.pool.submit(lambda: self.rows[index]).result())


class OfAv(Opened):
    def open(self) -> None:
        import av

        self.video = av.open(self.place)
        self.video.streams.video[0].thread_type = "FRAME"
        self.video.streams.video[0].codec_context.thread_count = 4

    def row(self, index: int) -> int:
        self.video.seek(0)
        frames = self.video.decode(video=0)
        frame = next(frame for number, frame in enumerate(frames) if number == index)
        return int(frame.width) + index


class OfGrpc(Opened):
    def open(self) -> None:
        import grpc

        self.channel = grpc.insecure_channel(self.place)
        self.call = self.channel.unary_unary("/rows/get")

    def row(self, index: int) -> int:
        return int(self.call(str(index).encode(), timeout=60))


class OfBoto3(Opened):
    def open(self) -> None:
        import boto3

        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "eu-west-1"}
        self.client = boto3.client("s3", endpoint_url=self.place, **keys)
        self.pool = futures.ThreadPoolExecutor(2)

    def row(self, index: int) -> int:
        read = self.client.get_object
        found = self.pool.submit(lambda: read(Bucket="rows", Key=str(index))["Body"].read())
        return int(found.result())


class OfFsspec(Opened):
    def open(self) -> None:
        import fsspec.asyn

        # The thread of all its asynchronous file systems (s3fs, gcsfs, adlfs).
        self.loop = fsspec.asyn.get_loop()

    def row(self, index: int) -> int:
        import fsspec.asyn

        async def read() -> int:
            await asyncio.sleep(0)
            return 3 * index

        return int(fsspec.asyn.sync(self.loop, read))


def parquet(folder: Path) -> str:
    import pyarrow.parquet

    rows = {"n": list(range(ROWS)), "m": [3 * number for number in range(ROWS)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "rows.parquet", row_group_size=4)
    return str(folder / "rows.parquet")


def lance_table(folder: Path) -> str:
    import lance
    import pyarrow

    rows = {"n": list(range(ROWS)), "m": [3 * number for number in range(ROWS)]}
    lance.write_dataset(pyarrow.table(rows), str(folder / "rows.lance"))
    return str(folder / "rows.lance")


def h5_file(folder: Path) -> str:
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file["m"] = 3 * np.arange(ROWS)
    return str(folder / "rows.h5")


def video(folder: Path) -> str:
    import av

    with av.open(str(folder / "rows.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(ROWS):
            pixels = np.full((64, 64, 3), 10 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return str(folder / "rows.mp4")


def grpc_server(folder: Path) -> str:
    import grpc

    def answer(request: bytes, context: object) -> bytes:
        return str(3 * int(request)).encode()

    handlers = {"get": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rows", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    HELD.append(server)
    return f"127.0.0.1:{port}"


class Objects(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = str(3 * int(self.path.rpartition("/")[2].partition("?")[0])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def object_store(folder: Path) -> str:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    HELD.append(server)
    return f"http://127.0.0.1:{server.server_port}"


HELD: list[object] = []
LIBRARIES: dict[str, tuple[type[Opened], Callable[[Path], str]]] = {
    "polars": (OfPolars, parquet),
    "lance": (OfLance, lance_table),
    "pyarrow": (OfPyarrow, parquet),
    "duckdb": (OfDuckdb, parquet),
    "h5py": (OfH5py, h5_file),
    "av": (OfAv, video),
    "grpc": (OfGrpc, grpc_server),
    "boto3": (OfBoto3, object_store),
    "fsspec": (OfFsspec, str),
}


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    install(DataLoader)
    kind, make = LIBRARIES[given["library"]]
    place = make(Path(given["folder"]))

    def total_of(run: int) -> dict[str, int]:
        # Another spec each time: another dataset process, and other workers.
        dataset = kind(place, salt=os.getpid() * 1000 + run)
        # And of another line: loaders of one that live short are not fed for long.
        line = compile("\n" * run + "DataLoader(dataset, **options)", "runs", "eval")
        options = {"batch_size": 4, "num_workers": given["num_workers"]}
        options["multiprocessing_context"] = given["start"]
        loader = eval(line, {"DataLoader": DataLoader, "dataset": dataset, "options": options})
        return {"run": run, "total": sum(int(batch.sum()) for batch in loader)}

    if given["at_once"] == 1:
        for run in range(given["runs"]):
            print(json.dumps(total_of(run)), flush=True)
        return
    with futures.ThreadPoolExecutor(given["at_once"]) as pool:
        for found in pool.map(total_of, range(given["runs"])):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
