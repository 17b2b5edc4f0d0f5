"""Checks the names and types of a config.json's settings before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from spmd_trainer.errors import did_you_mean
from spmd_trainer.hf.errors import HfError
from spmd_trainer.sharding.messages import count_text


def is_number(value: object) -> bool:
    """Returns True for a finite int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Returns True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


# Maximum for counts and sizes: no array dimension can be larger.
_LARGEST = 2**31 - 1
# {description of valid values: (function that returns True for a valid value, names of the settings)}
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Settings that count something, or that give a size.
    f"a whole number above 0, at most {_LARGEST:,}": (
        lambda value: is_whole(value) and 0 < value <= _LARGEST,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings original_max_position_embeddings sliding_window_pattern _sliding_window_pattern num_experts "
        "num_experts_per_tok num_local_experts moe_intermediate_size n_embd n_head n_inner n_layer n_positions "
        "n_routed_experts n_group topk_group q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "full_attention_interval shared_expert_intermediate_size intermediate_size_mlp attention_chunk_size floor_scale "
        "interleave_moe_layer_step no_rope_layer_interval global_head_dim num_global_key_value_heads",
    ),
    # Some folders give 0 where there is no window.
    f"a whole number of 0 or more, at most {_LARGEST:,}": (
        lambda value: is_whole(value) and 0 <= value <= _LARGEST,
        "sliding_window max_window_layers n_shared_experts first_k_dense_replace num_nextn_predict_layers "
        "hidden_size_per_layer_input",
    ),
    "a number above 0": (
        lambda value: is_number(value) and value > 0,
        "rms_norm_eps layer_norm_epsilon rope_theta rope_local_base_freq query_pre_attn_scalar attn_logit_softcapping "
        "final_logit_softcapping routed_scaling_factor partial_rotary_factor swiglu_alpha swiglu_limit attn_scale",
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
        "use_qk_norm use_sliding_window rope_interleave attention_k_eq_v",
    ),
    "a list of texts": (
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        "layer_types",
    ),
    "a list of whole numbers": (
        lambda value: isinstance(value, list) and all(is_whole(number) for number in value),
        "moe_layers no_rope_layers",
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
        "moe_layers",
        "no_rope_layers",
        "attention_chunk_size",
        "hidden_size_per_layer_input",
        "num_global_key_value_heads",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)


def check_types(settings: Mapping[str, Any], read: frozenset[str] | None = None, *, inside: str = "") -> None:
    """Checks the types and ranges of settings in a config.json.

    Args:
      settings: the content of a config.json, with the model family's defaults; or a JSON object inside config.json.
      read: names of the settings that the family reads; others may have any type. None: all are checked.
      inside: key of that JSON object, whose settings may be null; '' if `settings` is the whole config.json.

    Raises:
      HfError: a setting has the wrong type or is out of range.
    """
    for key in sorted(settings.keys() if read is None else read & settings.keys()):
        value, kind = settings[key], _KIND_OF.get(key)
        if kind is None or (value is None and (inside or key in _NULL_IS_NONE)):
            continue
        if not _KINDS[kind][0](value):
            raise HfError(f"{inside}{'.' if inside else ''}{key}={value!r:.200}; give {kind}")


# Settings without effect on the output of a trained model, in any family: bookkeeping, generation, dropout and initial values,
# tasks other than language modeling, and how transformers runs a model.
_NAMES_WITHOUT_EFFECT = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _comment _commit_hash
    _flash_attn_2_enabled _name_or_path _num_labels _sliding_window_pattern architectures attention_dropout
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_range is_decoder is_llama_config label2id length_penalty max_length max_sequence_length min_length
    model_max_length model_name model_type n_special no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past pad_token pad_token_id predict_special_tokens
    prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id sliding_window_pattern suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
_WITHOUT_EFFECT = frozenset(_NAMES_WITHOUT_EFFECT.split())


def check_known(config: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Checks that a config.json has only settings that the model family reads, or that are known to have no effect.

    Args:
      config: the content of a config.json. Settings that are null, false, 0 or empty are not checked: they switch nothing on.
      known: names of the settings that the family reads.
      where: path of the file, for the error message.

    Raises:
      HfError: there are unknown settings, which may change the model's output; the message names them.
    """
    given = (key for key, value in config.items() if value)
    unknown = sorted(key for key in given if key not in known and key not in _WITHOUT_EFFECT)
    if unknown:
        near = did_you_mean(unknown[0], sorted(known), otherwise="")
        shown = ", ".join(f"{key}={config[key]!r:.100}" for key in unknown)
        raise HfError(
            f"{where} has {count_text(len(unknown), 'unknown setting')}: {shown}{near}. If the model's output does not depend on "
            f"{'it' if len(unknown) == 1 else 'them'}, delete {'it' if len(unknown) == 1 else 'them'} from the file"
        )
