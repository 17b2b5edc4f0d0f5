"""Pax's experiment class for a large multilayer perceptron, used to measure performance on different meshes.

Class attributes and their defaults are those of paxml 1.4.0 (`paxml/tasks/lm/model_params.py`).
"""

from __future__ import annotations

from typing import Any

from praxis.layers import models
from praxis.pax_fiddle import Config

from spmd_trainer import base_experiment, task_defaults, tasks_lib


class ClassificationModelAdam(base_experiment.BaseExperiment):
    """Embedding, multilayer perceptron and softmax, with Adam.

    praxis' `ClassificationMLPModel` reports its accuracy as `total_loss`. The accuracy has no gradient, so only weight decay
    changes the weights, but a step costs the same as real training.

    Attributes:
      NUM_LAYER: number of layers of the perceptron.
      INPUT_DIM: width of the embedding; also the vocabulary size and the number of classes.
      HIDDEN_DIM: width of the hidden layers.
      OUTPUT_DIM: width of the last layer; must equal INPUT_DIM, the softmax's input width.
      LEARNING_RATE, WEIGHT_DECAY: settings of Adam.
      CHECKPOINT_EVERY_N_STEPS, SUMMARY_INTERVAL_STEPS, NUM_TRAIN_STEPS: `task.train.save_interval_steps`,
        `.summary_interval_steps` and `.num_train_steps`.
      MLP_WEIGHT_SHARDING: split mapping of the perceptron's weights [input, output].
      SOFTMAX_WEIGHT_SHARDING: split mapping of the softmax's weights [input, classes].
      MESH_SHAPE: sizes of replica, data and mdl; None runs data-parallel.
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
            task_defaults.set_sharding_annotations_v1(task_p, self.TRAINING_OPTIMIZED_SHARDING, self.MESH_SHAPE)
        task_defaults.set_default_adam(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY)
        return task_p
