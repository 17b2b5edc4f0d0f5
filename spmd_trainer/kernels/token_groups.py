"""Sorts tokens by their experts for `grouped_dot`, and puts the results back into the order of the tokens.

Each device sorts its own tokens, so that their rows stay on it: only the experts' weights, or sums over the parts of the experts,
cross between devices. XLA would compile a sort of the whole batch to an all-gather of all tokens. If an axis splits both tokens
and experts, the tokens are gathered over it before the sort, and the experts' results reduced and scattered after it.

No token is dropped, because a device allocates enough rows for any choice of the router. If a token chooses k experts, and the
device has G experts, these are min(k, G) rows per token. So splitting E experts into more parts lowers the temporary memory only
if there are more than E / k parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from spmd_trainer.kernels.grouped_dot import GroupedSplit, mesh_of_experts, num_parts


@dataclasses.dataclass(frozen=True)
class TokenParts:
    """How tokens and experts are divided among devices.

    Attributes:
      mesh: the mesh; None for one device.
      batch, length: mesh axes that split the rows of a batch, and the tokens of each row.
      experts: mesh axes that split the experts.
      num_experts: number of experts on all devices.
    """

    mesh: AbstractMesh | None
    batch: tuple[str, ...]
    length: tuple[str, ...]
    experts: tuple[str, ...]
    num_experts: int

    @classmethod
    def of(
        cls,
        x: jax.Array,
        num_experts: int,
        *,
        batch: tuple[str, ...],
        length: tuple[str, ...],
        experts: tuple[str, ...],
    ) -> TokenParts:
        """Returns how the ambient mesh divides tokens and experts.

        `x` is an array [batch, time, ...]. If the `length` axes don't divide its number of tokens evenly, they don't split it.
        """
        mesh = mesh_of_experts()
        if mesh is None:
            return cls(None, (), (), (), num_experts)
        batch, length, experts = (tuple(a for a in axes if mesh.shape[a] > 1) for axes in (batch, length, experts))
        if x.shape[1] % num_parts(mesh, length):
            length = ()
        return cls(mesh, batch, length, experts, num_experts)

    def count(self, axes: tuple[str, ...]) -> int:
        """Returns the number of parts that these mesh axes split a dimension into."""
        return num_parts(self.mesh, axes)

    @property
    def experts_of_part(self) -> int:
        """Number of experts in each part of the experts; the last parts may have fewer."""
        return -(-self.num_experts // self.count(self.experts))

    @property
    def moved(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of `batch` and of `length` that split the experts too. Tokens are gathered over these axes."""
        batch, length = (tuple(axis for axis in axes if axis in self.experts) for axes in (self.batch, self.length))
        return batch, length

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that split the sorted rows by token: those of `batch` and `length` that don't split the experts."""
        return tuple(axis for axis in (*self.batch, *self.length) if axis not in self.experts)

    def split(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> GroupedSplit:
        """Returns the `split` for a `grouped_dot` whose weights have inputs and outputs split over the given mesh axes."""
        if self.mesh is None:
            return GroupedSplit()
        inputs, outputs = (tuple(a for a in axes if self.count((a,)) > 1) for axes in (inputs, outputs))
        return GroupedSplit(self.tokens, self.experts, inputs, outputs)

    def specs(self, text: str) -> tuple[PartitionSpec, ...]:
        """Returns a PartitionSpec for each letter of `text`: 't': [batch, time, ...], 'g': [token parts, expert parts, ...]."""
        of = {
            "t": PartitionSpec(self.batch or None, self.length or None),
            "g": PartitionSpec(self.tokens or None, self.experts or None),
        }
        return tuple(of[letter] for letter in text)

    def on_each_device(self, fn: Callable[..., Any], inputs: str, outputs: str) -> Callable[..., Any]:
        """Returns a function that takes whole arrays and runs `fn` on each device's parts of them.

        `inputs` and `outputs` have one letter for each argument and result; see `specs`.
        """
        if self.mesh is None:
            return fn
        out_specs = self.specs(outputs)
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=self.specs(inputs),
            out_specs=out_specs if len(out_specs) > 1 else out_specs[0],
            check_vma=False,
        )

    def gather(self, x: jax.Array) -> jax.Array:
        """Gathers a device's tokens [batch, time, ...] over the axes `moved`."""
        for dim, axes in enumerate(self.moved):
            x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        return x

    def add_up(self, x: jax.Array) -> jax.Array:
        """Sums results for gathered tokens, [batch, time, ...], over all parts of the experts. Returns the device's tokens."""
        moved = self.moved
        for dim, axes in enumerate(moved):
            x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
        rest = tuple(axis for axis in self.experts if axis not in (*moved[0], *moved[1]))
        return lax.psum(x, rest) if rest else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """(token, expert) pairs, sorted by expert, in each of S parts of the tokens and X parts of the experts.

    Attributes:
      sizes: int32 [S, X, experts of a part], number of pairs of each expert.
      token: int32 [S, X, sorted pairs], the token of each pair; arbitrary after the last expert's pairs.
      choice: int32 [S, X, sorted pairs], index of each pair's expert among the experts of its token.
      place: int32 [S, X, tokens, experts of a token], position of each pair in the sorted order. If the pair's expert is in a
        different part, the position is at least the sum of the part's `sizes`.
      pair: int32 [S, X, sorted pairs], each pair's index in the global [batch, time, experts of a token], the same on any mesh.
      num_pairs: number of pairs in all parts.
    """

    sizes: jax.Array
    token: jax.Array
    choice: jax.Array
    place: jax.Array
    pair: jax.Array
    num_pairs: int = dataclasses.field(metadata={"static": True})


def sort(chosen: jax.Array, parts: TokenParts) -> Groups:
    """Sorts (token, expert) pairs by expert. `chosen`: int32 [batch, time, experts of a token], without duplicates per token."""
    most = min(chosen.shape[2], parts.experts_of_part)

    def local(chosen: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
        chosen, index = parts.gather(chosen), parts.gather(index)
        k = chosen.shape[2]
        first = lax.axis_index(parts.experts) * parts.experts_of_part if parts.experts else 0
        expert = chosen.reshape(-1) - first
        is_own = (expert >= 0) & (expert < parts.experts_of_part)
        keys = jnp.where(is_own, expert, parts.experts_of_part)
        pairs = jnp.arange(keys.size, dtype=jnp.int32)
        keys, order = lax.sort((keys, pairs), num_keys=1)
        place = jnp.zeros_like(pairs).at[order].set(pairs, unique_indices=True)
        ends = jnp.searchsorted(keys, jnp.arange(parts.experts_of_part), side="right").astype(jnp.int32)
        sizes = jnp.diff(ends, prepend=0)
        order = order[: most * (keys.size // k)]
        found = (sizes, order // k, order % k, place.reshape(-1, k), index.reshape(-1)[order])
        return tuple(x[None, None] for x in found)

    index = jnp.arange(chosen.size, dtype=jnp.int32).reshape(chosen.shape)
    given = (_with_rows(chosen, parts, parts.num_experts), _with_rows(index, parts, 0))
    sizes, token, choice, place, pair = parts.on_each_device(local, "tt", "ggggg")(*given)
    return Groups(sizes, token, choice, place, pair, chosen.size)


def for_each_token(fn: Callable[[jax.Array], jax.Array], x: jax.Array, parts: TokenParts) -> jax.Array:
    """Returns `fn(x)` for an array [batch, time, ...]. Each device applies `fn` to its own tokens.

    Without this, XLA would compute e.g. a top-k of the whole batch on every device.
    """
    found: jax.Array = parts.on_each_device(fn, "t", "t")(_with_rows(x, parts, 0))
    return found[: x.shape[0]]


def dispatch(x: jax.Array, groups: Groups, parts: TokenParts) -> jax.Array:
    """Copies tokens, [batch, time, features], to rows sorted by expert, [token parts, expert parts, rows, features]."""
    return _dispatch(parts, _with_rows(x, parts, 0), groups)


def weights_of_rows(weights: jax.Array, groups: Groups, parts: TokenParts) -> jax.Array:
    """Returns each sorted row's weight, [token parts, expert parts, rows, 1]. `weights`: [batch, time, experts of a token]."""
    of_tokens = dispatch(weights, groups, parts)
    is_chosen = groups.choice[..., None] == jnp.arange(weights.shape[-1])
    return jnp.sum(jnp.where(is_chosen, of_tokens, 0), axis=-1, keepdims=True)


def combine(rows: jax.Array, weights: jax.Array, groups: Groups, parts: TokenParts) -> jax.Array:
    """Returns the weighted sum of each token's rows, [batch, time, features], in the dtype of the rows.

    Args:
      rows: [token parts, expert parts, rows, features], the experts' outputs in sorted order.
      weights: [batch, time, experts of a token], the weights of each token's experts.
      groups: the order of the rows, from `sort`.
      parts: how tokens and experts are divided.
    """
    return _combine(parts, rows, _with_rows(weights, parts, 0), groups)[: weights.shape[0]]


def _with_rows(x: jax.Array, parts: TokenParts, fill: int) -> jax.Array:
    """Pads the batch dimension with `fill`, so that the mesh axes divide it. For `sort`, `fill` is no expert's number."""
    missing = -x.shape[0] % parts.count(parts.batch)
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if missing else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(parts: TokenParts, x: jax.Array, groups: Groups) -> jax.Array:
    def local(x: jax.Array, groups: Groups) -> jax.Array:
        x = parts.gather(x)
        return x.reshape(-1, x.shape[-1])[groups.token[0, 0]][None, None]

    out: jax.Array = parts.on_each_device(local, "tg", "g")(x, groups)
    return out


def _dispatch_forward(parts: TokenParts, x: jax.Array, groups: Groups) -> tuple[jax.Array, tuple[Groups, Any]]:
    return _dispatch(parts, x, groups), (groups, x.shape)


def _dispatch_backward(parts: TokenParts, saved: tuple[Groups, Any], grads: jax.Array) -> tuple[jax.Array, None]:
    groups, shape = saved

    def local(grads: jax.Array, groups: Groups) -> jax.Array:
        return parts.add_up(_whole(parts, jnp.sum(_of_pairs(grads, groups), axis=1), shape)).astype(grads.dtype)

    return parts.on_each_device(local, "gg", "t")(grads, groups), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(parts: TokenParts, rows: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    shape = (*weights.shape[:2], rows.shape[-1])

    def local(rows: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
        weights = parts.gather(weights).reshape(-1, weights.shape[-1], 1)
        total = jnp.sum(_of_pairs(rows, groups) * weights.astype(rows.dtype), axis=1)
        return parts.add_up(_whole(parts, total, shape))

    out: jax.Array = parts.on_each_device(local, "gtg", "t")(rows, weights, groups)
    return out


def _combine_forward(
    parts: TokenParts, rows: jax.Array, weights: jax.Array, groups: Groups
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Groups]]:
    return _combine(parts, rows, weights, groups), (rows, weights, groups)


def _combine_backward(
    parts: TokenParts, saved: tuple[jax.Array, jax.Array, Groups], grads: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, groups = saved

    def local(rows: jax.Array, weights: jax.Array, groups: Groups, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        grads = parts.gather(grads).reshape(-1, grads.shape[-1])
        weights = parts.gather(weights).reshape(-1, weights.shape[-1])
        token, choice = groups.token[0, 0], groups.choice[0, 0]
        of_rows = grads[token] * weights[token, choice][:, None].astype(grads.dtype)
        is_own = jnp.arange(token.size) < jnp.sum(groups.sizes)
        products = jnp.einsum("tkd,td->tk", _of_pairs(rows, groups), grads, preferred_element_type=jnp.float32)
        of_weights = parts.add_up(_whole(parts, products, saved[1].shape))
        return jnp.where(is_own[:, None], of_rows, 0)[None, None], of_weights.astype(weights.dtype)

    of_rows, of_weights = parts.on_each_device(local, "gtgt", "gt")(rows, weights, groups, grads)
    return of_rows, of_weights, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)
_combine.defvjp(_combine_forward, _combine_backward)


def _of_pairs(rows: jax.Array, groups: Groups) -> jax.Array:
    """Returns each token's rows, [tokens, experts of a token, features]; zeros for experts of other parts.

    `rows`: the device's sorted rows, [1, 1, rows, features].
    """
    found = jnp.take(rows[0, 0], groups.place[0, 0], axis=0, mode="fill", fill_value=0)
    is_own = groups.place[0, 0] < jnp.sum(groups.sizes)
    return jnp.where(is_own[..., None], found, jnp.zeros((), rows.dtype))


def _whole(parts: TokenParts, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes a device's [tokens, ...] to [batch, time, ...], for `add_up`. `shape`: the global shape [batch, time, ...]."""
    batch, length = (
        size // parts.count(tuple(axis for axis in axes if axis not in parts.experts))
        for size, axes in zip(shape[:2], (parts.batch, parts.length), strict=True)
    )
    return x.reshape(batch, length, *x.shape[1:])
