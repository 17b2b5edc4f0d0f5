"""Checks the types of a config.json's settings before they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmd_trainer.hf.errors import HfError

# Settings that count something, or that give a size.
_WHOLE = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
        "moe_intermediate_size",
        "n_embd",
        "n_head",
        "n_inner",
        "n_layer",
        "n_positions",
    }
)
# Some folders give 0 where there is no window.
_WHOLE_OR_ZERO = frozenset({"sliding_window", "max_window_layers"})
_NUMBERS = frozenset(
    {
        "rms_norm_eps",
        "layer_norm_epsilon",
        "rope_theta",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)
_TEXTS = frozenset({"hidden_act", "hidden_activation", "activation_function"})
_BOOLEANS = frozenset(
    {
        "attention_bias",
        "mlp_bias",
        "norm_topk_prob",
        "output_router_logits",
        "scale_attn_weights",
        "tie_word_embeddings",
        "use_sliding_window",
    }
)
_NULL_IS_NONE = frozenset(
    {
        "num_key_value_heads",
        "head_dim",
        "n_inner",
        "num_local_experts",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)


def check_types(settings: Mapping[str, Any], read: frozenset[str]) -> None:
    """Checks the types of settings.

    Args:
      settings: the content of a config.json, with the family's defaults.
      read: the settings that the family reads; others may have any type.

    Raises:
      HfError: a setting has the wrong type or is not positive.
    """
    for key in sorted(read & settings.keys()):
        value = settings[key]
        if value is None and key in _NULL_IS_NONE:
            continue
        if (expected := _expected(key, value)) is not None:
            raise HfError(f"{key}={value!r:.200}; give {expected}")


def is_number(value: object) -> bool:
    """Returns True for a finite int or float, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Returns True for an int, which a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _expected(key: str, value: Any) -> str | None:
    """Returns the valid values of a setting; None if it is valid."""
    if key in _WHOLE and not (is_whole(value) and value > 0):
        return "a whole number above 0"
    if key in _WHOLE_OR_ZERO and not (is_whole(value) and value >= 0):
        return "a whole number of 0 or more"
    if key in _NUMBERS and not (is_number(value) and value > 0):
        return "a number above 0"
    if key == "router_aux_loss_coef" and not (is_number(value) and value >= 0):
        return "a number of 0 or more"
    if key in _TEXTS and not isinstance(value, str):
        return "a text"
    if key in _BOOLEANS and not isinstance(value, bool):
        return "true or false"
    if key == "layer_types" and not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
        return "a list of texts"
    return None
