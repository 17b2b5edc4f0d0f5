"""Base class of the Transformer experiments in `model_params`: builds a stack of layers from class attributes."""

from __future__ import annotations

import math
from typing import Any

from praxis import base_layer, layers
from praxis.pax_fiddle import Config

from spmd_trainer import base_experiment, task_defaults, tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.tasks.lm import attention, cheaper_layers


class TransformerExperiment(base_experiment.BaseExperiment):
    """Base class of Transformer experiments. Declares the class attributes that they share; subclasses set the values.

    Attributes:
      NUM_LAYERS: number of Transformer layers.
      VOCAB_SIZE: number of tokens in the vocabulary.
      NUM_HEADS: number of attention heads.
      MODEL_DIMS: width of the model.
      HIDDEN_DIMS: width of the feed-forward layers.
      DROPOUT_PROB: dropout probability of all dropouts in the layers.
      LEARNING_RATE, WEIGHT_DECAY: settings of the default optimizer.
      DECAY_END: training step from which the learning rate is a tenth of its maximum.
      ATTEN_LOGIT_CAP: a tanh limits attention logits to plus or minus this value; 0 for no limit.
      USE_FUSED_ATTENTION: compute attention and the loss with the kernels of `spmd_trainer.kernels`; see the module
        `attention` and `cheaper_layers.FusedFullSoftmax`.
      ATTENTION_KERNEL: name of the kernel for USE_FUSED_ATTENTION; None for the first one that the device supports.
      ACTIVATION_CLS: activation of the feed-forward layers.
      USE_GATED_ACTIVATION: multiply the activation by a second projection.
      USE_REPEATED_LAYER: run one layer's program NUM_LAYERS times over stacked weights, which compiles much faster.
    """

    NUM_LAYERS: Any
    VOCAB_SIZE: Any
    NUM_HEADS: Any
    MODEL_DIMS: Any
    HIDDEN_DIMS: Any
    DROPOUT_PROB: Any
    LEARNING_RATE: Any
    WEIGHT_DECAY: Any
    DECAY_END: Any
    ATTEN_LOGIT_CAP: Any = 50.0
    USE_FUSED_ATTENTION: bool = False
    ATTENTION_KERNEL: str | None = None
    ACTIVATION_CLS: Any
    USE_GATED_ACTIVATION: Any
    USE_REPEATED_LAYER: Any

    def _task(self, name: str, model_p: Any, stack_p: Any) -> Config[tasks_lib.SingleTask]:
        """Puts the layers and the class attributes into a model's config. Returns the config of a task with this model."""
        lm_p = model_p.lm_tpl
        lm_p.model_dims = self.MODEL_DIMS
        lm_p.vocab_size = self.VOCAB_SIZE
        lm_p.softmax_tpl.params_init = base_layer.WeightInit.Gaussian(1.0 / math.sqrt(self.MODEL_DIMS))
        lm_p.stacked_transformer_tpl = stack_p
        cheaper_layers.use_cheaper_layers(model_p)
        if self.USE_FUSED_ATTENTION:
            attention.use_fused_attention_in(model_p, self.ATTENTION_KERNEL)
            cheaper_layers.use_fused_loss_in(model_p)
        return Config(tasks_lib.SingleTask, name=name, model=model_p)

    def _stack(self, num_layers: int, **repeated_fields: Any) -> Any:
        """Returns the config of a stack of Transformer layers. With USE_REPEATED_LAYER, one layer is repeated.

        Args:
          num_layers: number of layers.
          **repeated_fields: fields of `StackedTransformerRepeated`; ignored without USE_REPEATED_LAYER.
        """
        stack_p = Config(
            layers.StackedTransformer,
            model_dims=self.MODEL_DIMS,
            hidden_dims=self.HIDDEN_DIMS,
            num_layers=1 if self.USE_REPEATED_LAYER else num_layers,
            num_heads=self._num_heads(),
            dropout_prob=self.DROPOUT_PROB,
        )
        layer_p = stack_p.transformer_layer_params_tpl
        layer_p.tr_atten_tpl.atten_logit_cap = self.ATTEN_LOGIT_CAP
        layer_p.tr_atten_tpl.use_bias = False
        layer_p.tr_fflayer_tpl.activation_tpl = Config(self.ACTIVATION_CLS)
        layer_p.tr_fflayer_tpl.use_gated_activation = self.USE_GATED_ACTIVATION
        self._customize_stack(stack_p)
        task_defaults.maybe_setup_moe_params(stack_p)
        if self.USE_REPEATED_LAYER:
            return Config(layers.StackedTransformerRepeated, block=stack_p, x_times=num_layers, **repeated_fields)
        return stack_p

    def _customize_stack(self, stack_p: Any) -> None:
        """Applies the subclass's attributes. Called before feed-forward settings are copied to mixture-of-experts layers."""

    def _num_heads(self) -> int:
        return self.NUM_HEADS


def heads_of(cls: Any) -> int:
    """Returns the number of attention heads that an experiment's MODEL_DIMS, DIMS_PER_HEAD and NUM_HEADS give.

    Raises:
      UserError: the three attributes contradict each other, or neither DIMS_PER_HEAD nor NUM_HEADS is set.
    """
    dims, per_head, heads = cls.MODEL_DIMS, cls.DIMS_PER_HEAD, cls.NUM_HEADS
    if per_head is None and heads is None:
        raise UserError("neither NUM_HEADS nor DIMS_PER_HEAD is set; give one of them")
    if per_head is None:
        return heads
    if heads is None and dims % per_head:
        raise UserError(
            f"MODEL_DIMS={dims} is not a multiple of DIMS_PER_HEAD={per_head}; change one, or set NUM_HEADS"
        )
    if heads is not None and heads * per_head != dims:
        raise UserError(
            f"NUM_HEADS={heads} times DIMS_PER_HEAD={per_head} is {heads * per_head}, and MODEL_DIMS is {dims}; "
            "make them equal, or set one of the first two to None"
        )
    return dims // per_head
