"""The tiny byte-level language model with ShardMapPartitioner, whose collectives are explicit."""

from __future__ import annotations

from typing import Any

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.step.shard_map import ShardMapPartitioner


@experiment_registry.register(tags=["tiny"])
class ShardMapDataParallelTiny(StdlibBytesTiny):
    """StdlibBytesTiny, data parallel over all 8 devices, with two minibatches and one all-reduce per step."""

    GLOBAL_BATCH_SIZE = 16

    def partitioner(self) -> ShardMapPartitioner:
        return ShardMapPartitioner("dp", num_minibatches=2)


@experiment_registry.register(tags=["tiny"])
class ShardMapFsdpTiny(StdlibBytesTiny):
    """StdlibBytesTiny with its parameters split over all 8 devices and gathered layer by layer."""

    def partitioner(self) -> ShardMapPartitioner:
        """Returns a partitioner that splits parameters of 512 or more elements: here all but norms and biases."""
        return ShardMapPartitioner("fsdp", min_weight_size=512)


@experiment_registry.register(tags=["tiny"])
class ShardMapFsdpUnrolledTiny(ShardMapFsdpTiny):
    """ShardMapFsdpTiny with separate instead of stacked layers; the partitioner adds the rematerialisation that they lack."""

    def _model(self) -> Any:
        model_p = super()._model()
        repeated = model_p.lm_tpl.stacked_transformer_tpl
        model_p.lm_tpl.stacked_transformer_tpl = repeated.block.set(num_layers=repeated.x_times)
        return model_p
