"""One tiny language model in every structure that praxis offers, for the tests of mesh equivalence.

No mesh axis divides its sizes: vocabulary 61, feed-forward width 67, a batch of 6 rows. Each class changes one thing in `TinyLm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from praxis import layers, optimizers, pax_fiddle, schedules

from spmd_trainer import base_experiment, experiment_registry, learners, sharding, tasks_lib
from spmd_trainer.inputs import synthetic

Config = pax_fiddle.Config


class TinyLmBase(base_experiment.BaseExperiment):
    """Base class of the tiny language models."""

    ICI_MESH_SHAPE = (1, 4, 2)
    MESH_AXIS_NAMES = ("replica", "data", "mdl")
    BATCH_AXES: tuple[str, ...] = ("replica", "data")

    VOCAB_SIZE = 61
    MODEL_DIMS = 16
    HIDDEN_DIMS = 67
    NUM_HEADS = 2
    NUM_LAYERS = 2
    MAX_SEQ_LEN = 12
    GLOBAL_BATCH_SIZE = 6

    def datasets(self) -> list[Any]:
        """Returns synthetic text: endless for training, ten examples for evaluation."""
        fields = {"seq_len": self.MAX_SEQ_LEN, "batch_size": self.GLOBAL_BATCH_SIZE, "vocab_size": self.VOCAB_SIZE}
        train = Config(synthetic.SyntheticLmInput, name="train", is_training=True, **fields)
        return [train, Config(synthetic.SyntheticLmInput, name="heldout", num_examples=10, **fields)]

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = Config(tasks_lib.SingleTask, name="tiny")
        task_p.model = Config(layers.LanguageModel, name="lm")
        task_p.model.ici_mesh_shape = list(self.ICI_MESH_SHAPE)
        task_p.model.mesh_axis_names = list(self.MESH_AXIS_NAMES)
        task_p.model.lm_tpl = layers.TransformerLm.set_sharding_params_v1(
            self.lm(),
            replica_axis=self.MESH_AXIS_NAMES[0],
            data_axis=self.MESH_AXIS_NAMES[1],
            mdl_axis=self.MESH_AXIS_NAMES[2],
            ici_mesh_shape=task_p.model.ici_mesh_shape,
            mesh_axis_names=task_p.model.mesh_axis_names,
            training_optimized=False,
        )
        train_p = task_p.train
        train_p.num_train_steps = 10
        train_p.inputs_split_mapping = {"map_1d": (self.BATCH_AXES,), "map_2d": (self.BATCH_AXES, None)}
        train_p.learner.loss_name = "total_loss"
        train_p.learner.optimizer = adam()
        self.customize(task_p)
        return task_p

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def lm(self) -> Config[layers.TransformerLm]:
        lm_p = Config(layers.TransformerLm, vocab_size=self.VOCAB_SIZE, model_dims=self.MODEL_DIMS)
        lm_p.stacked_transformer_tpl = self.stack(self.NUM_LAYERS)
        return lm_p

    def stack(self, num_layers: int) -> Config[layers.StackedTransformer]:
        """Returns `num_layers` layers with separate variables."""
        stack_p = Config(
            layers.StackedTransformer,
            model_dims=self.MODEL_DIMS,
            hidden_dims=self.HIDDEN_DIMS,
            num_layers=num_layers,
            num_heads=self.NUM_HEADS,
        )
        layer_p = stack_p.transformer_layer_params_tpl
        # A key bias has no effect: its gradient is rounding noise, which Adam would scale up to full steps.
        layer_p.tr_atten_tpl.use_bias = False
        return stack_p

    def repeated(self, **fields: Any) -> Config[layers.StackedTransformerRepeated]:
        """Returns the layers of `stack` as one layer that is repeated over stacked variables."""
        return Config(layers.StackedTransformerRepeated, block=self.stack(1), x_times=self.NUM_LAYERS, **fields)

    def customize(self, task_p: Config[tasks_lib.SingleTask]) -> None:
        """Changes the task; subclasses override it."""


def adam() -> Config[optimizers.Adam]:
    """Returns Adam with a large epsilon, so that rounding noise in a gradient stays small in the update."""
    schedule = Config(schedules.Constant, value=1.0)
    return Config(optimizers.Adam, beta1=0.9, beta2=0.99, epsilon=1e-3, learning_rate=1e-2, lr_schedule=schedule)


@experiment_registry.register(tags=["tiny"])
class TinyLm(TinyLmBase):
    """Two transformer layers, each with its own variables; Adam with clipping."""

    def customize(self, task_p: Any) -> None:
        task_p.train.learner.optimizer.clip_gradient_norm_to_value = 1.0


@experiment_registry.register(tags=["tiny"])
class TinyRepeated(TinyLmBase):
    """Repeated layers (a scan over stacked variables) that save only dot products; Adam's state is stacked too."""

    def lm(self) -> Any:
        lm_p = super().lm()
        lm_p.stacked_transformer_tpl = self.repeated(checkpoint_policy=layers.AutodiffCheckpointType.SAVE_DOT_ONLY)
        return lm_p


@experiment_registry.register(tags=["tiny"])
class TinyRematerialized(TinyLmBase):
    """Repeated layers that save nothing and recompute the forward pass in the backward pass."""

    def lm(self) -> Any:
        lm_p = super().lm()
        lm_p.stacked_transformer_tpl = self.repeated(checkpoint_policy=layers.AutodiffCheckpointType.SAVE_NOTHING)
        return lm_p


class TinyPipelineBase(TinyLmBase):
    """Two stages of one layer each, over a separate mesh axis; microbatches of three rows."""

    MESH_AXIS_NAMES = ("stage", "data", "mdl")
    ICI_MESH_SHAPE = (2, 2, 2)
    BATCH_AXES = ("data",)
    STREAM_IO = False

    def lm(self) -> Any:
        lm_p = super().lm()
        lm_p.stacked_transformer_tpl = Config(
            layers.PipelinedTransformer,
            pipeline_stage=self.stack(1),
            num_pipeline_stages=2,
            num_pipeline_microbatches=2,
            stream_io=self.STREAM_IO,
        )
        return lm_p

    def task(self) -> Any:
        """Returns the task. Each stage's weights are on the stage's devices; activation rows are split over 'data' only."""
        task_p = super().task()
        lm_p = layers.TransformerLm.set_custom_sharding_params(
            task_p.model.lm_tpl,
            ici_mesh_shape=list(self.ICI_MESH_SHAPE),
            mesh_axis_names=list(self.MESH_AXIS_NAMES),
            w_df=["data", "mdl"],
            w_dnh=["data", "mdl", None],
            w_vd=["mdl", "data"],
            a_bld=["data", None, None],
            a_blf=["data", None, "mdl"],
            a_blnh=["data", None, "mdl", None],
            a_blv=["data", None, "mdl"],
        )
        lm_p.stacked_transformer_tpl.weight_split_dims_mapping.stages = ["stage"]
        task_p.model.lm_tpl = lm_p
        return task_p


@experiment_registry.register(tags=["tiny"])
class TinyPipeline(TinyPipelineBase):
    """A pipeline of two stages; its input and output are replicated over the stages."""


@experiment_registry.register(tags=["tiny"])
class TinyPipelineStreaming(TinyPipelineBase):
    """A pipeline of two stages; microbatches are split over the stages and streamed through."""

    STREAM_IO = True


@experiment_registry.register(tags=["tiny"])
class TinyMixtureOfExperts(TinyLmBase):
    """The feed-forward layer is a mixture of four experts, two per token."""

    NUM_LAYERS = 1

    def stack(self, num_layers: int) -> Any:
        stack_p = super().stack(num_layers)
        stack_p.num_experts = 4
        stack_p.moe_layers = [0]
        stack_p.num_groups = 2
        return stack_p


@experiment_registry.register(tags=["tiny"])
class TinyBFloat16(TinyLmBase):
    """Computes in bfloat16; variables and optimizer stay in float32."""

    NUM_LAYERS = 1

    def customize(self, task_p: Any) -> None:
        task_p.model.fprop_dtype = jnp.bfloat16


@experiment_registry.register(tags=["tiny"])
class TinyDropout(TinyLmBase):
    """Dropout after embedding, attention and feed-forward; masks depend only on the key and the step."""

    NUM_LAYERS = 1

    def customize(self, task_p: Any) -> None:
        stack_p = task_p.model.lm_tpl.stacked_transformer_tpl
        stack_p.dropout_prob = 0.1


@experiment_registry.register(tags=["tiny"])
class TinyMultiOptimizer(TinyLmBase):
    """Two optimizers: SGD for the softmax, Adam for all else."""

    NUM_LAYERS = 1

    def customize(self, task_p: Any) -> None:
        learner_p = Config(learners.MultiOptimizerLearner, name="learner", loss_name="total_loss")
        learner_p.optimizer = task_p.train.learner.optimizer
        learner_p.auxiliary_optimizers = [
            Config(optimizers.ShardedSgd, learning_rate=0.1, lr_schedule=Config(schedules.Constant, value=1.0))
        ]
        learner_p.auxiliary_regex = ["params/lm/softmax"]
        learner_p.auxiliary_names = ["softmax"]
        task_p.train.learner = learner_p


@experiment_registry.register(tags=["tiny"])
class TinyAccumulation(TinyLmBase):
    """Accumulates the gradients of two steps for one update."""

    NUM_LAYERS = 1

    def customize(self, task_p: Any) -> None:
        base = task_p.train.learner.optimizer
        task_p.train.learner.optimizer = Config(
            optimizers.ShardedStaticAccumulator,
            optimizer_tpl=adam(),
            num_sub_batches=2,
            learning_rate=base.learning_rate,
            lr_schedule=base.lr_schedule,
        )


@experiment_registry.register(tags=["tiny"])
class TinyEma(TinyLmBase):
    """Keeps moving averages (EMA) of the variables, and evaluates and decodes with them."""

    NUM_LAYERS = 1

    def customize(self, task_p: Any) -> None:
        task_p.train.learner.optimizer.ema_decay = 0.99
        task_p.train.eval_use_ema_states = True
        task_p.train.decode_use_ema_states = True


@experiment_registry.register(tags=["tiny"])
class TinyAdafactor(TinyRepeated):
    """Adafactor: second moments factored into rows and columns, on repeated layers."""

    def customize(self, task_p: Any) -> None:
        task_p.train.learner.optimizer = Config(
            optimizers.ShardedAdafactor,
            decay_method="adam",
            decay_adam=0.99,
            clip_threshold=1.0,
            learning_rate=1e-2,
            lr_schedule=Config(schedules.Constant, value=1.0),
        )


@experiment_registry.register(tags=["tiny"])
class TinyByStrategy(TinyLmBase):
    """No layer declares a split: `sharding_strategy` decides, with padding where an axis does not divide a dimension."""

    NUM_LAYERS = 1

    def customize(self, task_p: Any) -> None:
        task_p.model.lm_tpl = self.lm()
        task_p.train.sharding_strategy = [
            ("softmax", 'fsdp(axis="data, mdl", min_size_to_shard_mb=0, allow_uneven=True)'),
            (".*", 'fsdp(axis="data", min_size_to_shard_mb=0)'),
        ]
