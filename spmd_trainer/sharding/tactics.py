"""Tactics: the actions of path rules. A tactic takes a leaf's current spec and returns a new one.

A tactic is any callable `(spec, mesh, path, leaf) -> spec`; `spec` has an entry for every dimension of the leaf. The tactics
of this module can also be written as text in experiments and on the command line: `replicate`, `fsdp(axis="data")`,
`fsdp(axis="data, mdl", min_size_to_shard_mb=0)`, `shard_dim(-1, "mdl")`.

The design (regular expressions over parameter names, small composable tactics that refuse to shard twice) was published with
big_vision (https://github.com/google-research/big_vision). This module differs in two ways: if a tactic does not apply, the
sharding report (not a log) gives the reason, and uneven dimensions can be padded.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jax.sharding import PartitionSpec

from spmd_trainer.sharding.messages import bytes_text, did_you_mean, mesh_text, spec_text
from spmd_trainer.sharding.specs import AnyMesh, axes_by_dim, axes_text, mesh_shape_of
from spmd_trainer.sharding.variables import leaf_shape_dtype

Tactic = Callable[[PartitionSpec, AnyMesh, str, Any], PartitionSpec]

MEBIBYTE = 2**20


def replicate() -> BuiltinTactic:
    """Returns the tactic that replicates a leaf. It raises an error for a leaf that is already sharded."""
    return _Replicate()


def fsdp(axis: str | Sequence[str], min_size_to_shard_mb: float = 4, allow_uneven: bool = False) -> BuiltinTactic:
    """Returns the tactic that shards the largest unsharded dimension whose size the axes divide; on a tie, the last one.

    This is fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the same axis as the
    batch (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, stage 3).

    Args:
      axis: a mesh axis, or several as a tuple or as 'data, mdl'.
      min_size_to_shard_mb: leaves of at most this many MiB are not changed.
      allow_uneven: if the axes divide no dimension, shard the dimension that needs the least padding relative to its size.

    Returns:
      The tactic. It does not change scalars, small leaves, leaves already sharded over these axes, and leaves without an
      unsharded dimension that the axes divide; the sharding report gives the reason.

    Raises:
      ValueError: the axis or the size is invalid. When the tactic is applied: an axis is missing from the mesh, or the leaf
        is already sharded over some but not all of the axes.
    """
    if isinstance(min_size_to_shard_mb, bool) or not isinstance(min_size_to_shard_mb, int | float):
        raise ValueError(f"fsdp: min_size_to_shard_mb={min_size_to_shard_mb!r} must be a number of MiB, e.g. 4.")
    return _Fsdp(_parse_axes("fsdp", axis), min_size_to_shard_mb, allow_uneven)


def shard_dim(dim: int, axis: str | Sequence[str], allow_uneven: bool = False) -> BuiltinTactic:
    """Returns the tactic that shards one given dimension.

    Args:
      dim: the dimension; negative numbers count from the last.
      axis: a mesh axis, or several as a tuple or as 'data, mdl'.
      allow_uneven: shard with padding if the axes don't divide the dimension.

    Returns:
      The tactic. It does not change a leaf if the axes don't divide the dimension; the sharding report gives the reason.

    Raises:
      ValueError: the dimension or axis is invalid. When the tactic is applied: the leaf lacks the dimension (such as a
        scalar), the dimension already has other axes, or an axis is missing from the mesh or used by a different dimension.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(f"shard_dim: dim={dim!r} must be a whole number, e.g. 0 for the first dimension or -1.")
    return _ShardDim(dim, _parse_axes("shard_dim", axis), allow_uneven)


_KNOWN: dict[str, Callable[..., BuiltinTactic]] = {"replicate": replicate, "fsdp": fsdp, "shard_dim": shard_dim}


def parse_tactic(text: str) -> BuiltinTactic:
    """Returns the tactic for a text such as `fsdp(axis="data")` or `replicate`. Does not execute the text.

    Raises:
      ValueError: the text is not a call of a known tactic, or its arguments are invalid.
    """
    usage = ", ".join(f"{name}{_signature_text(make)}" for name, make in _KNOWN.items())
    suffix = f"Known tactics: {usage}. Put the names of axes in quotes."
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"Tactic {text!r} cannot be read: {error.msg}. {suffix}") from error
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is not a call of a tactic. {suffix}")
    name = call.func.id
    if name not in _KNOWN:
        raise ValueError(f"{text!r}: there is no tactic {name!r}{did_you_mean(name, _KNOWN, otherwise='.')} {suffix}")
    parameters = inspect.signature(_KNOWN[name]).parameters
    unknown = [str(keyword.arg) for keyword in call.keywords if keyword.arg not in parameters]
    if unknown:
        near = did_you_mean(unknown[0], parameters, otherwise=".")
        raise ValueError(f"{text!r}: {name} has no argument {unknown[0]!r}{near} {suffix}")
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError as error:
        raise ValueError(f"{text!r}: its arguments must be plain strings, numbers and tuples. {suffix}") from error
    try:
        inspect.signature(_KNOWN[name]).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}. {suffix}") from error
    return _KNOWN[name](*args, **kwargs)


def _signature_text(make: Callable[..., BuiltinTactic]) -> str:
    parameters = inspect.signature(make).parameters.values()
    return f"({', '.join(p.name if p.default is p.empty else f'{p.name}={p.default!r}' for p in parameters)})"


def _parse_axes(tactic: str, axis: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(axis, str):
        axes = [part.strip() for part in axis.split(",")]
    else:
        axes = list(axis) if isinstance(axis, Sequence) else []
    if not axes or not all(isinstance(name, str) and name for name in axes) or len(set(axes)) < len(axes):
        raise ValueError(
            f"{tactic}: axis={axis!r} must be the name of a mesh axis, or several different names as a tuple or as "
            "'data, mdl'."
        )
    return tuple(axes)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    tactic: BuiltinTactic
    path: str
    shape: tuple[int, ...]
    num_bytes: int
    spec: PartitionSpec
    mesh_shape: Mapping[str, int]

    @property
    def where(self) -> str:
        """The beginning of an error message about this leaf."""
        mesh = mesh_text(self.mesh_shape)
        return f"{self.path}: {self.tactic} on shape {self.shape} with spec {spec_text(self.spec)}, mesh {mesh}"

    @functools.cached_property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes over which each dimension is already sharded."""
        return axes_by_dim(self.spec, len(self.shape))

    def split(self, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the leaf's spec, with dimension `dim` sharded over `axes`."""
        entries = [*self.axes[:dim], axes, *self.axes[dim + 1 :]]
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


class BuiltinTactic:
    """A tactic that also gives the reason if it does not apply. A subclass has the tactic's arguments as fields."""

    name: ClassVar[str]
    axis: tuple[str, ...] = ()

    def decide(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> tuple[PartitionSpec, str]:
        """Returns (new spec, ''), or (unchanged spec, why the tactic did not apply). Raises the same errors as `__call__`."""
        shape, dtype = leaf_shape_dtype(path, leaf)
        sizes = mesh_shape_of(mesh)
        view = _Leaf(self, path, shape, math.prod(shape) * dtype.itemsize, spec, sizes)
        for axis in self.axis:
            if axis not in sizes:
                near = did_you_mean(axis, sizes, otherwise=".")
                raise ValueError(f"{view.where}: the mesh has no axis {axis!r}{near}")
        return self._decide(view)

    def _decide(self, leaf: _Leaf) -> tuple[PartitionSpec, str]:
        raise NotImplementedError

    def __call__(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> PartitionSpec:
        """Returns the new spec of the leaf at `path`.

        Raises:
          ValueError: see the function that made this tactic (`fsdp`, `shard_dim` or `replicate`).
        """
        return self.decide(spec, mesh, path, leaf)[0]

    def __str__(self) -> str:
        """Returns the text from which `parse_tactic` makes this tactic."""
        given = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f"{field.name}={(', '.join(value) if isinstance(value, tuple) else value)!r}")
        return f"{self.name}({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class _Replicate(BuiltinTactic):
    name: ClassVar[str] = "replicate"

    def _decide(self, leaf: _Leaf) -> tuple[PartitionSpec, str]:
        if any(leaf.axes):
            raise ValueError(
                f"{leaf.where}: it is already split, so it cannot be replicated. Remove the tactic that split it, or "
                "pass an unsplit leaf."
            )
        return leaf.spec, ""


@dataclasses.dataclass(frozen=True)
class _Fsdp(BuiltinTactic):
    name: ClassVar[str] = "fsdp"
    axis: tuple[str, ...]
    min_size_to_shard_mb: float = 4
    allow_uneven: bool = False

    def _decide(self, leaf: _Leaf) -> tuple[PartitionSpec, str]:
        used = {axis for axes in leaf.axes for axis in axes}
        split_over = axes_text(self.axis, leaf.mesh_shape)
        if used.issuperset(self.axis):
            return leaf.spec, f"already split over {split_over}"
        for axis in self.axis:
            if axis in used:
                raise ValueError(
                    f"{leaf.where}: axis {axis!r} already splits it, and an axis can split only one dimension. Remove "
                    f"{axis!r} from this tactic or from the one that used it."
                )
        if not leaf.shape:
            return leaf.spec, "a scalar has no dimension to split"
        if leaf.num_bytes <= self.min_size_to_shard_mb * MEBIBYTE:
            limit = f"min_size_to_shard_mb={self.min_size_to_shard_mb}"
            return leaf.spec, f"{bytes_text(leaf.num_bytes)} is not above {limit}"
        count = math.prod(leaf.mesh_shape[axis] for axis in self.axis)
        free = [(size, dim) for dim, (size, axes) in enumerate(zip(leaf.shape, leaf.axes, strict=True)) if not axes]
        even = [(size, dim) for size, dim in free if size % count == 0]
        if even:
            return leaf.split(max(even)[1], self.axis), ""
        if free and self.allow_uneven:
            _, _, dim = min((-size % count / size, -size, -dim) for size, dim in free)
            return leaf.split(-dim, self.axis), ""
        which = "dimension" if len(free) == len(leaf.shape) else "unsplit dimension"
        return leaf.spec, f"no {which} of {leaf.shape} divides by {split_over}"


@dataclasses.dataclass(frozen=True)
class _ShardDim(BuiltinTactic):
    name: ClassVar[str] = "shard_dim"
    dim: int
    axis: tuple[str, ...]
    allow_uneven: bool = False

    def _decide(self, leaf: _Leaf) -> tuple[PartitionSpec, str]:
        rank = len(leaf.shape)
        split_over = axes_text(self.axis, leaf.mesh_shape)
        if not -rank <= self.dim < rank:
            have = f"It has dimensions 0 to {rank - 1}." if rank else "A scalar cannot be split."
            raise ValueError(
                f"{leaf.where}: there is no dimension {self.dim} to split over {split_over}. {have} Narrow the rule's "
                "regex, or put a rule for this leaf before it."
            )
        dim = self.dim % rank
        if leaf.axes[dim] == self.axis:
            return leaf.spec, f"dimension {dim} is already split over {split_over}"
        for other, axes in enumerate(leaf.axes):
            if axes and (other == dim or set(axes) & set(self.axis)):
                raise ValueError(
                    f"{leaf.where}: dimension {other} (size {leaf.shape[other]}) is already split over "
                    f"{axes_text(axes, leaf.mesh_shape)}. A dimension is split only once, and an axis splits only one "
                    "dimension: remove one of the two tactics."
                )
        if not self.allow_uneven and leaf.shape[dim] % math.prod(leaf.mesh_shape[axis] for axis in self.axis):
            return leaf.spec, f"dimension {dim} of {leaf.shape} does not divide by {split_over}"
        return leaf.split(dim, self.axis), ""
