"""Pax's `partitioning`: the partitioners of `step/`."""

from spmd_trainer.errors.absent_names import getter
from spmd_trainer.step import (
    ABSENT,
    Partitioner,
    PjitPartitioner,
    create_partitioner,
    get_partitioned_spmd_model_decode_fn,
    partition_spmd_model,
)

__all__ = [
    "Partitioner",
    "PjitPartitioner",
    "create_partitioner",
    "get_partitioned_spmd_model_decode_fn",
    "partition_spmd_model",
]
__getattr__ = getter(__name__, ABSENT)
