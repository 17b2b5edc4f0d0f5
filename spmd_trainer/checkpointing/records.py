"""The JSON record beside a checkpoint's arrays: variables with logical shapes, mesh, versions, input position, metadata.

The record shows whether a checkpoint fits a model before any array is read, and makes the checkpoint readable without the
code that wrote it.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import json
import platform
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmd_trainer.checkpointing import step_files
from spmd_trainer.checkpointing.errors import CheckpointError, DamagedCheckpointError
from spmd_trainer.errors.installation import installed_version
from spmd_trainer.storage import json_values

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState

# Format 1 has no `input_states`: every process resumed from the position of process 0. In formats 1 and 2 arrays are stored
# with padding, in one flat dictionary {path: array}.
FORMAT = 3
READABLE_FORMATS = (1, 2, 3)
RECORD_ITEM = "record"
RECORD_FILE = "record.json"
_BYTES_KEY = "__bytes__"

Keys: TypeAlias = tuple[str | int, ...]


class VariableEntry(TypedDict):
    """A variable in a checkpoint's record: logical shape, dtype, PartitionSpec; in formats 1 and 2 also the stored shape."""

    shape: list[int]
    dtype: str
    padded_shape: NotRequired[list[int]]
    spec: str


class MeshEntry(TypedDict):
    """The mesh in a checkpoint's record: {axis name: size}, how many devices and processes, and JAX's platform name."""

    axes: dict[str, int]
    devices: int
    processes: int
    platform: str


class InputStatesEntry(TypedDict):
    """Input positions in a checkpoint's record: how many processes saved one, and whether all were the same."""

    processes: int
    same: bool


class Record(TypedDict):
    """The JSON record of a checkpoint.

    Attributes:
      format: `FORMAT` of the trainer that wrote the record.
      step: the number of training updates that led to the state.
      saved_at: the time in UTC, e.g. '2026-01-31T12:00:00+00:00'.
      mesh: the mesh that the state was on.
      versions: {package: version}.
      variables: {path: its logical shape, dtype and spec}; paths are written `layers/0/attn/kernel`.
      input_state: the position in the training input, as process 0 gave it to `Checkpointer.save`.
      input_states: how many processes saved a position, and whether it is the same on all of them.
      metadata: the caller's own entries, as they were given to `Checkpointer.save`.
    """

    format: int
    step: int
    saved_at: str
    mesh: MeshEntry
    versions: dict[str, str]
    variables: dict[str, VariableEntry]
    input_state: dict[str, Any] | None
    input_states: NotRequired[InputStatesEntry]
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SavedVariable:
    """A variable as a checkpoint stores it.

    Attributes:
      shape: the logical shape.
      dtype: the dtype's name, e.g. 'bfloat16', or 'key<fry>' for a PRNG key.
      stored_shape: the shape of the stored array, which has padding in old checkpoints.
      spec: the variable's PartitionSpec when it was saved, as text.
      keys: the keys that lead to the variable in the stored tree; an integer is an index into a list.
    """

    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    spec: str
    keys: Keys = ()

    def to_json(self) -> VariableEntry:
        """Returns the variable's entry in a record."""
        return {"shape": list(self.shape), "dtype": self.dtype, "spec": self.spec}

    @classmethod
    def from_json(cls, path: str, entry: VariableEntry, version: int) -> SavedVariable:
        """Returns the variable at `path` from its entry in a record. `version` is the record's format."""
        stored_shape = entry["shape"] if version >= 3 else entry["padded_shape"]
        keys = stored_keys(path) if version >= 3 else (path,)
        logical, stored = (json_values.shape(sizes, f"{path}.shape") for sizes in (entry["shape"], stored_shape))
        return cls(logical, entry["dtype"], stored, entry["spec"], keys)

    @classmethod
    def from_spec(cls, spec: VariableSpec) -> SavedVariable:
        """Returns the SavedVariable that a new checkpoint would have for a variable with this spec."""
        shape = tuple(spec.logical_shape)
        return cls(shape, dtype_name(spec.dtype), shape, str(spec.spec), stored_keys(spec.path))


def stored_keys(path: str) -> tuple[str, ...]:
    """Returns the keys that lead to a variable in the stored tree, e.g. ('layers', '0', 'kernel') for 'layers/0/kernel'."""
    return tuple(path.split("/"))


def check_stored_keys(paths: Iterable[str]) -> None:
    """Raises an error for paths that would collide in a stored tree, where Orbax joins keys by dots.

    Raises:
      CheckpointError: two paths would name one array, or a variable's path is also the parent of another variable's path.
    """
    by_name: dict[str, str] = {}
    for path in paths:
        other = by_name.setdefault(path.replace("/", "."), path)
        if other != path:
            raise CheckpointError(
                f"{other!r} and {path!r} would be one array in a checkpoint, where keys are joined by dots; rename one"
            )
    every = set(by_name.values())
    for path in every:
        keys = path.split("/")
        for above in ("/".join(keys[:i]) for i in range(1, len(keys))):
            if above in every:
                raise CheckpointError(f"{above!r} is a variable, and so is {path!r} below it; rename one")


def dtype_name(dtype: DTypeLike) -> str:
    """Returns 'float32', 'bfloat16', 'key<fry>', ... for a dtype, a scalar type or a name."""
    return str(dtype) if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name


def by_path(variables: TrainState) -> dict[str, VariableSpec]:
    """Returns {path: VariableSpec} in the tree's order.

    Raises:
      CheckpointError: two variables have the same path, or a leaf is not a VariableSpec.
    """
    result: dict[str, VariableSpec] = {}
    for spec in jax.tree.leaves(variables):
        if not hasattr(spec, "logical_shape"):
            raise CheckpointError(
                f"variables must hold VariableSpecs only, but holds a {type(spec).__name__}: {spec!r:.200}"
            )
        if spec.path in result:
            raise CheckpointError(f"Two variables have the path {spec.path!r}: {result[spec.path]} and {spec}.")
        result[spec.path] = spec
    return result


def make(
    step: int,
    state: TrainState,
    variables: Mapping[str, VariableSpec],
    input_state: dict[str, Any] | None,
    metadata: Mapping[str, object],
    *,
    same_input_state: bool = True,
) -> Record:
    """Returns the JSON record of a state, for its checkpoint.

    Args:
      step: the number of training updates that led to the state.
      state: the state; only its mesh is used.
      variables: {path: VariableSpec}.
      input_state: the position in the training input, as `to_json` returns it.
      metadata: the caller's own entries, e.g. the resolved config. Values that JSON cannot hold are written as their repr.
      same_input_state: whether all processes have this position.

    Raises:
      CheckpointError: paths would collide in the checkpoint, see `check_stored_keys`.
    """
    check_stored_keys(variables)
    return {
        "format": FORMAT,
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mesh": _describe_mesh(state),
        "versions": _versions(),
        "variables": {path: SavedVariable.from_spec(spec).to_json() for path, spec in variables.items()},
        "input_state": input_state,
        "input_states": {"processes": jax.process_count(), "same": same_input_state},
        "metadata": json.loads(json.dumps(dict(metadata), default=repr)),
    }


def to_json(input_state: Mapping[str, object] | None) -> dict[str, Any] | None:
    """Encodes the position in an input as JSON values.

    Args:
      input_state: the position: JSON values, bytes and NumPy values.

    Raises:
      CheckpointError: the position holds a value that could not be restored unchanged.
    """
    try:
        # Parsed by the function that restores it, so that what is saved can be restored.
        position: dict[str, Any] | None = json_values.parse(json.dumps(input_state, default=_to_json), finite=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise CheckpointError(
            f"The input's position cannot be saved: {e}. It must consist of plain numbers, strings, bytes, lists and dicts."
        ) from e
    return position


def from_json(text: bytes) -> Any:
    """Parses a JSON text, and decodes the bytes values that `to_json` encoded.

    Raises:
      ValueError: the text is malformed.
    """
    return _from_json(json_values.parse(text, finite=False))


def read(step_dir: epath.Path, step: int) -> Record:
    """Reads the JSON record of a checkpoint.

    Raises:
      DamagedCheckpointError: the record is missing, malformed, in an unknown format, or of a different step.
      CheckpointNotFoundError: there is no such step, or it has been deleted.
    """
    name = f"{RECORD_ITEM}/{RECORD_FILE}"
    path = step_dir / name
    try:
        text = step_files.read_file(step_dir, name, json_values.content_of)
    except step_files.MissingFileError as e:
        raise DamagedCheckpointError(f"Checkpoint step {step}: {path} {e.problem}.") from e
    try:
        record: Record = from_json(text)
        version, saved_step = record["format"], record["step"]
        if version in READABLE_FORMATS:
            _check_types(record)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedCheckpointError(f"Checkpoint step {step}: {path} is malformed ({type(e).__name__}: {e}).") from e
    if version not in READABLE_FORMATS:
        readable = " and ".join(map(str, READABLE_FORMATS))
        raise DamagedCheckpointError(
            f"Checkpoint step {step}: {path} has format {version!r}; this trainer reads formats {readable}."
        )
    if saved_step != step:
        raise DamagedCheckpointError(f"Checkpoint step {step}: {path} belongs to step {saved_step}.")
    return record


def _check_types(record: Record) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError if a field that a restore reads is missing or invalid."""
    saved_variables(record)
    if record["format"] > 1:
        json_values.integer(record["input_states"]["processes"], "input_states.processes", least=1)
        if not isinstance(record["input_states"]["same"], bool):
            raise TypeError("input_states.same must be true or false")
    if not isinstance(record["metadata"], dict) or not isinstance(record["input_state"], dict | None):
        raise TypeError("metadata and input_state must be dictionaries")


def saved_variables(record: Record) -> dict[str, SavedVariable]:
    """Returns {path: SavedVariable} of a checkpoint's record."""
    version = record["format"]
    return {path: SavedVariable.from_json(path, entry, version) for path, entry in record["variables"].items()}


def _describe_mesh(state: TrainState) -> MeshEntry:
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in jax.tree.leaves(state))
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return {
        "axes": {str(name): int(size) for name, size in mesh.shape.items()} if mesh is not None else {},
        "devices": mesh.size if mesh is not None else 1,
        "processes": jax.process_count(),
        "platform": jax.default_backend(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("spmd-trainer", "jax", "orbax-checkpoint", "praxis"):
        versions[name] = installed_version(name) or "not installed as a package"
    return versions


def _to_json(value: object) -> object:
    if isinstance(value, bytes):
        return {_BYTES_KEY: base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.100} is not a JSON value")


def _from_json(value: Any) -> Any:
    """Decodes the bytes values in a JSON value that `_to_json` encoded."""
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES_KEY}:
        return base64.b64decode(value[_BYTES_KEY])
    return {key: _from_json(entry) for key, entry in value.items()}
