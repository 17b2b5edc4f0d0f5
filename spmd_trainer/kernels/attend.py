"""The attention function that layers call. It picks a kernel and runs it on each device's part of the arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax._src.core import get_axis_env
from jax.sharding import AbstractMesh, PartitionSpec

from spmd_trainer.errors import UserError, did_you_mean, require_one_of
from spmd_trainer.kernels import all_to_all, chips, kernels, reference, ring, sequence_order
from spmd_trainer.kernels.kernels import Call, Choice, Pattern, Rows


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes that split each dimension of an attention call's arrays; () for a dimension that is not split.

    Attributes:
      batch: axes that split the rows.
      length: axes that split the tokens of each row (context parallelism).
      heads: axes that split the query heads. Keys and values are split over them too during the call.
    """

    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pattern: Pattern,
    *,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    split: Split = Split(),
    kernel: str | None = None,
    context_parallel: str | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    name: str = "",
) -> jax.Array:
    """Computes self-attention over B rows of T tokens. Returns [B, T, N, H], of value's dtype.

    On a mesh of several devices each device computes its own rows and heads. Rows and heads are padded so that they divide evenly
    among the devices. Under a `jax.shard_map`, `split` is ignored, because the arrays belong to one device.

    Args:
      query: [B, T, N, H], for N query heads of width H.
      key, value: [B, T, K, H], for K key heads; N is a multiple of K. Query head n uses key head n // (N / K).
      pattern: which keys a query sees.
      segment_ids: int32 [B, T]; a token sees only tokens of its segment. None if each row is one segment.
      sinks: [N], an additional logit in each head's softmax, whose probability goes to no key; None for no sinks.
      split: how the arrays are split over the ambient mesh (`jax.set_mesh`).
      kernel: name of the kernel to use; None for the first that can be used (see `kernels.choose`).
      context_parallel: how attention is computed if `split.length` splits the rows' tokens: 'ring', with tokens in the order of
        `sequence_order.py`, or 'all_to_all', with tokens in row order. None for 'ring'.
      dropout: function that drops probabilities [B, K, N / K, T, T]; None for no dropout.
      name: the layer's name, under which `kernels.record` records the chosen kernel.

    Raises:
      UserError: the kernel doesn't exist or can't be used; query heads are not a multiple of key heads; the mesh lacks an axis
        of `split`; T is not a multiple of the number of devices that split the tokens (for a ring, of twice this number).
    """
    if key.shape != value.shape or query.shape[2] % key.shape[2]:
        raise UserError(
            f"attention {name!r}: queries are {query.shape}, keys {key.shape} and values {value.shape} (rows, tokens, heads, "
            "width). The number of query heads must be a multiple of the number of key heads; keys and values must be alike"
        )
    mesh = jax.sharding.get_abstract_mesh()
    parts = _Parts.of(split, mesh, name)
    form = _context_parallel(parts, query.shape[1], context_parallel, name)
    if sinks is not None:
        # One copy for each row, so that the same mesh axes can split all arrays.
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), (query.shape[0], query.shape[2]))
    rows = Rows(query, key, value, segment_ids, sinks)
    padded = parts.padded(rows)
    call = Call(
        query=parts.local(padded.query),
        key=parts.local(padded.key),
        pattern=pattern,
        segments=segment_ids is not None,
        dropout=dropout is not None,
        target=chips.current_target(),
        sinks=sinks is not None,
    )
    choice = _choose(call, kernel, form, parts.count("length"))
    kernels.record(name, choice)
    if dropout is not None or (choice.kernel == "reference" and form is None):
        # XLA splits plain products itself, and dropout draws random numbers for whole arrays.
        return reference.attend(rows, pattern, dropout)
    return _on_each_device(choice, pattern, parts, padded)[: query.shape[0], :, : query.shape[2]]


def _on_each_device(choice: Choice, pattern: Pattern, parts: _Parts, rows: Rows) -> jax.Array:
    def local(rows: Rows) -> jax.Array:
        kernel = kernels.kernel(choice.kernel)
        match choice.context_parallel:
            case "ring":
                return ring.attend(rows, pattern, parts.length)
            case "all_to_all":
                return all_to_all.attend(rows, pattern, parts.length, kernel)
        return kernel.attend(rows, pattern)

    if not parts.sizes:
        return local(rows)
    batch, length, heads = parts.batch or None, parts.length or None, parts.heads or None
    of_heads = PartitionSpec(batch, length, heads)
    out: jax.Array = jax.shard_map(
        local,
        in_specs=(Rows._make([*[of_heads] * 3, PartitionSpec(batch, length), PartitionSpec(batch, heads)]),),
        out_specs=of_heads,
        # With `check_vma`, the backward pass needs no exchange over axes that split nothing. Pallas and cuDNN calls don't support
        # it, nor does `jax.vmap` over a mesh axis (praxis' pipelines).
        check_vma=(
            (choice.kernel, choice.context_parallel) == ("chunked", None) and not get_axis_env().spmd_axis_names
        ),
    )(rows)
    return out


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The `Split` of an attention call on a mesh, without axes of size 1. Nothing is split under a `jax.shard_map`.

    Attributes:
      sizes: size of each axis; empty on one device.
    """

    batch: tuple[str, ...]
    length: tuple[str, ...]
    heads: tuple[str, ...]
    sizes: dict[str, int]

    @classmethod
    def of(cls, split: Split, mesh: AbstractMesh, name: str) -> _Parts:
        """Returns the `_Parts` for a split on a mesh, which may be empty. `name`: the layer's name, for error messages.

        Raises:
          UserError: the mesh lacks an axis of `split`.
        """
        if mesh.axis_names:
            for axis in (*split.batch, *split.length, *split.heads):
                if axis not in mesh.axis_names:
                    raise UserError(
                        f"attention {name!r} is split over {axis!r}, which is not one of the mesh's axes "
                        f"{', '.join(mesh.axis_names)}{did_you_mean(axis, mesh.axis_names, otherwise='')}"
                    )
        # JAX 0.10 can't compile the gradient of a `shard_map` inside a `shard_map` over other axes.
        sizes = {} if mesh.manual_axes else {axis: size for axis, size in mesh.shape.items() if size > 1}
        batch, length, heads = (
            tuple(axis for axis in axes if axis in sizes) for axes in (split.batch, split.length, split.heads)
        )
        return cls(batch, length, heads, sizes)

    def count(self, dimension: str) -> int:
        """Returns the number of parts that the dimension 'batch', 'length' or 'heads' is split into."""
        return math.prod(self.sizes[axis] for axis in getattr(self, dimension))

    def local(self, x: jax.Array) -> jax.ShapeDtypeStruct:
        """Returns the shape of a device's part of a padded array [rows, tokens, heads, width]."""
        batch, length, heads, width = x.shape
        shape = (batch // self.count("batch"), length // self.count("length"), heads // self.count("heads"), width)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def padded(self, rows: Rows) -> Rows:
        """Pads rows and heads to divide evenly among the devices, so that each device has the keys of its query heads.

        Rows are padded with zeros. If query heads divide evenly, key heads are repeated to at least one per device. Otherwise
        key heads are repeated to one per query head, and then query and key heads are padded with zeros.
        """
        query, key, value = all_to_all.with_divisible_heads(rows.query, rows.key, rows.value, self.count("heads"))
        sinks = rows.sinks
        if sinks is not None:
            sinks = jnp.pad(sinks, ((0, 0), (0, query.shape[2] - sinks.shape[1])))
        padded = Rows(query, key, value, rows.segment_ids, sinks)
        if missing := -query.shape[0] % self.count("batch"):
            padded = jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), padded)
        return padded


def _context_parallel(parts: _Parts, length: int, asked: str | None, name: str) -> str | None:
    """Returns the context parallelism to use, 'ring' or 'all_to_all'; None if the tokens of a row are not split.

    Raises:
      UserError: the requested name, `asked`, is unknown; or the tokens can't be divided evenly among the devices.
    """
    if asked is not None:
        require_one_of("context_parallel", asked, sequence_order.FORMS)
    if not parts.length:
        return None
    form = asked or sequence_order.DEFAULT_FORM
    multiple = parts.count("length") * (2 if form == "ring" else 1)
    if length % multiple:
        raise UserError(
            f"attention {name!r}: rows of {length} tokens are split over {parts.count('length')} devices "
            f"({', '.join(parts.length)}), and {form} needs a multiple of {multiple} tokens"
        )
    return form


def _choose(call: Call, asked: str | None, form: str | None, num_devices: int) -> Choice:
    """Picks the kernel for a call. `form`: 'ring' or 'all_to_all' if the tokens are split over `num_devices`; otherwise None.

    Raises:
      UserError: as in `kernels.choose`; dropout with split tokens; or a ring with a requested kernel other than 'chunked'.
    """
    if form is None:
        return kernels.choose(call, asked)
    if call.dropout:
        raise UserError(
            "attention dropout can't be used with a split length; set the dropout to 0, or don't split the length"
        )
    if form == "all_to_all":
        query, key = all_to_all.shapes_of_kernel(call.query, call.key, num_devices)
        chosen = kernels.choose(dataclasses.replace(call, query=query, key=key), asked)
        return dataclasses.replace(chosen, context_parallel=form)
    if asked not in (None, "chunked"):
        kernels.kernel(asked)
        raise UserError(
            f"attention kernel {asked!r} can't be used in a ring, which needs 'chunked'; use context_parallel='all_to_all', or "
            "leave the choice to the trainer with None"
        )
    before = kernels.order(call)
    reasons = {name: ["a ring needs 'chunked'"] for name in before if name not in ("chunked", "reference")}
    return Choice("chunked", reasons, context_parallel=form)
