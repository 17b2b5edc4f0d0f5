"""Multi-head latent attention (DeepSeek V2, arXiv:2405.04434): keys and values are computed from a small vector per token.

For whole rows, the keys and values of each head are computed from these vectors. A decode step does not compute them: it
multiplies its queries and its output by the matrices that would compute keys and values. So all heads attend directly to the
cached vectors, which serve as the keys and the values of a single head.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.decoder.attention import Attention
from spmd_trainer.decoder.axes import Norm, Projection
from spmd_trainer.decoder.context import Context
from spmd_trainer.models.decoder_spec import LatentSpec


class LatentAttention(Attention):
    """Latent self-attention of one layer; see `LatentSpec` for the widths, and `DecoderSpec` for the variables.

    The cache has one array, `key_state`, [batch, tokens, copies, key_value_dims + rotary_dims], with a copy for each shard of
    the heads.
    """

    cached: ClassVar[tuple[str, ...]] = ("key_state",)

    def create_inputs(self) -> None:
        """Creates the layers that compute queries, latent vectors, keys and values; see `Attention.create_inputs`."""
        spec, latent, queries_from = self.spec, self._latent, "embed"
        if latent.query_dims:
            self._child_down("query_down", latent.query_dims)
            self._child_norm("query_down_norm", latent.query_dims)
            queries_from = "latent"
        of_heads = ("batch", "length", "activation_heads", "head_dims")
        self.child(
            "query",
            Projection,
            equation="btd,dnh->btnh",
            shape=(spec.query_input_dims, spec.num_heads, spec.head_dims),
            split_axes=(queries_from, "heads", "head_dims"),
            output_axes=of_heads,
        )
        self._child_down("key_value_down", latent.key_value_dims + spec.rotary_dims)
        self._child_norm("key_value_norm", latent.key_value_dims)
        self.child(
            "key_value",
            Projection,
            equation="btr,rnh->btnh",
            shape=(latent.key_value_dims, spec.num_heads, self._unrotated + latent.value_dims),
            split_axes=("latent", "heads", "head_dims"),
            output_axes=of_heads,
        )

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends over whole rows; see `Attention.__call__`."""
        query, vectors = self._query(x, context), self._vectors(x, context)
        self._fill_cache({"key_state": vectors[:, :, None]}, context)
        width = self._latent.key_value_dims
        unrotated, value = jnp.split(self.key_value(vectors[..., :width]), [self._unrotated], axis=-1)
        rotated = jnp.broadcast_to(vectors[:, :, None, width:], (*query.shape[:3], self.spec.rotary_dims))
        key = checkpoint_name(jnp.concatenate([unrotated, rotated], axis=-1), "key_proj")
        value = checkpoint_name(value, "value_proj")
        # Kernels need values that are as wide as keys.
        value = jnp.pad(value, [(0, 0)] * 3 + [(0, key.shape[-1] - value.shape[-1])])
        return self._project(self._attend(query, key, value, context)[..., : self._latent.value_dims])

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends from new tokens to the cache; see `Attention.extend_step`."""
        query = self._query(x, context)
        cache = self._extended("key_state", self._vectors(x, context)[:, :, None], context)
        to_key, to_value = jnp.split(self.key_value.read("w"), [self._unrotated], axis=-1)
        unrotated, rotated = jnp.split(query, [self._unrotated], axis=-1)
        query = jnp.concatenate([jnp.einsum("btnh,rnh->btnr", unrotated, to_key), rotated], axis=-1)
        # The values are the whole cached vectors, because a slice of them would be a copy of the cache.
        heads = self._attend_to_cache(query, cache, cache, context)[..., : self._latent.key_value_dims]
        return self._project(jnp.einsum("btnr,rnh->btnh", heads, to_value))

    def _query(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the queries, [batch, time, heads, head_dims], with rotary embeddings on the last `rotary_dims` dimensions."""
        if self._latent.query_dims:
            x = self.query_down_norm(self.query_down(x))
        unrotated, rotated = jnp.split(self.query(x), [self._unrotated], axis=-1)
        query = jnp.concatenate([unrotated, self._rotate(rotated, context)], axis=-1)
        return checkpoint_name(query, "query_proj")

    def _vectors(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the vectors to cache: each token's normalized latent vector, followed by the rotated part of its key."""
        vector, rotated = jnp.split(self.key_value_down(x), [self._latent.key_value_dims], axis=-1)
        rotated = self._rotate(rotated[:, :, None], context)[:, :, 0]
        return checkpoint_name(jnp.concatenate([self.key_value_norm(vector), rotated], axis=-1), "key_value_down")

    def _child_down(self, name: str, width: int) -> None:
        self.child(
            name,
            Projection,
            equation="btd,dr->btr",
            shape=(self.spec.model_dims, width),
            split_axes=("embed", "latent_out"),
            output_axes=("batch", "length", "activation_latent"),
        )

    def _child_norm(self, name: str, width: int) -> None:
        self.child(name, Norm, shape=(width,), kind="rms", epsilon=self._latent.norm_epsilon)

    @property
    def _latent(self) -> LatentSpec:
        assert self.spec.latent is not None  # otherwise `DecoderLayer` takes another class
        return self.spec.latent

    @property
    def _unrotated(self) -> int:
        return self.spec.head_dims - self.spec.rotary_dims

    @property
    def _cached_heads(self) -> int:
        return 1
