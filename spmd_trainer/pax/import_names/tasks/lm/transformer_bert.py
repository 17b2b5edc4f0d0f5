"""Pax's experiment classes for masked language models (BERT): data-parallel, and sharded.

Class attributes and their defaults are those of paxml 1.4.0 (`paxml/tasks/lm/model_params.py`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from praxis import layers
from praxis.layers import activations, models, transformer_models
from praxis.pax_fiddle import Config

from spmd_trainer import task_defaults, tasks_lib
from spmd_trainer.tasks.lm.transformer_experiment import TransformerExperiment


class _TransformerBert(TransformerExperiment):
    """Base of the two BERT experiments.

    Attributes:
      CHECKPOINT_POLICY: what repeated layers save for the backward pass.
      CHECKPOINT_EVERY_N_STEPS: `task.train.save_interval_steps`.
      ENABLE_BFLOAT16: compute in bfloat16; variables are float32.
    """

    VOCAB_SIZE = 32000
    DROPOUT_PROB = 0.0
    LEARNING_RATE = 1e-3
    WEIGHT_DECAY = 1e-3
    USE_REPEATED_LAYER = False
    CHECKPOINT_POLICY: Any = layers.AutodiffCheckpointType.SAVE_DOT_WITH_NO_BATCH_DIM
    ACTIVATION_CLS: Any = activations.ReLU
    USE_GATED_ACTIVATION = False
    CHECKPOINT_EVERY_N_STEPS: int
    ENABLE_BFLOAT16: bool

    def _bert_task(self, **model_fields: Any) -> Config[tasks_lib.SingleTask]:
        model_p = Config(models.BertModel, name="bert_lm", **model_fields)
        lm_p = model_p.lm_tpl
        lm_p.model_type = transformer_models.LanguageModelType.BIDIRECTIONAL
        lm_p.packed_input = True
        lm_p.softmax_tpl.scale_sqrt_depth = True
        lm_p.softmax_tpl.soft_cap_logits = 30.0
        if self.ENABLE_BFLOAT16:
            model_p.fprop_dtype = jnp.bfloat16
        stack_p = self._stack(self.NUM_LAYERS, checkpoint_policy=self.CHECKPOINT_POLICY)
        task_p = self._task("bert_task", model_p, stack_p)
        task_p.train.save_interval_steps = self.CHECKPOINT_EVERY_N_STEPS
        return task_p


class TransformerBertPmapAdam(_TransformerBert):
    """A masked language model trained data-parallel with Adam. The name is Pax's, from the time of `jax.pmap`.

    Attributes:
      FORCE_MASK_GENERATION: let the model mask tokens even if the batch has masks.
    """

    NUM_LAYERS = 4
    NUM_HEADS = 8
    MODEL_DIMS = 128
    HIDDEN_DIMS = MODEL_DIMS * 4
    CHECKPOINT_EVERY_N_STEPS = 5000
    DECAY_END = 300000
    FORCE_MASK_GENERATION = False
    ENABLE_BFLOAT16 = True

    def task(self) -> Config[tasks_lib.SingleTask]:
        """Returns the task's config."""
        task_p = self._bert_task(force_mask_generation=self.FORCE_MASK_GENERATION)
        task_defaults.set_default_adam(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY, decay_end=self.DECAY_END)
        return task_p


class TransformerBertSpmdAdafactor(_TransformerBert):
    """A masked language model whose variables are split over a mesh ('replica', 'data', 'mdl'), with Adafactor.

    Attributes:
      MASK_TOKEN_ID: the token that replaces masked tokens.
      MESH_SHAPE: sizes of replica, data and mdl; set by subclasses.
      TRAINING_OPTIMIZED_SHARDING: also split saved activations over mdl.
      CHECKPOINT_SAVE_MAX_TO_KEEP: `task.train.save_max_to_keep`.
    """

    NUM_LAYERS = 32
    NUM_HEADS = 16
    MODEL_DIMS = 1024
    HIDDEN_DIMS = MODEL_DIMS * 4
    ENABLE_BFLOAT16 = False
    MASK_TOKEN_ID = 0
    DECAY_END = 100000

    MESH_SHAPE: Any = None
    TRAINING_OPTIMIZED_SHARDING = True

    CHECKPOINT_EVERY_N_STEPS = 500
    CHECKPOINT_SAVE_MAX_TO_KEEP = 10

    def task(self) -> Config[tasks_lib.SingleTask]:
        """Returns the task's config.

        Raises:
          UserError: MESH_SHAPE does not have 3 sizes.
        """
        task_defaults.check_mesh_shape("MESH_SHAPE", self.MESH_SHAPE, task_defaults.MESH_AXIS_NAMES)
        task_p = self._bert_task(mask_token_id=self.MASK_TOKEN_ID)
        task_p.train.save_max_to_keep = self.CHECKPOINT_SAVE_MAX_TO_KEEP
        task_defaults.set_default_adafactor(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY, decay_end=self.DECAY_END)
        task_defaults.set_sharding_annotations_v1(task_p, self.TRAINING_OPTIMIZED_SHARDING, self.MESH_SHAPE)
        return task_p

    def _customize_stack(self, stack_p: Any) -> None:
        stack_p.transformer_layer_params_tpl.tr_atten_tpl.combine_qkv = True
