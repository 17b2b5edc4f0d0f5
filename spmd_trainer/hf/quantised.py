"""Reads quantized weights as bfloat16: FP8 in blocks, as in DeepSeek V3's folder, or MXFP4 (`mxfp4.py`).

An FP8 tensor NAME, float8_e4m3fn [outputs, inputs], is stored with a tensor `NAME_scale_inv` [blocks of outputs, blocks of
inputs], which holds one factor for each block (float32 in DeepSeek V3, bfloat16 in Qwen 3). The values are multiplied by the
factors in float32, and the products are rounded to bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spmd_trainer.hf import mxfp4
from spmd_trainer.hf.errors import HfDamagedError, HfError
from spmd_trainer.hf.safetensors_file import Tensor
from spmd_trainer.hf.setting_types import is_whole

# {quant_method: {setting: (function that returns True for a valid value, text about valid values)}}. The quantization of
# activations matters only for computing in FP8, but 'static' schemes store scales of activations in the folder.
_SETTINGS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "fp8": {
        "activation_scheme": (lambda value: value in (None, "dynamic"), "'dynamic' is"),
        "fmt": (lambda value: value in (None, "e4m3"), "'e4m3' is"),
        "scale_fmt": (lambda value: value in (None, "float", "ue8m0"), "'float' and 'ue8m0' are"),
        "weight_block_size": (
            lambda value: isinstance(value, list) and len(value) == 2 and all(is_whole(n) and n > 0 for n in value),
            "factors of blocks are, [rows, columns]",
        ),
    },
    "mxfp4": {},
}
# Settings that have no effect here with any method, because the tensors' names show which tensors are quantized.
_WITHOUT_EFFECT = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
FACTORS = "_scale_inv"
_FACTOR_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclasses.dataclass(frozen=True)
class Fp8Tensor(Tensor):
    """A bfloat16 tensor that is computed from FP8 values and factors when it is read; see `Tensor`.

    Attributes:
      values: the stored tensor of FP8 values.
      factors: the stored tensor of factors, one for each block of values.
      block: (number of rows, number of columns) of a block.
    """

    values: Tensor
    factors: Tensor
    block: tuple[int, int]

    def read_rows(self, first: int, last: int) -> npt.NDArray[ml_dtypes.bfloat16]:
        """Reads the rows [first, last) and dequantizes them; see `Tensor.read_rows`."""
        rows, columns = self.block
        of_rows = self._of_blocks[np.arange(first, last) // rows]
        factors = np.repeat(of_rows, columns, axis=1)[:, : self.shape[1]]
        found: npt.NDArray[ml_dtypes.bfloat16] = self.values.read_rows(first, last).astype(np.float32) * factors
        return found.astype(ml_dtypes.bfloat16)

    @functools.cached_property
    def _of_blocks(self) -> npt.NDArray[np.float32]:
        """The factors of all blocks. They are cached, because `read_rows` is called for many ranges of rows."""
        return self.factors.read_rows(0, self.factors.shape[0]).astype(np.float32)


def refuse_unsupported(config: Mapping[str, Any], where: str, *, in_mxfp4: bool) -> None:
    """Checks the `quantization_config` of a config.json, if there is one.

    Args:
      config: the content of config.json.
      where: path of the file, for messages.
      in_mxfp4: True to also allow MXFP4 weights, which only some model families support.

    Raises:
      HfError: the method, or one of its settings, is not supported.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return
    method = str(settings.get("quant_method")) if isinstance(settings, dict) else ""
    methods = ("fp8", "mxfp4") if in_mxfp4 else ("fp8",)
    if not isinstance(settings, dict) or method not in methods:
        supported = " and ".join(map(repr, methods))
        raise HfError(
            f"{where}: quantization_config={settings!r:.200} is not supported; quant_method may be {supported}"
        )
    if unknown := sorted(set(settings) - {*_WITHOUT_EFFECT, *_SETTINGS[method]}):
        raise HfError(f"{where}: quantization_config.{unknown[0]} is not supported")
    for key, (is_valid, right) in _SETTINGS[method].items():
        if not is_valid(settings.get(key)):
            raise HfError(f"{where}: quantization_config.{key}={settings.get(key)!r:.200} is not supported; {right}")


def combined(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a folder, with one bfloat16 tensor in place of each quantized tensor and its factors.

    Args:
      tensors: the stored tensors by name.
      config: the content of config.json, checked by `refuse_unsupported`.

    Raises:
      HfDamagedError: quantized values have no factors, factors have no values, or their shapes or dtypes don't fit.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return dict(tensors)
    if settings["quant_method"] == "mxfp4":
        return mxfp4.combined(tensors)
    return _from_fp8(tensors, tuple(settings["weight_block_size"]))


def _from_fp8(tensors: Mapping[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name, values in tensors.items():
        if name.endswith(FACTORS) and name.removesuffix(FACTORS) not in tensors:
            raise HfDamagedError(
                f"{values.path} has {name} and no {name.removesuffix(FACTORS)}. Copy the folder again."
            )
        if values.dtype != ml_dtypes.float8_e4m3fn:
            continue
        factors = found.pop(name + FACTORS, None)
        if factors is None:
            raise HfDamagedError(f"{values.path} has {name} in FP8 and no {name + FACTORS}. Copy the folder again.")
        wanted = tuple(-(-size // part) for size, part in zip(values.shape, block, strict=False))
        if len(values.shape) != 2 or factors.shape != wanted or factors.dtype.name not in _FACTOR_DTYPES:
            raise HfDamagedError(
                f"{values.path}: {name} is {values.shape}, and {factors.name} {factors.dtype.name} {factors.shape}; blocks of "
                f"{block} need {wanted}, {', '.join(_FACTOR_DTYPES)}"
            )
        found[name] = Fp8Tensor(
            name,
            np.dtype(ml_dtypes.bfloat16),
            values.shape,
            values.path,
            values.start,
            values=values,
            factors=factors,
            block=block,
        )
    return found
