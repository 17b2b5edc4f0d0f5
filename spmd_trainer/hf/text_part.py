"""The text model in a folder of a model for text and images: its part of config.json, and its tensors.

The vision model is not read, and an export has the text model alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.quantised import FACTORS
from spmd_trainer.hf.safetensors_file import Tensor

# {architecture of the whole: architecture of the text model}
_TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# Prefixes of the text model's tensors, and those in a folder of the text model alone. transformers 4 has the last two.
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
# Settings that the whole may have for its text model.
_SHARED = (
    _TIED,
    "quantization_config",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# {ending of a tensor with the matrices of all experts: which of an expert's matrices it has}
_FUSED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def config_of_text(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Returns the content of a config.json, or of its text model's part if it describes a model for text and images.

    Args:
      config: the content of the file.
      where: path of the file, for messages.

    Returns:
      The content, and for messages where it stands.

    Raises:
      HfError: the part is missing.
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
        found[_TIED] = config[_TIED]  # transformers ties those of the whole
    return {**found, "architectures": [_TEXT_MODELS[whole]]}, f"{where}: text_config"


def tensors_of_text(tensors: Mapping[str, Tensor], where: str, *, fused_experts: bool) -> dict[str, Tensor]:
    """Returns the tensors without those of a vision model, by their names in a folder of the text model alone.

    Args:
      tensors: the stored tensors by name.
      where: path of the folder, for a warning that the vision model is left out.
      fused_experts: replace a tensor that holds the matrices of all experts by one for each expert.

    Raises:
      HfError: such a tensor is in FP8.
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
    """Returns the name that a tensor has in a folder of the text model alone."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for each expert of [E, 2 X, D], gate and up, or [E, D, X], down; or the tensor itself."""
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
