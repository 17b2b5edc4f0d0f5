"""Opens one step of a Pax checkpoint: finds its version, its kind and its arrays, without reading the arrays' values.

On disk, a variable's name depends on the format. This trainer uses its path, e.g. `opt_states/0/no_prefix/2/m/params/lm/w`.

Pax names its zarr directory `opt_states_0.no_prefix_2.m.params.lm.w`, with dots between keys and underscores before indices.
In an OCDBT database, Orbax joins all keys by dots: `opt_states.0.no_prefix.2.m.params.lm.w`.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from spmd_trainer.checkpointing import step_files
from spmd_trainer.errors import did_you_mean
from spmd_trainer.pax import arrays, flax_file, shapes, steps
from spmd_trainer.pax.arrays import PaxArray
from spmd_trainer.pax.errors import PaxDamagedError, PaxError
from spmd_trainer.sharding.specs import entry_axes
from spmd_trainer.storage import backends, json_values, reading

# All versions of Pax's checkpoint format. From 1.0 on, the version is in `metadata`.
_VERSIONS = (0.0, 1.0, 1.1, 1.2)
_OCDBT_VERSION = 1.2
_OCDBT_MANIFEST = "manifest.ocdbt"
_MSGPACK_FILE = "checkpoint"
# Orbax's record of how each array was sharded.
_SHARDING_FILE = "_sharding"
# Files beside the directories of arrays; they are not arrays.
_FILES = (_MSGPACK_FILE, "commit_success.txt")
_MAX_LISTED = 10
_INDEX = re.compile(r"/(\d+)(?=/|$)")
_TRAILING_INDICES = re.compile(r"^(.*?)((?:_\d+)*)$")
_INDEXED_ROOTS = ("opt_states", "extra_state")
# praxis groups optimizer states: the key 'p#2#i-1' has those of a layer that is repeated twice, 'no_prefix' all other ones.
_NO_PREFIX, _PREFIX = "no_prefix", "p#"


@dataclasses.dataclass(frozen=True)
class Contents:
    """One step of a Pax checkpoint.

    Attributes:
      step: the step number.
      path: the step's directory or file.
      version: the version of Pax's checkpoint format.
      kind: 'zarr', 'ocdbt' or 'msgpack'.
      stored: {name on disk: array}; for a msgpack file, {path in the file's printed structure: array}.
      noted: the paths of the model variables that the metadata lists; empty if it lists none.
      flax: the leaves of a msgpack file; None for the other kinds.
    """

    step: int
    path: epath.Path
    version: float
    kind: str
    stored: Mapping[str, PaxArray]
    noted: tuple[str, ...] = ()
    flax: flax_file.FlaxLeaves | None = None

    @property
    def label(self) -> str:
        """The checkpoint's name in messages."""
        return f"Pax checkpoint {self.path}"

    def by_path(self, model: Sequence[str] = ()) -> dict[str, PaxArray]:
        """Returns {path of a variable: its stored array}.

        Args:
          model: the paths of the model's variables, in the order of the state's leaves. An array whose name on disk matches a
            path of the model gets this path; any other array gets the path that `path_of` derives from its name.

        Raises:
          PaxDamagedError: `model` is empty, and a variable that the metadata lists is not stored.
          PaxMismatchError: a msgpack file's structure can't be parsed, and its number of leaves doesn't fit the model.
        """
        if self.flax is not None and model:
            return shapes.with_logical_shapes(flax_file.by_position(self.flax, model, self.label))
        if not model:
            self._require_noted()
        found: dict[str, PaxArray] = {}
        rest = dict(self.stored)
        for path in model:
            name = next((n for n in (directory_name(path), dotted_name(path)) if n in rest), None)
            if name is not None:
                found[path] = dataclasses.replace(rest.pop(name), path=path)
        for array in rest.values():
            found.setdefault(array.path, array)
        return shapes.with_logical_shapes(found)

    def _require_noted(self) -> None:
        paths = {array.path for array in self.stored.values()}
        missing = [path for path in self.noted if path not in paths]
        if missing:
            near = did_you_mean(missing[0], paths - set(self.noted), otherwise="")
            raise PaxDamagedError(
                f"{self.label} is not complete: its metadata lists {', '.join(missing[:_MAX_LISTED])}, which it does not "
                f"hold{near}"
            )


def open_step(step: int, path: epath.Path) -> Contents:
    """Opens one step of a Pax checkpoint.

    Args:
      step: the step number.
      path: the step's directory, or its msgpack file if the version is 0.0.

    Raises:
      PaxError: the version or the layout is unknown.
      PaxDamagedError: files are missing or malformed.
    """
    label = f"Pax checkpoint {path}"
    # TensorStore opens files itself, and would wait for a named pipe.
    step_files.read(f"looking at {path}", lambda: reading.require_regular_below(path))
    if not step_files.read(f"looking at {path}", path.is_dir):
        return _open_msgpack(step, path, 0.0, path)
    version, logical, state_dir = _parts(path, label)
    present = steps.names_in(state_dir)
    if _OCDBT_MANIFEST in present:
        stored = _described(_open_ocdbt(state_dir, label), _sharding(state_dir, present), logical)
        return Contents(step, path, version, "ocdbt", stored, tuple(logical or ()))
    folders = [name for name in present if not name.startswith((".", "_")) and name not in _FILES]
    if _MSGPACK_FILE in present and not folders:
        return _open_msgpack(step, path, version, state_dir / _MSGPACK_FILE)
    if version >= _OCDBT_VERSION:
        raise PaxDamagedError(
            f"{label} is not complete: version {version} keeps its arrays in an OCDBT database, and {state_dir} has no "
            f"{_OCDBT_MANIFEST}. Copy it again."
        )
    if not folders:
        raise PaxDamagedError(f"{label} is not complete: {state_dir} holds no arrays. Copy it again.")
    base = backends.kvstore(f"{state_dir}/")
    # Orbax's parser of gs:// paths would cut a name at its '#'.
    specs = {name: {**base, "path": f"{base['path']}{name}/"} for name in folders}
    stored = _described(_opened(specs, label), _sharding(state_dir, present), logical)
    return Contents(step, path, version, "zarr", stored, tuple(logical or ()))


def _open_msgpack(step: int, path: epath.Path, version: float, file: epath.Path) -> Contents:
    label = f"Pax checkpoint {path}"
    leaves = flax_file.open_file(file, label)
    return Contents(step, path, version, "msgpack", flax_file.by_structure(leaves), flax=leaves)


def _parts(path: epath.Path, label: str) -> tuple[float, dict[str, tuple[int, ...]] | None, epath.Path]:
    """Returns the version, {path of a model variable: logical shape} (None if not recorded), and the arrays' directory."""
    present = steps.names_in(path)
    if steps.METADATA not in present:
        if steps.STATE in present:
            raise PaxDamagedError(
                f"{label} is not complete: it has {steps.STATE!r} but no {steps.METADATA!r}, which holds the version. Copy it "
                "again."
            )
        return 0.0, None, path
    version, logical = _read_metadata(path)
    if steps.STATE not in present:
        raise PaxDamagedError(f"{label} is not complete: it has no {steps.STATE!r}. Copy it again.")
    return version, logical, path / steps.STATE


def _read_metadata(path: epath.Path) -> tuple[float, dict[str, tuple[int, ...]] | None]:
    """Returns the version, and {path of a model variable: logical shape} (None if the metadata has no shapes)."""
    file = path / steps.METADATA / steps.METADATA
    try:
        metadata = json_values.parse_object(step_files.read(f"reading {file}", lambda: json_values.content_of(file)))
        version = float(metadata["version"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PaxDamagedError(f"Pax checkpoint {path} is not complete: {file} is missing. Copy it again.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PaxDamagedError(
            f"Pax checkpoint {path} is damaged: {file} is malformed ({type(error).__name__}: {error}). Copy it again."
        ) from error
    if version not in _VERSIONS:
        raise PaxError(
            f"Pax checkpoint {path} has version {version}; the versions that this trainer reads are "
            f"{', '.join(map(str, _VERSIONS))}"
        )
    tree = metadata.get("train_state_metadata")
    try:
        return version, None if tree is None else dict(_logical_shapes(tree, ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PaxDamagedError(
            f"Pax checkpoint {path} is damaged: train_state_metadata in {file} is malformed ({type(error).__name__}: {error})"
        ) from error


def _logical_shapes(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if tree.get("_array_metadata_tag"):
        if "unpadded_shape" in tree:
            yield prefix, json_values.shape(tree["unpadded_shape"], f"{prefix}.unpadded_shape")
        return
    for key, value in tree.items():
        if value is not None:
            yield from _logical_shapes(value, f"{prefix}/{key}" if prefix else key)


def _open_ocdbt(state_dir: epath.Path, label: str) -> dict[str, PaxArray]:
    import tensorstore as ts

    base = backends.kvstore(f"{state_dir}/")
    try:
        keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    except (ValueError, OSError) as error:
        raise arrays.read_error(error, _OCDBT_MANIFEST, label) from error
    suffix = f"/{arrays.ZARR_METADATA}"
    found = sorted(key.decode().removesuffix(suffix) for key in keys if key.decode().endswith(suffix))
    if not found:
        raise PaxDamagedError(
            f"{label} is not complete: its OCDBT database {state_dir} holds no arrays. Copy it again."
        )
    return _opened({name: {"driver": "ocdbt", "base": base, "path": f"{name}/"} for name in found}, label)


def _opened(specs: Mapping[str, dict[str, Any]], label: str) -> dict[str, PaxArray]:
    result = {}
    for name, store in arrays.open_tensorstore(specs, label).items():
        shape, chunks = tuple(store.shape), store.chunk_layout.read_chunk.shape
        shards = arrays.shard_counts(chunks, shape) if chunks is not None else None
        dtype: np.dtype[Any] = np.dtype(store.dtype.numpy_dtype)
        start = arrays.reader(store, name, label)
        result[name] = PaxArray(path_of(name), name, shape, dtype, None, shards, start)
    return result


def _sharding(state_dir: epath.Path, in_state: Sequence[str]) -> dict[str, Any]:
    """Returns {array name: Orbax's record of its sharding}; {} if the file `_sharding` is missing or can't be parsed."""
    if _SHARDING_FILE not in in_state:
        return {}
    file = state_dir / _SHARDING_FILE
    try:
        entries = json_values.parse_object(step_files.read(f"reading {file}", lambda: json_values.content_of(file)))
        return {base64.b64decode(name).decode(): json_values.parse(entry) for name, entry in entries.items()}
    except (ValueError, TypeError):
        return {}  # The records only narrow which stored shapes are possible.


def _described(
    stored: Mapping[str, PaxArray], sharding: Mapping[str, Any], logical: Mapping[str, tuple[int, ...]] | None
) -> dict[str, PaxArray]:
    """Returns `stored` with paths and logical shapes from `logical`, and shard counts from Orbax's records in `sharding`."""
    result = {}
    by_name: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for path, shape in (logical or {}).items():
        by_name |= {directory_name(path): (path, shape), dotted_name(path): (path, shape)}
    for name, array in stored.items():
        path, known_shape = by_name.get(name, (array.path, None))
        shards = _noted_shards(sharding.get(name), len(array.stored_shape)) or array.shards
        result[name] = dataclasses.replace(array, path=path, logical_shape=known_shape, shards=shards)
    return result


def _noted_shards(entry: Any, rank: int) -> tuple[int, ...] | None:
    """Returns the number of shards per dimension, from Orbax's record of a NamedSharding; None if the record is invalid."""
    try:
        sizes = dict(zip(entry["axis_names"], entry["shape"], strict=True))
        counts = []
        for axes in entry["partition_spec"]:
            counts.append(math.prod(json_values.integer(sizes[axis], axis, least=1) for axis in entry_axes(axes)))
    except (KeyError, TypeError, ValueError):
        return None
    return None if len(counts) > rank else tuple(counts + [1] * (rank - len(counts)))


def directory_name(path: str) -> str:
    """Returns the name of the zarr directory of the variable with this path."""
    return _INDEX.sub(r"_\1", path).replace("/", ".")


def dotted_name(path: str) -> str:
    """Returns the name of the variable with this path in an OCDBT database: the path's keys joined by dots."""
    return path.replace("/", ".")


def path_of(name: str) -> str:
    """Returns the path of a variable, given its name on disk.

    '_0' in a name may be a list index (`opt_states_0`) or belong to a layer's name (`x_layers_0`). This function takes it for
    an index only after `opt_states`, `extra_state`, `no_prefix` and the like. If the model's paths are known, use
    `directory_name` and `dotted_name` instead.
    """
    keys = name.split(".")
    root = _with_indices(keys[0])
    if root[0] not in _INDEXED_ROOTS:
        return "/".join(keys)
    path, rest = root, keys[1:]
    while rest and rest[0].isdigit():
        path.append(rest.pop(0))
    if rest and (size := _prefix_size(rest)):
        path += _with_indices(".".join(rest[:size]))
        rest = rest[size:]
    return "/".join(path + rest)


def _with_indices(key: str) -> list[str]:
    """Splits 'opt_states_0_2' into 'opt_states', '0' and '2'."""
    match = _TRAILING_INDICES.match(key)
    assert match is not None  # The regex matches every text.
    return [match[1], *match[2].split("_")[1:]]


def _prefix_size(keys: list[str]) -> int:
    """Returns how many of the first keys form a praxis prefix: 0 if there is none, 1 for 'p#2#i-1', 3 for 'p#2.3#i0.i-1'."""
    if keys[0].startswith(_NO_PREFIX):
        return 1
    if not keys[0].startswith(_PREFIX):
        return 0
    for number, key in enumerate(keys):
        if key.removeprefix(_PREFIX if number == 0 else "").count("#"):
            return 2 * number + 1  # there are as many mappings (i0.i-1) as dimensions (2.3)
    return 0
