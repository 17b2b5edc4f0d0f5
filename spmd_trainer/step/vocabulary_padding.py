"""Keeps a language model's padded vocabulary padded inside the step, because slicing the padding off costs time.

Slicing an uneven vocabulary to its logical size and padding it again moves rows between devices unless the compiler fuses
both (`benchmarks/padding.py` measures it). The padded rows of an embedding and softmax do no harm if three conditions hold: no
lookup reads them; their logits are masked, so that their gradients are zero; and the optimizer updates each element by itself,
so that zeros stay zeros. The step then works on the padded variables. The tests of mesh equivalence
(`tests/test_mesh_equivalence.py`) show that the results are those of one device, where nothing is padded.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from praxis import layers, optimizers, pax_fiddle
from praxis.layers import embedding_softmax, linears

from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step import opt_state_dtypes
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.learner import Learner
from spmd_trainer.train_states import NestedShapeDtypeStruct

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

# Optimizers that update each element from its own gradient and moments alone, and keep zeros at zero.
_ELEMENTWISE = (optimizers.Adam, optimizers.Lion, optimizers.Sgd, optimizers.ShardedSgd)
# praxis' language models and softmaxes of which this is known. Others set `harmless_vocabulary_padding`; not their subclasses.
_LAYERS = (layers.TransformerLm, embedding_softmax.FullSoftmax, embedding_softmax.SharedEmbeddingSoftmax)
# The variables of TransformerLm that have a row or a column per token id, and the number of that dimension.
_VOCAB_DIMENSION = {
    "softmax/logits_ffn/linear/w": 1,
    "softmax/logits_ffn/bias/b": 0,
    "embedding_lookup/emb_var": 0,
}


class MaskedFeedForward(linears.FeedForward):  # type: ignore[misc]  # praxis is untyped
    """A feed-forward layer whose outputs from `num_logits` on are large negative numbers, so their softmax is 0.

    Attributes:
      num_logits: number of outputs that are not padding; they come first.
    """

    num_logits: int = 0

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns [..., output_dims] for inputs [..., input_dims]."""
        logits: jax.Array = super().__call__(inputs)
        index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(index < self.num_logits, logits, jnp.finfo(logits.dtype).min / 2)


def for_step(layout: Layout, inputs_shape_dtype: NestedShapeDtypeStruct) -> Layout:
    """Returns the layout with which a step keeps the vocabulary's padding, and the task for it; `layout` if that is not safe.

    Args:
      layout: the task's layout, with or without optimizer states.
      inputs_shape_dtype: ShapeDtypeStructs of the step's global batch.
    """
    task = layout.task
    if not _is_safe(task, inputs_shape_dtype):
        return layout
    vocab_size = task.model.lm_tpl.vocab_size
    vocab_variables = _vocab_variables(layout, vocab_size)
    if task.lora is not None and vocab_variables.keys() & task.lora_model.matrix_dims().keys():
        return layout  # the adapters of these variables have the size of the vocabulary too
    sizes = {variable.padded_shape[dim] for variable, dim in vocab_variables.values()}
    if len(sizes) != 1 or sizes == {vocab_size}:
        return layout
    padded_vocab_size = sizes.pop()
    vocab_dims = {}
    for leaf in layout.records():
        owner = next((path for path in vocab_variables if leaf.path.endswith(path)), None)
        if owner is not None and leaf.logical_shape:
            variable, dim = vocab_variables[owner]
            if (leaf.logical_shape, leaf.spec) != (variable.logical_shape, variable.spec):
                return layout  # an optimizer state of another shape: it sums over the variable
            vocab_dims[leaf.path] = dim
    widen = functools.partial(_widen, vocab_dims, padded_vocab_size)
    hparams = jax.tree.map(
        lambda p, v: dataclasses.replace(p, shape=list(v.logical_shape)) if v.path in vocab_dims else p,
        layout.var_weight_hparams,
        jax.tree.map(widen, layout.variables.mdl_vars),
    )
    return dataclasses.replace(
        layout,
        task=_with_vocabulary(task, vocab_size, padded_vocab_size),
        var_weight_hparams=hparams,
        in_step=jax.tree.map(widen, layout.variables),
    )


def _widen(vocab_dims: Mapping[str, int], size: int, variable: VariableSpec) -> VariableSpec:
    """Counts the padding of a variable's vocabulary dimension as part of its logical shape."""
    if variable.path not in vocab_dims:
        return variable
    dim = vocab_dims[variable.path]
    shape, paddings = list(variable.logical_shape), list(variable.paddings)
    shape[dim], paddings[dim] = size, 0
    return dataclasses.replace(variable, logical_shape=tuple(shape), paddings=tuple(paddings))


def _vocab_variables(layout: Layout, vocab_size: int) -> dict[str, tuple[VariableSpec, int]]:
    """Returns {path below mdl_vars: (variable, its vocabulary dimension)} of the language model."""
    found = {}
    for variable in jax.tree.leaves(layout.variables.mdl_vars):
        for ending, dim in _VOCAB_DIMENSION.items():
            below = f"params/lm/{ending}"
            if variable.path == f"mdl_vars/{below}" and variable.logical_shape[dim] == vocab_size:
                found[below] = (variable, dim)
    return found


def _is_safe(task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct) -> bool:
    """Returns True if model and learner are of the kinds on which padded rows have no effect."""
    if type(task.model) is not layers.LanguageModel or "class_probabilities" in inputs_shape_dtype:
        return False
    lm_p = task.model.lm_tpl
    if not _is_known(lm_p.cls) or lm_p.ngrammer_tpl is not None:
        return False
    softmax_p = lm_p.softmax_tpl
    plain_softmax = (
        _is_known(softmax_p.cls)
        and softmax_p.feed_forward_tpl is not None
        and softmax_p.feed_forward_tpl.cls is linears.FeedForward
        # These take probability from all classes, or undo the mask.
        and not softmax_p.label_smoothing_prob
        and not softmax_p.soft_cap_logits
        and softmax_p.bi_tempered_loss_tpl is None
    )
    separate_p = lm_p.separate_embedding_tpl
    plain_embedding = separate_p is None or separate_p.cls is embedding_softmax.Embedding
    return plain_softmax and plain_embedding and _is_elementwise(task.learner)


def _is_known(layer: type) -> bool:
    return layer in _LAYERS or bool(vars(layer).get("harmless_vocabulary_padding"))


def _is_elementwise(learner: Learner) -> bool:
    # States in few bits are rounded by rows, and by an element's place in the logical shape.
    if learner.scale_update_by_var_norm or opt_state_dtypes.changes(learner):
        return False
    every = [learner.optimizer, *getattr(learner, "auxiliary_optimizers", ())]
    every = [getattr(optimizer, "base_optimizer", optimizer) for optimizer in every]
    return all(type(optimizer) in _ELEMENTWISE and getattr(optimizer, "epsilon", 1.0) > 0 for optimizer in every)


def _with_vocabulary(task: SingleTask, vocab_size: int, padded_vocab_size: int) -> SingleTask:
    """Returns the same task with a padded vocabulary; the logits from `vocab_size` on are masked."""
    lm_p = task.model.lm_tpl.clone()
    lm_p.vocab_size = padded_vocab_size
    feed_forward_p = lm_p.softmax_tpl.feed_forward_tpl
    lm_p.softmax_tpl.feed_forward_tpl = pax_fiddle.Config(
        MaskedFeedForward,
        num_logits=vocab_size,
        **{name: getattr(feed_forward_p, name) for name in feed_forward_p.__arguments__},
    )
    task = copy.copy(task)
    task.model = task.model.clone(lm_tpl=lm_p)
    return task
