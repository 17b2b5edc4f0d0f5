"""Reads optimizer states that were saved in another dtype than the run now keeps them in: float32, bfloat16 or 8 bits."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, PartitionSpec

from spmd_trainer.sharding.variables import VariableSpec, named_shardings
from spmd_trainer.step import opt_state_dtypes
from spmd_trainer.step.opt_state_dtypes import BFLOAT16, EIGHT_BITS, FLOAT32, Bytes

if TYPE_CHECKING:
    from spmd_trainer.checkpointing.records import SavedVariable

_STATES = "opt_states/"
_CODES, _SCALE = "/codes_8bit", "/scale_8bit"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What to read in place of the wanted arrays, and how these are made of it.

    Attributes:
      wanted: the variables that the run has, by path.
      read: the variables to read, by path, with the dtypes of the checkpoint.
      parts: {path of a part of a state, without '/codes_8bit': (dtype saved, dtype wanted)}, of those that differ.
    """

    wanted: Mapping[str, VariableSpec]
    read: Mapping[str, VariableSpec]
    parts: Mapping[str, tuple[str, str]]

    def made(self, arrays: dict[str, jax.Array], mesh: Mesh, step: int) -> dict[str, jax.Array]:
        """Returns the wanted arrays, padded, and logs what is converted.

        Args:
          arrays: the arrays of `read`, padded. Those of converted parts are deleted.
          mesh: their mesh.
          step: the step of the checkpoint, for the rounding.
        """
        if not self.parts:
            return arrays
        counts = collections.Counter(self.parts.values())
        for (before, now), count in counts.items():
            logging.info(
                "%d parts of the optimizer state are converted: saved in %s, now kept in %s", count, before, now
            )
        given = {path: arrays[path] for path in self.read if _part_of(path) in self.parts}
        targets = {path: spec for path, spec in self.wanted.items() if _part_of(path) in self.parts}

        def convert(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            found: dict[str, jax.Array] = {}
            for path, (before, now) in self.parts.items():
                signed = opt_state_dtypes.is_signed(path)
                is_bytes = before == EIGHT_BITS
                old = Bytes(given[path + _CODES], given[path + _SCALE], signed) if is_bytes else given[path]
                new = opt_state_dtypes.encode(path, opt_state_dtypes.decode(old), now, step)
                found |= (
                    {path + _CODES: new.codes_8bit, path + _SCALE: new.scale_8bit}
                    if isinstance(new, Bytes)
                    else {path: new}
                )
            return found

        converted = jax.jit(convert, out_shardings=named_shardings(targets, mesh))(given)
        for path in given:
            arrays[path].delete()
        made = arrays | converted
        return {path: made[path] for path in self.wanted}


def conversion(saved: Mapping[str, SavedVariable], wanted: Mapping[str, VariableSpec]) -> Conversion:
    """Finds the parts of an optimizer state that a checkpoint holds in another dtype.

    Args:
      saved: the checkpoint's variables by path.
      wanted: the run's variables by path.
    """
    read: dict[str, VariableSpec] = {}
    parts: dict[str, tuple[str, str]] = {}
    for path, spec in wanted.items():
        part = _part_of(path)
        now, before = _dtype(wanted, part), _dtype(saved, part)
        if not path.startswith(_STATES) or now is None or before is None or now == before:
            read[path] = spec
            continue
        parts[part] = before, now
        values = wanted[part if now != EIGHT_BITS else part + _CODES]
        if before != EIGHT_BITS:
            read[part] = dataclasses.replace(values, path=part, dtype=np.dtype(jnp.dtype(before)))
        else:
            read[part + _CODES] = dataclasses.replace(values, path=part + _CODES, dtype=np.dtype(np.uint8))
            read[part + _SCALE] = _of_rows(values, part + _SCALE)
    return Conversion(wanted, read, parts)


def _of_rows(values: VariableSpec, path: str) -> VariableSpec:
    spec = PartitionSpec(*values.spec[:-1], None) if values.spec else values.spec
    return dataclasses.replace(
        values,
        path=path,
        dtype=np.dtype(np.float32),
        spec=spec,
        logical_shape=(*values.logical_shape[:-1], 1),
        paddings=(*values.paddings[:-1], 0),
    )


def _part_of(path: str) -> str:
    return path.removesuffix(_CODES).removesuffix(_SCALE)


def _dtype(variables: Mapping[str, SavedVariable] | Mapping[str, VariableSpec], part: str) -> str | None:
    """Returns in which of `DTYPES` a part of a state is kept; None if it is another dtype, or not there."""
    if part + _CODES in variables and part + _SCALE in variables:
        return EIGHT_BITS
    found = str(variables[part].dtype) if part in variables else None
    return found if found in (FLOAT32, BFLOAT16) else None
