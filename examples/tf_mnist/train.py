"""Trains a small Keras network on digits, with the heavy augmentation of an image job.

A plain Keras script. By itself it augments in its own process; where TF_DATA_SERVICE_ADDRESS is
set, as under `engine: tf.data.service`, the workers of tf.data service do.
"""

import argparse
import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

try:
    import tensorflow as tf
except ModuleNotFoundError:
    raise SystemExit(
        "this example needs TensorFlow, in a separate environment: "
        "pip install --no-deps -r examples/tf_mnist/requirements.txt "
        "(docs/engines.md of stoker's checkout)"
    ) from None

SIDE = 96
SPLIT_SEED = 1998
# Digits of a split: tf.data service hands out a source's elements one by one, a millisecond each.
SPLIT = 64
BUNDLED = Path(__file__).resolve().parents[1] / "mnist" / "data"


def read_idx(path: Path) -> np.ndarray:
    """Reads the array in a gzipped IDX file, the format MNIST comes in."""
    content = gzip.decompress(path.read_bytes())
    num_dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=num_dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


def read_split(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Reads training and validation digits: 8,000 and 2,000 drawn ones, or those of MNIST."""
    images = read_idx(folder / "t10k-images-idx3-ubyte.gz")
    labels = read_idx(folder / "t10k-labels-idx1-ubyte.gz")
    if (folder / "train-images-idx3-ubyte.gz").exists():
        train_images = read_idx(folder / "train-images-idx3-ubyte.gz")
        train_labels = read_idx(folder / "train-labels-idx1-ubyte.gz")
        return (train_images, train_labels), (images, labels)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    train, test = order[:8000], order[8000:]
    return (images[train], labels[train]), (images[test], labels[test])


def resized(image: tf.Tensor) -> tf.Tensor:
    """Resizes a digit of 28 x 28 bytes to (96, 96, 1) numbers of 0..255."""
    pixels = tf.cast(image[..., tf.newaxis], tf.float32)
    return tf.clip_by_value(tf.image.resize(pixels, (SIDE, SIDE), "bicubic"), 0.0, 255.0)


def augmented(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes another picture of the same digit: turned, tilted, of other light and focus.

    In TensorFlow's own operations only, so that a worker on another host can run it.
    """
    pixels = resized(image)
    pixels = viewed(pixels)
    pixels = tf.image.random_brightness(pixels, 60.0)
    pixels = tf.image.random_contrast(pixels, 0.7, 1.3)
    pixels = blurred(pixels, tf.random.uniform((), 0.2, 3.0))
    # A quarter of the bytes of float32 on its way to the trainer, which normalises it.
    return tf.cast(tf.clip_by_value(pixels, 0.0, 255.0), tf.uint8), label


def plain(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the picture as it is, for validation."""
    return tf.cast(resized(image), tf.uint8), label


def viewed(pixels: tf.Tensor) -> tf.Tensor:
    """Turns, shears and zooms the picture around its centre, and tilts it a little."""
    angle = tf.random.uniform((), -0.35, 0.35)
    shear = tf.random.uniform((), -0.2, 0.2)
    zoom = tf.random.uniform((), 0.85, 1.15)
    tilt = tf.random.uniform((2,), -0.001, 0.001)
    a, b = zoom * tf.cos(angle), zoom * (shear - tf.sin(angle))
    c, d = zoom * tf.sin(angle), zoom * tf.cos(angle)
    centre = SIDE / 2
    depth = 1.0 + (tilt[0] + tilt[1]) * centre
    x, y = centre * (depth - a - b), centre * (depth - c - d)
    view = tf.stack([a, b, x, c, d, y, tilt[0], tilt[1]])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=pixels[tf.newaxis],
        transforms=view[tf.newaxis],
        output_shape=(SIDE, SIDE),
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )[0]


def blurred(pixels: tf.Tensor, radius: tf.Tensor) -> tf.Tensor:
    """Blurs the picture by a Gaussian of that radius."""
    steps = tf.range(-8.0, 9.0)
    weights = tf.exp(-0.5 * tf.square(steps / radius))
    weights /= tf.reduce_sum(weights)
    rows, columns = tf.reshape(weights, (17, 1, 1, 1)), tf.reshape(weights, (1, 17, 1, 1))
    batch = tf.nn.depthwise_conv2d(pixels[tf.newaxis], rows, (1, 1, 1, 1), "SAME")
    return tf.nn.depthwise_conv2d(batch, columns, (1, 1, 1, 1), "SAME")[0]


def batches_of(
    digits: tuple[np.ndarray, np.ndarray], *, batch_size: int, seed: int, service: str | None
) -> tf.data.Dataset:
    """Returns batches of augmented digits, made here or by the workers of tf.data service."""
    images, labels = map(tf.constant, digits)

    def split(start: tf.Tensor) -> tf.data.Dataset:
        rows = slice(start, start + SPLIT)
        return tf.data.Dataset.from_tensor_slices((images[rows], labels[rows]))

    batches = (
        tf.data.Dataset.range(0, len(images), SPLIT)
        .flat_map(split)
        .shuffle(len(images), seed=seed)
        .map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
        # The last ones may be smaller: each worker of the service has its own last one.
        .batch(batch_size)
    )
    if service:
        policy = tf.data.experimental.service.ShardingPolicy
        batches = batches.apply(
            tf.data.experimental.service.distribute(
                # Each digit once an epoch, whichever worker has time for it.
                processing_mode=policy.DYNAMIC,
                service=service,
            )
        )
    return batches.prefetch(tf.data.AUTOTUNE)


def network() -> tf.keras.Model:
    """Stacks three strided convolutions, from 96 x 96 pixels to 6 x 6, and a linear layer."""
    layers = tf.keras.layers
    stack: list[tf.keras.layers.Layer] = [
        tf.keras.Input((SIDE, SIDE, 1), dtype="uint8"),
        layers.Rescaling(1 / (255 * 0.3081), offset=-0.1307 / 0.3081),
    ]
    for filters, size, stride in ((32, 8, 4), (64, 3, 2), (96, 3, 2)):
        stack += [
            layers.Conv2D(filters, size, stride, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
        ]
    return tf.keras.Sequential(
        [*stack, layers.AveragePooling2D(3), layers.Flatten(), layers.Dense(10)]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; SageMaker's variables give the defaults where they are set."""
    parser = argparse.ArgumentParser(description="Trains on digits in MNIST's format.")
    data = Path(os.environ.get("SM_CHANNEL_TRAINING", BUNDLED))
    parser.add_argument(
        "--data", type=Path, default=data, help="folder with .gz files in MNIST's format"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="train on the first so many images only")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    metrics = os.environ.get("STOKER_METRICS")
    parser.add_argument("--metrics", default=metrics, help="write the accuracy to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, prints a line per epoch, and returns the accuracy on digits it has not seen."""
    options = parse(arguments)
    tf.keras.utils.set_random_seed(options.seed)
    (images, labels), test = read_split(options.data)
    digits = images[: options.samples], labels[: options.samples]
    service = os.environ.get("TF_DATA_SERVICE_ADDRESS")
    batches = batches_of(digits, batch_size=options.batch_size, seed=options.seed, service=service)
    validation = tf.data.Dataset.from_tensor_slices(test).map(plain).batch(250)
    model = network()
    model.compile(
        tf.keras.optimizers.Adam(options.learning_rate),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    print(f"batches are made by {service or 'this process'}", flush=True)
    num_batches = 0
    started = time.monotonic()

    def count(batch: int, logs: object) -> None:
        nonlocal num_batches
        num_batches += 1

    def say(epoch: int, logs: dict[str, float]) -> None:
        print(
            f"epoch {epoch + 1}/{options.epochs}  loss {logs['loss']:.4f}"
            f"  accuracy {logs['val_accuracy']:.4f}  {num_batches} batches"
            f"  {time.monotonic() - started:.1f} s",
            flush=True,
        )

    history = model.fit(
        batches,
        epochs=options.epochs,
        validation_data=validation,
        callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=count, on_epoch_end=say)],
        verbose=0,
    )
    accuracy = float(history.history["val_accuracy"][-1])
    if options.metrics:
        Path(options.metrics).write_text(json.dumps({"accuracy": accuracy}))
    if "SM_MODEL_DIR" in os.environ:
        model.save(Path(os.environ["SM_MODEL_DIR"]) / "model.keras")
    return accuracy


if __name__ == "__main__":
    main()
