"""Writes a state as a Hugging Face folder: tensors in files of bounded size, the configs, the tokenizer's files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
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
from spmd_trainer.interop.hf.safetensors_file import Described, in_file_order, write
from spmd_trainer.interop.hf.tensor_names import FUSED, Piece, Variable
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.sharding.variables import VariableSpec, named_leaves
from spmd_trainer.storage import reading
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
_UNFINISHED = ".writing"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
        there. None: config.json is made from the model, and there is no tokenizer.
      architecture: the model's class in transformers; None: that of `imported_from`, or the first that describes the model.
      max_file_bytes: tensors are written to several files, each of at most so many bytes.

    Raises:
      HfError: the directory is not empty, the dtype is unknown, or no architecture of transformers describes the model.
      HfMismatchError: `imported_from` holds another model.
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
    if path.exists() and any(path.iterdir()):
        raise HfError(f"{path} is not empty; give a new directory")
    specs = {f"mdl_vars/{name}": leaf for name, leaf in named_leaves(job.partitioner.metadata.variables.mdl_vars)}
    config = _config(spec, source, architecture)
    variables = tensor_names.variables_of(spec, FAMILIES[config["architectures"][0]])
    if surplus := sorted(set(specs) - set(variables)):
        raise HfMismatchError(
            f"the model has variables that {config['architectures'][0]} lacks: {', '.join(surplus[:5])}"
        )
    stored = next(iter(specs.values())).dtype if dtype is None else jnp.dtype(dtype)
    config["dtype"] = stored.name
    config.pop("torch_dtype", None)
    return _Plan(config, _files(_tensors(variables, stored), max_file_bytes), specs)


def _config(spec: DecoderSpec, source: epath.Path | None, architecture: str | None) -> dict[str, Any]:
    if source is None:
        return config_json.config_of(spec, architecture)
    config = read_json(source, CONFIG)
    if config is None:
        raise HfError(f"{source} has no {CONFIG}")
    where = os.path.join(os.fspath(source), CONFIG)
    family = config_json.family_of(config, where)
    differing = config_json.differing_fields(config_json.spec_of(config, where), spec)
    if differing or architecture not in (None, family.architecture):
        if architecture is None:
            raise HfMismatchError(
                f"{where} describes another model than the one that is exported: {', '.join(differing)} differ. Export without it"
            )
        made = config_json.config_of(spec, architecture)
        return {**{key: config[key] for key in _TOKENS if key in config}, **made}
    return {**config, "architectures": [family.architecture]}


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
        unfinished = path.parent / f".{path.name}.{os.getpid()}{_UNFINISHED}"
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            if path.exists():
                path.rmdir()  # it was empty when the export began
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    multihost.barrier("the export is written")


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
            _copy_into(content, part, piece)
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


def _copy_into(content: npt.NDArray[Any], part: npt.NDArray[Any], piece: Piece) -> None:
    letters = [letter for group in piece.groups for letter in group]
    view = content.reshape([piece.sizes[letter] for letter in letters])
    if FUSED in letters:
        axis = letters.index(FUSED)
        view = view[(slice(None),) * axis + (piece.part,)]
        letters.remove(FUSED)
    np.copyto(view.transpose([letters.index(letter) for letter in piece.order]), part, casting="unsafe")


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
        generation = {"_from_model_config": True, **{key: plan.config[key] for key in _TOKENS if key in plan.config}}
    _write_json(target / GENERATION_CONFIG, generation)
    if source is not None:
        for name in reading.names(os.fspath(source)):
            if name in TOKENIZER_FILES:
                (target / name).write_bytes(reading.read(os.path.join(os.fspath(source), name)))
    _write_json(target / CONFIG, plan.config)


def _write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
