"""Shapes and dtypes of batches, and padding with rows of weight 0."""

from __future__ import annotations

from typing import Any

import fiddle as fdl
import jax
import numpy as np
from praxis import base_hyperparams, base_input, pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, first_paragraph
from spmd_trainer.sharding.variables import path_str

# Names of the leaves that hold weights of rows or tokens. A batch needs at least one, to distinguish padding rows from data.
WEIGHT_NAMES = ("weights", "eval_sample_weights", "weight")
# Values of padding rows, by the last part of a leaf's path. Other leaves repeat the batch's first row, because arbitrary
# values could give NaN in a row of weight 0, and 0 * NaN is NaN.
_FILL: dict[str, int] = {**dict.fromkeys(WEIGHT_NAMES, 0), "paddings": 1, "segment_ids": 0, "prompt_index": -1}


def pad_batch(batch: Any, to_size: int) -> Any:
    """Appends rows of weight 0 to a batch. Returns `batch` itself if it already has `to_size` rows.

    Example: a language-model batch of 6 rows padded to 8 gets two rows with `weights` 0, `eval_sample_weights` 0,
    `paddings` 1 and `segment_ids` 0; their `ids` and `labels` are those of row 0.

    Args:
      batch: any pytree of numpy arrays [B, ...] with the same number of rows B.
      to_size: number of rows of the result, at least B.

    Raises:
      ValueError: the leaves have different numbers of rows or no rows; `to_size` is below B; or no leaf is a weight, so
        that padding could not be distinguished from data.
    """
    leaves = [(path_str(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]]
    size = _batch_size(leaves)
    if size == to_size:
        return batch
    if size > to_size:
        raise ValueError(f"a batch of {size} rows cannot be padded to {to_size}; pad to {size} or more")
    if not any(path.rpartition("/")[2] in WEIGHT_NAMES for path, _ in leaves):
        raise ValueError(
            f"padding rows in this batch could not be told from data: it has {', '.join(path for path, _ in leaves)}. "
            "Add `eval_sample_weights`, float32 [B], 1 for each row that counts"
        )
    padded = [_pad_rows(path.rpartition("/")[2], leaf, to_size - size) for path, leaf in leaves]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(batch), padded)


def blank_rows(batch: NestedMap, real: np.ndarray) -> NestedMap:
    """Turns the rows of a batch that hold no data into padding rows, and returns the new batch.

    The weights and segment ids of a padding row are 0, its paddings 1 and its `prompt_index` -1; its other values stay as
    they were. If the batch has no `eval_sample_weights` float32 [B], they are added.

    Args:
      batch: numpy arrays [B, ...], where B is the number of rows.
      real: bool [B], True for each row that holds data.
    """
    batch = NestedMap(batch)
    if "eval_sample_weights" not in batch:
        batch.eval_sample_weights = np.ones(len(real), np.float32)
    if real.all():
        return batch

    def blank(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        name = path_str(path).rpartition("/")[2]
        if name not in _FILL:
            return leaf
        mask = real.reshape(-1, *[1] * (np.ndim(leaf) - 1))
        return np.where(mask, leaf, np.asarray(_FILL[name], np.asarray(leaf).dtype))

    return jax.tree_util.tree_map_with_path(blank, batch)


def _batch_size(leaves: list[tuple[str, np.ndarray]]) -> int:
    sizes = {path: leaf.shape[0] if leaf.ndim else None for path, leaf in leaves}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(
            "every array of a batch has the same first dimension; here they are "
            + ", ".join(f"{path}: {'a scalar' if size is None else size}" for path, size in sizes.items())
        )
    size = leaves[0][1].shape[0]
    if size == 0:
        raise ValueError("a batch of 0 rows cannot be padded: there is no row to take shapes and values from")
    return size


def _pad_rows(name: str, leaf: np.ndarray, rows: int) -> np.ndarray:
    shape = (rows, *leaf.shape[1:])
    if name in _FILL:
        return np.concatenate([leaf, np.full(shape, _FILL[name], leaf.dtype)])
    return np.concatenate([leaf, np.broadcast_to(leaf[:1], shape)])


def cut_rows(batch: NestedMap, length: int) -> NestedMap:
    """Cuts each row of a language-model batch into T / length shorter rows, where T is the number of tokens per row.

    No token is lost. Attention does not cross a cut. A segment that a cut divides continues in the next row, with positions
    from 0. New rows that hold only padding get `eval_sample_weights` 0.

    Args:
      batch: numpy arrays as in `lm_input_specs`, with T tokens per row.
      length: tokens per new row, a divisor of T.
    """
    parts = batch.ids.shape[1] // length
    cut = NestedMap({name: x.reshape(-1, length) if x.ndim == 2 else np.repeat(x, parts) for name, x in batch.items()})
    begun = cut.segment_ids == cut.segment_ids[:, :1]
    cut.segment_pos = cut.segment_pos - np.where(begun, cut.segment_pos[:, :1], 0)
    cut.eval_sample_weights = cut.eval_sample_weights * (cut.paddings.min(axis=1) < 1)
    return cut


def lm_input_specs(batch_size: int, seq_len: int) -> NestedMap:
    """Returns the shapes and dtypes of a batch for praxis' `LanguageModel`, as jax.ShapeDtypeStruct.

    `ids`, `labels`, `segment_ids`, `segment_pos` are int32 [batch_size, seq_len]; `paddings`, `weights` float32
    [batch_size, seq_len]; `eval_sample_weights` float32 [batch_size]. `batch_size` counts the rows of one process.
    """
    tokens = jax.ShapeDtypeStruct((batch_size, seq_len), np.int32)
    floats = jax.ShapeDtypeStruct((batch_size, seq_len), np.float32)
    return NestedMap(
        ids=tokens,
        labels=tokens,
        paddings=floats,
        weights=floats,
        segment_ids=tokens,
        segment_pos=tokens,
        eval_sample_weights=jax.ShapeDtypeStruct((batch_size,), np.float32),
    )


def dataset_input_specs(dataset: Any) -> NestedMap:
    """Returns the shapes and dtypes of one process's batches, before rows are added by padding, as jax.ShapeDtypeStruct.

    Calls `input_specs()` of the input, or of the input inside a `LingvoInputAdaptor`. If `dataset` is the config of an
    input without that method, builds a temporary instance and reads one batch.

    Args:
      dataset: a `pax_fiddle.Config` of a `BaseInput`, or an input with `input_specs()`.

    Raises:
      UserError: the input rejects its settings or its files.
      ValueError: `dataset` is an input, not a config, and has no `input_specs()`. Reading a batch would lose that batch.
    """
    if isinstance(dataset, fdl.Buildable):
        if fdl.get_callable(dataset) is base_input.LingvoInputAdaptor and hasattr(dataset.input.cls, "input_specs"):
            return dataset.input.cls.input_specs(dataset.input)
        try:
            built = base_hyperparams.instantiate(dataset)
        except ValueError as error:
            raise UserError(first_paragraph(error)) from error
        if hasattr(built, "input_specs"):
            return built.input_specs()
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), built.get_next())
    if hasattr(dataset, "input_specs"):
        return dataset.input_specs()
    raise ValueError(
        f"{type(dataset).__name__} has no input_specs(), and reading a batch to measure it would lose the batch; "
        "pass its config instead"
    )


class DatasetSpecsProvider(base_input.BaseInputSpecsProvider):
    """Provides the shapes and dtypes of a dataset's batches, as `dataset_input_specs` returns them.

    Attributes:
      input_p: the dataset's config.
    """

    input_p: pax_fiddle.Config[base_input.BaseInput] | None = None

    def get_input_specs(self) -> NestedMap:
        """Returns the shapes and dtypes of a batch. Raises ValueError if `input_p` is not set."""
        if self.input_p is None:
            raise ValueError("DatasetSpecsProvider has no input_p; set it to the config of the training dataset")
        return dataset_input_specs(self.input_p)
