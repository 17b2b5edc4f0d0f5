"""Pax's `model_params`: experiment classes and helpers for language-model experiment files.

    from spmd_trainer.tasks.lm import model_params

    class Mine(model_params.TransformerLmSpmdAdafactor, MyDataset):
        NUM_LAYERS = 18
        MODEL_DIMS = 3072
        ICI_MESH_SHAPE = [1, 4, 1]

Names, class attributes and defaults are those of paxml 1.4.0. The docstring of each class documents its attributes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from praxis import layers
from praxis.layers import activations, models, transformer_models
from praxis.pax_fiddle import Config

from spmd_trainer import base_experiment, task_defaults, tasks_lib
from spmd_trainer.task_defaults import (
    UnsupportedError,
    maybe_setup_moe_params,
    set_default_adafactor,
    set_default_adam,
    set_sharding_annotations_v1,
)
from spmd_trainer.tasks.lm.transformer_experiment import TransformerExperiment
from spmd_trainer.tasks.lm.transformer_lm import (
    TransformerLmPmapAdam,
    TransformerLmSpmdAdafactor,
    TransformerLmSpmdPipelineAdafactor,
)

__all__ = [
    "ClassificationModelAdam",
    "TransformerBertPmapAdam",
    "TransformerBertSpmdAdafactor",
    "TransformerLmPmapAdam",
    "TransformerLmSpmdAdafactor",
    "TransformerLmSpmdPipelineAdafactor",
    "UnsupportedError",
    "maybe_setup_moe_params",
    "set_default_adafactor",
    "set_default_adam",
    "set_sharding_annotations_v1",
]


class ClassificationModelAdam(base_experiment.BaseExperiment):
    """An embedding, a multilayer perceptron and a softmax, trained with Adam.

    praxis' `ClassificationMLPModel` reports its accuracy as `total_loss`. The accuracy has no gradient, so only weight decay
    changes the weights, but a step costs as much as in real training.

    Attributes:
      NUM_LAYER: number of layers of the perceptron.
      INPUT_DIM: width of the embedding; also the vocabulary size and the number of classes.
      HIDDEN_DIM: width of the hidden layers.
      OUTPUT_DIM: width of the last layer; must equal INPUT_DIM, the softmax's input width.
      LEARNING_RATE, WEIGHT_DECAY: settings of Adam.
      CHECKPOINT_EVERY_N_STEPS, SUMMARY_INTERVAL_STEPS, NUM_TRAIN_STEPS: values for `task.train.save_interval_steps`,
        `.summary_interval_steps` and `.num_train_steps`.
      MLP_WEIGHT_SHARDING: mesh axes over which the perceptron's weights [input, output] are sharded, one entry per dimension.
      SOFTMAX_WEIGHT_SHARDING: mesh axes over which the softmax's weights [input, classes] are sharded, one entry per dimension.
      MESH_SHAPE: sizes of the mesh axes replica, data and mdl; None for data-parallel training.
      TRAINING_OPTIMIZED_SHARDING: no effect, because the model is not a Transformer.
    """

    NUM_LAYER = 8
    INPUT_DIM = 4096
    HIDDEN_DIM = 7168
    OUTPUT_DIM = 4096
    LEARNING_RATE = 1e-3
    WEIGHT_DECAY = 1e-3
    CHECKPOINT_EVERY_N_STEPS = 5
    SUMMARY_INTERVAL_STEPS = 5
    NUM_TRAIN_STEPS = 10
    MLP_WEIGHT_SHARDING: Any = None
    SOFTMAX_WEIGHT_SHARDING: Any = None

    MESH_SHAPE: Any = None
    TRAINING_OPTIMIZED_SHARDING = True

    def task(self) -> Config[tasks_lib.SingleTask]:
        """Returns the task's config.

        Raises:
          UserError: MESH_SHAPE does not have 3 sizes.
        """
        task_p = Config(tasks_lib.SingleTask, name="classification_task")
        task_p.model = Config(models.ClassificationMLPModel, name="classification_model")
        mlp_p, softmax_p = task_p.model.mlp_tpl, task_p.model.softmax_tpl
        mlp_p.ff_tpl.input_dims = self.INPUT_DIM
        mlp_p.ff_tpl.output_dims = self.OUTPUT_DIM
        mlp_p.hidden_dims = self.HIDDEN_DIM
        mlp_p.num_layers = self.NUM_LAYER
        mlp_p.weight_split_dims_mapping.wt = self.MLP_WEIGHT_SHARDING
        softmax_p.input_dims = self.INPUT_DIM
        softmax_p.num_classes = self.INPUT_DIM
        softmax_p.weight_split_dims_mapping.wt = self.SOFTMAX_WEIGHT_SHARDING
        task_p.train.save_interval_steps = self.CHECKPOINT_EVERY_N_STEPS
        task_p.train.summary_interval_steps = self.SUMMARY_INTERVAL_STEPS
        task_p.train.num_train_steps = self.NUM_TRAIN_STEPS
        if self.MESH_SHAPE is not None:
            set_sharding_annotations_v1(task_p, self.TRAINING_OPTIMIZED_SHARDING, self.MESH_SHAPE)
        set_default_adam(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY)
        return task_p


class _TransformerBert(TransformerExperiment):
    """Base class of the two BERT experiments.

    Attributes:
      CHECKPOINT_POLICY: what repeated layers save for the backward pass; the rest is recomputed.
      CHECKPOINT_EVERY_N_STEPS: value for `task.train.save_interval_steps`.
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
    """A masked language model trained data-parallel with Adam. Pax named the class when it used `jax.pmap`.

    Attributes:
      FORCE_MASK_GENERATION: let the model mask tokens even if the batch already has masked tokens.
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
        set_default_adam(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY, decay_end=self.DECAY_END)
        return task_p


class TransformerBertSpmdAdafactor(_TransformerBert):
    """A masked language model trained with Adafactor, with variables sharded over the mesh axes replica, data and mdl.

    Attributes:
      MASK_TOKEN_ID: id of the token that replaces masked tokens.
      MESH_SHAPE: sizes of the mesh axes replica, data and mdl; set by subclasses.
      TRAINING_OPTIMIZED_SHARDING: also shard over mdl the activations that are saved for the backward pass.
      CHECKPOINT_SAVE_MAX_TO_KEEP: value for `task.train.save_max_to_keep`.
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
        set_default_adafactor(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY, decay_end=self.DECAY_END)
        set_sharding_annotations_v1(task_p, self.TRAINING_OPTIMIZED_SHARDING, self.MESH_SHAPE)
        return task_p

    def _customize_stack(self, stack_p: Any) -> None:
        stack_p.transformer_layer_params_tpl.tr_atten_tpl.combine_qkv = True
