"""What a save does besides writing: it checks the state, logs how long it takes, and says what became of it if it fails."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointReadError, NonFiniteStateError
from spmd_trainer.checkpointing.records import dtype_name
from spmd_trainer.sharding.messages import format_duration

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState

    CheckFinite: TypeAlias = bool | Callable[[TrainState], bool | jax.Array]

MAX_LISTED = 20


def arrays_by_path(state: TrainState, variables: TrainState, specs: Mapping[str, VariableSpec]) -> dict[str, jax.Array]:
    """Returns {path: array} after checking that the state matches its VariableSpecs.

    Args:
      state: a TrainState (or another tree) of jax.Arrays at padded shapes.
      variables: the same tree with VariableSpecs as leaves.
      specs: the VariableSpecs by path, in the tree's order.

    Raises:
      CheckpointError: the trees differ in structure, a leaf is not a jax.Array, or an array's shape or dtype differs from
        its VariableSpec.
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


def refuse_non_finite(step: int, state: TrainState, arrays: Mapping[str, jax.Array], check: CheckFinite) -> None:
    """Raises if the state must not be saved.

    Args:
      step: the step, for the message.
      state: the state, passed to `check` if it is a function.
      arrays: the state's arrays by path.
      check: True looks for NaN and infinity in every floating-point array, on the devices. A function takes the state and
        returns True if it may be saved. False checks nothing.

    Raises:
      NonFiniteStateError: the state holds NaN or infinity; the message names the variables.
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
    replicated = None
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
    finite = _all_finite(replicated)(list(floats.values()))
    bad = [path for path, good in zip(floats, finite.tolist(), strict=True) if not good]
    if bad:
        more = f" and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        raise NonFiniteStateError(f"{refused}NaN or infinity in {', '.join(bad[:MAX_LISTED])}{more}.")


@functools.lru_cache(maxsize=8)
def _all_finite(replicated: NamedSharding | None) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Returns one compiled function that checks all arrays. Every process gets the result: a boolean per array."""

    def all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(x).all() for x in arrays])

    return jax.jit(all_finite, out_shardings=replicated)


class SaveTimes:
    """Times one save: how long its caller waits, and how long until the step is on disk.

    The caller continues while the step is still being written; either may finish first. The last line is logged when
    both times are known; it is never logged for a save that fails.
    """

    def __init__(
        self,
        what: str,
        *,
        report: Callable[[str], object] = logging.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the clock.

        Args:
          what: names the saved thing in the log, e.g. 'step 200'.
          report: receives each log line.
          clock: returns the time in seconds.
        """
        self._what = what
        self._report = report
        self._clock = clock
        self._began = clock()
        self._waited: float | None = None
        self._took: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Logs that the save begins."""
        self._report(f"saving {self._what}")

    def mark_copied(self) -> None:
        """Records that the arrays are copied to the host, so that the caller waits no longer."""
        with self._lock:
            self._waited = self._clock() - self._began
            self._report_if_done()

    def mark_on_disk(self) -> None:
        """Records that every process has written its part of the step. The saving thread calls this."""
        with self._lock:
            self._took = self._clock() - self._began
            self._report_if_done()

    def _report_if_done(self) -> None:
        if self._took is not None and self._waited is not None:
            self._report(
                f"saved {self._what} in {format_duration(max(self._took, self._waited))} "
                f"(the loop waited {format_duration(self._waited)})"
            )


def error_of(
    directory: epath.Path, step: int | None, cause: Exception, latest_step: Callable[[], int | None]
) -> CheckpointError:
    """Discards what a failed save has written, and returns the error to raise.

    Args:
      directory: the directory of the checkpoints.
      step: the step that was saved; None if no save was started.
      cause: what the save raised.
      latest_step: returns the newest whole step; may raise CheckpointReadError.
    """
    from spmd_trainer.checkpointing import orbax_io

    if step is not None and jax.process_index() == 0:
        orbax_io.discard(directory, step)
    fate = "The step is discarded."
    try:
        newest = latest_step()
        if newest is not None and newest == step:
            fate = "All of its files are there, and the next start commits it."
        then = "there is no whole step yet." if newest is None else f"the newest whole step is {newest}."
    except CheckpointReadError as error:
        then = f"which steps are whole is not known ({error})"
    return CheckpointError(
        f"Saving checkpoint step {step} to {directory} failed: {type(cause).__name__}: {cause}\n"
        f"{fate} Check free space, quota and permissions there, then start the run again: {then}"
    )
