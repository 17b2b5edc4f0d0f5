"""Writes a train state as a Hugging Face folder: tensor files of limited size, the configs and the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from spmd_trainer import storage
from spmd_trainer.checkpointing.agreement import agreed
from spmd_trainer.decoder.lora import is_adapter
from spmd_trainer.errors import did_you_mean
from spmd_trainer.hf import config_json, tensor_names, writing
from spmd_trainer.hf.errors import HfError, HfMismatchError
from spmd_trainer.hf.experiment import Job, spec_of_task
from spmd_trainer.hf.families import FAMILIES
from spmd_trainer.hf.families.family import MTP_LAYERS, ROOT
from spmd_trainer.hf.folder import CONFIG, GENERATION_CONFIG, INDEX, SINGLE, read_config, read_json
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.sharding.variables import VariableSpec, named_leaves
from spmd_trainer.storage import reading
from spmd_trainer.train_states import TrainState

# transformers' own limit. A larger tensor gets a separate file.
MAX_FILE_BYTES = 5 * 10**9
DTYPES = ("float32", "bfloat16", "float16")
# Names of tokenizer files, in current and older formats.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# Folder of further chat templates, e.g. for tools and retrieval.
TEMPLATES = "additional_chat_templates"


def export(
    state: TrainState,
    job: Job,
    directory: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    imported_from: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    eos_id: int | None = None,
    architecture: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the variables of a state as a folder that transformers can open. Called by every process; process 0 writes.

    The folder gets its final name once it is complete. In an object store, config.json is written last.

    Args:
      state: a state on the job's mesh, with or without optimizer states. Adapters are not written; to merge them first, see
        `LoraModel.merged`.
      job: the job; its model must be a DecoderLanguageModel.
      directory: the folder to write; it must be missing or empty.
      dtype: 'float32', 'bfloat16' or 'float16'; None: the dtype of the variables.
      imported_from: the Hugging Face folder that the model came from. Its config.json, generation_config.json and tokenizer
        are copied. If the model's settings have changed since, config.json is made from the model instead, and only the
        token ids are copied to it. None: config.json is made from the model.
      tokenizer: the tokenizer to copy: a folder, a tokenizer.json or a SentencePiece file; ignored with `imported_from`.
      eos_id: id of the end-of-text token, for config.json; ignored with `imported_from`.
      architecture: the model's class in transformers; None: the class in `imported_from` if it describes the model, or else
        the first that does.
      max_file_bytes: maximum size of a tensor file. A larger tensor gets a separate file.

    Raises:
      UserError: the directory can't be written.
      HfError: the directory is not empty, the dtype is unknown or too narrow, or no transformers architecture describes
        the model.
      HfMismatchError: `imported_from` has a different vocabulary size.
      OSError: the folder can't be written.
    """
    path: epath.Path = storage.directory("export_dir", directory)
    source = None if imported_from is None else storage.directory("imported_from", imported_from)
    config, files, specs = agreed(lambda: _plan(state, job, path, dtype, source, architecture, max_file_bytes))
    if source is None and eos_id is not None:
        config["eos_token_id"] = eos_id
    with writing.atomically(path, last=CONFIG) as target:
        for name, tensors in files.items():
            writing.write_file(target, name, tensors, specs, state)
        if target is not None:
            _write_rest(target, config, files, source or tokenizer)
    tensors_text = count_text(sum(map(len, files.values())), "tensor")
    logging.info("wrote %s in %s to %s", tensors_text, count_text(len(files), "file"), path)


# {file name: the tensors in the file}
_Files: TypeAlias = dict[str, list[writing.ToWrite]]


def _plan(
    state: TrainState,
    job: Job,
    path: epath.Path,
    dtype: str | None,
    source: epath.Path | None,
    architecture: str | None,
    max_file_bytes: int,
) -> tuple[dict[str, Any], _Files, Mapping[str, VariableSpec]]:
    """Makes all checks before anything is written. Returns config.json's content, the tensors by file, and the VariableSpecs."""
    if dtype is not None and dtype not in DTYPES:
        raise HfError(f"dtype={dtype!r}; give one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES, otherwise='')}")
    spec = spec_of_task(job.task)
    if spec is None:
        raise HfError(f"task.model is a {type(job.task.model).__name__}; only a DecoderLanguageModel can be exported")
    if jax.process_index() == 0:
        writing.check_directory("export_dir", path)
    leaves = named_leaves(job.partitioner.metadata.variables.mdl_vars)
    specs = {f"mdl_vars/{name}": leaf for name, leaf in leaves if not is_adapter(name)}
    learning = next(leaf for path, leaf in specs.items() if path.startswith(ROOT))
    stored = learning.dtype if dtype is None else jnp.dtype(dtype)
    config = _config(spec, source, architecture, stored.name)
    family = FAMILIES[config["architectures"][0]]
    variables = tensor_names.variables_of(spec, family)
    if surplus := sorted(set(specs) - set(variables)):
        raise HfMismatchError(
            f"the model has variables that {config['architectures'][0]} lacks: {', '.join(surplus[:5])}"
        )
    tensors = writing.tensors_of(variables, stored, tensor_names.mtp_copies_of(spec, family))
    return config, _files(tensors, max_file_bytes), specs


def _config(spec: DecoderSpec, source: epath.Path | None, architecture: str | None, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json: copied from `source` if that describes the model, else made from the model."""
    dtypes = {"dtype": dtype, "torch_dtype": dtype}  # the spellings of transformers 5 and 4
    if source is None:
        return {**config_json.config_of(spec, architecture), **dtypes}
    config, where = read_config(source)
    family = config_json.family_of(config, where)
    there = config_json.spec_of(config, where)
    differing = config_json.differing_fields(there, spec)
    if "vocab_size" in differing:
        raise HfMismatchError(
            f"{where} describes another model than the exported one: {', '.join(differing)} differ. The tokenizer is "
            "for that vocabulary. Export without it"
        )
    if not differing and architecture in (None, family.architecture):
        if "torch_dtype" not in config:
            del dtypes["torch_dtype"]
        found = {**config, "architectures": [family.architecture], "model_type": family.model_type, **dtypes}
        if MTP_LAYERS in found:
            found[MTP_LAYERS] = spec.mtp_layers
        found.pop("quantization_config", None)  # an export is not quantized
        found.pop("auto_map", None)  # names Python files that are not copied; transformers has the architecture
        if spec.max_positions not in (0, there.max_positions):
            found[family.keys["max_positions"]] = spec.max_positions
        # The new maximum length may have changed the rotary scaling.
        if not config_json.differing_fields(config_json.spec_of(found, where), spec):
            return found
    if differing:
        logging.warning(
            "%s describes another model than the exported one: %s differ. %s is made from the model; the token ids "
            "and the tokenizer are copied",
            where,
            ", ".join(differing),
            CONFIG,
        )
    tokens = {key: config[key] for key in config_json.TOKENS if key in config}
    return {**_made(spec, architecture, family.architecture), **tokens, **dtypes}


def _made(spec: DecoderSpec, asked: str | None, usual: str) -> dict[str, Any]:
    """Makes config.json for the architecture `asked`. If it is None: for `usual` if that fits, else for any that fits."""
    if asked is not None:
        return config_json.config_of(spec, asked)
    try:
        return config_json.config_of(spec, usual)
    except HfError:
        return config_json.config_of(spec)


def _files(tensors: list[writing.ToWrite], max_file_bytes: int) -> _Files:
    groups: list[list[writing.ToWrite]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: _by_layer(tensor.described.name)):
        if groups[-1] and size + tensor.described.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.described.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _by_layer(name: str) -> tuple[int, int, str]:
    """Returns the sort key of a tensor: embeddings come first, then the layers by number, then the rest."""
    number = next((int(part) for part in name.split(".") if part.isdigit()), None)
    is_embedding = any(part in ("embed_tokens", "wte", "wpe") for part in name.split("."))
    return (0 if is_embedding else 2 if number is None else 1, number or 0, name)


def _write_rest(
    target: epath.Path, config: Mapping[str, Any], files: _Files, source: str | os.PathLike[str] | None
) -> None:
    """Writes the index of tensors, the tokenizer and the configs. config.json is last, because it marks a complete folder."""
    if SINGLE not in files:
        weight_map = {tensor.described.name: name for name, tensors in files.items() for tensor in tensors}
        described = [tensor.described for tensors in files.values() for tensor in tensors]
        total = sum(one.nbytes for one in described)
        count = sum(one.nbytes // one.dtype.itemsize for one in described)
        metadata = {"total_parameters": count, "total_size": total}
        writing.write_json(target / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    is_folder = source is not None and reading.is_dir(os.fspath(source))
    generation = read_json(epath.Path(source), GENERATION_CONFIG) if source is not None and is_folder else None
    if generation is None:
        tokens = {key: config[key] for key in config_json.TOKENS if config.get(key) is not None}
        generation = {"_from_model_config": True, **tokens}
    writing.write_json(target / GENERATION_CONFIG, generation)
    if source is not None and is_folder:
        _copy_tokenizer(os.fspath(source), target)
    elif source is not None:
        content = reading.read(os.fspath(source))
        (target / ("tokenizer.json" if content.lstrip().startswith(b"{") else "tokenizer.model")).write_bytes(content)
    writing.write_json(target / CONFIG, config)


def _copy_tokenizer(source: str, target: epath.Path) -> None:
    names = reading.names(source)
    for name in names:
        if name in TOKENIZER_FILES:
            (target / name).write_bytes(reading.read(os.path.join(source, name)))
    templates = os.path.join(source, TEMPLATES)
    if TEMPLATES in names and reading.is_dir(templates):
        if not storage.is_remote(target):
            (target / TEMPLATES).mkdir()
        for name in reading.names(templates):
            if name.endswith(".jinja"):
                (target / TEMPLATES / name).write_bytes(reading.read(os.path.join(templates, name)))
