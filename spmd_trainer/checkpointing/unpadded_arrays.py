"""Orbax's handler for jax.Arrays, changed to write no padding: a checkpoint holds every variable at its logical shape.

So any Orbax program reads the shapes that its model declares, and a run on a different mesh reads no padding. All shards of a
jax.Array have the same size, so an array can't be cut on the devices. It is cut on the host, after the copy: the last shards
of a padded dimension are written only partly, or not at all.

Orbax has no public interface for this. The functions used here belong to Orbax 0.12 (`orbax.checkpoint._src.serialization`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from orbax.checkpoint._src.arrays import fragments, numpy_utils
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.metadata import array_metadata, array_metadata_store
from orbax.checkpoint._src.serialization import jax_array_handlers, replica_slices, type_handler_registry, types


@dataclasses.dataclass(frozen=True)
class _LogicalSlices(replica_slices.ReplicaSlices):  # type: ignore[misc, unused-ignore]  # Orbax has no type information.
    """Slices of an array on the host, cut to the logical shape. Unlike Orbax's own slices, they may differ in size."""

    def to_fragments(self) -> fragments.ConcreteFragments:
        """Returns the slices as Orbax fragments, the form in which Orbax writes them."""
        parts = [
            fragments.ConcreteFragment(index=numpy_utils.resolve_slice(s.index, self.global_shape), value=s.data())
            for s in self.replica_slices
        ]
        return fragments.ConcreteFragments(shape=self.global_shape, dtype=self.dtype, fragments=parts)


class UnpaddedArrayHandler(jax_array_handlers.ArrayHandler):  # type: ignore[misc, unused-ignore]
    """Writes arrays at their logical shapes; reads like Orbax's handler.

    Attributes:
      logical_shapes: {array's name in the checkpoint: its logical shape} for the arrays with padding. Set it before a save.
    """

    def __init__(self) -> None:
        super().__init__(array_metadata_store=array_metadata_store.Store())
        self.logical_shapes: Mapping[str, tuple[int, ...]] = {}

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[types.ParamInfo],
        args: Sequence[types.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        """Copies the arrays to the host, and returns futures of their writes; see Orbax's `ArrayHandler.serialize`."""
        if not any(info.name in self.logical_shapes for info in infos):
            futures: Sequence[future.Future] = await super().serialize(values, infos, args)
            return futures
        args = args or [ocp.SaveArgs()] * len(values)
        types.check_input_arguments(values, infos, args)
        jax_array_handlers.check_array_values(values, infos)
        arrays, about_keys = _without_keys(values, infos)
        shapes = [self._shape(info.name, array) for info, array in zip(infos, arrays, strict=True)]
        on_host = replica_slices.transfer_arrays_to_host(arrays, self._replica_id, self._use_replica_parallel)
        cut = [_cut(slices, shape) for slices, shape in zip(on_host, shapes, strict=True)]
        shardings = [_readable(array, shape) for array, shape in zip(arrays, shapes, strict=True)]
        write_arrays = jax_array_handlers._async_serialize_replica_slices(
            cut,
            infos,
            args,
            primary_host=self._primary_host,
            metadata_key=self._metadata_key,
            array_metadata_store=self._array_metadata_store,
            enable_replica_parallel_separate_folder=self._enable_replica_parallel_separate_folder,
            use_replica_parallel=self._use_replica_parallel,
            ext_metadata=about_keys,
        )
        write_shardings = jax_array_handlers._async_serialize_shardings(
            shardings, infos, primary_host=self._primary_host
        )
        return [
            future.CommitFutureAwaitingContractedSignals(write_shardings, name="shardings"),
            future.CommitFutureAwaitingContractedSignals(write_arrays, name="arrays"),
        ]

    def _shape(self, name: str, array: jax.Array) -> tuple[int, ...]:
        """Returns the shape to write. The uint32 data of PRNG keys has one dimension more than the keys."""
        logical = self.logical_shapes.get(name)
        return array.shape if logical is None else (*logical, *array.shape[len(logical) :])


def pytree_handler(arrays: UnpaddedArrayHandler) -> ocp.PyTreeCheckpointHandler:
    """Returns an Orbax PyTree handler that writes arrays with the handler `arrays`."""
    registry = type_handler_registry.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _without_keys(
    values: Sequence[jax.Array], infos: Sequence[types.ParamInfo]
) -> tuple[list[jax.Array], dict[str, dict[str, str]]]:
    """Replaces PRNG keys with their uint32 data. Returns the arrays, and {name: Orbax's metadata} for the keys."""
    arrays, notes = [], {}
    for value, info in zip(values, infos, strict=True):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            notes[info.name] = {array_metadata.RANDOM_KEY_IMPL: str(jax.random.key_impl(value))}
            value = jax.random.key_data(value)
        arrays.append(value)
    return arrays, notes


def _cut(slices: replica_slices.ReplicaSlices, shape: tuple[int, ...]) -> replica_slices.ReplicaSlices:
    """Returns an array's slices, cut to its logical shape. Slices that lie outside it are dropped."""
    if slices.global_shape == shape:
        return slices
    kept = []
    for part in slices.replica_slices:
        starts = [index.start or 0 for index in part.index]
        sizes = [
            min(size, end - start) for size, end, start in zip(part.unsliced_data.shape, shape, starts, strict=True)
        ]
        if min(sizes) > 0:
            index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            data = part.unsliced_data[tuple(map(slice, sizes))]
            kept.append(dataclasses.replace(part, index=index, unsliced_data=data))
    return _LogicalSlices(shape, slices.local_shape, slices.sharding, slices.dtype, True, kept)


def _readable(array: jax.Array, shape: tuple[int, ...]) -> Sharding:
    """Returns the sharding to record for a saved array: its own, or a fully replicated one if its own needs padding."""
    sharding = array.sharding
    if array.shape == shape or not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec())
