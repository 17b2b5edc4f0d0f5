"""Ring attention (Liu et al. 2023, arXiv:2310.01889): each device has a part of the row; keys and values travel around a ring.

Rows are in zig-zag order (`sequence_order.py`): of 2 n chunks, device i has the chunks i and 2 n - 1 - i. After s steps, device
i gets the keys and values of device i - s. That makes four pairs of a query chunk and a key chunk. A causal pattern needs two:

    i >= s: both query chunks see the earlier key chunk; neither sees the later one
    i < s:  the later query chunk sees both key chunks; the earlier one sees neither

So every device computes the same number of blocks in every step, all of which it needs. With a window, steps without visible
keys are skipped, and all devices compute as many blocks as the busiest one.

The forward pass moves the keys and values of the whole row (n - 1) / n times. So does the backward pass, which also moves their
float32 gradients. The next keys and values travel while the current ones are used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.kernels import chunked, sequence_order
from spmd_trainer.kernels.chunked import Residuals, Tokens
from spmd_trainer.kernels.kernels import Pattern, Rows

State = TypeVar("State")
Arrays = TypeVar("Arrays")


def attend(rows: Rows, pattern: Pattern, axes: tuple[str, ...]) -> jax.Array:
    """Computes attention over rows whose tokens are split over mesh axes in zig-zag order. Call it under `jax.shard_map`.

    Returns this device's part of the output, with the shape of `rows.query` and the dtype of the values.

    Args:
      rows: this device's part of the rows, with an even number of tokens.
      pattern: which keys a query sees.
      axes: the mesh axes that split the tokens.
    """
    return _attention(rows, Ring.of(axes, lax.axis_size(axes), rows.query.shape[1], pattern))


@dataclasses.dataclass(frozen=True)
class Ring:
    """The blocks that each device of the ring computes at each step.

    Attributes:
      axes: the mesh axes that split the tokens.
      count: number of devices on these axes, n.
      chunk: number of tokens in a chunk. Each device has two chunks.
      block: number of tokens in a block; chunks are padded to a multiple of it.
      pattern: which keys a query sees.
    """

    axes: tuple[str, ...]
    count: int
    chunk: int
    block: int
    pattern: Pattern

    @classmethod
    def of(cls, axes: tuple[str, ...], count: int, local_length: int, pattern: Pattern) -> Ring:
        """Returns the ring for `local_length` tokens on each device."""
        chunk = local_length // 2
        return cls(axes, count, chunk, chunked.block_length(chunk), pattern)

    @property
    def blocks(self) -> int:
        """Number of blocks in a chunk."""
        return -(-self.chunk // self.block)

    @property
    def shifts(self) -> list[int]:
        """Steps in which some device needs the arriving keys; at step s, device i has the keys of device i - s."""
        return [shift for shift in range(1, self.count) if self.visible(shift).any()]

    def visible(self, shift: int) -> np.ndarray:
        """Returns the pairs of blocks that each device needs at step `shift`, as a mask [devices, query blocks, key blocks]."""
        devices = np.arange(self.count)
        query = self._first_tokens(devices)[:, :, None]
        key = self._first_tokens((devices - shift) % self.count)[:, None, :]
        last = self.block - 1
        seen = np.ones(np.broadcast_shapes(query.shape, key.shape), bool)
        if self.pattern.causal:
            seen &= key <= query
        if self.pattern.window is not None:
            seen &= query - (key + last) < self.pattern.window
        return seen

    def pairs(self, shift: int | jax.Array) -> jax.Array:
        """Returns the (query block, key block) pairs that this device computes at step `shift`, int32 [pairs, 2].

        Call it under `shard_map`. Without a window, `shift` may be traced, and must then not be 0.
        """
        device = lax.axis_index(self.axes)
        if self.pattern.window is not None:
            return jnp.asarray(tables(self.visible(int(shift))))[device]
        if (isinstance(shift, int) and shift == 0) or not self.pattern.causal:
            return jnp.asarray(tables(self.visible(0))[0])  # the same for all devices
        last_device, first_device = tables(self.visible(1))[[-1, 0]]
        return jnp.where(device >= shift, last_device, first_device)

    def tokens(self, shift: int | jax.Array, segment_ids: jax.Array | None) -> Tokens:
        """On device i, returns the positions and segments of the tokens of device i - shift. Call it under `shard_map`.

        Args:
          shift: the step.
          segment_ids: segment ids of the tokens of all devices, int32 [devices, rows, tokens of a device]; None without segments.
        """
        device = (lax.axis_index(self.axes) - shift) % self.count
        within = jnp.arange(self.blocks * self.block, dtype=jnp.int32)
        index = jnp.concatenate(
            [
                jnp.where(within < self.chunk, chunk * self.chunk + within, chunked.PADDING_INDEX)
                for chunk in sequence_order.chunks_of(device, self.count)
            ]
        )
        return chunked.token_blocks(
            index, None if segment_ids is None else self.padded(segment_ids[device]), self.block
        )

    def padded(self, x: jax.Array) -> jax.Array:
        """Pads both chunks of [rows, 2 * chunk, ...] with zeros to whole blocks. Returns [rows, 2 * blocks * block, ...]."""
        if not (missing := self.blocks * self.block - self.chunk):
            return x
        chunks = x.reshape(x.shape[0], 2, self.chunk, *x.shape[2:])
        padded = jnp.pad(chunks, [(0, missing if dim == 2 else 0) for dim in range(chunks.ndim)])
        return padded.reshape(x.shape[0], -1, *x.shape[2:])

    def unpadded(self, x: jax.Array) -> jax.Array:
        """Inverts `padded`: [rows, 2 * blocks * block, ...] -> [rows, 2 * chunk, ...]."""
        chunks = x.reshape(x.shape[0], 2, self.blocks * self.block, *x.shape[2:])[:, :, : self.chunk]
        return chunks.reshape(x.shape[0], 2 * self.chunk, *x.shape[2:])

    def moved(self, arrays: Arrays, hops: int) -> Arrays:
        """Returns the arrays of the device that is `hops` steps before this one in the ring. Call it under `shard_map`."""
        permutation = [(device, (device + hops) % self.count) for device in range(self.count)]
        moved: Arrays = lax.ppermute(arrays, self.axes, permutation)
        return moved

    def around(
        self, state: State, arrays: Arrays, step: Callable[[State, Arrays, int | jax.Array, int], State]
    ) -> State:
        """Passes arrays around the ring, and calls `step` when they arrive. Returns the last state. Call it under `shard_map`.

        The arrays of the next step are sent before `step` is called, so that they travel during its computation.

        Args:
          state: the state for the first call of `step`.
          arrays: this device's arrays.
          step: called as step(state, arrays, shift, hops) for each shift; returns the new state. On device i, these are
            the arrays of device i - shift. hops is this shift minus the previous one; 0 in the first call.
        """
        if not (shifts := self.shifts):
            return state
        arrays, hops = self.moved(arrays, shifts[0]), 0
        # Without a window every step is needed, so all but the first and the last are a loop.
        looped = [] if self.pattern.window is not None else shifts[1:-1]
        for shift, next_shift in itertools.pairwise(shifts[:2] if looped else shifts):
            following, hops_before = self.moved(arrays, next_shift - shift), hops
            hops = next_shift - shift
            state, arrays = step(state, arrays, shift, hops_before), following
        if looped:

            def body(carry: tuple[State, Arrays], shift: jax.Array) -> tuple[tuple[State, Arrays], None]:
                state, arrays = carry
                following = self.moved(arrays, 1)
                return (step(state, arrays, shift, 1), following), None

            (state, arrays), _ = lax.scan(body, (state, arrays), jnp.array(looped))
        return step(state, arrays, shifts[-1], hops)

    def _first_tokens(self, devices: np.ndarray) -> np.ndarray:
        """Returns the index in the whole row of the first token of each block, int [devices, 2 * blocks]."""
        starts = np.stack(sequence_order.chunks_of(devices, self.count), axis=1) * self.chunk
        first: np.ndarray = (starts[:, :, None] + np.arange(self.blocks) * self.block).reshape(len(devices), -1)
        return first


def tables(visible: np.ndarray) -> np.ndarray:
    """Returns each device's (query block, key block) pairs, int32 [devices, pairs, 2], the same number for all devices.

    `visible` is the result of `Ring.visible`. Devices with fewer visible pairs also get invisible pairs, which add nothing.
    """
    flat = visible.reshape(len(visible), -1)
    pairs = flat.sum(axis=1).max()
    # Stable, so that a block's pairs stay together; the visible ones first.
    chosen = np.argsort(~flat, axis=1, kind="stable")[:, :pairs]
    return np.stack(np.divmod(chosen, visible.shape[-1]), axis=-1).astype(np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(rows: Rows, ring: Ring) -> jax.Array:
    return _forward(rows, ring)[0]


def _forward(rows: Rows, ring: Ring) -> tuple[jax.Array, Residuals]:
    queries, own = _blocks(rows, ring)
    segments = _gathered(rows.segment_ids, ring)
    query_tokens = ring.tokens(0, segments)

    def add(
        sums: chunked.Sums, keys_values: tuple[jax.Array, jax.Array], shift: int | jax.Array, hops: int = 0
    ) -> chunked.Sums:
        del hops
        tokens, pairs = ring.tokens(shift, segments), ring.pairs(shift)
        return chunked.forward(queries, *keys_values, query_tokens, tokens, pairs, sums, ring.pattern)

    # Own keys first: every query sees itself, so blocks without a visible key add nothing afterwards.
    sums = add(chunked.initial_sums(queries, rows.sinks), own, 0)
    outs, lse = chunked.finish(ring.around(sums, own, add))
    out = ring.unpadded(chunked.from_query_blocks(outs, 2 * ring.blocks * ring.block)).astype(rows.value.dtype)
    # As in the chunked kernel, a rematerialization policy that saves the layers' outputs needs no second forward pass.
    out, lse = checkpoint_name(out, "context"), checkpoint_name(lse, "context")
    return out, (rows, out, lse)


def _backward(ring: Ring, residuals: Residuals, out_grad: jax.Array) -> tuple[Rows]:
    rows, out, lse = residuals
    queries, own = _blocks(rows, ring)
    outs, out_grads = (chunked.query_blocks(ring.padded(x), rows.key.shape[2], ring.block) for x in (out, out_grad))
    of_rows = chunked.RowGrads(out_grads, lse, chunked.row_sums(outs, out_grads))
    segments = _gathered(rows.segment_ids, ring)
    query_tokens = ring.tokens(0, segments)
    zeros = jnp.zeros_like(own[0], jnp.float32)

    def add(
        grads: chunked.Grads, keys_values: tuple[jax.Array, jax.Array], shift: int | jax.Array, hops: int = 0
    ) -> chunked.Grads:
        """Adds a step's gradients. Query gradients stay on this device; key and value gradients travel with keys and values."""
        arrived = ring.moved(grads[1:], hops) if hops else grads[1:]
        tokens, pairs = ring.tokens(shift, segments), ring.pairs(shift)
        grads = chunked.Grads(grads.query, zeros, zeros)
        grads = chunked.backward(queries, *keys_values, query_tokens, tokens, pairs, of_rows, grads, ring.pattern)
        return chunked.Grads(grads.query, *(x + y for x, y in zip(grads[1:], arrived, strict=True)))

    mine = add(chunked.initial_grads(queries, own[0]), own, 0)
    of_others = ring.around(chunked.Grads(mine.query, zeros, zeros), own, add)
    of_keys = list(mine[1:])
    if shifts := ring.shifts:
        returned = ring.moved(of_others[1:], ring.count - shifts[-1])
        of_keys = [x + y for x, y in zip(of_keys, returned, strict=True)]
    length = 2 * ring.blocks * ring.block
    of_query = ring.unpadded(chunked.from_query_blocks(of_others.query, length)).astype(rows.query.dtype)
    of_key, of_value = (
        ring.unpadded(chunked.from_key_blocks(x, length)).astype(like.dtype)
        for x, like in zip(of_keys, (rows.key, rows.value), strict=True)
    )
    return (Rows(of_query, of_key, of_value, sinks=chunked.sink_grads(rows.sinks, of_rows)),)


_attention.defvjp(_forward, _backward)


def _blocks(rows: Rows, ring: Ring) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    queries = chunked.query_blocks(ring.padded(rows.query), rows.key.shape[2], ring.block)
    keys, values = (chunked.key_blocks(ring.padded(x), ring.block) for x in (rows.key, rows.value))
    return queries, (keys, values)


def _gathered(segment_ids: jax.Array | None, ring: Ring) -> jax.Array | None:
    # Segment ids are small, so one gather is better than n steps.
    return None if segment_ids is None else lax.all_gather(segment_ids, ring.axes)
