"""The public names of `spmd_trainer.sharding`, which imports this module at the first use of one of them."""

from spmd_trainer.sharding.intermediate_sharding import (
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    find_intermediate_sharding,
)
from spmd_trainer.sharding.mesh import create_device_mesh, create_hybrid_mesh, fit_mesh_shape, size_problem
from spmd_trainer.sharding.mesh_split import split_by_mesh_axis
from spmd_trainer.sharding.padding import pad_uneven, slice_uneven, uneven_paddings
from spmd_trainer.sharding.path_rules import infer_sharding, plan_sharding
from spmd_trainer.sharding.placement import (
    get_local_slice_from_fsarray,
    make_fsarray_from_local_slice,
    place_like_target,
    update_model_sharding,
)
from spmd_trainer.sharding.report import ShardingReport, sharding_report
from spmd_trainer.sharding.report_data import ShardingTotals, sharding_totals
from spmd_trainer.sharding.resharding import reshard, reshard_with_intermediate_sharding
from spmd_trainer.sharding.shape_rules import MeshPartitionHelper
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
from spmd_trainer.sharding.tactics import fsdp, parse_tactic, replicate, shard_dim
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec, named_shardings, path_str

__all__ = [
    "MeshPartitionHelper",
    "NoIntermediateShardingError",
    "NoIntermediateShardingNeededError",
    "ShardingReport",
    "ShardingTotals",
    "VariableSpec",
    "create_device_mesh",
    "create_hybrid_mesh",
    "find_intermediate_sharding",
    "fit_mesh_shape",
    "fsdp",
    "get_local_slice_from_fsarray",
    "infer_partition_spec_based_on_rank_fn",
    "infer_sharding",
    "input_partition_spec",
    "input_partition_specs",
    "make_fsarray_from_local_slice",
    "make_variable_spec",
    "named_shardings",
    "pad_uneven",
    "parse_tactic",
    "path_str",
    "place_like_target",
    "plan_sharding",
    "replicate",
    "reshard",
    "reshard_input_based_on_rank_fn",
    "reshard_inputs",
    "reshard_with_intermediate_sharding",
    "shard_dim",
    "shard_on_batch_dim_partition_spec",
    "sharding_report",
    "sharding_totals",
    "size_problem",
    "slice_uneven",
    "split_by_mesh_axis",
    "to_partition_spec",
    "uneven_paddings",
    "update_model_sharding",
    "validate_split_mapping",
]
