"""Reads and makes PEFT's adapter_config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from spmd_trainer.decoder.lora import Lora
from spmd_trainer.hf import config_json
from spmd_trainer.hf.errors import HfError, HfNotFoundError
from spmd_trainer.hf.families import FAMILIES, Family
from spmd_trainer.hf.folder import is_folder, read_json, read_model
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.storage import json_values

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Options that combine base and adapters in other ways than LoRA and DoRA.
_UNSUPPORTED = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# Initializations that keep the base weights unchanged; others subtract the initial adapters from the base weights.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def read(directory: epath.PathLike) -> dict[str, Any]:
    """Reads a folder's adapter_config.json, checks that it describes supported adapters, and returns its content.

    Raises:
      HfNotFoundError: the file is missing.
      HfError: the file describes a method other than LoRA or DoRA, or has options that are not supported.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    where = os.path.join(os.fspath(directory), CONFIG)
    config = read_json(directory, CONFIG)
    if config is None:
        raise HfNotFoundError(f"{where} is missing: give a folder that PEFT's save_pretrained wrote")
    if config.get("peft_type") != "LORA":
        raise HfError(
            f"{where}: peft_type is {config.get('peft_type')!r}; only 'LORA' is supported, with or without use_dora"
        )
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise HfError(f"{where}: lora_alpha is {alpha!r:.100}; it must be a number")
    try:
        json_values.integer(config.get("r"), "r", least=1)
    except ValueError as error:
        raise HfError(f"{where}: {error}") from error
    used = [f"{name}={config[name]!r:.100}" for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        used.append(f"bias={config['bias']!r}")
    if config.get("init_lora_weights") not in _PLAIN_INITIALISATIONS:
        used.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if used:
        raise HfError(
            f"{where} has options that are not supported: {', '.join(used)}. Merge the adapters with PEFT "
            "(merge_and_unload, save_pretrained), and open the merged folder"
        )
    return config


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that `task.lora` must have to use adapters with this adapter_config.json, as {field: value}."""
    return {
        "rank": config["r"],
        "alpha": float(config["lora_alpha"]),
        "rslora": bool(config.get("use_rslora")),
        "dora": bool(config.get("use_dora")),
    }


def base_of(directory: epath.PathLike) -> epath.Path | None:
    """Returns the base model's Hugging Face folder if the PEFT folder `directory` names one that exists, else None.

    Raises:
      CheckpointReadError: storage does not answer, or refuses access.
    """
    name = (read_json(directory, CONFIG) or {}).get("base_model_name_or_path")
    # It may also be a name on the Hugging Face Hub ('org/model').
    return epath.Path(name) if isinstance(name, str) and name and is_folder(name) else None


def family_of(spec: DecoderSpec, base: str | os.PathLike[str] | None, *, otherwise: str | None = None) -> Family:
    """Returns the family whose tensor names are used: the base model folder's family, or else the first that fits the model.

    Args:
      spec: the model.
      base: the Hugging Face folder of the base model, if there is one.
      otherwise: the architecture to use if no family describes the model; None: raise HfError.

    Raises:
      HfError: no family describes the model, or the folder can't be read.
    """
    if base is not None:
        return read_model(base)[1]
    try:
        architecture = config_json.config_of(spec)["architectures"][0]
    except HfError:
        if otherwise is None:
            raise
        architecture = otherwise
    return FAMILIES[architecture]


def make(
    lora: Lora, modules: Sequence[str], *, base: str | os.PathLike[str] | None, fan_in_fan_out: bool
) -> dict[str, Any]:
    """Returns the content of adapter_config.json.

    Args:
      lora: the task's adapter settings.
      modules: PEFT's `target_modules`: names, or last parts of names, of the base model's modules.
      base: the Hugging Face folder of the base model, if there is one.
      fan_in_fan_out: True if the base model's weights are [in, out], as in GPT-2.
    """
    alpha = float(lora.alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else os.fspath(base),
        "inference_mode": True,
        "r": int(lora.rank),
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": float(lora.dropout),
        "use_rslora": bool(lora.rslora),
        "use_dora": bool(lora.dora),
        "target_modules": sorted(modules),
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
