"""Where arrays live on a mesh: meshes, specs, padding, rules and a report. Needs JAX and NumPy only."""

from spmd_trainer.sharding.mesh import create_device_mesh, create_hybrid_mesh
from spmd_trainer.sharding.padding import pad_uneven, slice_uneven, uneven_paddings
from spmd_trainer.sharding.split_mapping import (
    infer_partition_spec_based_on_rank_fn,
    input_partition_spec,
    input_partition_specs,
    reshard_input_based_on_rank_fn,
    reshard_inputs,
    shard_on_batch_dim_partition_spec,
    to_partition_spec,
    validate_split_mapping,
)
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec, named_shardings, path_str

__all__ = [
    "VariableSpec",
    "create_device_mesh",
    "create_hybrid_mesh",
    "infer_partition_spec_based_on_rank_fn",
    "input_partition_spec",
    "input_partition_specs",
    "make_variable_spec",
    "named_shardings",
    "pad_uneven",
    "path_str",
    "reshard_input_based_on_rank_fn",
    "reshard_inputs",
    "shard_on_batch_dim_partition_spec",
    "slice_uneven",
    "to_partition_spec",
    "uneven_paddings",
    "validate_split_mapping",
]
