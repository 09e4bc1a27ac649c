"""This yardstick has the workers of tf.data service make batches of a tf.data pipeline.

There is a process for the dispatcher and for each worker, which makes one batch after the other.
Sharding is dynamic, which visits each element once, in whatever order they come. The functions are
TensorFlow's own, as the graph that goes to the workers cannot call Python there.

    python tf_service_loader.py dispatcher|worker [ADDRESS]      serves until it is killed
"""

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from cases import SAMPLE_SHAPE, Case

if TYPE_CHECKING:
    import tensorflow as tf

# In a worker's own folder: how many times slower it is than the others.
_FACTOR = "factor"


class TfServiceLoader:
    """Yields the batches in the order of their arrival; a context in which the service runs."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="tf-service-")
        folder = Path(self._folder.name)
        self._start(folder, "dispatcher")
        self._address = _said(self._servers[0])
        for worker in range(self._case.workers):
            place = folder / str(worker)
            place.mkdir()
            factor = self._case.slow_factor if worker == 0 else 1.0
            (place / _FACTOR).write_text(str(factor))
            self._start(place, "worker", self._address)
        for server in self._servers[1:]:
            _said(server)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.kill()
            server.communicate()
        self._folder.cleanup()

    def _start(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        server = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self._servers.append(server)

    def __iter__(self) -> Iterator[torch.Tensor]:
        import tensorflow as tf

        # What TensorFlow gives is read-only, and nobody writes to a batch here.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        service = tf.data.experimental.service
        batches = _batches(self._case).apply(
            service.distribute(
                processing_mode=service.ShardingPolicy.DYNAMIC,
                service=self._address,
                # Random bytes do not get smaller, and to find that out costs both sides time.
                compression=None,
            )
        )
        for batch in batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
            yield torch.from_numpy(batch)


def _said(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    line = server.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"tf.data service's {server.args} did not start")
    return line


def _batches(case: Case) -> "tf.data.Dataset":
    """Returns a pipeline that does what `Images` and `SleptCollate` do, in TensorFlow."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    generator = torch.Generator().manual_seed(0)
    shape = (2 * case.batch_size, *SAMPLE_SHAPE)
    images = tf.constant(torch.randint(256, shape, dtype=torch.uint8, generator=generator).numpy())
    costs = tf.constant([1e6 * case.cost_of(n) for n in range(case.num_batches)], tf.float64)

    def made(number: "tf.Tensor") -> "tf.data.Dataset":
        begun = tf.timestamp()
        with tf.control_dependencies([begun]):
            first = number * case.batch_size
            indices = tf.range(first, first + case.batch_size) % len(images)
            flat = tf.reshape(tf.gather(images, indices), [-1])
            stamp = tf.bitcast(number, tf.uint8)
            batch = tf.reshape(tf.concat([stamp, flat[8:]], 0), (case.batch_size, *SAMPLE_SHAPE))
        factor = tf.strings.to_number(tf.io.read_file(_FACTOR), tf.float64)
        with tf.control_dependencies([batch, factor]):
            left = costs[number] * factor - 1e6 * (tf.timestamp() - begun)
        left = tf.cast(tf.maximum(left, 0.0), tf.int64)
        # The first only: it sleeps before it finds that there is no second, too.
        return tf.data.Dataset.from_tensors(batch).apply(sleep(left)).take(1)

    return tf.data.Dataset.range(case.num_batches).flat_map(made)


def main(role: str, *arguments: str) -> None:
    """Serves; prints its address."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if role == "dispatcher":
        server = service.DispatchServer()
        print(server.target.partition("://")[2], flush=True)
    else:
        server = service.WorkerServer(service.WorkerConfig(dispatcher_address=arguments[0]))
        print("ready", flush=True)
    server.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
