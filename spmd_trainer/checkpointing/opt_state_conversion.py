"""Converts optimizer states whose dtype in a checkpoint (float32, bfloat16 or 8 bits) differs from that in the run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from spmd_trainer.sharding.variables import VariableSpec, named_shardings
from spmd_trainer.step import opt_state_dtypes
from spmd_trainer.step.opt_state_dtypes import BFLOAT16, CODES, EIGHT_BITS, FLOAT32, SCALE, Bytes

if TYPE_CHECKING:
    from spmd_trainer.checkpointing.records import SavedVariable

_STATES = "opt_states/"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The variables to read from a checkpoint, and how to convert them to the variables of the run.

    An optimizer state consists of parts. A part is an array or, in 8 bits, a pair of arrays (`Bytes`), whose paths end in
    '/codes_8bit' and '/scale_8bit'.

    Attributes:
      wanted: the run's variables by path.
      read: the variables to read, by path. Those to be converted have the checkpoint's dtypes here.
      source: {path in `read`: path in the checkpoint}.
      parts: {path of a part to convert, without '/codes_8bit': (saved dtype, wanted dtype)}.
    """

    wanted: Mapping[str, VariableSpec]
    read: Mapping[str, VariableSpec]
    source: Mapping[str, str]
    parts: Mapping[str, tuple[str, str]]

    def made(self, arrays: dict[str, jax.Array], mesh: Mesh, step: int) -> dict[str, jax.Array]:
        """Converts the arrays that were read. Returns the run's arrays (`wanted`), padded. Logs how many parts are converted.

        Args:
          arrays: the arrays of `read`, padded. Arrays that are converted are deleted.
          mesh: the mesh of the arrays.
          step: the step of the checkpoint, which selects the random bits for rounding.
        """
        if not self.parts:
            return arrays
        counts = collections.Counter(self.parts.values())
        for (before, now), count in counts.items():
            logging.info(
                "%d parts of the optimizer state are converted: saved in %s, now kept in %s", count, before, now
            )
        given = {path: arrays[path] for path in self.read if part_of(path) in self.parts}
        targets = {path: spec for path, spec in self.wanted.items() if part_of(path) in self.parts}

        def convert(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            found: dict[str, jax.Array] = {}
            for path, (before, now) in self.parts.items():
                signed = opt_state_dtypes.is_signed(path)
                is_bytes = before == EIGHT_BITS
                old = Bytes(given[path + CODES], given[path + SCALE], signed) if is_bytes else given[path]
                new = opt_state_dtypes.encode(path, opt_state_dtypes.decode(old), now, step)
                found |= (
                    {path + CODES: new.codes_8bit, path + SCALE: new.scale_8bit}
                    if isinstance(new, Bytes)
                    else {path: new}
                )
            return found

        converted = jax.jit(convert, out_shardings=named_shardings(targets, mesh))(given)
        for path in given:
            arrays[path].delete()
        made = arrays | converted
        return {path: made[path] for path in self.wanted}


def conversion(
    saved: Mapping[str, SavedVariable], wanted: Mapping[str, VariableSpec], source: Mapping[str, str] | None = None
) -> Conversion:
    """Finds the parts of an optimizer state that were saved in a different dtype, and plans their conversion.

    Args:
      saved: the checkpoint's variables by path.
      wanted: the run's variables by path.
      source: {wanted path: saved path}; None if these are equal. Of a pair of saved arrays (8 bits), either path may be given.
    """
    source = {path: path for path in wanted} if source is None else source
    read: dict[str, VariableSpec] = {}
    read_from: dict[str, str] = {}
    parts: dict[str, tuple[str, str]] = {}
    for path, spec in wanted.items():
        part, saved_part = part_of(path), part_of(source[path])
        now, before = _dtype(wanted, part), _dtype(saved, saved_part)
        if not path.startswith(_STATES) or now is None or before is None or now == before:
            read[path], read_from[path] = spec, source[path]
            continue
        parts[part] = before, now
        # The conversion runs on the devices, so its inputs must not be in host memory.
        values = dataclasses.replace(wanted[part if now != EIGHT_BITS else part + CODES], memory_kind=None)
        if before != EIGHT_BITS:
            found = [dataclasses.replace(values, path=part, dtype=np.dtype(jnp.dtype(before)))]
        else:
            codes = dataclasses.replace(values, path=part + CODES, dtype=np.dtype(np.uint8))
            found = [codes, opt_state_dtypes.scale_spec(codes)]
        read |= {one.path: one for one in found}
        read_from |= {one.path: saved_part + one.path.removeprefix(part) for one in found}
    return Conversion(wanted, read, read_from, parts)


def part_of(path: str) -> str:
    """Returns the path of an optimizer state: `path`, of one of its arrays, without any suffix '/codes_8bit' or '/scale_8bit'."""
    return path.removesuffix(CODES).removesuffix(SCALE)


def _dtype(variables: Mapping[str, SavedVariable] | Mapping[str, VariableSpec], part: str) -> str | None:
    """Returns the dtype of a part if it is one of `DTYPES`; None if it isn't, or if `variables` lacks the part."""
    if part + CODES in variables and part + SCALE in variables:
        return EIGHT_BITS
    found = str(variables[part].dtype) if part in variables else None
    return found if found in (FLOAT32, BFLOAT16) else None
