"""Cross entropy of a language model without storing its logits: computed in blocks of tokens, forward and backward.

The logits of a block are computed, reduced to a few numbers per token, and dropped; the backward pass computes them again. Memory
holds the logits of one block only, whatever the batch and the vocabulary. The price is a fourth matrix product: with stored
logits there are three. The method was published as Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009), whose kernels also
split the vocabulary into blocks; here only the mesh splits it.

On a mesh, each device computes its own tokens with its own part of the vocabulary. The output matrix is gathered along its width
before the first block. Maxima, sums and gradients are combined across devices after the last block, in float32. The loops contain
no collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_trainer.sharding import jaxprs
from spmd_trainer.sharding.host_devices import hold_until_known

# Maximum number of logits in a block, on one device.
BLOCK_LOGITS = 2**27

# If there are several blocks of this many tokens or more, their size is a multiple of this, which suits matrix units.
_TILE = 128

# Logits of the padding.
_LEAST = float(jnp.finfo(jnp.float32).min)


class TokenLosses(NamedTuple):
    """Losses and related results for each token.

    Attributes:
      xent: cross entropy of the token's label, float32 [rows, tokens].
      log_sum: logarithm of the sum of the token's exponentiated logits, float32 [rows, tokens].
      argmax: the token's most likely label (the first one if several are equal), int32 [rows, tokens]. It has no gradient.
    """

    xent: jax.Array
    log_sum: jax.Array
    argmax: jax.Array


@dataclasses.dataclass(frozen=True)
class VocabularySplit:
    """The mesh axes that split the tokens and the output matrix, [vocabulary, width]; () for a dimension that is not split.

    Attributes:
      batch, length: axes that split the rows of tokens, and the tokens of each row.
      vocab: axes that split the matrix's rows, i.e. the vocabulary.
      width: axes that split the matrix's columns. Over axes that also split tokens, this module gathers the matrix for the
        products, and reduces and scatters its gradient. Over other axes, XLA gathers the matrix.
    """

    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that split tokens."""
        return (*self.batch, *self.length)


def cross_entropy(
    hidden: jax.Array,
    matrix: jax.Array,
    labels: jax.Array,
    *,
    biases: jax.Array | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    split: VocabularySplit = VocabularySplit(),
) -> TokenLosses:
    """Computes the cross entropy of labels, for the logits `hidden` times the transpose of `matrix`.

    The batch and the matrix are padded to divide evenly among the devices. Added labels get the probability 0. In the context
    `sharding.jaxprs.products_shown`, the logits of all tokens are computed in one product.

    Args:
      hidden: [B, T, D], for B rows of T tokens with D features.
      matrix: [V, D], for a vocabulary of V labels; of the same dtype as `hidden`.
      labels: int32 [B, T], 0 to V - 1.
      biases: [V], added to the logits of each token; None for no biases.
      softcap: logits become softcap * tanh(logits / softcap); None for no cap.
      label_smoothing: probability that is taken from the label and divided equally among the other labels. (In Szegedy et al.
        2016, arXiv:1512.00567, it is divided among all labels.)
      split: how the arrays are split over the ambient mesh. Ignored under a `jax.shard_map`.
    """
    if jaxprs.are_products_shown():
        form = _Form(VocabularySplit(), (), matrix.shape[0], matrix.shape, softcap, label_smoothing)
        return jax.vmap(functools.partial(_of_row, form, matrix, biases))(hidden, labels)
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.manual_axes else {axis: size for axis, size in mesh.shape.items() if size > 1}

    def even(size: int, axes: tuple[str, ...]) -> int:
        return size + -size % math.prod(sizes[axis] for axis in axes)

    kept = VocabularySplit(*(tuple(axis for axis in axes if axis in sizes) for axes in dataclasses.astuple(split)))
    (rows, length), (vocab_size, width) = hidden.shape[:2], matrix.shape
    if length != even(length, kept.length):
        kept = dataclasses.replace(kept, length=())
    # An axis splits either tokens or the vocabulary, because all parts of a token's logits must be on devices with this token.
    kept = dataclasses.replace(
        kept,
        vocab=tuple(axis for axis in kept.vocab if axis not in kept.tokens),
        width=tuple(axis for axis in kept.width if axis in kept.tokens),
    )
    padded = (even(vocab_size, kept.vocab), even(width, kept.width))
    form = _Form(kept, tuple(sizes), vocab_size, padded, softcap, label_smoothing)
    matrix, labels = form.after(hidden, matrix, labels)
    if biases is not None:
        (biases,) = form.after(hidden, _padded(biases, padded[:1]))
    hidden, labels = (_padded(x, (even(rows, kept.batch), *x.shape[1:])) for x in (hidden, labels))
    xent, log_sum, argmax = _losses(form, hidden, _padded(matrix, padded), biases, labels)
    return TokenLosses(xent[:rows], log_sum[:rows], lax.stop_gradient(argmax)[:rows])


def _padded(x: jax.Array, shape: tuple[int, ...], fill: float = 0) -> jax.Array:
    if x.shape == shape:
        return x
    widths = [(0, size - held) for size, held in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, widths, constant_values=fill)


@dataclasses.dataclass(frozen=True)
class _Form:
    """Static settings of a `cross_entropy` call.

    Attributes:
      split: the call's split, without mesh axes of size 1.
      axes: all mesh axes larger than 1.
      vocab_size: number of labels without padding.
      padded: shape of the matrix with its padding.
      softcap, label_smoothing: see `cross_entropy`.
    """

    split: VocabularySplit
    axes: tuple[str, ...]
    vocab_size: int
    padded: tuple[int, ...]
    softcap: float | None
    label_smoothing: float

    @property
    def of_other(self) -> float:
        """Target probability of each label other than the token's own label."""
        return self.label_smoothing / (self.vocab_size - 1) if self.label_smoothing else 0.0

    def on_each_device(self, local: Callable[..., Any], given: str, returned: str) -> Callable[..., Any]:
        """Returns a function that takes whole arrays and runs `local` on each device's parts of them.

        `given` and `returned` have one letter per argument and result: 't' for [rows, tokens, ...], 'v' for the matrix, 'w' for
        the matrix with its whole width, 'b' for the biases.
        """
        if not self.axes:
            return local
        rows = self.split.vocab or None
        specs = {
            "t": PartitionSpec(self.split.batch or None, self.split.length or None),
            "v": PartitionSpec(rows, self.split.width or None),
            "w": PartitionSpec(rows),
            "b": PartitionSpec(rows),
        }
        in_specs, out_specs = (tuple(specs[one] for one in names) for names in (given, returned))
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def gathered(self, part: jax.Array, width: int) -> jax.Array:
        """Gathers a device's part of the matrix to its whole width, and removes the padding of the width."""
        if not self.split.width:
            return part
        return lax.all_gather(part, self.split.width, axis=1, tiled=True)[:, :width]

    def scattered(self, of_part: jax.Array) -> jax.Array:
        """Reduce-scatters `of_part`, the gradient, from this device's tokens, for its rows of the matrix at their whole width.

        Returns this device's part of the sum over all devices' tokens, padded like the argument of `gathered`.
        """
        if self.split.width:
            of_part = _padded(of_part, (of_part.shape[0], self.padded[1]))
            of_part = lax.psum_scatter(of_part, self.split.width, scatter_dimension=1, tiled=True)
        rest = tuple(axis for axis in self.split.tokens if axis not in self.split.width)
        return lax.psum(of_part, rest) if rest else of_part

    def after(self, earlier: jax.Array, *later: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the arrays `later`. On CPU meshes, makes computations on them wait for `earlier`; see `hold_until_known`."""
        return hold_until_known([earlier], *later) if self.axes else later

    def first(self, part: jax.Array) -> jax.Array | int:
        """Returns the first label in this device's part of the matrix."""
        return lax.axis_index(self.split.vocab) * part.shape[0] if self.split.vocab else 0

    def logits(self, hidden: jax.Array, part: jax.Array, biases: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns a block's logits for this device's labels, float32 [tokens, labels], and these labels, int32 [labels]."""
        products = jnp.einsum("nd,vd->nv", hidden, part, preferred_element_type=jnp.float32)
        if biases is not None:
            products += biases
        if self.softcap is not None:
            products = self.softcap * jnp.tanh(products / self.softcap)
        labels = self.first(part) + jnp.arange(part.shape[0])
        # Finite, because a device may have nothing but padding.
        is_padded = self.padded[0] > self.vocab_size
        return jnp.where(labels < self.vocab_size, products, _LEAST) if is_padded else products, labels

    def probabilities(self, own: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the target probability of each label on this device for each token of a block, float32 [tokens, labels].

        Args:
          own: int32 [labels], the labels on this device.
          labels: int32 [tokens], the tokens' labels.
        """
        others = jnp.where(own < self.vocab_size, self.of_other, 0.0) if self.label_smoothing else 0.0
        return jnp.where(own == labels[:, None], 1.0 - self.label_smoothing, others)

    def expected(self, logits: jax.Array, own: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the sum of logits * `probabilities` over this device's labels, for each token of a block."""
        of_label = jnp.sum(jnp.where(own == labels[:, None], logits, 0.0), axis=-1)
        if not self.label_smoothing:
            return of_label
        of_all = jnp.sum(jnp.where(own < self.vocab_size, logits, 0.0), axis=-1)
        return (1.0 - self.label_smoothing - self.of_other) * of_label + self.of_other * of_all


def _of_row(
    form: _Form, matrix: jax.Array, biases: jax.Array | None, hidden: jax.Array, labels: jax.Array
) -> TokenLosses:
    logits, own = form.logits(hidden, matrix, biases)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    return TokenLosses(
        log_sum - form.expected(logits, own, labels), log_sum, jnp.argmax(logits, axis=-1).astype(jnp.int32)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(
    form: _Form, hidden: jax.Array, matrix: jax.Array, biases: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, ...]:
    return _losses_forward(form, hidden, matrix, biases, labels)[0]


def _losses_forward(
    form: _Form, hidden: jax.Array, matrix: jax.Array, biases: jax.Array | None, labels: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    local = form.on_each_device(functools.partial(_forward, form), "tvbt", "tttw")
    *found, whole = local(hidden, matrix, biases, labels)
    return tuple(found), (hidden, whole, biases, labels, found[1])


def _losses_backward(
    form: _Form, saved: tuple[jax.Array, ...], grads: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    local = form.on_each_device(functools.partial(_backward, form), "twbtttt", "tvb")
    return *local(*saved, *form.after(saved[-1], *grads[:2])), None


_losses.defvjp(_losses_forward, _losses_backward)


def _forward(
    form: _Form, hidden: jax.Array, part: jax.Array, biases: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, ...]:
    def block(given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        hidden, labels = given
        logits, own = form.logits(hidden, part, biases)
        most = jnp.max(logits, axis=-1)
        total = jnp.sum(jnp.exp(logits - most[:, None]), axis=-1)
        argmax = form.first(part) + jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return most, total, form.expected(logits, own, labels), argmax

    shape, axes = labels.shape, form.split.vocab
    part = form.gathered(part, hidden.shape[-1])
    found = lax.map(block, tuple(map(functools.partial(_blocks, part.shape[0]), (hidden, labels))))
    most, total, expected, argmax = (x.reshape(-1)[: labels.size].reshape(shape) for x in found)
    if axes:
        whole = lax.pmax(most, axes)
        argmax = lax.pmin(jnp.where(most == whole, argmax, form.vocab_size), axes)
        total, expected = lax.psum((total * jnp.exp(most - whole), expected), axes)
        most = whole
        # Nothing else waits for the exchange of `argmax`.
        (total,) = form.after(argmax, total)
    log_sum = most + jnp.log(total)
    return log_sum - expected, log_sum, argmax, part


def _backward(
    form: _Form, hidden: jax.Array, part: jax.Array, biases: jax.Array | None, labels: jax.Array, *rest: jax.Array
) -> tuple[jax.Array | None, ...]:
    # Gradients that are summed over devices are float32.
    of_hidden_dtype = jnp.float32 if form.split.vocab else hidden.dtype

    def block(
        sums: tuple[jax.Array, jax.Array | None], given: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array | None], jax.Array]:
        of_part, of_biases = sums
        hidden, labels, log_sum, of_xent, of_log_sum = given
        logits, own = form.logits(hidden, part, biases)
        grads = jnp.exp(logits - log_sum[:, None]) * (of_xent + of_log_sum)[:, None]
        grads -= form.probabilities(own, labels) * of_xent[:, None]
        if form.softcap is not None:
            grads *= 1 - jnp.square(jnp.maximum(logits, -form.softcap) / form.softcap)
        if of_biases is not None:
            of_biases += jnp.sum(grads, axis=0)
        grads = grads.astype(hidden.dtype)
        of_part += jnp.einsum("nv,nd->vd", grads, hidden, preferred_element_type=jnp.float32)
        of_hidden = jnp.einsum("nv,vd->nd", grads, part, preferred_element_type=jnp.float32)
        return (of_part, of_biases), of_hidden.astype(of_hidden_dtype)

    log_sum, *grads = rest
    # The padding of a block gets no gradient, whatever the biases are, because exp(logits - inf) is 0.
    given = (
        *(_blocks(part.shape[0], x) for x in (hidden, labels)),
        _blocks(part.shape[0], log_sum, math.inf),
        *(_blocks(part.shape[0], x) for x in grads),
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (part, biases))
    (of_part, of_biases), of_hidden = lax.scan(block, zeros, given)
    of_hidden = of_hidden.reshape(-1, hidden.shape[-1])[: labels.size].reshape(hidden.shape)
    if form.split.vocab:
        of_hidden = lax.psum(of_hidden, form.split.vocab)
    of_part = form.scattered(of_part).astype(part.dtype)
    if biases is not None and of_biases is not None:
        of_biases = lax.psum(of_biases, form.split.tokens) if form.split.tokens else of_biases
        of_biases = of_biases.astype(biases.dtype)
    return form.after(of_part, of_hidden.astype(hidden.dtype))[0], of_part, of_biases


def _blocks(vocab_size: int, x: jax.Array, fill: float = 0) -> jax.Array:
    """Cuts a device's [rows, tokens, ...] into [blocks, tokens of a block, ...], and fills up the last block with `fill`."""
    x = x.reshape(-1, *x.shape[2:])
    most = max(1, BLOCK_LOGITS // vocab_size)
    unit = _TILE if _TILE <= most < x.shape[0] else 1
    count = -(-x.shape[0] // (most // unit * unit))
    size = -(-x.shape[0] // (count * unit)) * unit
    return _padded(x, (count * size, *x.shape[1:]), fill).reshape(count, size, *x.shape[1:])
