"""A small convolutional net for 8 x 8 images, in Flax NNX and in Flax Linen, with its inputs and its loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from praxis.py_utils import NestedMap

_KERNEL = (3, 3)
_STRIDES = (2, 2)


class ConvNet(nnx.Module):
    """Two convolutions with batch norm, dropout, and a linear classifier.

    Args:
      features: channels of the first convolution; the second has twice as many.
      num_classes: number of labels.
      dropout: probability with which a feature is dropped in training.
      rngs: keys of the initialisation and of dropout.
    """

    def __init__(self, features: int, num_classes: int, dropout: float, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, features, _KERNEL, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(features, 2 * features, _KERNEL, strides=_STRIDES, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * features, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(2 * features, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits float32 [batch, num_classes] of images float32 [batch, height, width, 1]."""
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(jnp.mean(x, axis=(1, 2))))


class LinenConvNet(nn.Module):
    """The net of `ConvNet` in Flax Linen.

    Attributes:
      features: channels of the first convolution; the second has twice as many.
      num_classes: number of labels.
      dropout: probability with which a feature is dropped in training.
    """

    features: int
    num_classes: int
    dropout: float

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits float32 [batch, num_classes] of images float32 [batch, height, width, 1]."""
        x = nn.Conv(self.features, _KERNEL, use_bias=False, name="conv1")(images)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, name="norm1")(x))
        x = nn.Conv(2 * self.features, _KERNEL, strides=_STRIDES, use_bias=False, name="conv2")(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, name="norm2")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(jnp.mean(x, axis=(1, 2)))
        return nn.Dense(self.num_classes, name="head")(x)


def visible(batch: NestedMap) -> jax.Array:
    return batch.images * batch.mask[..., None]


def classification_loss(logits: jax.Array, batch: NestedMap) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns {name: (mean, weight)} of the cross-entropy, 'loss', and 'accuracy'; rows of weight 0 don't count."""
    weights = batch.eval_sample_weights
    total = jnp.sum(weights)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values * weights) / jnp.maximum(total, 1e-8)

    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    right = (jnp.argmax(logits, axis=-1) == batch.labels).astype(jnp.float32)
    return {"loss": (mean(xent), total), "accuracy": (mean(right), total)}


def labels_and_logits(logits: jax.Array, batch: NestedMap) -> dict[str, jax.Array]:
    """Returns labels int32 [batch] and logits float32 [batch, num_classes], for evaluations that write outputs per example."""
    return {"labels": batch.labels, "logits": logits}
