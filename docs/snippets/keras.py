"""The example of stoker.keras in docs/reference/python.md; it needs TensorFlow, so no test runs it."""

# %% timed
import tensorflow as tf

import stoker.keras

images = tf.random.uniform((256, 28, 28, 1))
labels = tf.random.uniform((256,), maxval=10, dtype=tf.int64)
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(32).prefetch(2)
batches, times = stoker.keras.timed(batches)
model.fit(batches, epochs=2, callbacks=[times])
