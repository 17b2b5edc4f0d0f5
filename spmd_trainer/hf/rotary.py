"""Settings of rotary embeddings in config.json, in both spellings of transformers, as fields of a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_trainer.errors import did_you_mean
from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.setting_types import check_types
from spmd_trainer.models.decoder_spec import DecoderSpec, RotaryScaling

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_KINDS = ("default", "linear", "llama3", "yarn")
# {kind: {field of RotaryScaling: key}}
_FIELDS = {
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
}
# transformers has no defaults for these.
_REQUIRED = {"linear": ("factor",), "llama3": tuple(_FIELDS["llama3"].values()), "yarn": ("factor",)}
_NO_FLOATS = ("original_max_position_embeddings", "truncate")
_KEPT = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_rotary(settings: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Adds `rotary_base`, `rotary_scaling` and `local_rotary_base` to the fields of a spec.

    Args:
      settings: the content of config.json, with the family's defaults.
      fields: the fields, with the sizes already set.

    Raises:
      HfError: the kind of scaling, or one of its settings, is not supported or missing.
    """
    parameters = _object(settings, "rope_parameters")
    older = _object(settings, "rope_scaling")
    longest = fields["max_positions"]
    by_layer_type = "rope_local_base_freq" in settings
    if (_GLOBAL in parameters or _LOCAL in parameters) and (by_layer_type or not older):
        # transformers gives rope_scaling to the global layers alone.
        of_global = {**_object(parameters, _GLOBAL), **older}
        of_local = _object(parameters, _LOCAL)
        fields["rotary_base"] = of_global.get("rope_theta", settings["rope_theta"])
        fields["rotary_scaling"] = _scaling(of_global, f"rope_parameters.{_GLOBAL}", longest)
        if _scaling(of_local, f"rope_parameters.{_LOCAL}", longest) is not None:
            raise HfError(f"rope_parameters.{_LOCAL} scales the frequencies, which is supported in {_GLOBAL} alone")
        fields["local_rotary_base"] = of_local.get("rope_theta", settings.get("rope_local_base_freq"))
        return
    # transformers 5 prefers the older spelling, too.
    name = "rope_scaling" if older else "rope_parameters"
    scaling = older or parameters
    fields["rotary_base"] = scaling.get("rope_theta", settings["rope_theta"])
    fields["rotary_scaling"] = _scaling(scaling, name, longest)
    if by_layer_type:
        fields["local_rotary_base"] = settings["rope_local_base_freq"]


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object in the settings; {} if it is missing."""
    found = settings.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise HfError(f"{key} is {found!r:.200}; give an object, e.g. {{'rope_type': 'linear', 'factor': 2.0}}")
    return found


def _scaling(parameters: Mapping[str, Any], name: str, longest: int) -> RotaryScaling | None:
    check_types(parameters, inside=name)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KINDS:
        raise HfError(
            f"{name} has the rope type {kind!r}, which is not supported; {', '.join(_KINDS)} are"
            f"{did_you_mean(str(kind), _KINDS, otherwise='')}"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise HfError(f"{name}.partial_rotary_factor={parameters['partial_rotary_factor']} is not supported; 1.0 is")
    if kind == "default":
        return None
    known = _FIELDS[kind]
    if missing := [key for key in _REQUIRED[kind] if parameters.get(key) is None]:
        raise HfError(f"{name} has the rope type {kind!r} and no {', '.join(missing)}")
    if unknown := sorted(set(parameters) - {*known.values(), *_KEPT, "original_max_position_embeddings"}):
        raise HfError(f"{name}.{unknown[0]} is not supported{did_you_mean(unknown[0], list(known.values()))}")
    given = {field: parameters[key] for field, key in known.items() if parameters.get(key) is not None}
    if "original_max_positions" in known:
        given.setdefault("original_max_positions", longest)
    return RotaryScaling(kind=kind, **given)


def write_rotary(spec: DecoderSpec, *, by_layer_type: bool) -> dict[str, Any]:
    """Returns the rotary settings of a config.json, in the spellings of transformers 4 and 5.

    Args:
      spec: the model.
      by_layer_type: True for families with separate settings for local layers.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(spec.rotary_base)}
    if spec.rotary_scaling is not None:
        scaling = spec.rotary_scaling
        parameters["rope_type"] = scaling.kind
        for field, key in _FIELDS[scaling.kind].items():
            # transformers takes mscale=0 like a missing one, and warns of it.
            if (value := getattr(scaling, field)) is not None and not (field.startswith("mscale") and value == 0):
                parameters[key] = float(value) if key not in _NO_FLOATS else value
    config: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": parameters["rope_theta"]}
    if spec.rotary_scaling is not None:
        config["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if by_layer_type:
        base = float(spec.rotary_base if spec.local_rotary_base is None else spec.local_rotary_base)
        config["rope_parameters"] = {_GLOBAL: parameters, _LOCAL: {"rope_type": "default", "rope_theta": base}}
        config["rope_local_base_freq"] = base
    return config
