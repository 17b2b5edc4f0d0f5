"""Writes folders of safetensors files: checks the directory, gathers variables, and renames the finished folder.

Process 0 writes; the other processes take part in gathering the variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import jax
import numpy as np
import numpy.typing as npt
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer import multihost, storage
from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.placing import copy_in_range
from spmd_trainer.hf.safetensors_file import Described, in_file_order, write
from spmd_trainer.hf.tensor_names import Piece, Variable
from spmd_trainer.sharding.variables import VariableSpec, named_leaves
from spmd_trainer.storage import access
from spmd_trainer.train_states import TrainState

_UNFINISHED = ".writing"


@dataclasses.dataclass(frozen=True)
class ToWrite:
    """A tensor to write to a safetensors file.

    Attributes:
      described: name, dtype and shape of the tensor.
      parts: the variables that the tensor holds, each with the `Piece` that maps it to the tensor.
    """

    described: Described
    parts: tuple[tuple[Variable, Piece], ...]


def tensors_of(
    variables: Mapping[str, Variable], dtype: np.dtype[Any], copies: Mapping[str, str] | None = None
) -> list[ToWrite]:
    """Returns the tensors to write, in the order of the variables. A tensor that fuses several variables has several parts.

    Args:
      variables: the variables by path.
      dtype: dtype of the tensors. Non-trainable variables are always written in float32, because the differences between
        the experts' biases are too small for bfloat16.
      copies: {second name: name} of tensors to write twice. Ignored for tensors that are not written, such as tied ones.
    """
    parts: dict[str, list[tuple[Variable, Piece]]] = {}
    for variable in variables.values():
        for piece in variable.pieces:
            parts.setdefault(piece.name, []).append((variable, piece))
    parts |= {copy: parts[name] for copy, name in (copies or {}).items() if name in parts}
    return [
        ToWrite(Described(name, dtype if found[0][0].learns else np.dtype(np.float32), found[0][1].shape), tuple(found))
        for name, found in parts.items()
    ]


def check_directory(name: str, path: epath.Path) -> None:
    """Checks that a directory is writable, and missing or empty. Temporary folders that a killed export left are ignored.

    Args:
      name: name of the setting that gives the directory, for messages.
      path: the directory.

    Raises:
      UserError: the directory can't be read or written.
      HfError: the directory is not empty.
    """
    access.check_readable(name, path)
    access.check_writable(name, path)
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    if not all(name.startswith(".") and name.endswith(_UNFINISHED) for name in names):
        raise HfError(f"{name}={path} is not empty; give a new directory")


@contextlib.contextmanager
def atomically(path: epath.Path, *, last: str) -> Iterator[epath.Path | None]:
    """Context manager for writing a folder. Yields the folder to write to on process 0, and None on other processes.

    A local folder has a temporary name until the `with` block ends. In an object store, files are written to `path` directly.

    Args:
      path: the final path of the folder.
      last: name of the file by which readers recognize a folder; it is moved to `path` last.
    """
    if jax.process_index() != 0:
        yield None
        multihost.barrier("the export is written")
        return
    if storage.is_remote(path):
        yield path
    else:
        with _under_another_name(epath.Path(os.path.realpath(path)), last) as unfinished:
            yield unfinished
    multihost.barrier("the export is written")


@contextlib.contextmanager
def _under_another_name(path: epath.Path, last: str) -> Iterator[epath.Path]:
    """Yields a temporary folder. Its content is moved to `path` at the end, or deleted if the `with` block fails.

    Args:
      path: the final path, with symbolic links resolved. An empty directory there is not replaced: it may be a mount point.
      last: name of the file to move last.
    """
    exists = path.exists()
    parent = path if exists else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = epath.Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_UNFINISHED, dir=parent))
    try:
        # mkdtemp makes the folder readable by the owner alone.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(unfinished, 0o777 & ~umask)
        yield unfinished
        if exists:
            for name in sorted(os.listdir(unfinished), key=lambda name: name == last):
                os.replace(unfinished / name, path / name)
            unfinished.rmdir()
        else:
            os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_file(
    target: epath.Path | None,
    name: str,
    tensors: Sequence[ToWrite],
    specs: Mapping[str, VariableSpec],
    state: TrainState,
) -> None:
    """Writes a safetensors file. Called by every process, because all of them take part in gathering the variables.

    Args:
      target: the folder; None on the processes that don't write.
      name: the file's name.
      tensors: the tensors, in any order.
      specs: VariableSpecs of the variables, by path.
      state: the state that holds the variables.
    """
    by_name = {tensor.described.name: tensor for tensor in tensors}
    order = in_file_order([tensor.described for tensor in tensors])
    arrays = _contents([by_name[described.name] for described in order], specs, state)
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
    tensors: list[ToWrite], specs: Mapping[str, VariableSpec], state: TrainState
) -> Iterator[npt.NDArray[Any]]:
    leaves = {f"mdl_vars/{path}": leaf for path, leaf in named_leaves(state.mdl_vars)}
    for tensor in tensors:
        content = np.empty(tensor.described.shape, tensor.described.dtype)
        for variable, piece in tensor.parts:
            part = _logical(leaves[variable.path], specs[variable.path], piece.leading)
            _copy_into(content, part, piece, tensor.described.name)
        yield content


def _logical(array: jax.Array, spec: VariableSpec, leading: tuple[int, ...]) -> npt.NDArray[Any]:
    """Returns `array[leading]` as a host array without padding. Called by every process."""
    part = array
    if leading or not array.is_fully_addressable:
        part = _slicer(array.sharding, len(leading), array.is_fully_addressable)(array, leading)
    return np.asarray(part)[tuple(slice(0, size) for size in spec.logical_shape[len(leading) :])]


@functools.cache
def _slicer(sharding: NamedSharding, depth: int, is_local: bool) -> Callable[..., jax.Array]:
    """Returns a jitted function (array, index) -> array[index], so that only one layer at a time is copied to the host.

    `depth`: length of the index. The result is sharded like the array, or replicated if other processes have shards of it.
    """
    spec = PartitionSpec(*sharding.spec[depth:]) if is_local else PartitionSpec()

    def take(array: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for i in index:
            array = jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
        return array

    return jax.jit(take, out_shardings=NamedSharding(sharding.mesh, spec))


def _copy_into(content: npt.NDArray[Any], part: npt.NDArray[Any], piece: Piece, name: str) -> None:
    begin, end = piece.rows(0, piece.sizes[piece.outermost])
    copy_in_range(piece.of_rows(content[begin:end]), part, name)


def write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
