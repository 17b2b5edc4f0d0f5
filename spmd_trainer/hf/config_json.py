"""Converts the config.json of a Hugging Face folder to a `DecoderSpec`, and back.

Missing keys get transformers' defaults, which differ between model families. Rotary settings can be read under the key
names of transformers 4 (`rope_theta` with `rope_scaling`) and of transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_trainer.errors import did_you_mean
from spmd_trainer.hf import quantised
from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import FAMILIES, Family
from spmd_trainer.hf.families.family import Settings
from spmd_trainer.hf.families.shared import MOST_LAYERS, ROUTING_OFF, head_dims
from spmd_trainer.hf.setting_types import check_known, check_types
from spmd_trainer.models.decoder_spec import DecoderSpec, RotaryScaling
from spmd_trainer.sharding.messages import count_text

# Maximum number of experts, over all layers of a folder's model.
_MOST_EXPERTS = 1_000_000
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
# Settings without a default that `Family.read` uses if they are present.
_READ_IF_PRESENT = ("num_local_experts", "sliding_window_pattern", "_sliding_window_pattern")
_ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
# Fields of DecoderSpec that are written to config.json as floats.
_FLOATS = ("norm_epsilon", "attention_softcap", "final_softcap")
# Unsupported options of transformers that change a model's output: {key: the values that switch it off}.
_SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    **ROUTING_OFF,
}
# Rotary embeddings.
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
# {kind of scaling: {field of RotaryScaling: key in config.json}}
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
    "proportional": {"factor": "factor", "share": "partial_rotary_factor"},
}
# The keys that each kind of scaling requires. transformers has no defaults for them.
_REQUIRED_OF_SCALING: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": tuple(_SCALING_KEYS["llama3"].values()),
    "yarn": ("factor",),
    "proportional": (),
}
_NO_FLOATS = ("original_max_position_embeddings", "truncate")
# Keys that any kind of scaling may have. `mrope_...` divides a head between positions in time, height and width, which are
# equal for text.
_OF_ANY_KIND = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Returns the model family that a config.json names.

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
      config: content of the file.
      where: path of the file, for messages.

    Raises:
      HfError: the architecture or an option is not supported, a setting is missing, or settings contradict each other.
    """
    family = family_of(config, where)
    _refuse_options(config, family, where)
    given = {key: value for key, value in config.items() if value is not None or key != "rope_parameters"}
    settings: Settings = {**family.defaults, **given}
    if missing := [key for key in family.keys.values() if key not in settings]:
        raise HfError(f"{where} has no {', '.join(missing)}")
    fields: Settings = {**family.fixed, **{field: settings[key] for field, key in family.keys.items()}}
    try:
        check_types(settings, frozenset({*family.keys.values(), *family.defaults, *_READ_IF_PRESENT}))
        _complete(settings, fields, family)
        spec = DecoderSpec(**fields)
    except HfError as error:
        raise HfError(f"{where}: {error}") from error
    if problems := spec.problems() or _absurd_counts(spec):
        raise HfError(f"{where}: {'; '.join(problems)}")
    return spec


def _absurd_counts(spec: DecoderSpec) -> list[str]:
    """Returns a list with an error message if the model has more layers or experts than a folder may have, else []."""
    experts = 1 if spec.moe is None else spec.moe.num_experts
    if spec.num_layers <= MOST_LAYERS and spec.num_layers * experts <= _MOST_EXPERTS:
        return []
    found = f"{count_text(spec.num_layers, 'layer')} with {count_text(experts, 'expert')} in each"
    return [
        f"it has {found}; a folder may have up to {MOST_LAYERS:,} layers and {_MOST_EXPERTS:,} experts in all. For more, give "
        "your experiment a DecoderSpec that doesn't come from a folder"
    ]


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
        if fields.get("head_dims", 0) is None:
            fields["head_dims"] = head_dims(
                fields["model_dims"], fields["num_heads"], "hidden_size", "num_attention_heads"
            )
        _read_rotary(settings, fields, family)
    family.read(settings, fields)


def _refuse_options(config: Mapping[str, Any], family: Family, where: str) -> None:
    quantised.refuse_unsupported(config, where, in_mxfp4=family.in_mxfp4)
    of_others = {key: off for key, off in _SWITCHED_OFF.items() if key not in family.defaults}
    for key, off in {**of_others, **family.off}.items():
        if key in config and config[key] not in off:
            raise HfError(f"{where}: {key}={config[key]!r:.200} is not supported; {off[-1]!r} is")
    known = {*family.keys.values(), *family.defaults, *_SWITCHED_OFF, *family.off, *family.without_effect}
    check_known(config, {*known, *_ROTARY_KEYS, "quantization_config"}, where)


def config_of(spec: DecoderSpec, architecture: str | None = None) -> Settings:
    """Makes the content of a config.json for a model, with the key names of both transformers 4 and 5.

    The content has no dtype, and its token ids are None.

    Args:
      spec: the model.
      architecture: the model's class in transformers; None: the class of the first family that describes the model exactly.

    Raises:
      HfError: no family describes the model, or the requested family doesn't.
    """
    if architecture is not None and architecture not in FAMILIES:
        raise HfError(f"architecture={architecture!r} is not supported{did_you_mean(architecture, FAMILIES)}")
    found = "no supported architecture of transformers describes"
    if architecture is not None:
        found = f"{architecture} can't be"
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
        nearest = min(differences, key=lambda name: len({field.partition(".")[0] for field in differences[name]}))
        reasons.insert(0, f"{nearest} differs in {', '.join(differences[nearest])}")
    raise HfError(f"{found} this model: {'; '.join(reasons)}")


def _write(spec: DecoderSpec, family: Family) -> Settings:
    if family.heads_divide_dims and spec.model_dims % spec.num_heads:
        raise HfError(
            f"model_dims={spec.model_dims} is not a multiple of num_heads={spec.num_heads}, and transformers refuses that"
        )
    if spec.mtp_layers and not family.names(spec).in_mtp_layer:
        raise HfError(f"mtp_layers={spec.mtp_layers}, and it has no layers that predict further tokens")
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
        config.update(_write_rotary(spec, family))
    # Without these keys, transformers would use the token ids of the family's first models.
    config.update(dict.fromkeys(TOKENS))
    family.write(spec, config)
    return config


def _spelling(activation: str, usual: str) -> str:
    """Returns transformers' name for an activation. If there are several, prefers `usual`, then the first one."""
    if _ACTIVATIONS[usual] == activation:
        return usual
    return next((theirs for theirs, ours in _ACTIVATIONS.items() if ours == activation), activation)


# Training settings, which don't change a trained model's output.
_OF_TRAINING = ("dropout", "attention_dropout", "initializer_range", "mtp_layers", "mtp_weight")


def differing_fields(one: DecoderSpec, other: DecoderSpec) -> list[str]:
    """Returns the names of the fields in which two models differ, ignoring fields that matter only in training."""
    names = [field.name for field in dataclasses.fields(DecoderSpec) if field.name not in _OF_TRAINING]
    differing = [name for name in names if _comparable(one, name) != _comparable(other, name)]
    if "moe" in differing and one.moe is not None and other.moe is not None:
        a, b = (vars(_comparable(spec, "moe")) for spec in (one, other))
        differing += [f"moe.{name}" for name in a if a[name] != b[name]]
        differing.remove("moe")
    return differing


def _comparable(spec: DecoderSpec, field: str) -> Any:
    value = getattr(spec, field)
    match field:
        case "layer_pattern":
            return spec.layer_kinds
        case "window":
            return value if {"local", "chunked"} & {*spec.layer_kinds} else None
        case "unrotated_kinds":
            return {*value} & {*spec.layer_kinds}
        case "temperature" if spec.positions == "rotary" and not {*spec.unrotated_kinds} & {*spec.layer_kinds}:
            return None
        case "query_scale":
            return round((value or spec.head_dims**-0.5) ** -2, 6)
        case "global_heads" if "global" not in spec.layer_kinds:
            return None
        case "embedding_scale":
            return round(value, 6)
        case "hidden_dims" if spec.num_layers_with_experts == spec.num_layers:
            return None
        case "max_positions" if spec.positions != "learned":
            return None  # only informative
        case "rotary_base" | "rotary_scaling" | "local_rotary_base" if spec.positions != "rotary":
            return None
        case "local_rotary_base" if "local" not in spec.layer_kinds:
            return None
        case "local_rotary_base" if value == spec.rotary_base and spec.rotary_scaling is None:
            return None  # the local layers have the same frequencies as the others
        case "moe" if value is not None:
            return dataclasses.replace(value, aux_loss_weight=0.0, z_loss_weight=0.0, choice_bias_rate=0.0)
    return value


def _read_rotary(settings: Mapping[str, Any], fields: dict[str, Any], family: Family) -> None:
    """Adds `rotary_dims`, `rotary_base`, `rotary_scaling` and `local_rotary_base` to the fields of a spec.

    Args:
      settings: the content of config.json, with the family's defaults.
      fields: the spec's fields, which must already include the sizes.
      family: the model family.

    Raises:
      HfError: the kind of scaling is not supported; a setting for it is missing or not supported; or only a part of each
        head is rotated, and the family doesn't support that.
    """
    by_layer_type = family.rotary_by_layer_type
    parameters = _object(settings, "rope_parameters")
    older = _object(settings, "rope_scaling")
    longest = fields["max_positions"]
    # transformers 5 keeps partial_rotary_factor among the rotary settings.
    rotated = parameters.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1
    if rotated != 1 and "partial_rotary_factor" not in family.defaults:
        raise HfError(f"rope_parameters.partial_rotary_factor: {family.architecture} rotates whole heads; leave it out")
    fields["rotary_dims"] = 0 if rotated == 1 else int(fields["head_dims"] * rotated)
    local_base = settings.get("rope_local_base_freq") or (settings["rope_theta"] if by_layer_type else None)
    if (_GLOBAL in parameters or _LOCAL in parameters) and (by_layer_type or not older):
        # transformers applies rope_scaling to the global layers only.
        of_global = {**_object(parameters, _GLOBAL), **older}
        of_local = _object(parameters, _LOCAL)
        for kind, found in {_GLOBAL: of_global, _LOCAL: of_local}.items():
            if found.get("rope_type") != "proportional" and found.get("partial_rotary_factor") not in (None, 1):
                raise HfError(f"rope_parameters.{kind}.partial_rotary_factor needs the rope type 'proportional'")
        fields["rotary_base"] = of_global.get("rope_theta", settings["rope_theta"])
        fields["rotary_scaling"] = _scaling(of_global, f"rope_parameters.{_GLOBAL}", longest)
        if _scaling(of_local, f"rope_parameters.{_LOCAL}", longest) is not None:
            raise HfError(f"rope_parameters.{_LOCAL} scales the frequencies, which is supported in {_GLOBAL} alone")
        fields["local_rotary_base"] = of_local.get("rope_theta", local_base)
        return
    # transformers 5 prefers the older spelling, too.
    name, scaling = ("rope_scaling", older) if older else ("rope_parameters", parameters)
    fields["rotary_base"] = scaling.get("rope_theta", settings["rope_theta"])
    fields["rotary_scaling"] = _scaling(scaling, name, longest)
    if by_layer_type:
        fields["local_rotary_base"] = local_base


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the JSON object `settings[key]`; {} if it is missing. Raises HfError if the value is not an object."""
    found = settings.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise HfError(f"{key} is {found!r:.200}; give an object, e.g. {{'rope_type': 'linear', 'factor': 2.0}}")
    return found


def _scaling(parameters: Mapping[str, Any], name: str, longest: int) -> RotaryScaling | None:
    check_types(
        parameters, frozenset({"rope_theta"}).union(*(keys.values() for keys in _SCALING_KEYS.values())), inside=name
    )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROTARY_KINDS:
        raise HfError(
            f"{name} has the rope type {kind!r}, which is not supported; {', '.join(_ROTARY_KINDS)} are"
            f"{did_you_mean(str(kind), _ROTARY_KINDS, otherwise='')}"
        )
    known = _SCALING_KEYS[kind]
    # With the kind 'default', frequencies are not scaled, and the settings of other kinds are allowed but have no effect.
    read = known.values() if known else {key for keys in _SCALING_KEYS.values() for key in keys.values()}
    if missing := [key for key in _REQUIRED_OF_SCALING[kind] if parameters.get(key) is None]:
        raise HfError(f"{name} has the rope type {kind!r} and no {', '.join(missing)}")
    if unknown := sorted(set(parameters) - {*read, *_OF_ANY_KIND, "original_max_position_embeddings"}):
        raise HfError(f"{name}.{unknown[0]} is not supported{did_you_mean(unknown[0], sorted(read))}")
    if kind == "default":
        return None
    given = {field: parameters[key] for field, key in known.items() if parameters.get(key) is not None}
    if "original_max_positions" in known:
        given.setdefault("original_max_positions", longest)
    return RotaryScaling(kind=kind, **given)


def _write_rotary(spec: DecoderSpec, family: Family) -> dict[str, Any]:
    """Returns the rotary settings for a family's config.json, with the key names of both transformers 4 and 5."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(spec.rotary_base)}
    if spec.rotary_scaling is not None:
        scaling = spec.rotary_scaling
        parameters["rope_type"] = scaling.kind
        for field, key in _SCALING_KEYS[scaling.kind].items():
            # transformers treats mscale=0 as missing, and warns about it.
            if (value := getattr(scaling, field)) is not None and not (field.startswith("mscale") and value == 0):
                parameters[key] = float(value) if key not in _NO_FLOATS else value
    config: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": parameters["rope_theta"]}
    if "partial_rotary_factor" in family.defaults:
        rotated = (spec.rotary_dims or spec.head_dims) / spec.head_dims
        config["partial_rotary_factor"] = parameters["partial_rotary_factor"] = rotated
    if (
        spec.rotary_scaling is not None and spec.rotary_scaling.kind != "proportional"
    ):  # transformers 4 has no such kind
        config["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if family.rotary_by_layer_type:
        base = float(spec.rotary_base if spec.local_rotary_base is None else spec.local_rotary_base)
        config["rope_parameters"] = {_GLOBAL: parameters, _LOCAL: {"rope_type": "default", "rope_theta": base}}
        config["rope_local_base_freq"] = base
    return config
