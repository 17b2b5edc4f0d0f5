"""Base class of the decoder experiments. Class attributes set the model, the mesh, and AdamW with a cosine schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from praxis import layers
from praxis.pax_fiddle import Config

from spmd_trainer import base_experiment, task_defaults, tasks_lib
from spmd_trainer.decoder import axes
from spmd_trainer.decoder.lm import DecoderLanguageModel, DecoderLm
from spmd_trainer.models.decoder_spec import DecoderSpec


class DecoderExperiment(base_experiment.BaseExperiment):
    """An experiment with a decoder-only language model. Subclasses give the sizes and the data.

    A field of `DecoderSpec` is set by the class attribute of the same name in capitals, e.g. MODEL_DIMS or ROTARY_BASE; fields
    without an attribute keep their defaults.

    Attributes:
      MESH_AXIS_NAMES: names of the mesh axes. An axis 'seq', as in ('replica', 'data', 'seq', 'mdl'), splits each row's tokens.
      ICI_MESH_SHAPE, DCN_MESH_SHAPE: sizes of these axes, within a slice and across slices; DCN_MESH_SHAPE None: one slice.
      TRAINING_OPTIMIZED_SHARDING: also split the residual stream, and so the saved activations, over the mesh axis 'mdl'.
      AXES: changes to `axes.DEFAULT_AXES`: {logical axis: mesh axes}.
      ATTENTION_KERNEL: name of the attention kernel; None for the first that suits the device and the layer.
      CONTEXT_PARALLEL: attention algorithm for rows whose tokens are split over the mesh: 'ring' (also None) or 'all_to_all'.
      FPROP_DTYPE: dtype of the computation; variables are float32.
      CHECKPOINT_POLICY: rematerialization policy of the layers.
      LEARNING_RATE, WEIGHT_DECAY, WARMUP_STEPS, NUM_TRAIN_STEPS: settings of AdamW (beta1 0.9, beta2 0.95), with gradients
        clipped to norm 1, linear warm-up and cosine decay to a tenth. Norms and biases have no weight decay.
      ADAM_EPSILON: added to the square root of the second moment.
      EVAL_INTERVAL_STEPS, CHECKPOINT_EVERY_N_STEPS: `eval_interval_steps` and `save_interval_steps` of `task.train`.
    """

    MESH_AXIS_NAMES: Sequence[str] = task_defaults.MESH_AXIS_NAMES
    ICI_MESH_SHAPE: Any = (1, 1, 1)
    DCN_MESH_SHAPE: Any = None
    TRAINING_OPTIMIZED_SHARDING = True
    AXES: Mapping[str, Any] | None = None
    ATTENTION_KERNEL: str | None = None
    CONTEXT_PARALLEL: str | None = None
    FPROP_DTYPE: Any = jnp.bfloat16
    CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_NOTHING
    LEARNING_RATE = 3e-4
    WEIGHT_DECAY = 0.1
    WARMUP_STEPS = 2000
    NUM_TRAIN_STEPS = 100_000
    ADAM_EPSILON = 1e-8
    EVAL_INTERVAL_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 1000

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = Config(tasks_lib.SingleTask, name="decoder", model=self.model())
        self._set_mesh(task_p)
        train_p = task_p.train
        train_p.num_train_steps = self.NUM_TRAIN_STEPS
        train_p.eval_interval_steps = self.EVAL_INTERVAL_STEPS
        train_p.save_interval_steps = self.CHECKPOINT_EVERY_N_STEPS
        task_defaults.set_adam_with_cosine_decay(
            train_p.learner,
            "total_loss",
            learning_rate=self.LEARNING_RATE,
            # The schedule needs a step between the end of the warm-up and the last one.
            warmup_steps=max(0, min(self.WARMUP_STEPS, self.NUM_TRAIN_STEPS - 2)),
            num_train_steps=self.NUM_TRAIN_STEPS,
        )
        train_p.learner.optimizer.set(
            decoupled_weight_decay=self.WEIGHT_DECAY, epsilon=self.ADAM_EPSILON, beta2=0.95, clip_threshold=0.0
        )
        return task_p

    def model(self) -> Config[DecoderLanguageModel]:
        lm_p = Config(
            DecoderLm,
            spec=self.spec(),
            axes=self.AXES,
            checkpoint_policy=self.CHECKPOINT_POLICY,
            attention_kernel=self.ATTENTION_KERNEL,
            context_parallel=self.CONTEXT_PARALLEL,
        )
        return Config(DecoderLanguageModel, name="lm", lm_tpl=lm_p, fprop_dtype=self.FPROP_DTYPE)

    def spec(self) -> Config[DecoderSpec]:
        """Returns the config of the model's `DecoderSpec`, made from the class attributes."""
        names = [field.name for field in dataclasses.fields(DecoderSpec)]
        return config_of_spec({name: getattr(self, name.upper()) for name in names if hasattr(self, name.upper())})

    def _set_mesh(self, task_p: Any) -> None:
        model_p, names = task_p.model, tuple(self.MESH_AXIS_NAMES)
        across = [1] * len(names) if self.DCN_MESH_SHAPE is None else self.DCN_MESH_SHAPE
        task_defaults.set_mesh(task_p, names, self.ICI_MESH_SHAPE, across)
        rows = tuple(axis for axis in (task_defaults.REPLICA_AXIS, task_defaults.DATA_AXIS) if axis in names)
        mapping = task_defaults.batch_split_mapping(rows)
        if axes.SEQUENCE_AXIS in names:
            mapping.map_2d = (rows, axes.SEQUENCE_AXIS)
        task_p.train.inputs_split_mapping = mapping
        task_defaults.shard_lm_v1(model_p, self.TRAINING_OPTIMIZED_SHARDING)


def config_of_spec(fields: Mapping[str, Any]) -> Config[DecoderSpec]:
    """Returns the config of a `DecoderSpec`. Dataclasses among its fields become configs too, so that they can be overridden."""
    parts = {name: Config(type(x), **vars(x)) for name, x in fields.items() if dataclasses.is_dataclass(x)}
    return Config(DecoderSpec, **{**fields, **parts})
