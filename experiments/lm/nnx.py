"""A byte-level language model in Flax NNX: logical axes, bfloat16, scanned and rematerialised layers, a padded vocabulary."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from praxis import pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer import experiment_registry, models, tasks_lib
from spmd_trainer.experiments.lm import stdlib

# Timescales of rotary embeddings range from 1 to this many positions.
_MAX_TIMESCALE = 10_000
_MASKED = -1e9
_DTYPE = jnp.bfloat16
# The axis that stacking adds to a variable.
_STACKED = {nnx.PARTITION_NAME: "layers"}


def _annotated(fan_in: int, *axes: str | None) -> Any:
    """Returns an initialiser with normal values of variance 1 / fan_in, for a variable with these logical axes."""
    return nnx.with_partitioning(nnx.initializers.normal(1 / math.sqrt(fan_in)), axes)


class Block(nnx.Module):
    """Self-attention and a feed-forward layer, each with a layer norm before it and a residual connection around it.

    Args:
      dims: width of the residual stream.
      hidden_dims: width of the feed-forward layer.
      num_heads: attention heads; they divide `dims`.
      rngs: keys of the initialisation.
    """

    def __init__(self, dims: int, hidden_dims: int, num_heads: int, *, rngs: nnx.Rngs):
        head_dims = dims // num_heads
        self.norm1, self.norm2 = nnx.LayerNorm(dims, rngs=rngs), nnx.LayerNorm(dims, rngs=rngs)
        qkv = _annotated(dims, None, "embed", "heads", "head_dim")(rngs.params(), (3, dims, num_heads, head_dims))
        out = _annotated(dims, "heads", "head_dim", "embed")(rngs.params(), (num_heads, head_dims, dims))
        self.qkv, self.out = nnx.Param(qkv), nnx.Param(out)
        linear = functools.partial(nnx.Linear, dtype=_DTYPE, rngs=rngs)
        self.up = linear(dims, hidden_dims, kernel_init=_annotated(dims, "embed", "mlp"))
        self.down = linear(hidden_dims, dims, kernel_init=_annotated(hidden_dims, "mlp", "embed"))

    def __call__(self, x: jax.Array, positions: jax.Array, visible: jax.Array) -> jax.Array:
        """Returns x [batch, time, dims] after the block.

        Args:
          x: [batch, time, dims].
          positions: int32 [batch, time].
          visible: bool [batch, 1, time, time], True where a query (third dimension) attends to a key (last dimension).
        """
        y = self.norm1(x)
        query, key, value = jnp.einsum("btd,sdnh->sbtnh", y, self.qkv[...].astype(_DTYPE))
        query, key = rotary(query, positions), rotary(key, positions)
        logits = jnp.einsum("btnh,bsnh->bnts", query, key).astype(jnp.float32) / math.sqrt(query.shape[-1])
        weights = jax.nn.softmax(jnp.where(visible, logits, _MASKED)).astype(_DTYPE)
        x = x + jnp.einsum("bnts,bsnh,nhd->btd", weights, value, self.out[...].astype(_DTYPE))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A decoder-only language model whose output layer is its embedding.

    Args:
      vocab_size: number of tokens.
      dims, hidden_dims, num_heads: as in `Block`.
      num_layers: number of blocks; their variables are stacked, and one scan runs over them.
      rngs: keys of the initialisation.
    """

    def __init__(
        self, vocab_size: int, dims: int, hidden_dims: int, num_heads: int, num_layers: int, *, rngs: nnx.Rngs
    ):
        self.embedding = nnx.Param(_annotated(dims, "vocab", "embed")(rngs.params(), (vocab_size, dims)))

        @nnx.vmap(transform_metadata=_STACKED)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(dims, hidden_dims, num_heads, rngs=rngs)

        self.blocks = stacked(rngs.split(num_layers))
        self.norm = nnx.LayerNorm(dims, rngs=rngs)

    def __call__(self, ids: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        """Returns logits float32 [batch, time, vocab]; `ids`, `positions` and `segments` are int32 [batch, time]."""
        length = ids.shape[1]
        visible = jnp.tril(jnp.ones((length, length), bool)) & (segments[:, :, None] == segments[:, None, :])

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=_STACKED)
        @nnx.remat
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x, positions, visible[:, None])

        embedding = self.embedding[...].astype(_DTYPE)
        x = run(self.blocks, embedding[ids] * math.sqrt(embedding.shape[1]))
        return jnp.einsum("btd,vd->btv", self.norm(x), embedding).astype(jnp.float32)


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns x [batch, time, heads, head_dims] with rotary embeddings (Su et al., 2021) of `positions` int32 [batch, time]."""
    half = x.shape[-1] // 2
    timescales = _MAX_TIMESCALE ** (jnp.arange(half) / half)
    angles = positions[:, :, None, None] / timescales
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def text_inputs(batch: NestedMap) -> tuple[jax.Array, ...]:
    return batch.ids, batch.segment_pos, batch.segment_ids


def token_loss(logits: jax.Array, batch: NestedMap) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns {name: (mean cross-entropy in nats per token, sum of the tokens' weights)} for 'loss' and 'avg_xent'."""
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    total = jnp.sum(batch.weights)
    mean = jnp.sum(xent * batch.weights) / jnp.maximum(total, 1e-8)
    return {"loss": (mean, total), "avg_xent": (mean, total)}


@experiment_registry.register
class StdlibNnx(stdlib.StdlibBytes):
    """StdlibBytes as a Flax NNX model: logical axes, bfloat16, scanned layers. Mesh (1, 4, 2)."""

    LOGICAL_AXIS_RULES: ClassVar = [
        ("vocab", "mdl"),
        ("embed", "data"),
        ("heads", "mdl"),
        ("mlp", "mdl"),
        ("head_dim", None),
        ("layers", None),
    ]

    def decode_datasets(self) -> list[Any]:
        """Returns no datasets, because the model has no `generate`."""
        return []

    def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
        task_p = super().task()
        task_p.train.learner.loss_name = "loss"
        return task_p

    def _model(self) -> Any:
        module = pax_fiddle.Config(
            Transformer,
            vocab_size=stdlib.VOCAB_SIZE,
            dims=self.MODEL_DIMS,
            hidden_dims=self.HIDDEN_DIMS,
            num_heads=self.NUM_HEADS,
            num_layers=self.NUM_LAYERS,
        )
        return pax_fiddle.Config(
            models.NnxModel,
            module=module,
            inputs=text_inputs,
            loss=token_loss,
            fprop_dtype=_DTYPE,
            logical_axis_rules=self.LOGICAL_AXIS_RULES,
            ici_mesh_shape=list(self.ICI_MESH_SHAPE),
            mesh_axis_names=list(self.MESH_AXIS_NAMES),
        )


@experiment_registry.register(tags=["tiny"])
class StdlibNnxTiny(StdlibNnx, stdlib.StdlibBytesTiny):
    """StdlibNnx with the sizes of StdlibBytesTiny."""
