"""A decoder as a praxis language model: embeddings, repeated layers, logits, loss, and a cache for decoding.

    task_p.model = Config(lm.DecoderLanguageModel, name="lm")
    task_p.model.lm_tpl.spec = Config(spec.DecoderSpec, vocab_size=32000, model_dims=4096, ...)

`DecoderLanguageModel.decode` generates text by the settings in its field `generation`. To use praxis' own decode functions
instead, use a praxis `LanguageModel` with a `DecoderLm`. A decode loop must run in a method of the model, with the collection
`base_layer.DECODE_CACHE` mutable:

    logits = self.lm.prefill(ids, lengths, cache_length)   # ids int32 [B, T], prompts at the left, any right padding
    ...                                                    # logits float32 [B, V], for the token after each prompt
    logits = self.lm.extend_step(token).logits             # token int32 [B]; logits float32 [B, V], for the next token

B is the number of rows, T the width of `ids` and V the size of the vocabulary. `prefill` moves each prompt to the right end of
[0, T), so that the tokens of a decode step have the same cache index in all rows, T + step. The collection has these variables
below `lm`: `time_step`, int32, the next index to write; `first_index`, int32 [B], the index of each row's first token; and for
each layer `attention/key_state` and `attention/value_state`, [B, cache_length, K, H], for K cached heads of width H. Latent
attention has only `attention/key_state`; for linear attention see `DeltaAttention`. Layers that are repeated R times have stacked
variables with a leading dimension R, or with `unroll_in_decode` separate variables below `layer{r}`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from praxis import base_layer, layers, pax_fiddle
from praxis.layers import transformer_models
from praxis.layers.checkpoint_policy import custom_policy
from praxis.py_utils import NestedMap

from spmd_trainer.decoder import context as context_lib
from spmd_trainer.decoder.axes import Norm, SpecLayer, renamed_axes
from spmd_trainer.decoder.context import PADDING, Context
from spmd_trainer.decoder.generation import decode as generation_decode
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.layers import DecoderBlock, DecoderLayer, Embedding, Logits, create_layers
from spmd_trainer.decoder.multi_token import MultiTokenPrediction, Rows
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.kernels import cross_entropy, kernels, sequence_order
from spmd_trainer.kernels.cross_entropy import TokenLosses
from spmd_trainer.kernels.sequence_order import SequenceOrder

# Outputs of `compute_loss` with dimensions batch and time.
_PER_TOKEN = ("logits", "log_probs", "probs", "per_example_xent", "per_example_argmax", "per_token_xent")


class DecoderLm(SpecLayer):
    """A decoder-only transformer that replaces praxis' `TransformerLm`.

    Attributes:
      packed_input: True if a row may hold several texts, distinguished by segment_ids.
      model_type: only CAUSAL is supported. praxis' LanguageModel sets it.
      checkpoint_policy: rematerialization policy of each block of layers.
      unroll_in_decode: unroll the loop over layers in decode steps. The cache then has separate variables for each layer,
        which are updated in place, but compilation takes longer.
      attention_kernel: name of the attention kernel, see `spmd_trainer.kernels.kernels`. None: the first one that suits the
        device and the layer.
      context_parallel: attention algorithm for rows whose tokens are split over the mesh (`axes` maps 'length' to mesh axes):
        'ring' or 'all_to_all'. None: 'ring'.
    """

    packed_input: bool = True
    model_type: Any = transformer_models.LanguageModelType.CAUSAL
    checkpoint_policy: layers.AutodiffCheckpointType = layers.AutodiffCheckpointType.SAVE_NOTHING
    unroll_in_decode: bool = True
    attention_kernel: str | None = None
    context_parallel: str | None = None

    @classmethod
    def set_sharding_params_v1(
        cls,
        lm_p: Any,
        *,
        replica_axis: str,
        data_axis: str,
        mdl_axis: str,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        mesh_axis_names: Sequence[str],
        training_optimized: bool,
    ) -> Any:
        """Sets the mesh in a config, and adapts `DEFAULT_AXES` to these names of the mesh axes. Returns lm_p.

        Args:
          lm_p: config of this class, changed in place. Entries that its `axes` already has are kept.
          replica_axis, data_axis, mdl_axis: names of the mesh axes.
          ici_mesh_shape, dcn_mesh_shape: sizes of all mesh axes, within a slice and across slices.
          mesh_axis_names: names of all mesh axes.
          training_optimized: also split the residual stream over mdl_axis.
        """
        lm_p.ici_mesh_shape, lm_p.dcn_mesh_shape = ici_mesh_shape, dcn_mesh_shape
        lm_p.mesh_axis_names = mesh_axis_names
        axes = renamed_axes({"replica": replica_axis, "data": data_axis, "mdl": mdl_axis}, mesh_axis_names)
        if training_optimized:
            axes["activation_embed"] = mdl_axis
        lm_p.axes = {**axes, **(lm_p.axes or {})}
        return lm_p

    def setup(self) -> None:
        """Checks the settings and creates the child layers.

        Raises:
          UserError: the spec or `context_parallel` is invalid, or model_type is not CAUSAL.
        """
        spec = self.spec
        spec.check("task.model.lm_tpl.spec")
        self._check_names()
        if self.model_type != transformer_models.LanguageModelType.CAUSAL:
            raise UserError(f"task.model.model_type={self.model_type}; a DecoderLm can only be CAUSAL")
        self.child("token_emb", Embedding, num_rows=spec.vocab_size)
        if spec.positions == "learned":
            self.child("position_emb", Embedding, num_rows=spec.max_positions, rows_axis="positions")
        create_layers(self, "first_layers", spec.first_layers)
        if spec.num_repeats:
            repeat_p = pax_fiddle.Config(
                layers.Repeat,
                sub_tpl=pax_fiddle.Config(DecoderBlock, spec=spec, axes=self.axes),
                x_times=spec.num_repeats,
                checkpoint_policy=self.checkpoint_policy,
                unroll_in_decode=self.unroll_in_decode,
            )
            self.create_child("layers", repeat_p)
        create_layers(self, "last_layers", spec.last_layers)
        self.child("final_norm", Norm, shape=(spec.model_dims,))
        if spec.mtp_layers:
            self.child("mtp", MultiTokenPrediction, checkpoint_policy=self.checkpoint_policy)
        if not spec.tied_embeddings:
            self.child("logits", Logits)

    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array,
        labels: NestedMap | None = None,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        causal_attention_mask: jax.Array | None = None,
        segment_mask: jax.Array | None = None,
        start_time_step: int | jax.Array = 0,
    ) -> NestedMap:
        """Computes logits, and also the loss if labels are given. The signature is that of praxis' `TransformerLm`. Returns
        `logits`, float32 [batch, time, vocab_size], and the other outputs of `compute_loss`.

        Args:
          inputs: token ids, int32 [batch, time].
          paddings: [batch, time], 1 for padding.
          labels: class_ids int32 [batch, time] and class_weights [batch, time]; None computes no loss.
          segment_ids: int32 [batch, time], the same for all tokens of a text, which are consecutive; None: a row is one text.
          segment_pos: int32 [batch, time], position of each token in its text. None: 0, 1, 2, ...
          causal_attention_mask, segment_mask: must be None.
          start_time_step: index in the decode cache at which the next `extend_step` writes.

        Raises:
          UserError: an attention mask is given, or rows have more tokens than there are learned positions.
        """
        if causal_attention_mask is not None or segment_mask is not None:
            raise UserError(
                "a DecoderLm supports neither causal_attention_mask nor segment_mask; remove them from the batch"
            )
        batch, length = inputs.shape
        if segment_ids is None:
            segment_ids = jnp.asarray(1 - paddings, jnp.int32)
        if segment_pos is None:
            segment_pos = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        self.update_decode_state("time_step", jnp.asarray(start_time_step, jnp.int32))
        # A decode step without segment_pos continues these rows: each row's last token is at the right end.
        self.update_decode_state("first_index", length - 1 - segment_pos[:, -1].astype(jnp.int32))
        segment_ids = jnp.where(paddings > 0, PADDING, segment_ids)
        order = self._order(length)
        context = self._context_of_rows(order, segment_ids, segment_pos)
        x = self._hidden(order.apply(inputs), context)
        if self.spec.mtp_layers and labels is None and self.is_initializing():  # these layers create their variables
            labels = NestedMap(class_ids=inputs, class_weights=paddings)
        if labels is not None:
            if self.spec.mtp_layers:
                rows = Rows(inputs, labels.class_ids, labels.class_weights, segment_ids)
                self.mtp(x, rows, context, lambda ids: self._embed(ids, context), self._token_losses)
            labels = NestedMap({name: order.apply(x) for name, x in labels.items()})
        output = self.compute_loss(x, labels)
        output.update({name: order.undo(output[name]) for name in _PER_TOKEN if name in output})
        return output

    def compute_loss(self, activations: jax.Array, labels: NestedMap | None = None) -> NestedMap:
        """Computes logits and cross entropy.

        The loss doesn't need the logits (see `kernels.cross_entropy`). XLA drops their computation if nothing else uses them.

        Args:
          activations: output of the final norm, [batch, time, model_dims].
          labels: class_ids int32 [batch, time] and class_weights [batch, time]; None: no loss.

        Returns:
          The outputs of praxis' `TransformerLm`: logits and log_probs, float32 [batch, time, vocab_size]. With labels also
          per_example_argmax, per_example_xent and per_token_xent (weighted), [batch, time]; per_sequence_xent [batch]; and the
          scalars total_xent, total_weight, avg_xent, aux_loss and total_loss. Without labels also probs.
        """
        logits = self.split(self._logits(activations), "batch", "length", "activation_vocab")
        log_probs = jax.nn.log_softmax(logits)
        output = NestedMap(logits=logits, log_probs=log_probs)
        if labels is None:
            output.probs = jnp.exp(log_probs)
            return output
        of_tokens = self._token_losses(activations, labels.class_ids)
        weights = labels.class_weights.astype(jnp.float32)
        output.per_example_xent, output.per_example_argmax = of_tokens.xent, of_tokens.argmax
        output.per_token_xent = output.per_example_xent * weights
        output.per_sequence_xent = jnp.sum(output.per_token_xent, axis=-1)
        output.total_xent, output.total_weight = jnp.sum(output.per_token_xent), jnp.sum(weights)
        output.avg_xent = output.total_xent / (output.total_weight + 1e-6)
        output.aux_loss = self._aux_loss()
        output.total_loss = output.avg_xent + output.aux_loss
        return output

    def prefill(self, ids: jax.Array, lengths: jax.Array, cache_length: int) -> jax.Array:
        """Runs the model on prompts and fills the decode cache. Returns float32 [batch, vocab_size], logits of the next token.

        Args:
          ids: token ids, int32 [batch, time]; each row's prompt begins at 0.
          lengths: int32 [batch], number of tokens in each prompt, 1 or more.
          cache_length: number of tokens that the cache must hold: `time` plus the number of decode steps.

        Raises:
          UserError: cache_length is less than `time`, or greater than the number of learned positions.
        """
        length = ids.shape[1]
        if cache_length < length:
            raise UserError(f"the decode cache of {cache_length} tokens is shorter than the prompts of {length}")
        self._check_positions(cache_length)
        first_index = length - lengths.astype(jnp.int32)
        positions = jnp.arange(length, dtype=jnp.int32) - first_index[:, None]
        segment_ids, positions = jnp.where(positions >= 0, 1, PADDING), jnp.maximum(positions, 0)
        ids = jnp.take_along_axis(ids, positions, axis=1)
        self.update_decode_state("time_step", jnp.asarray(length, jnp.int32))
        self.update_decode_state("first_index", first_index)
        order = self._order(length)
        context = self._context_of_rows(order, segment_ids, positions, cache_length)
        x = order.undo(self._hidden(order.apply(ids), context))
        return self._logits(x[:, -1:])[:, 0]

    def extend_step(self, inputs: jax.Array, segment_pos: jax.Array | None = None) -> NestedMap:
        """Runs the model on new tokens, and adds them to the decode cache.

        A previous call of `prefill`, or of `__call__` for models without linear attention, must have filled the cache.

        Args:
          inputs: token ids, int32 [batch] or [batch, new tokens].
          segment_pos: positions of the tokens in their texts, int32 of the same shape. None: the next positions of each row.

        Returns:
          logits, log_probs and probs for the token after each input token, float32 [batch, vocab_size] or [batch, new tokens,
          vocab_size].
        """
        ids = inputs[:, None] if inputs.ndim == 1 else inputs
        time_step = self.get_decode_state("time_step")
        index = time_step + jnp.arange(ids.shape[1], dtype=jnp.int32)
        if segment_pos is None:
            first_index = self.get_decode_state("first_index")
        else:
            first_index = time_step - segment_pos.reshape(ids.shape)[:, 0]
        self.update_decode_state("time_step", time_step + ids.shape[1])
        context = context_lib.of_step(self.spec, index, first_index)
        x = self._through(
            self._embed(ids, context),
            lambda layer, x: layer.extend_step(x, context),
            lambda x: self.layers.extend_step(x, context=context),
        )
        output = self.compute_loss(self.final_norm(x))
        return jax.tree.map(lambda x: x[:, 0], output) if inputs.ndim == 1 else output

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of the decode cache with `transform_fn(array, batch_dim, time_dim)`. `time_dim` is -1 if none."""
        self.update_decode_state("first_index", transform_fn(self.get_decode_state("first_index"), 0, -1))
        if self.spec.num_repeats:
            self.layers.transform_decode_state(transform_fn)
        for layer in (*self._not_repeated("first_layers"), *self._not_repeated("last_layers")):
            layer.transform_decode_state(transform_fn)

    def lazy_broadcast_prefix(self, num_suffix_samples: int, suffix_length: int) -> None:
        """Overrides a praxis method that this class does not support.

        Raises:
          UserError: always.
        """
        del num_suffix_samples, suffix_length
        raise UserError(
            "a DecoderLm does not support lazily broadcast prefixes; set task.model.decoder_tpl.lazy_prefix_broadcast=False"
        )

    def _context_of_rows(
        self, order: SequenceOrder, segment_ids: jax.Array, positions: jax.Array, cache_length: int | None = None
    ) -> Context:
        self._check_positions(segment_ids.shape[1])
        return context_lib.of_rows(
            self.spec, order, segment_ids, positions, cache_length, self.attention_kernel, self.context_parallel
        )

    def _hidden(self, ids: jax.Array, context: Context) -> jax.Array:
        """Returns the final norm's output, [batch, padded time, model_dims], for rows of ids in the order `context.order`."""

        def run(layer: DecoderLayer, x: jax.Array) -> jax.Array:
            return layer(x, context)

        run = nn.remat(run, policy=custom_policy(self.checkpoint_policy))
        x = self._embed(ids, context)
        normed: jax.Array = self.final_norm(self._through(x, run, lambda x: self.layers(x, context=context)))
        return normed

    def _through(
        self,
        x: jax.Array,
        run: Callable[[DecoderLayer, jax.Array], jax.Array],
        run_repeated: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Returns the residual stream after all layers. `run` applies one layer, `run_repeated` applies all repeated layers."""
        for layer in self._not_repeated("first_layers"):
            x = run(layer, x)
        if self.spec.num_repeats:
            x = run_repeated(x)
        for layer in self._not_repeated("last_layers"):
            x = run(layer, x)
        return x

    def _embed(self, ids: jax.Array, context: Context) -> jax.Array:
        x = self.token_emb(ids)
        if self.spec.embedding_scale != 1:
            x = x * jnp.asarray(self.spec.embedding_scale, x.dtype)
        if self.spec.positions == "learned":
            x = x + self.position_emb(context.positions)
        return self.dropped(x, self.spec.dropout, context.order)

    def _logits(self, x: jax.Array) -> jax.Array:
        logits: jax.Array = self._output_layer.logits(x)
        cap = self.spec.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _token_losses(self, activations: jax.Array, class_ids: jax.Array) -> TokenLosses:
        split = cross_entropy.VocabularySplit(*map(self.mesh_axes, ("batch", "length", "activation_vocab", "embed")))
        matrix, cap = self._output_layer.matrix(), self.spec.final_softcap
        return cross_entropy.cross_entropy(activations, matrix, class_ids, softcap=cap, split=split)

    @property
    def _output_layer(self) -> Embedding | Logits:
        layer: Embedding | Logits = self.token_emb if self.spec.tied_embeddings else self.logits
        return layer

    def _aux_loss(self) -> jax.Array:
        losses = jax.tree.leaves(
            self.variables.get(base_layer.AUX_LOSS, {}), is_leaf=lambda x: isinstance(x, base_layer.AuxLossStruct)
        )
        return sum((jnp.sum(loss.value) for loss in losses), jnp.zeros((), jnp.float32))

    def _not_repeated(self, which: Literal["first_layers", "last_layers"]) -> list[DecoderLayer]:
        return [getattr(self, f"{which}_{index}") for index in range(len(getattr(self.spec, which)))]

    def _order(self, length: int) -> SequenceOrder:
        return sequence_order.of_rows(length, self.mesh_axes("length"), self.context_parallel)

    def _check_names(self) -> None:
        if self.attention_kernel is not None:
            kernels.kernel(self.attention_kernel)
        forms = sequence_order.FORMS
        if self.context_parallel not in (None, *forms):
            hint = f"{did_you_mean(self.context_parallel, forms)}. Forms: {', '.join(forms)}"
            raise UserError(f"task.model.lm_tpl.context_parallel={self.context_parallel!r}{hint}")

    def _check_positions(self, length: int) -> None:
        if self.spec.positions == "learned" and length > self.spec.max_positions:
            raise UserError(
                f"rows of {length} tokens are longer than task.model.lm_tpl.spec.max_positions={self.spec.max_positions}"
            )


class DecoderLanguageModel(layers.LanguageModel):
    """praxis' `LanguageModel` with a `DecoderLm` as `lm_tpl`. Its method `decode` uses the settings in `generation`."""

    lm_tpl: pax_fiddle.Config[base_layer.BaseLayer] = base_layer.template_field(DecoderLm)
    generation: GenerationSettings = base_layer.instance_field(GenerationSettings)

    def matrix_flops(self, num_params: float, num_frozen: float, length: int) -> float:
        """Returns the FLOPs per token of all matrix products; see `DecoderSpec.matrix_flops`."""
        flops: float = pax_fiddle.build(self.lm_tpl.spec).matrix_flops(num_params, num_frozen, length)
        return flops

    def decode(
        self, input_batch: NestedMap, result_callback: None = None, return_result_for_suffix_score: bool = False
    ) -> tuple[NestedMap, NestedMap, dict[str, Any]]:
        """Continues the prompts of a batch with the settings `generation`; see `decoder.generation.decode.decode`.

        Raises:
          UserError: a setting is invalid, or `result_callback` or `return_result_for_suffix_score` is given.
        """
        if result_callback is not None or return_result_for_suffix_score:
            raise UserError(
                "a DecoderLanguageModel supports neither result_callback nor suffix scores; call decode(batch) without them"
            )
        return generation_decode.decode(self, input_batch, self.generation)
