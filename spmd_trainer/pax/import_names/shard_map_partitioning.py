"""Import names of the partitioner with explicit collectives.

The code is in `step/shard_map.py`, `step/collectives.py` and `step/minibatches.py`.
"""

from __future__ import annotations

from spmd_trainer.step.collectives import fold_rng_over_axis, gather_params, shard_params, sync_gradients
from spmd_trainer.step.minibatches import accumulate_gradients
from spmd_trainer.step.shard_map import ShardMapPartitioner

__all__ = [
    "ShardMapPartitioner",
    "accumulate_gradients",
    "fold_rng_over_axis",
    "gather_params",
    "shard_params",
    "sync_gradients",
]
