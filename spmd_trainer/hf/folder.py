"""Opens Hugging Face folders: reads config.json and the headers of the safetensors files, and checks that they agree."""

from __future__ import annotations

import collections
import dataclasses
import operator
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.checkpointing import mismatch, step_files
from spmd_trainer.errors import did_you_mean
from spmd_trainer.hf import config_json, quantised, tensor_names, text_part
from spmd_trainer.hf.errors import HfDamagedError, HfMismatchError, HfNotFoundError
from spmd_trainer.hf.families import Family
from spmd_trainer.hf.families.family import MTP_LAYERS
from spmd_trainer.hf.safetensors_file import Tensor, read_header
from spmd_trainer.hf.tensor_names import Variable
from spmd_trainer.inputs.files import listed
from spmd_trainer.models.decoder_spec import DecoderSpec, DeltaSpec
from spmd_trainer.storage import json_values, reading

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
# Weight files of older folders.
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Buffers that older versions of transformers stored: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
_TIED = "lm_head.weight"
_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class HfFolder:
    """An opened Hugging Face folder.

    Attributes:
      path: path of the folder.
      config: the content of config.json; for a multimodal model, the settings of its text model.
      family: the architecture's config.json format and tensor names.
      spec: the model's settings.
      variables: the model's variables by path, each with the tensors that hold it.
      tensors: the stored tensors by name.
    """

    path: str
    config: Mapping[str, Any]
    family: Family
    spec: DecoderSpec
    variables: Mapping[str, Variable]
    tensors: Mapping[str, Tensor]

    @property
    def label(self) -> str:
        return f"Hugging Face folder {self.path}"

    def dtype(self) -> np.dtype[Any]:
        """Returns the dtype that most of the stored parameters have."""
        counts: dict[np.dtype[Any], int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + int(np.prod(tensor.shape))
        return max(counts, key=lambda dtype: counts[dtype])


def is_folder(directory: epath.PathLike) -> bool:
    """Returns True if a directory has a config.json that names an architecture or a model type.

    Raises:
      CheckpointReadError: storage does not answer, or refuses access.
    """
    config = read_json(directory, CONFIG)
    return config is not None and ("architectures" in config or "model_type" in config)


def open_folder(directory: epath.PathLike) -> HfFolder:
    """Opens a Hugging Face folder: reads config.json and the headers of the safetensors files.

    Raises:
      HfNotFoundError: the directory has no config.json, or no safetensors files.
      HfDamagedError: a file is malformed or cut off.
      HfMismatchError: tensors are missing or surplus, or have the wrong shape or dtype.
      HfError: the architecture or an option in config.json is not supported.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    path = os.fspath(directory)
    config, family, spec = _described(path)
    tensors = {name: tensor for file in _files(path) for name, tensor in read_header(os.path.join(path, file)).items()}
    _refuse_beyond_files(path, config, spec)
    tensors = text_part.tensors_of_text(tensors, path, fused_experts=family.fused_experts)
    tensors = quantised.combined(tensors, config)
    names = family.names(spec)
    base = names.base
    if not any(name.startswith(base) for name in tensors):
        # The model was saved without its output head, so its names lack the prefix, as in OpenAI's folder of GPT-2.
        tensors = {name if name == _TIED else base + name: tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not _BUFFERS.search(name)}
    if spec.tied_embeddings:
        tensors.pop(_TIED, None)  # transformers does not read it either
    # transformers keeps the number of multi-token prediction layers in config.json, even though it doesn't save them.
    has_further = any(name.startswith(f"{base}layers.{spec.num_layers}.") for name in tensors)
    further = min(config.get(MTP_LAYERS) or 0, len(tensors)) if has_further and names.in_mtp_layer else 0
    whole = dataclasses.replace(spec, mtp_layers=further)
    variables = tensor_names.variables_of(whole, family)
    copies = tensor_names.mtp_copies_of(whole, family)
    if any(name.startswith(family.not_read) for name in tensors):
        logging.warning(
            "%s: layers that predict further tokens are not read: %s*. transformers does not read them either",
            path,
            "*, ".join(family.not_read),
        )
    tensors = {
        name: tensor for name, tensor in tensors.items() if name not in copies and not name.startswith(family.not_read)
    }
    folder = HfFolder(path, config, family, spec, variables, tensors)
    head = f"{folder.label} does not hold the {family.architecture} that its {CONFIG} describes:"
    fix = f"Fix: copy the folder again, or correct {CONFIG}."
    check_tensors(variables, tensors, _FLOATS, CONFIG, head=head, fix=fix)
    return folder


def read_model(directory: epath.PathLike) -> tuple[dict[str, Any], Family, DecoderSpec]:
    """Reads a folder's config.json. Returns its content, and the architecture and the model that it describes.

    Raises:
      HfNotFoundError: config.json is missing.
      HfDamagedError: config.json is malformed.
      HfMismatchError: the folder has weight files, and config.json describes a larger model than they can hold.
      HfError: the architecture or an option is not supported, or the model has too many layers or experts.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    config, family, spec = _described(os.fspath(directory))
    _refuse_beyond_files(os.fspath(directory), config, spec)
    return config, family, spec


def _described(path: str) -> tuple[dict[str, Any], Family, DecoderSpec]:
    config, where = read_config(path)
    return config, config_json.family_of(config, where), config_json.spec_of(config, where)


def read_config(directory: epath.PathLike) -> tuple[dict[str, Any], str]:
    """Returns the settings in a folder's config.json (see `text_part.config_of_text`), and their location for messages.

    Raises:
      HfNotFoundError: config.json is missing.
      HfDamagedError: config.json is malformed.
      HfError: config.json describes a multimodal model, and lacks the settings of its text model.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    where = os.path.join(os.fspath(directory), CONFIG)
    config = read_json(directory, CONFIG)
    if config is None:
        raise HfNotFoundError(f"{where} is missing; give a Hugging Face folder, which has one")
    return text_part.config_of_text(config, where)


def _refuse_beyond_files(path: str, config: Mapping[str, Any], spec: DecoderSpec) -> None:
    """Raises HfMismatchError if config.json describes more parameters than the folder's weight files can hold.

    Called before any work whose cost grows with the number of layers.
    """

    def weights() -> int:
        found = [os.path.join(path, name) for name in reading.names(path) if name.endswith(SUFFIX)]
        return sum(reading.for_each(found, reading.size))

    held, described = step_files.read(f"listing {path}", weights), _values_at_least(spec)
    values_of_byte = 1 if config.get("quantization_config") is None else 2
    if held and described > held * values_of_byte:
        raise HfMismatchError(
            f"{os.path.join(path, CONFIG)} describes a model of {described:,} values or more, and the {SUFFIX} files beside it "
            f"have {held:,} bytes. Copy the folder again, or correct {CONFIG}."
        )


def _values_at_least(spec: DecoderSpec) -> int:
    """Returns a lower bound on the number of parameters. It counts the embedding and the largest weights of each layer."""
    counts = collections.Counter(spec.layer_kinds)
    delta = spec.delta or DeltaSpec()
    linear = spec.model_dims * delta.num_heads * 2 * (delta.key_dims + delta.values_per_head * delta.value_dims)
    attention = counts.pop("linear", 0) * linear
    for kind, count in counts.items():
        query, output = (
            spec.query_input_dims * spec.heads_of(kind).head_dims,
            spec.model_dims * spec.value_dims_of(kind),
        )
        attention += count * spec.num_heads * (query + output)
    of_experts = 0 if spec.moe is None else spec.moe.num_experts * spec.moe.hidden_dims + spec.moe.shared_dims
    sparse = spec.num_layers_with_experts
    widths = (spec.num_layers - sparse) * spec.hidden_dims + sparse * of_experts
    return spec.vocab_size * spec.model_dims + attention + 2 * spec.model_dims * widths


def read_json(directory: epath.PathLike, name: str) -> dict[str, Any] | None:
    """Returns the object in the JSON file `name` of a directory; None if the file doesn't exist.

    Raises:
      HfDamagedError: the content is not JSON, or not an object.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    path = os.path.join(os.fspath(directory), name)
    try:
        content = step_files.read(f"reading {path}", lambda: json_values.content_of(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return json_values.parse_object(content)
    except ValueError as error:
        raise HfDamagedError(f"{path} is not JSON that can be read: {error}") from error


def _files(path: str) -> list[str]:
    names = step_files.read(f"listing {path}", lambda: reading.names(path))
    if SINGLE in names:
        return [SINGLE]  # before the index, as in transformers
    index = read_json(path, INDEX)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise HfDamagedError(f"{os.path.join(path, INDEX)} has no weight_map")
        wanted = sorted(set(map(str, weight_map.values())))
        if missing := [name for name in wanted if name not in names]:
            raise HfDamagedError(f"{path} lacks {listed(missing)}, which {INDEX} lists. Copy the folder again.")
        return wanted
    found = [name for name in names if name.endswith(SUFFIX)]
    if len(found) > 1:
        raise HfDamagedError(f"{path} has {len(found)} safetensors files and no {INDEX}, which lists them")
    if not found:
        hint = ""
        if any(name in names for name in _PICKLED):
            hint = "; it holds pickled weights: save it with transformers' save_pretrained, which writes safetensors"
        raise HfNotFoundError(f"{path} has no {SINGLE} and no {INDEX}{hint}")
    return found


def check_tensors(
    variables: Mapping[str, Variable],
    stored: Mapping[str, Tensor],
    dtypes: Sequence[str],
    described_by: str,
    *,
    head: str,
    fix: str,
) -> None:
    """Checks that the stored tensors are exactly those that a model's variables need.

    Args:
      variables: the variables by path.
      stored: the stored tensors by name.
      dtypes: names of the allowed dtypes.
      described_by: where the model's shapes come from, for the error message, e.g. 'config.json'.
      head, fix: first and last line of the error message.

    Raises:
      HfMismatchError: names, shapes or dtypes differ; the message lists the first differences.
    """
    wanted = {piece.name: piece for variable in variables.values() for piece in variable.pieces}
    missing = [name for name in wanted if name not in stored]
    surplus = [name for name in stored if name not in wanted]
    lines = [f"  missing: {name} {wanted[name].shape}{did_you_mean(name, surplus, otherwise='')}" for name in missing]
    lines += [f"  surplus: {name} {stored[name].shape}" for name in surplus]
    for name, piece in wanted.items():
        found = stored.get(name)
        if found is not None and found.shape != piece.shape:
            lines.append(f"  misshapen: {name}, stored {found.shape}, by {described_by} {piece.shape}")
        if found is not None and found.dtype.name not in dtypes:
            lines.append(f"  dtype: {name} is {found.dtype.name}; {', '.join(dtypes)} are supported")
    if lines:
        raise HfMismatchError("\n".join([head, *mismatch.first_lines(lines), fix]))


def require_agreement(directory: epath.PathLike, spec: DecoderSpec) -> None:
    """Checks that a folder's config.json describes the model `spec`, also in settings that don't change shapes.

    Raises:
      HfMismatchError: the models differ; the message names the fields that differ.
      HfError, CheckpointReadError: see `read_model`.
    """
    _, _, there = read_model(directory)
    differing = config_json.differing_fields(there, spec)
    if differing:
        details = ", ".join(
            f"{name} ({operator.attrgetter(name)(there)!r} there, {operator.attrgetter(name)(spec)!r} here)"
            for name in differing
        )
        raise HfMismatchError(
            f"Hugging Face folder {directory} holds another model: {details}. Build it from the folder: lm.hf.FromFolder"
        )
