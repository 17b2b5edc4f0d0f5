"""Checks the types of a config.json's settings before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from spmd_trainer.hf.errors import HfError


def is_number(value: object) -> bool:
    """Returns True for a finite int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Returns True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


# Of what counts something, or gives a size: no dimension of an array is longer.
_LARGEST = 2**31 - 1
# {what a setting must be: (True for a valid value, the settings)}
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Settings that count something, or that give a size.
    f"a whole number above 0, at most {_LARGEST:,}": (
        lambda value: is_whole(value) and 0 < value <= _LARGEST,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings original_max_position_embeddings sliding_window_pattern _sliding_window_pattern num_experts "
        "num_experts_per_tok num_local_experts moe_intermediate_size n_embd n_head n_inner n_layer n_positions "
        "n_routed_experts n_group topk_group q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    ),
    # Some folders give 0 where there is no window.
    f"a whole number of 0 or more, at most {_LARGEST:,}": (
        lambda value: is_whole(value) and 0 <= value <= _LARGEST,
        "sliding_window max_window_layers n_shared_experts first_k_dense_replace num_nextn_predict_layers",
    ),
    "a number above 0": (
        lambda value: is_number(value) and value > 0,
        "rms_norm_eps layer_norm_epsilon rope_theta rope_local_base_freq query_pre_attn_scalar attn_logit_softcapping "
        "final_logit_softcapping routed_scaling_factor partial_rotary_factor swiglu_alpha swiglu_limit",
    ),
    "a number of 0 or more": (lambda value: is_number(value) and value >= 0, "router_aux_loss_coef"),
    "a number": (
        is_number,
        "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim",
    ),
    "a text": (lambda value: isinstance(value, str), "hidden_act hidden_activation activation_function"),
    "true or false": (
        lambda value: isinstance(value, bool),
        "attention_bias mlp_bias norm_topk_prob output_router_logits scale_attn_weights tie_word_embeddings truncate "
        "use_qk_norm use_sliding_window rope_interleave",
    ),
    "a list of texts": (
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        "layer_types",
    ),
}
_KIND_OF = {name: kind for kind, (_, names) in _KINDS.items() for name in names.split()}
_NULL_IS_NONE = frozenset(
    {
        "num_key_value_heads",
        "head_dim",
        "n_inner",
        "num_local_experts",
        "q_lora_rank",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)


def check_types(settings: Mapping[str, Any], read: frozenset[str] | None = None, *, inside: str = "") -> None:
    """Checks the types of settings.

    Args:
      settings: the content of a config.json, with the family's defaults, or an object in it.
      read: the settings that the family reads; others may have any type. None: all.
      inside: name of the object if `settings` is an object in a config.json; its settings may be null.

    Raises:
      HfError: a setting has the wrong type or is out of range.
    """
    for key in sorted(settings.keys() if read is None else read & settings.keys()):
        value, kind = settings[key], _KIND_OF.get(key)
        if kind is None or (value is None and (inside or key in _NULL_IS_NONE)):
            continue
        if not _KINDS[kind][0](value):
            raise HfError(f"{inside}{'.' if inside else ''}{key}={value!r:.200}; give {kind}")
