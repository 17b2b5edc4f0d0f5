"""What a state must pass before it is saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.checkpointing.errors import CheckpointError, NonFiniteStateError
from spmd_trainer.checkpointing.records import dtype_name

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec

MAX_LISTED = 20


def arrays_by_path(state: Any, variables: Any, specs: Mapping[str, VariableSpec]) -> dict[str, jax.Array]:
    """Returns {path: array} of a state that is what its VariableSpecs say.

    Args:
      state: a tree of jax.Arrays.
      variables: the same tree with VariableSpecs.
      specs: the VariableSpecs by path, in the tree's order.

    Raises:
      CheckpointError: another structure, a leaf that is no jax.Array, another padded shape, another dtype.
    """
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(state)
    if structure != jax.tree.structure(variables):
        raise CheckpointError(
            "state and variables have different structures:\n"
            f"  state:     {structure}\n  variables: {jax.tree.structure(variables)}"
        )
    arrays = dict(zip(specs, leaves, strict=True))
    for path, array in arrays.items():
        spec = specs[path]
        if not isinstance(array, jax.Array):
            raise CheckpointError(f"{path} is a {type(array).__name__}, not a jax.Array.")
        if array.shape != tuple(spec.padded_shape) or dtype_name(array.dtype) != dtype_name(spec.dtype):
            raise CheckpointError(
                f"{path} is {array.shape} {dtype_name(array.dtype)}; its VariableSpec says {tuple(spec.padded_shape)} "
                f"{dtype_name(spec.dtype)} (logical shape {tuple(spec.logical_shape)})."
            )
    return arrays


def refuse_non_finite(
    step: int, state: Any, arrays: Mapping[str, jax.Array], check: bool | Callable[[Any], Any]
) -> None:
    """Raises when a state is not to be saved.

    Args:
      step: the step, for the message.
      state: the state, for a `check` that is a function.
      arrays: the same by path.
      check: True looks for NaN and infinity in every floating-point array, on the devices; a function returns whether
        the state is good; False lets all pass.

    Raises:
      NonFiniteStateError: names the variables.
    """
    refused = f"Checkpoint step {step} was not saved: "
    if callable(check):
        if not bool(check(state)):
            raise NonFiniteStateError(f"{refused}{getattr(check, '__name__', check)} refused its state.")
        return
    floats = {path: x for path, x in arrays.items() if x.size and jnp.issubdtype(x.dtype, jnp.inexact)}
    if not check or not floats:
        return
    sharding = next(iter(floats.values())).sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    finite = _all_finite(replicated)(list(floats.values()))
    bad = [path for path, good in zip(floats, finite.tolist(), strict=True) if not good]
    if bad:
        more = f" and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        raise NonFiniteStateError(f"{refused}NaN or infinity in {', '.join(bad[:MAX_LISTED])}{more}.")


@functools.lru_cache(maxsize=8)
def _all_finite(replicated: NamedSharding | None) -> Any:
    """One compiled reduction for all arrays; its result is on every process."""

    def all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(x).all() for x in arrays])

    return jax.jit(all_finite, out_shardings=replicated)
