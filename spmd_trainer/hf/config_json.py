"""config.json of a Hugging Face folder as a `DecoderSpec`, and back.

Keys that a config.json lacks have transformers' defaults, which differ from family to family. Both spellings of the rotary
settings are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from spmd_trainer.errors import did_you_mean
from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import FAMILIES, Family
from spmd_trainer.hf.family_settings import Settings, head_dims
from spmd_trainer.hf.rotary import read_rotary, write_rotary
from spmd_trainer.hf.setting_types import check_types
from spmd_trainer.models.decoder_spec import DecoderSpec

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
# Keys without effect on the trained model's output: bookkeeping, generation, dropout and initial values.
_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "sliding_window_pattern",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Settings without a default that `Family.read` looks at.
_READ_IF_PRESENT = ("num_local_experts", "sliding_window_pattern", "_sliding_window_pattern")
# Fields that a config.json must hold as floats.
_FLOATS = ("norm_epsilon", "attention_softcap", "final_softcap")
# Unsupported options of transformers that change a model's output: {key: the values that switch it off}.
_SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Returns the family named by a config.json.

    Args:
      config: content of the file.
      where: path of the file, for messages.

    Raises:
      HfError: the architecture is missing or not supported.
    """
    names = config.get("architectures")
    if not isinstance(names, Sequence) or not names or not isinstance(names[0], str):
        by_type = {family.model_type: family for family in FAMILIES.values()}
        if (model_type := config.get("model_type")) in list(by_type):
            return by_type[str(model_type)]
        raise HfError(f"{where} names no architecture: architectures is {names!r}; give e.g. ['LlamaForCausalLM']")
    if names[0] not in FAMILIES:
        raise HfError(
            f"{where}: the architecture {names[0]} is not supported; {', '.join(FAMILIES)} are"
            f"{did_you_mean(names[0], FAMILIES, otherwise='')}"
        )
    return FAMILIES[names[0]]


def spec_of(config: Mapping[str, Any], where: str) -> DecoderSpec:
    """Returns the model described by a config.json.

    Args:
      config: its content.
      where: its path, for messages.

    Raises:
      HfError: the architecture or an option is not supported, a setting is missing, or settings contradict each other.
    """
    family = family_of(config, where)
    _refuse_options(config, family, where)
    settings: Settings = {**family.defaults, **config}
    if missing := [key for key in family.keys.values() if key not in settings]:
        raise HfError(f"{where} has no {', '.join(missing)}")
    fields: Settings = {**family.fixed, **{field: settings[key] for field, key in family.keys.items()}}
    try:
        check_types(settings, frozenset({*family.keys.values(), *family.defaults, *_READ_IF_PRESENT}))
        _complete(settings, fields, family)
        spec = DecoderSpec(**fields)
    except HfError as error:
        raise HfError(f"{where}: {error}") from error
    if problems := spec.problems():
        raise HfError(f"{where}: {'; '.join(problems)}")
    return spec


def _complete(settings: Settings, fields: Settings, family: Family) -> None:
    if (activation := fields["activation"]) not in _ACTIVATIONS:
        raise HfError(
            f"{family.keys['activation']}={activation!r} is not supported; {', '.join(_ACTIVATIONS)} are"
            f"{did_you_mean(str(activation), _ACTIVATIONS, otherwise='')}"
        )
    fields["activation"] = _ACTIVATIONS[activation]
    if family.fixed.get("positions") != "learned":
        if fields["num_kv_heads"] is None:
            fields["num_kv_heads"] = fields["num_heads"]
        if fields["head_dims"] is None:
            fields["head_dims"] = head_dims(
                fields["model_dims"], fields["num_heads"], "hidden_size", "num_attention_heads"
            )
        read_rotary(settings, fields)
    family.read(settings, fields)


def _refuse_options(config: Mapping[str, Any], family: Family, where: str) -> None:
    for key, off in {**_SWITCHED_OFF, **family.off}.items():
        if key in config and config[key] not in off:
            raise HfError(f"{where}: {key}={config[key]!r:.200} is not supported; {off[-1]!r} is")
    known = {
        *family.keys.values(),
        *family.defaults,
        *_SWITCHED_OFF,
        *family.off,
        *family.without_effect,
        *_WITHOUT_EFFECT,
    }
    known |= {"rope_theta", "rope_scaling", "rope_parameters"}
    unread = sorted(key for key, value in config.items() if key not in known and value not in (None, False))
    if unread:
        logging.warning("%s: these settings are not read: %s", where, ", ".join(unread))


def config_of(spec: DecoderSpec, architecture: str | None = None) -> Settings:
    """Returns the config.json of a model, in the spellings of transformers 4 and 5. It has no dtype and no token ids.

    Args:
      spec: the model.
      architecture: the model's class in transformers; None: the first family that describes the model exactly.

    Raises:
      HfError: no family, or not the requested one, describes the model.
    """
    if architecture is not None and architecture not in FAMILIES:
        raise HfError(f"architecture={architecture!r} is not supported{did_you_mean(architecture, FAMILIES)}")
    found = (
        "no supported architecture of transformers describes" if architecture is None else f"{architecture} can't be"
    )
    differences, refusals = {}, {}
    for name in [architecture] if architecture else FAMILIES:
        try:
            config = _write(spec, FAMILIES[name])
            differing = differing_fields(spec, spec_of(config, "config.json"))
        except HfError as error:
            refusals[name] = str(error)
            continue
        if not differing:
            return config
        differences[name] = differing
    reasons = [f"{name} can't hold it: {refusal}" for name, refusal in refusals.items()]
    if differences:
        nearest = min(differences, key=lambda name: len(differences[name]))
        reasons.insert(0, f"{nearest} differs in {', '.join(differences[nearest])}")
    raise HfError(f"{found} this model: {'; '.join(reasons)}")


def _write(spec: DecoderSpec, family: Family) -> Settings:
    if family.heads_divide_dims and spec.model_dims % spec.num_heads:
        raise HfError(
            f"model_dims={spec.model_dims} is not a multiple of num_heads={spec.num_heads}, and transformers refuses that"
        )
    config: Settings = {"architectures": [family.architecture], "model_type": family.model_type}
    for field, key in family.keys.items():
        value = getattr(spec, field)
        if field == "activation":
            value = _spelling(value, family.defaults[key])
        elif field in _FLOATS and value is not None:
            value = float(value)
        config[key] = value
    config["initializer_range"] = float(spec.initializer_range)
    if spec.positions == "rotary":
        if not spec.max_positions:
            del config[family.keys["max_positions"]]
        config.update(write_rotary(spec, by_layer_type="rope_local_base_freq" in family.defaults))
    # Otherwise transformers uses the ids of the family's first models.
    config.update(dict.fromkeys(TOKENS))
    family.write(spec, config)
    return config


def _spelling(activation: str, usual: str) -> str:
    """Returns transformers' name of an activation: the family's usual one, or the first with the same meaning."""
    if _ACTIVATIONS[usual] == activation:
        return usual
    return next((theirs for theirs, ours in _ACTIVATIONS.items() if ours == activation), activation)


# Settings of training, which don't change a trained model's output.
_OF_TRAINING = ("dropout", "attention_dropout", "initializer_range")


def differing_fields(one: DecoderSpec, other: DecoderSpec) -> list[str]:
    """Returns the fields in which two models differ, ignoring those that only matter in training."""
    names = [field.name for field in dataclasses.fields(DecoderSpec) if field.name not in _OF_TRAINING]
    return [name for name in names if _comparable(one, name) != _comparable(other, name)]


def _comparable(spec: DecoderSpec, field: str) -> Any:
    value = getattr(spec, field)
    match field:
        case "layer_pattern":
            return spec.layer_kinds
        case "window":
            return value if "local" in spec.layer_kinds else None
        case "query_scale":
            return round((value or spec.head_dims**-0.5) ** -2, 6)
        case "embedding_scale":
            return round(value, 6)
        case "hidden_dims" if spec.moe is not None:
            return None
        case "max_positions" if spec.positions != "learned":
            return None  # only informative
        case "rotary_base" | "rotary_scaling" | "local_rotary_base" if spec.positions != "rotary":
            return None
        case "moe" if value is not None:
            return dataclasses.replace(value, aux_loss_weight=0.0)
    return value
