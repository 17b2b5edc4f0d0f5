"""Decoder-only language models in the sizes that Pax publishes for the cloud, on synthetic text.

Each class is a model size with its mesh; `model_params` documents the attributes. To train on other data, subclass one
and override `datasets`. The largest ones need as many chips as their meshes have; `--mode=inspect` with `--mesh` shows
the layout on another mesh. The `...Tiny` classes have the same structures and run in seconds on 8 devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from praxis import layers
from praxis.pax_fiddle import Config

from spmd_trainer import base_experiment, experiment_registry, sharding
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import synthetic
from spmd_trainer.tasks.lm import model_params


def rows_per_process(global_batch_size: int) -> int:
    """Returns the number of rows that this process feeds.

    Use it in a config as `batch_size=Config(rows_per_process, global_batch_size=128)`: the number of processes is
    known only when the input is built, and asking for it initialises the devices.

    Raises:
      UserError: the number of processes doesn't divide the batch.
    """
    processes = jax.process_count()
    if global_batch_size % processes:
        raise UserError(
            f"a global batch of {global_batch_size} rows can't be divided among {processes} processes; the next that can has "
            f"{-(-global_batch_size // processes) * processes} rows: set the experiment's PERCORE_BATCH_SIZE, GLOBAL_BATCH_SIZE "
            "or ROWS, whichever it has"
        )
    return global_batch_size // processes


class SyntheticText(base_experiment.BaseExperiment):
    """Synthetic text: endless for training, a finite set for evaluation.

    Attributes:
      PERCORE_BATCH_SIZE: rows per device of the declared mesh. The global batch is the same on any other mesh.
      MAX_SEQ_LEN: tokens per row.
      NUM_EVAL_EXAMPLES: rows of the evaluation set.
    """

    PERCORE_BATCH_SIZE: float = 16
    MAX_SEQ_LEN = 1024
    NUM_EVAL_EXAMPLES = 1024
    VOCAB_SIZE: Any
    ICI_MESH_SHAPE: Any
    DCN_MESH_SHAPE: Any

    def global_batch_size(self) -> int:
        return round(self.PERCORE_BATCH_SIZE * math.prod(self.ICI_MESH_SHAPE) * math.prod(self.DCN_MESH_SHAPE or ()))

    def datasets(self) -> list[Any]:
        """Returns learnable text: token t is followed by (5 t + 3) mod VOCAB_SIZE."""

        def text(**fields: Any) -> Any:
            return Config(
                synthetic.SyntheticLmInput,
                vocab_size=self.VOCAB_SIZE,
                seq_len=self.MAX_SEQ_LEN,
                batch_size=Config(rows_per_process, global_batch_size=self.global_batch_size()),
                **fields,
            )

        return [text(name="train", is_training=True), text(name="heldout", num_examples=self.NUM_EVAL_EXAMPLES)]

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")


class CloudExperiment(SyntheticText):
    """Base of all sizes: GELU, rematerialised layers, and the optimizer. List this class before the model class.

    Attributes:
      USE_ADAFACTOR: use Adafactor instead of Adam; its state is little more than a momentum of one byte per parameter.
      WARMUP_STEPS: warm-up steps of the learning rate.
      NUM_TRAIN_STEPS: `task.train.num_train_steps`; None for its default.
    """

    ACTIVATION_CLS = layers.GELU
    CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_NOTHING
    USE_ADAFACTOR = False
    WARMUP_STEPS = 4000
    NUM_TRAIN_STEPS: int | None = None
    LEARNING_RATE: Any
    WEIGHT_DECAY: Any

    def task(self) -> Any:
        task_p = super().task()  # type: ignore[safe-super]  # the model class stands behind this one
        if not self.USE_ADAFACTOR:  # the model classes set Adafactor
            model_params.set_default_adam(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY)
        task_p.train.learner.optimizer.lr_schedule.warmup_steps = self.WARMUP_STEPS
        if self.NUM_TRAIN_STEPS is not None:
            task_p.train.num_train_steps = self.NUM_TRAIN_STEPS
        return task_p


class LmCloudSpmd(CloudExperiment, model_params.TransformerLmSpmdAdafactor):
    """Repeated layers on the mesh axes ('replica', 'data', 'mdl')."""

    USE_REPEATED_LAYER = True


@experiment_registry.register
class LmCloudSpmd2B(LmCloudSpmd):
    """2.1B parameters on 4 chips, global batch 32."""

    PERCORE_BATCH_SIZE = 8
    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 4, 1)


@experiment_registry.register
class LmCloudSpmd2BLimitSteps(LmCloudSpmd2B):
    """LmCloudSpmd2B for 300 steps."""

    NUM_TRAIN_STEPS = 300


@experiment_registry.register
class LmCloudSpmd2BAdafactor(LmCloudSpmd2B):
    """LmCloudSpmd2B with Adafactor."""

    USE_ADAFACTOR = True


@experiment_registry.register
class LmCloudSpmdMultislice2B(LmCloudSpmd2B):
    """LmCloudSpmd2B on 2 slices of 4 chips: replicated across slices, split within a slice; global batch 128."""

    PERCORE_BATCH_SIZE = 16
    DCN_MESH_SHAPE = (2, 1, 1)


@experiment_registry.register
class LmCloudSpmd16B(LmCloudSpmd):
    """16.5B parameters on 32 chips, global batch 256."""

    PERCORE_BATCH_SIZE = 8
    NUM_LAYERS = 36
    MODEL_DIMS = 6144
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 16, 2)


@experiment_registry.register
class LmCloudSpmd32B(LmCloudSpmd):
    """32.5B parameters on 64 chips, global batch 512."""

    PERCORE_BATCH_SIZE = 8
    NUM_LAYERS = 40
    MODEL_DIMS = 8192
    HIDDEN_DIMS = MODEL_DIMS * 4
    CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_CONTEXT_AND_OUT_PROJ
    ICI_MESH_SHAPE = (1, 16, 4)


@experiment_registry.register
class LmCloudSpmd64B(LmCloudSpmd):
    """64.5B parameters on 128 chips, global batch 512."""

    PERCORE_BATCH_SIZE = 4
    NUM_LAYERS = 51
    MODEL_DIMS = 10240
    HIDDEN_DIMS = MODEL_DIMS * 4
    CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_CONTEXT_AND_OUT_PROJ
    ICI_MESH_SHAPE = (1, 16, 8)


@experiment_registry.register
class LmCloudSpmd128B(LmCloudSpmd):
    """129B parameters on 256 chips, global batch 1024."""

    PERCORE_BATCH_SIZE = 4
    NUM_LAYERS = 71
    MODEL_DIMS = 12288
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 64, 4)


@experiment_registry.register
class LmCloudSpmd175B(LmCloudSpmd):
    """174B parameters, GPT-3's shape, on 512 chips, global batch 1024 of 2048 tokens."""

    PERCORE_BATCH_SIZE = 2
    MAX_SEQ_LEN = 2048
    NUM_LAYERS = 96
    NUM_HEADS = 96
    MODEL_DIMS = 12288
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 64, 8)


@experiment_registry.register
class LmCloudSpmd256B(LmCloudSpmd):
    """258B parameters on 512 chips, global batch 2048."""

    PERCORE_BATCH_SIZE = 4
    NUM_LAYERS = 80
    MODEL_DIMS = 16384
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 64, 8)


@experiment_registry.register
class LmCloudSpmd512B(LmCloudSpmd):
    """514B parameters on 1024 chips, global batch 4096."""

    PERCORE_BATCH_SIZE = 4
    NUM_LAYERS = 102
    MODEL_DIMS = 20480
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 64, 16)


@experiment_registry.register
class LmCloudSpmd1024B(LmCloudSpmd):
    """1030B parameters on 2048 chips, global batch 4096."""

    PERCORE_BATCH_SIZE = 2
    NUM_LAYERS = 142
    MODEL_DIMS = 24576
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 256, 8)


class LmCloudSpmdPipeline(CloudExperiment, model_params.TransformerLmSpmdPipelineAdafactor):
    """Pipelined layers on the mesh axes ('stage', 'replica', 'data', 'mdl')."""


@experiment_registry.register
class LmCloudSpmdPipeline9B(LmCloudSpmdPipeline):
    """9.8B parameters in 16 stages on 64 chips, global batch 512."""

    MICROBATCH_SIZE = 4
    PERCORE_BATCH_SIZE = 8
    NUM_STAGES = 16
    NUM_LAYERS = 48
    MODEL_DIMS = 4096
    HIDDEN_DIMS = MODEL_DIMS * 4
    FPROP_DTYPE = jnp.float32
    ICI_MESH_SHAPE = (16, 4, 1, 1)


@experiment_registry.register
class LmCloudSpmdPipeline175B(LmCloudSpmdPipeline):
    """174B parameters, GPT-3's shape, in 8 stages, each split over a host of 16 GPUs by 'mdl'; global batch 96."""

    MICROBATCH_SIZE = 2
    PERCORE_BATCH_SIZE = 0.75
    MAX_SEQ_LEN = 2048
    NUM_STAGES = 8
    NUM_LAYERS = 96
    NUM_HEADS = 96
    MODEL_DIMS = 12288
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 1, 1, 16)
    DCN_MESH_SHAPE = (8, 1, 1, 1)


@experiment_registry.register
class LmCloudSpmdPipelineMultislice2B(LmCloudSpmdPipeline):
    """2.1B parameters in 2 stages, one per slice of 4 chips, streaming; global batch 128."""

    MICROBATCH_SIZE = 4
    PERCORE_BATCH_SIZE = 16
    NUM_STAGES = 2
    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = MODEL_DIMS * 4
    ICI_MESH_SHAPE = (1, 4, 1, 1)
    DCN_MESH_SHAPE = (2, 1, 1, 1)
    EMB_W_DATA_DIMS = ("replica", "data")
    STREAM_IO = True


@experiment_registry.register
class LmCloudSpmdPipelineMultislice2BCircular(LmCloudSpmdPipelineMultislice2B):
    """LmCloudSpmdPipelineMultislice2B with a circular pipeline: microbatches pass through the stages 3 times."""

    MICROBATCH_SIZE = 8
    CIRCULAR_REPEAT = 3


class TinyCloud(CloudExperiment):
    """Sizes of the tiny classes: no mesh axis divides the vocabulary of 61 tokens or the feed-forward width of 67."""

    NUM_LAYERS = 2
    VOCAB_SIZE = 61
    MODEL_DIMS = 32
    HIDDEN_DIMS = 67
    DIMS_PER_HEAD = 8
    FPROP_DTYPE = jnp.float32
    PERCORE_BATCH_SIZE = 1
    MAX_SEQ_LEN = 16
    NUM_EVAL_EXAMPLES = 12
    LEARNING_RATE = 1e-2
    WARMUP_STEPS = 2
    NUM_TRAIN_STEPS = 8


@experiment_registry.register(tags=["tiny"])
class LmCloudSpmdAdamTiny(TinyCloud, LmCloudSpmd):
    """The cloud sizes' structure with Adam, on 8 devices."""

    ICI_MESH_SHAPE = (1, 4, 2)


@experiment_registry.register(tags=["tiny"])
class LmCloudSpmdAdafactorTiny(TinyCloud, LmCloudSpmd):
    """The cloud sizes' structure with Adafactor, on 8 devices; the momentum is float32."""

    USE_ADAFACTOR = True
    ICI_MESH_SHAPE = (1, 4, 2)

    def task(self) -> Any:
        task_p = super().task()
        # In int8, a difference in the last bit of a gradient can grow to 1/127 of the largest momentum, so two meshes
        # would not give the same numbers.
        task_p.train.learner.optimizer.quantized_dtype = "float32"
        return task_p


@experiment_registry.register(tags=["tiny"])
class LmCloudSpmdPipelineTiny(TinyCloud, LmCloudSpmdPipeline):
    """The pipelined sizes' structure: 2 stages on 8 devices, 2 microbatches."""

    NUM_STAGES = 2
    NUM_MICROBATCHES = 2
    ICI_MESH_SHAPE = (2, 1, 2, 2)
