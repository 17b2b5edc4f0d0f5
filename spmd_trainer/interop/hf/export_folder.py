"""Writes a state as a Hugging Face folder: tensors in files of bounded size, the configs, the tokenizer's files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from absl import logging
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer import multihost, storage
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.errors import did_you_mean
from spmd_trainer.interop.hf import config_json, tensor_names
from spmd_trainer.interop.hf.errors import HfError, HfMismatchError
from spmd_trainer.interop.hf.experiment import Job, spec_of_task
from spmd_trainer.interop.hf.families import FAMILIES
from spmd_trainer.interop.hf.folder import CONFIG, GENERATION_CONFIG, INDEX, SINGLE, read_json
from spmd_trainer.interop.hf.placing import copy_in_range
from spmd_trainer.interop.hf.safetensors_file import Described, in_file_order, write
from spmd_trainer.interop.hf.tensor_names import FUSED, Piece, Variable
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.sharding.variables import VariableSpec, named_leaves
from spmd_trainer.storage import access, reading
from spmd_trainer.train_states import TrainState

# transformers' own limit. A tensor that is larger gets a file of its own.
MAX_FILE_BYTES = 5 * 10**9
DTYPES = ("float32", "bfloat16", "float16")
# What a tokenizer consists of, in the folders of today and of yesterday.
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
# Jinja templates for further purposes, e.g. tools and retrieval.
TEMPLATES = "additional_chat_templates"
_UNFINISHED = ".writing"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to write.

    Attributes:
      described: its name, dtype and shape.
      parts: the variables that it holds, each with the way from the variable to the tensor.
    """

    described: Described
    parts: tuple[tuple[Variable, Piece], ...]


def export(
    state: TrainState,
    job: Job,
    directory: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    imported_from: str | os.PathLike[str] | None = None,
    architecture: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the variables of a state as a folder that transformers opens. Called by every process; process 0 writes.

    The folder appears under its name when it is whole. In an object store, config.json is written last.

    Args:
      state: a state on the job's mesh, with or without optimizer states.
      job: the job; its model is a decoder of `tasks.lm.decoder`.
      directory: the folder; it must not exist, or be empty.
      dtype: 'float32', 'bfloat16' or 'float16'; None: that of the variables.
      imported_from: the folder that the model came from: config.json, generation_config.json and the tokenizer are taken from
        there. If settings of the model were changed since, config.json is made from the model, with the folder's token ids.
        None: config.json is made from the model, and there is no tokenizer.
      architecture: the model's class in transformers; None: that of `imported_from`, or the first that describes the model.
      max_file_bytes: tensors are written to several files, each of at most so many bytes.

    Raises:
      UserError: the directory can't be written.
      HfError: the directory is not empty, the dtype is unknown or too narrow, or no architecture of transformers describes
        the model.
      HfMismatchError: `imported_from` has another vocabulary.
      OSError: the folder can't be written.
    """
    path: epath.Path = storage.directory("export_dir", directory)
    source = None if imported_from is None else storage.directory("imported_from", imported_from)
    plans: list[_Plan] = []
    agreed_problem(lambda: plans.append(_plan(state, job, path, dtype, source, architecture, max_file_bytes)))
    plan = plans[0]
    with _atomically(path) as target:
        for name, tensors in plan.files.items():
            _write_file(target, name, tensors, plan, state)
        if target is not None:
            _write_rest(target, plan, source)
    logging.info("wrote %s tensors in %s files to %s", sum(map(len, plan.files.values())), len(plan.files), path)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What will be written.

    Attributes:
      config: the content of config.json.
      files: the tensors of each file, by its name.
      specs: the layout of each variable, by path.
    """

    config: dict[str, Any]
    files: dict[str, list[_Tensor]]
    specs: Mapping[str, VariableSpec]


def _plan(
    state: TrainState,
    job: Job,
    path: epath.Path,
    dtype: str | None,
    source: epath.Path | None,
    architecture: str | None,
    max_file_bytes: int,
) -> _Plan:
    """Checks what can be checked before anything is written."""
    if dtype is not None and dtype not in DTYPES:
        raise HfError(f"dtype={dtype!r}; give one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES, otherwise='')}")
    spec = spec_of_task(job.task)
    if spec is None:
        raise HfError(f"task.model is a {type(job.task.model).__name__}; only a DecoderLanguageModel can be exported")
    if jax.process_index() == 0:
        check_directory("export_dir", path)
    specs = {f"mdl_vars/{name}": leaf for name, leaf in named_leaves(job.partitioner.metadata.variables.mdl_vars)}
    stored = next(iter(specs.values())).dtype if dtype is None else jnp.dtype(dtype)
    config = _config(spec, source, architecture, stored.name)
    variables = tensor_names.variables_of(spec, FAMILIES[config["architectures"][0]])
    if surplus := sorted(set(specs) - set(variables)):
        raise HfMismatchError(
            f"the model has variables that {config['architectures'][0]} lacks: {', '.join(surplus[:5])}"
        )
    return _Plan(config, _files(_tensors(variables, stored), max_file_bytes), specs)


def check_directory(name: str, path: epath.Path) -> None:
    """Makes sure that a folder can be written to a directory. What a killed export left there does not count.

    Args:
      name: what the directory was given as, for messages.
      path: the directory.

    Raises:
      UserError: it can't be written; says why and what to do.
      HfError: it is not empty.
    """
    access.check_readable(name, path)
    access.check_writable(name, path)
    if path.exists() and not all(_is_unfinished(entry.name) for entry in path.iterdir()):
        raise HfError(f"{name}={path} is not empty; give a new directory")


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(_UNFINISHED)


def _config(spec: DecoderSpec, source: epath.Path | None, architecture: str | None, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json: the source's if it describes the model, otherwise one made from the model."""
    dtypes = {"dtype": dtype, "torch_dtype": dtype}  # the spellings of transformers 5 and 4
    if source is None:
        return {**config_json.config_of(spec, architecture), **dtypes}
    config = read_json(source, CONFIG)
    if config is None:
        raise HfError(f"{source} has no {CONFIG}")
    where = os.path.join(os.fspath(source), CONFIG)
    family = config_json.family_of(config, where)
    there = config_json.spec_of(config, where)
    differing = config_json.differing_fields(there, spec)
    if "vocab_size" in differing:
        raise HfMismatchError(
            f"{where} describes another model than the one that is exported: {', '.join(differing)} differ. The tokenizer is "
            "for that vocabulary. Export without it"
        )
    if not differing and architecture in (None, family.architecture):
        if "torch_dtype" not in config:
            del dtypes["torch_dtype"]
        found = {**config, "architectures": [family.architecture], **dtypes}
        if spec.max_positions not in (0, there.max_positions):
            found[family.keys["max_positions"]] = spec.max_positions
        # The length may also be that of the rotary scaling.
        if not config_json.differing_fields(config_json.spec_of(found, where), spec):
            return found
    if differing:
        logging.warning(
            "%s describes another model than the one that is exported: %s differ. %s is made from the model; the token ids "
            "and the tokenizer are copied",
            where,
            ", ".join(differing),
            CONFIG,
        )
    tokens = {key: config[key] for key in config_json.TOKENS if key in config}
    return {**_made(spec, architecture, family.architecture), **tokens, **dtypes}


def _made(spec: DecoderSpec, asked: str | None, usual: str) -> dict[str, Any]:
    """Returns a config.json made from a model: of the architecture that was asked for, else the usual one, else any."""
    if asked is not None:
        return config_json.config_of(spec, asked)
    try:
        return config_json.config_of(spec, usual)
    except HfError:
        return config_json.config_of(spec)


def _tensors(variables: Mapping[str, Variable], dtype: np.dtype[Any]) -> list[_Tensor]:
    """Returns the tensors in the order of the variables. Fused ones have several parts."""
    parts: dict[str, list[tuple[Variable, Piece]]] = {}
    for variable in variables.values():
        for piece in variable.pieces:
            parts.setdefault(piece.name, []).append((variable, piece))
    return [_Tensor(Described(name, dtype, found[0][1].shape), tuple(found)) for name, found in parts.items()]


def _files(tensors: list[_Tensor], max_file_bytes: int) -> dict[str, list[_Tensor]]:
    """Distributes tensors over files, in the order of the model's layers."""
    groups: list[list[_Tensor]] = [[]]
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
    """Embeddings, then the layers by number, then the rest."""
    number = next((int(part) for part in name.split(".") if part.isdigit()), None)
    is_embedding = any(part in ("embed_tokens", "wte", "wpe") for part in name.split("."))
    return (0 if is_embedding else 2 if number is None else 1, number or 0, name)


@contextlib.contextmanager
def _atomically(path: epath.Path) -> Iterator[epath.Path | None]:
    """Yields the folder to write to on process 0, and None on the others. It gets its name at the end."""
    if jax.process_index() != 0:
        yield None
        multihost.barrier("the export is written")
        return
    if storage.is_remote(path):
        yield path
    else:
        with _under_another_name(epath.Path(os.path.realpath(path))) as unfinished:
            yield unfinished
    multihost.barrier("the export is written")


@contextlib.contextmanager
def _under_another_name(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a new folder whose content is moved to a path at the end, and deleted if the block fails.

    Args:
      path: a directory without links in its name. It is new, or empty: then it may be a mount point, and stays.
    """
    exists = path.exists()
    parent = path if exists else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = epath.Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_UNFINISHED, dir=parent))
    try:
        # mkdtemp lets the owner alone read it.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(unfinished, 0o777 & ~umask)
        yield unfinished
        if exists:
            for name in sorted(os.listdir(unfinished), key=lambda name: name == CONFIG):
                os.replace(unfinished / name, path / name)
            unfinished.rmdir()
        else:
            os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_file(target: epath.Path | None, name: str, tensors: list[_Tensor], plan: _Plan, state: TrainState) -> None:
    """Writes a file. The other processes bring their parts of the arrays."""
    by_name = {tensor.described.name: tensor for tensor in tensors}
    order = in_file_order([tensor.described for tensor in tensors])
    arrays = _contents([by_name[described.name] for described in order], plan.specs, state)
    if target is None:
        for _ in arrays:
            pass
        return
    with (target / name).open("wb") as file:
        write(cast(BinaryIO, file), order, arrays)
        if not storage.is_remote(target):
            file.flush()
            os.fsync(file.fileno())


def _contents(
    tensors: list[_Tensor], specs: Mapping[str, VariableSpec], state: TrainState
) -> Iterator[npt.NDArray[Any]]:
    """Yields the content of each tensor; one is in memory at a time."""
    leaves = {f"mdl_vars/{path}": leaf for path, leaf in named_leaves(state.mdl_vars)}
    for tensor in tensors:
        content = np.empty(tensor.described.shape, tensor.described.dtype)
        for variable, piece in tensor.parts:
            part = _logical(leaves[variable.path], specs[variable.path], piece.leading)
            _copy_into(content, part, piece, tensor.described.name)
        yield content


def _logical(array: jax.Array, spec: VariableSpec, leading: tuple[int, ...]) -> npt.NDArray[Any]:
    """Returns one index of a variable's leading dimensions on the host, without padding. Called by every process."""
    part = array
    if leading or not array.is_fully_addressable:
        part = _slicer(array.sharding, len(leading), array.is_fully_addressable)(array, leading)
    return np.asarray(part)[tuple(slice(0, size) for size in spec.logical_shape[len(leading) :])]


@functools.cache
def _slicer(sharding: NamedSharding, depth: int, is_local: bool) -> Callable[..., jax.Array]:
    """Returns a jitted (array, index) -> array[index], so that one layer at a time leaves the devices.

    The result is split like the array. If other processes hold parts of it, every process gets all of it.
    """
    spec = PartitionSpec(*sharding.spec[depth:]) if is_local else PartitionSpec()

    def take(array: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for i in index:
            array = jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
        return array

    return jax.jit(take, out_shardings=NamedSharding(sharding.mesh, spec))


def _copy_into(content: npt.NDArray[Any], part: npt.NDArray[Any], piece: Piece, name: str) -> None:
    letters = [letter for group in piece.groups for letter in group]
    view = content.reshape([piece.sizes[letter] for letter in letters])
    if FUSED in letters:
        axis = letters.index(FUSED)
        view = view[(slice(None),) * axis + (piece.part,)]
        letters.remove(FUSED)
    copy_in_range(view.transpose([letters.index(letter) for letter in piece.order]), part, name)


def _write_rest(target: epath.Path, plan: _Plan, source: epath.Path | None) -> None:
    """Writes the index, the tokenizer and the configs; config.json, which makes the folder one, comes last."""
    if SINGLE not in plan.files:
        weight_map = {tensor.described.name: name for name, tensors in plan.files.items() for tensor in tensors}
        total = sum(tensor.described.nbytes for tensors in plan.files.values() for tensor in tensors)
        count = total // next(iter(plan.files.values()))[0].described.dtype.itemsize
        metadata = {"total_parameters": count, "total_size": total}
        _write_json(target / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    generation = None if source is None else read_json(source, GENERATION_CONFIG)
    if generation is None:
        tokens = {key: plan.config[key] for key in config_json.TOKENS if plan.config.get(key) is not None}
        generation = {"_from_model_config": True, **tokens}
    _write_json(target / GENERATION_CONFIG, generation)
    if source is not None:
        _copy_tokenizer(os.fspath(source), target)
    _write_json(target / CONFIG, plan.config)


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


def _write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
