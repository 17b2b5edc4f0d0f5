"""Sharding of the decoder's variables and activations: logical axes, and the layer class that maps them to mesh axes.

Also defines two basic layers: `Projection` and `Norm`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from praxis import base_layer, pax_fiddle

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.kernels import sequence_order
from spmd_trainer.kernels.sequence_order import SequenceOrder
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.sharding.specs import entry_axes

MeshAxes = str | tuple[str, ...] | None
SEQUENCE_AXIS = "seq"

# {logical axis: mesh axes}. The first part is for variables, the second for activations. As in Pax's v1 sharding, weights are
# split over 'data' along the width of the residual stream and over 'mdl' along the other dimension. A mesh axis 'seq', if there
# is one, splits each row's tokens (context parallelism), and splits weights like 'data'.
DEFAULT_AXES: dict[str, MeshAxes] = {
    "vocab": "mdl",
    "positions": None,
    "embed": ("data", SEQUENCE_AXIS),
    "heads": "mdl",
    "kv_heads": "mdl",
    "head_dims": None,
    "latent": ("data", SEQUENCE_AXIS),
    "latent_out": None,
    "mlp": "mdl",
    "experts": "mdl",
    "expert_mlp": None,
    "router": None,
    "norm": None,
    "batch": ("replica", "data"),
    "length": SEQUENCE_AXIS,
    "activation_embed": None,
    "activation_latent": None,
    "activation_heads": "mdl",
    "activation_kv_heads": "mdl",
    "activation_linear_heads": ("mdl", SEQUENCE_AXIS),
    "activation_mlp": "mdl",
    "activation_vocab": "mdl",
}


def resolve_axes(changes: Mapping[str, Any] | None, mesh_axis_names: Sequence[str] | None) -> dict[str, MeshAxes]:
    """Returns {logical axis: mesh axes, or None if it is not split}.

    Args:
      changes: changes to `DEFAULT_AXES`: {logical axis: mesh axis, tuple of mesh axes, or None (not split)}.
      mesh_axis_names: axes of the mesh; None without a mesh. Default axes missing from the mesh are left out.

    Raises:
      UserError: `changes` names an unknown logical axis, or an axis missing from the mesh.
    """
    mesh = tuple(mesh_axis_names or ())
    resolved: dict[str, MeshAxes] = {}
    for name, axes in DEFAULT_AXES.items():
        kept = tuple(axis for axis in entry_axes(axes) if axis in mesh)
        resolved[name] = kept or None
    for name, axes in (changes or {}).items():
        if name not in DEFAULT_AXES:
            raise UserError(f"axes has no logical axis {name!r}{did_you_mean(name, DEFAULT_AXES)}")
        for axis in entry_axes(axes):
            if mesh and axis not in mesh:
                raise UserError(f"axes[{name!r}]={axes!r}, and the mesh has no axis {axis!r}{did_you_mean(axis, mesh)}")
        resolved[name] = (entry_axes(axes) or None) if mesh else None
    return resolved


def renamed_axes(names: Mapping[str, str], mesh_axis_names: Sequence[str]) -> dict[str, MeshAxes]:
    """Returns the changes to `DEFAULT_AXES` for a mesh with different axis names. Axes missing from the mesh are dropped.

    Args:
      names: {default name of a mesh axis: its name in this mesh}.
      mesh_axis_names: axes of the mesh.
    """
    changed: dict[str, MeshAxes] = {}
    for key, axes in DEFAULT_AXES.items():
        renamed = tuple(names.get(axis, axis) for axis in entry_axes(axes))
        if renamed != entry_axes(axes):
            changed[key] = tuple(axis for axis in renamed if axis in mesh_axis_names)
    return changed


class SpecLayer(base_layer.BaseLayer):
    """Base class of the decoder's layers.

    Attributes:
      spec: architecture and sizes of the model.
      axes: changes to `DEFAULT_AXES`, see `resolve_axes`; None for no changes.
    """

    spec: DecoderSpec = pax_fiddle.instance_field(DecoderSpec)
    axes: Any = None

    def child(self, name: str, cls: type[base_layer.BaseLayer], **fields: Any) -> None:
        self.create_child(name, pax_fiddle.Config(cls, spec=self.spec, axes=self.axes, **fields))

    def add_weight(
        self,
        name: str,
        shape: Sequence[int],
        axes: Sequence[str],
        init: float | base_layer.WeightInit | None = None,
        collections: Sequence[str] = (),
        *,
        trainable: bool = True,
    ) -> None:
        """Creates a variable.

        Args:
          name: name of the variable.
          shape: logical shape.
          axes: a logical axis for each dimension.
          init: a constant initial value, as for norms and biases, or a praxis WeightInit; in both cases, the variable has no
            weight decay. None draws from a normal distribution with standard deviation `spec.initializer_range`.
          collections: additional praxis collections of the variable (`WeightHParams.collections`).
          trainable: False for a variable without a gradient. Such a variable is float32 in every model.
        """
        if init is None:
            initial = base_layer.WeightInit.Gaussian(self.spec.initializer_range)
        else:
            initial = init if isinstance(init, base_layer.WeightInit) else base_layer.WeightInit.Constant(init)
            collections = [*collections, base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION]
        hparams = base_layer.WeightHParams(
            shape=list(shape),
            init=initial,
            dtype=None if trainable else jnp.float32,
            collections=list(collections),
            mesh_shape=self.mesh_shape,
            tensor_split_dims_mapping=self._split(axes),
        )
        self.create_variable(name, hparams, trainable=trainable)

    def read(self, name: str) -> jax.Array:
        """Returns the variable `name`, cast to `fprop_dtype`."""
        x: jax.Array = getattr(self.theta, name)
        return x.astype(self.fprop_dtype)

    def split(self, x: jax.Array, *axes: str) -> jax.Array:
        """Constrains the sharding of an activation. `axes`: a logical axis for each dimension of `x`.

        'activation_embed' (the width of the residual stream) is sharded only in training, where the backward pass stores it.
        'length' is not sharded if it can't be divided evenly, as for new tokens in decode steps; whole rows are padded.
        """

        def stays_whole(axis: str, size: int) -> bool:
            if axis == "length":
                return size % sequence_order.num_shards(self.mesh_axes(axis)) != 0
            return axis == "activation_embed" and self.do_eval

        mesh_axes = [
            None if stays_whole(axis, size) else split
            for axis, split, size in zip(axes, self._split(axes), x.shape, strict=True)
        ]
        return jnp.asarray(base_layer.maybe_shard(x, mesh_axes, self.mesh_axis_names))

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes that split a logical axis; () if it is not split."""
        return entry_axes(resolve_axes(self.axes, self.mesh_axis_names)[axis])

    def dropped(self, x: jax.Array, probability: float, order: SequenceOrder | None = None) -> jax.Array:
        """Applies dropout in training; returns x unchanged in evaluation.

        Args:
          x: the array. If `order` is given, [batch, time, ...].
          probability: probability of setting an element to 0; the others are divided by 1 - probability.
          order: order of the tokens in `x`; None for row order. A token's random numbers depend on its index in the row, not
            on this order.
        """
        if not probability or self.do_eval:
            return x
        shape = x.shape if order is None else (x.shape[0], order.length, *x.shape[2:])
        kept = jax.random.bernoulli(self.next_prng_key(), 1 - probability, shape)
        kept = kept if order is None else order.apply(kept)
        return jnp.where(kept, x / (1 - probability), jnp.zeros((), x.dtype))

    def _split(self, axes: Sequence[str]) -> list[MeshAxes]:
        resolved = resolve_axes(self.axes, self.mesh_axis_names)
        return [resolved[axis] for axis in axes]


def unit(x: jax.Array, dims: tuple[int, ...], epsilon: float) -> jax.Array:
    """Returns x, float32, divided by its root mean square over the dimensions `dims`. `epsilon`: added to the mean square."""
    size = math.prod(x.shape[dim] for dim in dims)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=dims, keepdims=True) / size + epsilon)


class Projection(SpecLayer):
    """A layer that computes an einsum of its input and a weight, plus an optional bias.

    Attributes:
      equation: the einsum of the input and the weight, e.g. 'btd,dnh->btnh'.
      shape: the weight's shape.
      split_axes: logical axes of `shape`.
      bias_axes: logical axes of the bias; () for no bias. The bias has the last len(bias_axes) dimensions of `shape`.
      output_axes: logical axes of the output; () leaves its layout to the compiler.
    """

    equation: str = ""
    shape: Any = ()
    split_axes: Any = ()
    bias_axes: Any = ()
    output_axes: Any = ()

    def setup(self) -> None:
        self.add_weight("w", self.shape, self.split_axes)
        if self.bias_axes:
            self.add_weight("b", self.shape[-len(self.bias_axes) :], self.bias_axes, init=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.einsum(self.equation, x, self.read("w"))
        if self.bias_axes:
            x = x + self.read("b")
        return self.split(x, *self.output_axes) if self.output_axes else x


class Norm(SpecLayer):
    """RMS norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450) over the last len(shape) dimensions.

    Attributes:
      shape: sizes of the dimensions to normalize; also the shape of the scale.
      split_axes: logical axes of `shape`.
      kind: 'rms' or 'layer'; None for `spec.norm`.
      epsilon: added to the mean square; None for `spec.norm_epsilon`.
      scale_offset: added to the scale; None for `spec.norm_scale_offset`.
    """

    shape: Any = ()
    split_axes: Any = ("norm",)
    kind: str | None = None
    epsilon: float | None = None
    scale_offset: float | None = None

    def setup(self) -> None:
        self.add_weight("scale", self.shape, self.split_axes, init=1.0 - self._offset)
        if self._kind == "layer":
            self.add_weight("bias", self.shape, self.split_axes, init=0.0)

    @property
    def _kind(self) -> str:
        return self.kind or self.spec.norm

    @property
    def _offset(self) -> float:
        return self.spec.norm_scale_offset if self.scale_offset is None else self.scale_offset

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normalized inputs, in the dtype of `inputs`."""
        dims = tuple(range(-len(self.shape), 0))
        x = inputs.astype(jnp.float32)
        if self._kind == "layer":
            x = x - jnp.mean(x, axis=dims, keepdims=True)
        x = unit(x, dims, self.spec.norm_epsilon if self.epsilon is None else self.epsilon)
        x = x * (self.theta.scale.astype(jnp.float32) + self._offset)
        if self._kind == "layer":
            x = x + self.theta.bias.astype(jnp.float32)
        return x.astype(inputs.dtype)
