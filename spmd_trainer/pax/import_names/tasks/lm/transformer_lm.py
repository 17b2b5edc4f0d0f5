"""Pax's experiment classes for decoder-only Transformers: data-parallel, sharded, and pipelined.

Class attributes and their defaults are those of paxml 1.4.0 (`paxml/tasks/lm/model_params.py`).
"""

from __future__ import annotations

from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from praxis import layers
from praxis.layers import activations, embedding_softmax, models
from praxis.pax_fiddle import Config

from spmd_trainer import task_defaults, tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.task_defaults import DATA_AXIS, MDL_AXIS, REPLICA_AXIS, STAGE_AXIS
from spmd_trainer.tasks.lm import cheaper_layers
from spmd_trainer.tasks.lm.transformer_experiment import TransformerExperiment, heads_of


class TransformerLmPmapAdam(TransformerExperiment):
    """A Transformer language model trained data-parallel with Adam.

    Pax named the class when it used `jax.pmap`. Here the experiment runs like any other, on a mesh with one axis over all
    devices and with every variable replicated.

    Attributes:
      INPUT_DROPOUT_PROB: dropout probability of the embeddings.
      REL_POS_EMB_DIM: width of the relative position embeddings of Transformer-XL attention; None for plain attention.
      PACKED_INPUT: a row may hold several sequences, separated by `segment_ids`.
      USE_BIAS: add biases to the projections of the attention.
    """

    NUM_LAYERS = 32
    VOCAB_SIZE = 32000
    NUM_HEADS = 16
    MODEL_DIMS = 1024
    HIDDEN_DIMS = MODEL_DIMS * 4
    INPUT_DROPOUT_PROB = 0.0
    DROPOUT_PROB = 0.0
    LEARNING_RATE = 1e-3
    WEIGHT_DECAY = 1e-3
    USE_REPEATED_LAYER = False
    ACTIVATION_CLS = activations.ReLU
    USE_GATED_ACTIVATION = False
    DECAY_END = 300000
    REL_POS_EMB_DIM: Any = None

    PACKED_INPUT = True
    ATTEN_LOGIT_CAP = 50.0
    USE_BIAS = False

    def task(self) -> Config[tasks_lib.SingleTask]:
        """Returns the task's config."""
        model_p = Config(models.LanguageModel, name="xformer_lm")
        model_p.lm_tpl.packed_input = self.PACKED_INPUT
        model_p.lm_tpl.softmax_tpl.scale_sqrt_depth = True
        task_p = self._task("xformer_task", model_p, self._stack(self.NUM_LAYERS))
        task_defaults.set_default_adam(task_p, self.LEARNING_RATE, self.WEIGHT_DECAY, decay_end=self.DECAY_END)
        return task_p

    def _customize_stack(self, stack_p: Any) -> None:
        stack_p.input_dropout_prob = self.INPUT_DROPOUT_PROB
        layer_p = stack_p.transformer_layer_params_tpl
        layer_p.tr_atten_tpl.use_bias = self.USE_BIAS
        if self.REL_POS_EMB_DIM is not None:
            attention_p = Config(layers.DotProductAttentionXL)
            attention_p.copy_fields_from(layer_p.tr_atten_tpl)
            attention_p.rel_pos_emb_dim = self.REL_POS_EMB_DIM
            layer_p.tr_atten_tpl = attention_p


class TransformerLmSpmdAdafactor(TransformerExperiment):
    """A Transformer language model trained with Adafactor, with variables sharded over the mesh axes replica, data and mdl.

    Attributes:
      DIMS_PER_HEAD: width of an attention head. If NUM_HEADS is None, there are MODEL_DIMS / DIMS_PER_HEAD heads.
      FPROP_DTYPE: dtype of the computation; variables are float32.
      PACKED_INPUT: a row may hold several sequences, separated by `segment_ids`.
      SEPARATE_EMBEDDING: use a separate embedding table instead of the softmax's weights.
      TRAINABLE_POSITION_EMB: use learned position embeddings instead of sinusoids.
      TRAINABLE_PE_MAX_SEQ_LEN: number of learned positions.
      RELATIVE_BIAS: add learned biases, which depend on the distance of two tokens, to attention logits.
      USE_ROTARY_POSITION_EMB: use rotary position embeddings. Can't be combined with RELATIVE_BIAS.
      NORM_POLICY: position of the layer norms: 'pre', 'post', 'primer_hybrid' or 'post_skip'.
      ENABLE_DCONV: use a depthwise convolution after the projections to queries, keys and values.
      COMBINE_QKV: use one variable for the projections to queries, keys and values.
      USE_FP8: use praxis' fp8 einsums. Must be False, because they do not run on current flax.
      CLIP_GRADIENT_NORM_TO_VALUE: global gradient norm above which gradients are scaled down.
      SOFTMAX_CAP_LOGITS: a tanh limits the softmax's logits to plus or minus this value; 0 for no limit.
      CHECKPOINT_POLICY: what repeated layers save for the backward pass; the rest is recomputed.
      CHECKPOINT_EVERY_N_STEPS, CHECKPOINT_MAX_TO_KEEP, SUMMARY_INTERVAL_STEPS, EVAL_INTERVAL_STEPS,
      PROFILER_NUM_STEPS, PROFILER_MIN_DURATION_SEC, PROFILER_CAPTURE_STEP: values for `task.train.save_interval_steps`,
        `.save_max_to_keep`, `.summary_interval_steps`, `.eval_interval_steps` and `.profiler_*`.
      ICI_MESH_SHAPE: sizes of the mesh axes replica, data and mdl within a slice. None for data-parallel training.
      DCN_MESH_SHAPE: sizes of the mesh axes replica, data and mdl across slices.
      TRAINING_OPTIMIZED_SHARDING: also shard over mdl the activations that are saved for the backward pass.
      MODEL_CLASS: class of the model.
    """

    NUM_LAYERS = 10
    VOCAB_SIZE = 32000
    DIMS_PER_HEAD: Any = 128
    NUM_HEADS: Any = None
    MODEL_DIMS = 2048
    HIDDEN_DIMS = MODEL_DIMS * 4
    FPROP_DTYPE: Any = jnp.bfloat16
    PACKED_INPUT = True

    USE_REPEATED_LAYER = False
    SEPARATE_EMBEDDING = False
    TRAINABLE_POSITION_EMB = False
    TRAINABLE_PE_MAX_SEQ_LEN = 16 * 1024
    RELATIVE_BIAS = False
    USE_ROTARY_POSITION_EMB = False
    NORM_POLICY = "pre"
    ENABLE_DCONV = False
    COMBINE_QKV = True
    ACTIVATION_CLS: Any = activations.ReLU
    USE_GATED_ACTIVATION = False
    DECAY_END = 100000
    USE_FP8 = False

    DROPOUT_PROB = 0.0
    LEARNING_RATE = 2.5e-4
    CLIP_GRADIENT_NORM_TO_VALUE = 5.0
    WEIGHT_DECAY = 1e-3
    SOFTMAX_CAP_LOGITS = 30.0
    ATTEN_LOGIT_CAP = 50.0
    CHECKPOINT_POLICY: Any = layers.AutodiffCheckpointType.SAVE_NOTHING

    CHECKPOINT_EVERY_N_STEPS = 5000
    SUMMARY_INTERVAL_STEPS = 100
    CHECKPOINT_MAX_TO_KEEP = 10
    EVAL_INTERVAL_STEPS = 100

    PROFILER_NUM_STEPS = 2
    PROFILER_MIN_DURATION_SEC = 1
    PROFILER_CAPTURE_STEP: Any = None

    ICI_MESH_SHAPE: Any = None
    DCN_MESH_SHAPE: Any = [1, 1, 1]  # noqa: RUF012 (Pax's lists)
    TRAINING_OPTIMIZED_SHARDING = True

    MODEL_CLASS: Any = models.LanguageModel

    def task(self) -> Config[tasks_lib.SingleTask]:
        """Returns the task's config.

        Raises:
          UserError: the class attributes contradict each other.
        """
        self._check()
        task_p = self._task("xformer_task", self._model(), self._layers())
        self._set_training(task_p)
        self._set_sharding(task_p)
        return task_p

    def _check(self) -> None:
        if self.RELATIVE_BIAS and self.USE_ROTARY_POSITION_EMB:
            raise UserError("RELATIVE_BIAS and USE_ROTARY_POSITION_EMB are both True; set one of them to False")
        if self.USE_FP8:
            raise task_defaults.UnsupportedError(
                "USE_FP8=True needs praxis' Fp8EinsumOp, which calls flax.linen.fp8_ops.in_qdq without the q_dtype that "
                "current flax asks for; set USE_FP8 = False"
            )

    def _num_heads(self) -> int:
        return heads_of(self)

    def _model(self) -> Any:
        model_p = Config(self.MODEL_CLASS, name="xformer_lm", fprop_dtype=self.FPROP_DTYPE)
        lm_p = model_p.lm_tpl
        lm_p.packed_input = self.PACKED_INPUT
        if self.SEPARATE_EMBEDDING:
            lm_p.separate_embedding_tpl = Config(layers.Embedding)
            lm_p.softmax_tpl = Config(layers.FullSoftmax)
        self._embedding(lm_p).scale_sqrt_depth = True
        lm_p.softmax_tpl.soft_cap_logits = self.SOFTMAX_CAP_LOGITS
        if self.TRAINABLE_POSITION_EMB:
            lm_p.position_emb_tpl = Config(
                layers.TrainablePositionalEmbedding, max_seq_length=self.TRAINABLE_PE_MAX_SEQ_LEN
            )
        return model_p

    def _embedding(self, lm_p: Any) -> Any:
        return lm_p.separate_embedding_tpl if self.SEPARATE_EMBEDDING else lm_p.softmax_tpl

    def _layers(self) -> Any:
        return self._stack(self.NUM_LAYERS, checkpoint_policy=self.CHECKPOINT_POLICY)

    def _customize_stack(self, stack_p: Any) -> None:
        stack_p.dim_per_head = self.DIMS_PER_HEAD
        layer_p = stack_p.transformer_layer_params_tpl
        layer_p.norm_policy = self.NORM_POLICY
        layer_p.tr_atten_tpl.combine_qkv = self.COMBINE_QKV
        layer_p.tr_atten_tpl.dconv_qkv = self.ENABLE_DCONV
        if self.RELATIVE_BIAS:
            layer_p.tr_atten_tpl.relative_bias_tpl = Config(layers.RelativeBias)
        if self.USE_ROTARY_POSITION_EMB:
            layer_p.tr_atten_tpl.use_rotary_position_emb = True

    def _set_training(self, task_p: Any) -> None:
        task_defaults.set_default_adafactor(
            task_p,
            self.LEARNING_RATE,
            self.WEIGHT_DECAY,
            decay_end=self.DECAY_END,
            clip_gradient_norm_to_value=self.CLIP_GRADIENT_NORM_TO_VALUE,
        )
        train_p = task_p.train
        train_p.save_interval_steps = self.CHECKPOINT_EVERY_N_STEPS
        train_p.summary_interval_steps = self.SUMMARY_INTERVAL_STEPS
        train_p.save_max_to_keep = self.CHECKPOINT_MAX_TO_KEEP
        train_p.eval_interval_steps = self.EVAL_INTERVAL_STEPS
        train_p.profiler_num_steps = self.PROFILER_NUM_STEPS
        train_p.profiler_min_duration_sec = self.PROFILER_MIN_DURATION_SEC
        train_p.profiler_capture_step = self.PROFILER_CAPTURE_STEP

    def _set_sharding(self, task_p: Any) -> None:
        if self.ICI_MESH_SHAPE is not None:
            task_defaults.set_sharding_annotations_v1(
                task_p, self.TRAINING_OPTIMIZED_SHARDING, self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE
            )


class TransformerLmSpmdPipelineAdafactor(TransformerLmSpmdAdafactor):
    """`TransformerLmSpmdAdafactor` in pipeline stages, on a mesh with the axes stage, replica, data and mdl.

    The embedding and the softmax are outside the pipeline: for them, 'stage' is one more data-parallel axis. praxis' pipelines
    can't decode; to decode, use a class with the same model and no pipeline.

    Attributes:
      NUM_STAGES: number of pipeline stages; must equal the mesh's size along 'stage', counted over all slices.
      CIRCULAR_REPEAT: number of times that each microbatch passes through all stages. NUM_STAGES * CIRCULAR_REPEAT must divide
        NUM_LAYERS.
      NUM_MICROBATCHES, MICROBATCH_SIZE: number or size of the microbatches that a batch is split into; set one of the two.
      PIPELINE_BROADCAST_INPUTS: pass inputs that all stages use (masks, positions) from stage to stage with their microbatch,
        instead of replicating them.
      EMB_W_DATA_DIMS: mesh axes, in addition to mdl, over which the embedding and softmax weights are sharded. Sharding layers
        of the pipeline over these axes would cost a gather per microbatch.
      STREAM_IO: shard the pipeline's input and output over the stages and stream them. Useful if links between stages are slow.
      ICI_MESH_SHAPE, DCN_MESH_SHAPE: sizes of the mesh axes stage, replica, data and mdl within and across slices.
    """

    NUM_STAGES: Any = None
    CIRCULAR_REPEAT = 1
    PIPELINE_BROADCAST_INPUTS = False
    NUM_MICROBATCHES: Any = None
    MICROBATCH_SIZE: Any = None

    DCN_MESH_SHAPE: Any = [1, 1, 1, 1]  # noqa: RUF012
    EMB_W_DATA_DIMS: Any = DATA_AXIS
    STREAM_IO = False

    _MESH_AXIS_NAMES = (STAGE_AXIS, REPLICA_AXIS, DATA_AXIS, MDL_AXIS)

    def _check(self) -> None:
        super()._check()
        task_defaults.check_mesh_shape("ICI_MESH_SHAPE", self.ICI_MESH_SHAPE, self._MESH_AXIS_NAMES)
        task_defaults.check_mesh_shape("DCN_MESH_SHAPE", self.DCN_MESH_SHAPE, self._MESH_AXIS_NAMES)
        if self.NUM_STAGES is None:
            raise UserError("NUM_STAGES is not set; give the mesh's size along 'stage'")
        on_mesh = self.ICI_MESH_SHAPE[0] * self.DCN_MESH_SHAPE[0]
        if on_mesh != self.NUM_STAGES:
            raise UserError(
                f"NUM_STAGES={self.NUM_STAGES}, and the mesh has {self.ICI_MESH_SHAPE[0]} (ICI_MESH_SHAPE[0]) times "
                f"{self.DCN_MESH_SHAPE[0]} (DCN_MESH_SHAPE[0]) = {on_mesh} along 'stage'; make them equal"
            )
        if self.NUM_LAYERS % (self.NUM_STAGES * self.CIRCULAR_REPEAT):
            raise UserError(
                f"NUM_LAYERS={self.NUM_LAYERS} is not a multiple of NUM_STAGES * CIRCULAR_REPEAT = "
                f"{self.NUM_STAGES} * {self.CIRCULAR_REPEAT}; every stage holds equally many layers"
            )
        if self.NUM_MICROBATCHES is None and self.MICROBATCH_SIZE is None:
            raise UserError("neither NUM_MICROBATCHES nor MICROBATCH_SIZE is set; give one of them")
        if self.NUM_MICROBATCHES is not None and self.MICROBATCH_SIZE is not None:
            raise UserError(
                f"NUM_MICROBATCHES={self.NUM_MICROBATCHES} and MICROBATCH_SIZE={self.MICROBATCH_SIZE} are both set; set one of "
                "them to None"
            )

    def _layers(self) -> Any:
        layers_per_stage = self.NUM_LAYERS // (self.NUM_STAGES * self.CIRCULAR_REPEAT)
        return Config(
            layers.PipelinedTransformer,
            pipeline_stage=self._stack(layers_per_stage, checkpoint_policy=self.CHECKPOINT_POLICY),
            num_pipeline_stages=self.NUM_STAGES,
            circular_repeat=self.CIRCULAR_REPEAT,
            num_pipeline_microbatches=self.NUM_MICROBATCHES,
            pipeline_microbatch_size=self.MICROBATCH_SIZE,
            stream_io=self.STREAM_IO,
            checkpoint_policy=self.CHECKPOINT_POLICY,
            pipeline_broadcast_inputs=self.PIPELINE_BROADCAST_INPUTS,
        )

    def _set_sharding(self, task_p: Any) -> None:
        task_defaults.set_mesh(task_p, self._MESH_AXIS_NAMES, self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
        task_defaults.shard_lm_v1(task_p.model, self.TRAINING_OPTIMIZED_SHARDING)

        activations_split = (self._MESH_AXIS_NAMES[:-1], None, MDL_AXIS)  # [batch, time, width]
        lm_p = task_p.model.lm_tpl
        embedding_p = self._embedding(lm_p)
        embedding_p.activation_split_dims_mapping.emb_out_split_dims_mapping = list(activations_split)
        embedding_p.activation_split_dims_mapping.out = list(activations_split)
        lm_p.softmax_tpl.weight_split_dims_mapping.wt = self._softmax_split(lm_p.softmax_tpl)
        if self.SEPARATE_EMBEDDING:
            embedding_p.weight_split_dims_mapping.wt = [self.EMB_W_DATA_DIMS, MDL_AXIS]
        pipeline_p = lm_p.stacked_transformer_tpl
        pipeline_p.weight_split_dims_mapping.stages = [STAGE_AXIS]
        # The pipeline's output is the softmax's input.
        pipeline_p.activation_split_dims_mapping.final_out = list(activations_split)

    def _softmax_split(self, softmax_p: Any) -> list[Any]:
        softmax_cls = fdl.get_callable(softmax_p)
        if softmax_cls == embedding_softmax.GShardSharedEmbeddingSoftmax:
            return [MDL_AXIS, self.EMB_W_DATA_DIMS]  # [vocabulary, width]
        if softmax_cls in (
            embedding_softmax.SharedEmbeddingSoftmax,
            embedding_softmax.FullSoftmax,
            *cheaper_layers.SOFTMAXES,
        ):
            return [self.EMB_W_DATA_DIMS, MDL_AXIS]  # [width, vocabulary]
        raise task_defaults.UnsupportedError(
            f"the softmax is a {softmax_cls.__name__}, whose weights the pipeline class does not know how to split; use "
            "SharedEmbeddingSoftmax, FullSoftmax or GShardSharedEmbeddingSoftmax"
        )
