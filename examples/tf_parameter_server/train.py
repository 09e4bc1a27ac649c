"""Trains a small Keras model with TensorFlow's parameter servers, which are on the data group.

The training is the chief: it hands steps to the workers and has no variables of its own.
`configs/parameter-server.yaml` runs a worker beside it on each dnn host and a parameter server on
each data host, and hands their addresses to all of them. On other dnn hosts there is nothing to do.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

WEIGHTS = np.linspace(-1.0, 1.0, 32, dtype=np.float32)
LEARNING_RATE = 0.1


def batches(batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns points without end, and on which side of a plane they are."""

    def point(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.random.normal((len(WEIGHTS),))
        return values, tf.cast(tf.tensordot(values, WEIGHTS, 1) > 0.0, tf.float32)

    return tf.data.Dataset.counter().map(point).batch(batch_size).prefetch(2)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, prints the accuracy, and returns it."""
    parser = argparse.ArgumentParser(description="Trains with parameter servers.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch, all workers together")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", default=os.environ.get("STOKER_METRICS"))
    options = parser.parse_args(arguments)
    tf.keras.utils.set_random_seed(options.seed)

    if "TF_CLUSTER" not in os.environ:
        parser.error("TF_CLUSTER is not set: run it under stoker, with a data group")
    if os.environ.get("NODE_RANK", "0") != "0":
        print("the chief trains; this host has its worker")
        return 0.0
    tasks = [task.partition("=") for task in os.environ["TF_CLUSTER"].split()]
    cluster = tf.train.ClusterSpec({name: hosts.split(",") for name, _, hosts in tasks})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((len(WEIGHTS),)),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(1),
            ]
        )

    @tf.function
    def step(iterator: Iterator[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
        points, sides = next(iterator)
        with tf.GradientTape() as tape:
            logits = model(points, training=True)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=sides, logits=logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Keras 3 has no optimizer for parameter servers; each step is added where the variable is.
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.value.assign_sub(LEARNING_RATE * gradient)
        return tf.reduce_mean(tf.cast((logits > 0.0) == (sides > 0.5), tf.float32))

    per_worker = coordinator.create_per_worker_dataset(
        lambda: batches(options.batch_size, options.seed)
    )
    iterator = iter(per_worker)
    accuracy = 0.0
    for epoch in range(options.epochs):
        # Whichever worker is free takes the next step.
        steps = [coordinator.schedule(step, args=(iterator,)) for _ in range(options.steps)]
        coordinator.join()
        accuracy = float(np.mean([each.fetch() for each in steps]))
        print(f"epoch {epoch + 1}/{options.epochs}  accuracy {accuracy:.4f}", flush=True)
    places = sorted({variable.value.device for variable in model.trainable_variables})
    print(f"variables on {', '.join(places)}", flush=True)
    if options.metrics:
        Path(options.metrics).write_text(json.dumps({"accuracy": accuracy}))
    return accuracy


if __name__ == "__main__":
    main()
