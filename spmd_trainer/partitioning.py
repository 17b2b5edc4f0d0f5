"""The partitioned steps under Pax's import name. The code is in `partition/pjit.py` and `partition/own_loop.py`."""

from __future__ import annotations

from spmd_trainer.partition.own_loop import get_partitioned_spmd_model_decode_fn, partition_spmd_model
from spmd_trainer.partition.pjit import PjitPartitioner

__all__ = ["PjitPartitioner", "get_partitioned_spmd_model_decode_fn", "partition_spmd_model"]
