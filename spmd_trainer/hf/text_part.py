"""Finds the text model in the folder of a multimodal model: its settings in config.json, and its tensors.

The vision and audio models are not read, and an export contains the text model alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.quantised import FACTORS
from spmd_trainer.hf.safetensors_file import Tensor

# {architecture of the multimodal model: architecture of its text model}
_TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# {prefix of the text model's tensor names: their prefix in a folder of the text model alone}. transformers 4 has the last two.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_VISION = (
    "model.visual.",
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "multi_modal_projector.",
)
_TIED = "tie_word_embeddings"
# Settings of the text model that may stand at the top level of config.json.
_SHARED = (
    _TIED,
    "quantization_config",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# {name ending of a tensor that holds matrices of all experts: which of each expert's matrices it holds}
_FUSED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def config_of_text(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Returns the settings in a config.json; for a multimodal model, the settings of its text model.

    Args:
      config: the content of config.json.
      where: path of the file, for messages.

    Returns:
      The settings, and their location for messages.

    Raises:
      HfError: the settings of the text model are missing.
    """
    names = config.get("architectures")
    whole = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if whole not in _TEXT_MODELS:
        return dict(config), where
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise HfError(f"{where}: {whole} has no text_config, an object with the settings of its text model")
    found = {key: config[key] for key in _SHARED if config.get(key) is not None}
    found |= {key: value for key, value in text.items() if value is not None or key not in found}
    if config.get(_TIED) is not None:
        found[_TIED] = config[_TIED]  # transformers uses the setting of the multimodal model
    return {**found, "architectures": [_TEXT_MODELS[whole]]}, f"{where}: text_config"


def tensors_of_text(tensors: Mapping[str, Tensor], where: str, *, fused_experts: bool) -> dict[str, Tensor]:
    """Returns the text model's tensors under the names that they would have in a folder with only the text model.

    Args:
      tensors: the stored tensors by name.
      where: path of the folder, for a warning that the vision model is left out.
      fused_experts: True to replace each tensor that holds matrices of all experts by one tensor per expert and matrix.

    Raises:
      HfError: `fused_experts` is True, and a tensor to be replaced is in FP8.
    """
    if any(name.startswith(_VISION) for name in tensors):
        logging.warning("%s: its text model is read, and its vision model is not", where)
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(_VISION):
            continue
        alone = name_in_text(name)
        if fused_experts and alone.endswith(tuple(ending + FACTORS for ending in _FUSED)):
            raise HfError(
                f"{where}: {name} shows that all experts of a layer are one tensor in FP8, which is not supported"
            )
        for inner, part in _experts(alone, tensor) if fused_experts else [(alone, tensor)]:
            found[inner] = part
    return found


def name_in_text(name: str) -> str:
    """Returns the name that a multimodal model's tensor `name` would have in a folder with only the text model."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Splits a tensor with matrices of all experts: yields (name, tensor) for each matrix. Yields other tensors unchanged.

    Such a tensor is [experts, 2 * hidden, model] (gate, then up) or [experts, model, hidden] (down).
    """
    ending = next((ending for ending in _FUSED if name.endswith(ending)), None)
    if ending is None or len(tensor.shape) != 3 or tensor.shape[1] % len(_FUSED[ending]):
        yield name, tensor
        return
    parts = _FUSED[ending]
    rows = tensor.shape[1] // len(parts)
    for expert in range(tensor.shape[0]):
        for index, part in enumerate(parts):
            inner = f"{name.removesuffix(ending)}.experts.{expert}.{part}.weight"
            first = expert * tensor.row_bytes + index * tensor.row_bytes // len(parts)
            yield (
                inner,
                dataclasses.replace(tensor, name=inner, shape=(rows, tensor.shape[2]), start=tensor.start + first),
            )
