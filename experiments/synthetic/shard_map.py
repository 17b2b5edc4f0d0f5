"""The tiny byte-level language model with ShardMapPartitioner, which writes every collective out."""

from __future__ import annotations

from typing import Any

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.step.shard_map import ShardMapPartitioner


@experiment_registry.register(tags=["tiny"])
class ShardMapDataParallelTiny(StdlibBytesTiny):
    """StdlibBytesTiny, data parallel over all 8 devices: one all-reduce per step of two minibatches."""

    GLOBAL_BATCH_SIZE = 16

    def partitioner(self) -> ShardMapPartitioner:
        return ShardMapPartitioner("dp", num_minibatches=2)


@experiment_registry.register(tags=["tiny"])
class ShardMapFsdpTiny(StdlibBytesTiny):
    """StdlibBytesTiny, its parameters split over all 8 devices and gathered layer by layer."""

    def partitioner(self) -> ShardMapPartitioner:
        """Splits parameters of 512 or more elements: here all but norms and biases."""
        return ShardMapPartitioner("fsdp", min_weight_size=512)


@experiment_registry.register(tags=["tiny"])
class ShardMapFsdpUnrolledTiny(ShardMapFsdpTiny):
    """ShardMapFsdpTiny with separate instead of stacked layers, which need explicit rematerialisation."""

    def _model(self) -> Any:
        model_p = super()._model()
        repeated = model_p.lm_tpl.stacked_transformer_tpl
        model_p.lm_tpl.stacked_transformer_tpl = repeated.block.set(num_layers=repeated.x_times)
        return model_p
