"""Reads a Pax checkpoint that is one msgpack file: the state's leaves in order, and the state's PyTreeDef as printed by JAX."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import msgpack
import numpy as np
from etils import epath
from flax import serialization

from spmd_trainer.checkpointing import step_files
from spmd_trainer.pax.arrays import Index, PaxArray
from spmd_trainer.pax.errors import PaxDamagedError, PaxMismatchError
from spmd_trainer.storage import reading

if TYPE_CHECKING:
    import numpy.typing as npt

LEAVES, STRUCTURE = "flattened_state", "str_pytree_state"
# The text that JAX prints for a PyTreeDef is Python, except its leaves (*) and objects (<...>). String literals are kept.
_PRINTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|<[^<>]*>|\*""")
_AS_PYTHON = {"*": "leaf", "<": "None"}
_FIELDS = {"TrainState": ("step", "mdl_vars", "opt_states", "extra_state")}


@dataclasses.dataclass(frozen=True)
class FlaxLeaves:
    """The leaves of a msgpack file.

    Attributes:
      leaves: {position: array}, ascending. Positions at which the state had no array are left out.
      paths: the paths of the leaves at all positions, from the printed structure; None if it can't be parsed. In these paths, a
        named tuple's field is identified by its position, not its name.
    """

    leaves: dict[int, npt.NDArray[Any]]
    paths: tuple[str, ...] | None

    def array(self, position: int, path: str) -> PaxArray:
        """Returns the leaf at a position as a PaxArray with the given path."""
        leaf = self.leaves[position]

        def start(index: Index) -> Callable[[], npt.NDArray[Any]]:
            # The leaf is a read-only view of the file. And an index without dimensions would give a scalar.
            return lambda: np.array(leaf[index])

        return PaxArray(path, f"{LEAVES}[{position}]", leaf.shape, leaf.dtype, leaf.shape, None, start)


def open_file(file: epath.Path, label: str) -> FlaxLeaves:
    """Reads a whole msgpack file into memory, as Pax does. Pax writes such a file only if a run has no mesh.

    Raises:
      PaxDamagedError: the file is not a Pax checkpoint, or it is cut short.
    """
    content = step_files.read(f"reading {file}", lambda: reading.read(str(file)))
    try:
        state = serialization.msgpack_restore(content)
        leaves, printed = state[LEAVES], str(state[STRUCTURE])
        # Orbax writes a list, Flax a map with the positions as keys.
        found = leaves if isinstance(leaves, list) else [leaves[str(i)] for i in range(len(leaves))]
        arrays = {i: array for i, leaf in enumerate(found) if (array := _array(i, leaf)) is not None}
    except (
        ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, SyntaxError, RecursionError,
        msgpack.exceptions.UnpackException,
    ) as error:  # fmt: skip
        raise PaxDamagedError(
            f"{label} is damaged (cut short, say), or not a Pax checkpoint: {file} is no whole msgpack file with {LEAVES!r} and "
            f"{STRUCTURE!r} ({type(error).__name__}: {error}). Copy it again."
        ) from error
    paths = structure_paths(printed)
    return FlaxLeaves(arrays, None if paths is None or len(paths) != len(found) else tuple(paths))


def _array(position: int, leaf: object) -> npt.NDArray[Any] | None:
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        array = array.view(jnp.bfloat16) if array.dtype == np.dtype("V2") else array
        if array.dtype.kind in "MmSUO" or array.dtype.type is np.void:
            raise ValueError(f"{LEAVES}[{position}] has the dtype {array.dtype}")
        return array
    if leaf is not None and leaf != {}:
        raise ValueError(f"{LEAVES}[{position}] is no array: {leaf!r:.100}")
    return None


def structure_paths(printed: str) -> list[str] | None:
    """Returns the leaf paths of a PyTreeDef, given the text that JAX prints for it; None if the text can't be parsed.

    The text looks like PyTreeDef(CustomNode(TrainState[()], [*, {'params': {'w': *}}, [], ()])). JAX does not print the field
    names of a named tuple, so the paths contain positions in their place.
    """
    try:
        text = _PRINTED.sub(lambda found: _AS_PYTHON.get(found[0][0], found[0]), printed)
        match ast.parse(text, mode="eval").body:
            case ast.Call(func=ast.Name(id="PyTreeDef"), args=[root]):
                return list(_leaf_paths(root, ""))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    return None


def _leaf_paths(node: ast.expr, path: str) -> Iterator[str]:
    keys: Sequence[Any]
    match node:
        case ast.Name(id="leaf"):
            yield path
            return
        case ast.Constant(value=None):
            return
        case ast.List(elts=children) | ast.Tuple(elts=children):
            keys = range(len(children))
        case ast.Dict(values=children):
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        case ast.Call(
            func=ast.Name(id="CustomNode"),
            args=[ast.Subscript(value=ast.Name(id=kind), slice=data), ast.List(elts=children)],
        ):
            keys = _FIELDS.get(kind, range(len(children)))
            if kind == "NestedMap":
                keys = [part.value for part in ast.walk(data) if isinstance(part, ast.Constant) and part.value]
        case _:
            raise ValueError(f"{ast.unparse(node)} is no node")
    if len(keys) < len(children):
        raise ValueError(f"{path} has {len(children)} children and {len(keys)} keys")
    for key, child in zip(keys, children, strict=False):
        yield from _leaf_paths(child, f"{path}/{key}" if path else str(key))


def by_structure(flax: FlaxLeaves) -> dict[str, PaxArray]:
    """Returns {path: array}, with paths from the printed structure, or from positions if the structure can't be parsed."""
    paths = {i: flax.paths[i] if flax.paths else f"{LEAVES}/{i}" for i in flax.leaves}
    return {path: flax.array(i, path) for i, path in paths.items()}


def by_position(flax: FlaxLeaves, model: Sequence[str], label: str) -> dict[str, PaxArray]:
    """Returns {model's path: array}, matched by order. If the structure contradicts the model, calls `by_structure` instead.

    Args:
      flax: the leaves of the msgpack file.
      model: the paths of the model's state, in the order of its leaves.
      label: the checkpoint's name in error messages.

    Raises:
      PaxMismatchError: the file's number of leaves doesn't fit the model, and the file's structure can't be parsed.
    """
    present = list(flax.leaves)
    # A checkpoint for inference has the step and the model variables only.
    inference = [path for path in model if not path.startswith(("opt_states/", "extra_state/"))]
    paths = next((list(p) for p in (model, inference) if len(p) == len(present)), None)
    if flax.paths is not None:
        printed = [flax.paths[position] for position in present]
        if paths is None or not all(map(_may_be_same, printed, paths)):
            return by_structure(flax)
    if paths is None:
        raise PaxMismatchError(
            f"{label} does not fit the model: it holds {len(present)} arrays by position, and the model's state has {len(model)} "
            f"({len(inference)} without optimizer states)"
        )
    return {path: flax.array(i, path) for i, path in zip(present, paths, strict=True)}


def _may_be_same(printed: str, path: str) -> bool:
    """Returns True if `printed`, a path with positions in place of named tuples' field names, can be the model's `path`."""
    ours, theirs = path.split("/"), printed.split("/")
    return len(ours) == len(theirs) and all(a == b or b.isdigit() for a, b in zip(ours, theirs, strict=True))
