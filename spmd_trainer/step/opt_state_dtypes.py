"""Stores optimizer states in 16 or 8 bits between steps. The optimizer itself computes with float32 (`stored`, `loaded`).

'bfloat16' keeps the upper half of a float32. '8bit' keeps one byte for each element, and for each row (the last dimension) one
float32 scale, the row's largest magnitude. Dettmers et al. 2022 (arXiv:2110.02861) use blocks of elements instead; but rows are
the same on every mesh. The byte is a logarithmic code with eight levels per power of two.

Arrays that are initialized with values of the variables, such as moving averages and schedule-free's `z`, stay float32, because
they change too slowly to be stored in few bits. The preconditioners of `soap.Soap` stay float32 too.

Both formats are rounded stochastically, up or down at random, so that the expected value is exact. With rounding to nearest, a
moment would not change if a training step changes it by less than half a rounding step, as most steps do. The random bits depend
only on the training step, the path and the element, not on the mesh or on restarts. (But two meshes may round a moment to
different levels if its float32 values differ in the last bit.)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec
from praxis import base_layer

from spmd_trainer.errors import require_one_of
from spmd_trainer.sharding.variables import VariableSpec, path_str
from spmd_trainer.step import masks
from spmd_trainer.train_states import PyTree

FLOAT32, BFLOAT16, EIGHT_BITS = "float32", "bfloat16", "8bit"
DTYPES = (FLOAT32, BFLOAT16, EIGHT_BITS)
# Ends of the paths of the two arrays of `Bytes`.
CODES, SCALE = "/codes_8bit", "/scale_8bit"
# Smaller arrays stay float32, as in Dettmers et al.: they need little memory, and norms and biases are sensitive.
LEAST_ELEMENTS = 4096
# Levels of the 8-bit code per power of two, and their values between 1 and 2.
_PER_OCTAVE = 8
_ROOTS = (2.0 ** (np.arange(_PER_OCTAVE) / _PER_OCTAVE)).astype(np.float32)
# praxis' and optax' names of state arrays that are never negative: their codes use the sign bit for a larger range.
_SECOND_MOMENTS = frozenset({"v", "vr", "vc", "nu", "nu_max", "v_row", "v_col", "sum_of_squares"})
_step: contextvars.ContextVar[jax.Array | int] = contextvars.ContextVar("step")
# Name of the state of moving averages.
_AVERAGES = "ema"
# State arrays of `soap.Soap`: averages of products of gradients, and their eigenvectors.
GRAM_ROWS, GRAM_COLS, BASIS_ROWS, BASIS_COLS = "gram_rows", "gram_cols", "basis_rows", "basis_cols"
# They stay float32: rounded eigenvectors are not orthogonal, and small eigenvalues are lost beside large ones.
_PRECONDITIONERS = frozenset({GRAM_ROWS, GRAM_COLS, BASIS_ROWS, BASIS_COLS})


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes_8bit", "scale_8bit"), meta_fields=("signed",))
@dataclasses.dataclass(frozen=True)
class Bytes:
    """A float32 array [..., n] of an optimizer state, stored in 8 bits.

    Attributes:
      codes_8bit: uint8 [..., n], the code of each element. Code 0 stands for the value 0; it also fills padding.
      scale_8bit: float32 [..., 1], the largest magnitude of each row (last dimension).
      signed: False for second moments, which are never negative.
    """

    codes_8bit: Any
    scale_8bit: Any
    signed: bool


def check(learner: Any) -> None:
    """Checks a learner's `opt_state_dtype` and `opt_state_dtype_rules`.

    Raises:
      ValueError: a dtype is unknown, a rule is not a (regex, dtype) pair, or a regex doesn't compile.
    """
    asked = {"opt_state_dtype": learner.opt_state_dtype}
    for number, rule in enumerate(learner.opt_state_dtype_rules, start=1):
        if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ValueError(f"opt_state_dtype_rules: rule {number} is {rule!r}; give (regex, dtype)")
        try:
            re.compile(rule[0])
        except re.error as error:
            raise ValueError(f"opt_state_dtype_rules: rule {number}, {rule[0]!r}, doesn't compile: {error}") from error
        asked[f"opt_state_dtype_rules: rule {number}"] = rule[1]
    for name, dtype in asked.items():
        require_one_of(name, dtype, DTYPES)


def changes(learner: Any) -> bool:
    """Returns True if the learner's settings may store an array of the optimizer state in fewer bits than float32."""
    return learner.opt_state_dtype != FLOAT32 or bool(learner.opt_state_dtype_rules)


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer in the optimizer state of repeated layers, whose arrays stack the layers in dimension 0.

    Attributes:
      state: the path of the repeated layers' state in the whole optimizer state.
      index: int32 scalar, the index of the layer.
      count: the size of dimension 0, the number of layers.
    """

    state: str
    index: jax.Array
    count: int

    def path(self, path: str) -> str:
        """Returns an array's path in the whole optimizer state, given its path in the state of the repeated layers."""
        return f"{self.state}/{path}"


def initial(learner: Any, init: Callable[[PyTree], PyTree], variables: PyTree) -> PyTree:
    """Returns the initial state of an optimizer in its stored form. Use under jit.

    Args:
      learner: the learner, with `opt_state_dtype` and `opt_state_dtype_rules`.
      init: the optimizer's `init`: variables -> state.
      variables: the variables, with those that have no optimizer state masked out.
    """
    state, dtypes = init(variables), kept_dtypes(learner, init, variables)

    def one(keys: tuple[Any, ...], x: jax.Array) -> jax.Array | Bytes:
        path = path_str(keys)
        return encode(path, x, dtypes.get(path, FLOAT32), 0)

    return jax.tree_util.tree_map_with_path(one, state) if dtypes else state


def kept_dtypes(learner: Any, init: Callable[[PyTree], PyTree], variables: PyTree) -> dict[str, str]:
    """Returns {path: dtype} of the state arrays that the learner stores in fewer bits than float32. Arguments as for `initial`.

    Only arrays that the optimizer itself initializes in float32 are included.
    """
    if not changes(learner):
        return {}
    found = {path: _asked(learner, path, shape) for path, shape in _parts(init, variables)[1].items()}
    return {path: dtype for path, dtype in found.items() if dtype != FLOAT32}


@contextlib.contextmanager
def rounding_for(step: jax.Array | int) -> Iterator[None]:
    """Context manager inside which `stored` rounds optimizer states with the random bits of a training step.

    The step is not an argument of `Learner.update_states`, because that method has the same arguments as in Pax.

    Args:
      step: uint32 scalar, the number of the training step.
    """
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def stored(dtypes: Mapping[str, str], state: PyTree, row: Row | None = None) -> PyTree:
    """Returns an optimizer state in the form that is stored until the next step. Use under jit and inside `rounding_for`.

    Args:
      dtypes: `kept_dtypes` of the whole state.
      state: the state that the optimizer returned.
      row: the layer, if `state` is the state of only one repeated layer; None for the whole state. The result for one layer is
        bit-identical to that layer of the whole stored state.

    Raises:
      RuntimeError: arrays must be rounded, and the call is not inside `rounding_for`.
    """
    if not dtypes:
        return state
    index, step = None if row is None else row.index, _step.get(None)
    if step is None:  # the same random bits in every step would bias the moments
        raise RuntimeError(
            "small dtypes are rounded by the step's number: call this in opt_state_dtypes.rounding_for(step)"
        )

    def one(keys: tuple[Any, ...], x: jax.Array) -> jax.Array | Bytes:
        path = _whole_path(keys, row)
        return encode(path, x, dtypes.get(path, FLOAT32), step, index)

    return jax.tree_util.tree_map_with_path(one, state)


def loaded(dtypes: Mapping[str, str], state: PyTree, row: Row | None = None) -> PyTree:
    """Returns the float32 form of a stored optimizer state, for the optimizer. Use under jit.

    Arrays that the optimizer itself keeps in bfloat16 stay bfloat16.

    Args:
      dtypes, state, row: as in `stored`.
    """

    def one(keys: tuple[Any, ...], x: Any) -> Any:
        return decode(x) if _whole_path(keys, row) in dtypes else x

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=lambda x: isinstance(x, Bytes)) if dtypes else state


def warn_of_unused_rules(learner: Any, init: Callable[[PyTree], PyTree], variables: PyTree) -> None:
    """Warns of each dtype rule that matches no state array that can be stored in fewer bits. Arguments as for `initial`."""
    if not learner.opt_state_dtype_rules:
        return
    shapes, may_change = _parts(init, variables)
    for number, (regex, _) in enumerate(learner.opt_state_dtype_rules, start=1):
        if not any(re.search(regex, path) for path in may_change):
            logging.warning(
                "task.train.learner.opt_state_dtype_rules: rule %d (%r) matches no optimizer state but copies of variables, "
                "preconditioners, scalars and other dtypes than float32; paths are %s",
                number,
                regex,
                masks.paths_text(shapes),
            )


def scale_spec(codes: VariableSpec) -> VariableSpec:
    """Returns the VariableSpec of `Bytes.scale_8bit`, given that of `Bytes.codes_8bit`."""
    return dataclasses.replace(
        codes,
        path=codes.path.removesuffix(CODES) + SCALE,
        dtype=np.dtype(np.float32),
        spec=PartitionSpec(*codes.spec[:-1], None) if codes.spec else codes.spec,
        logical_shape=(*codes.logical_shape[:-1], 1),
        paddings=(*codes.paddings[:-1], 0),
    )


def encode(
    path: str, x: jax.Array, dtype: str, step: jax.Array | int, row: jax.Array | None = None
) -> jax.Array | Bytes:
    """Returns the stored form of one array of an optimizer state. Encoding a decoded array gives the same stored array again.

    Args:
      path: the array's path in the whole optimizer state, without the field names of `Bytes`.
      x: the array, float32 for the dtypes 'bfloat16' and '8bit'.
      dtype: one of `DTYPES`.
      step: see `stored`.
      row: int32 scalar, the index of `x` in dimension 0 of a stacked array; None if `x` is the whole array.
    """
    if dtype == BFLOAT16:
        bits, drawn = lax.bitcast_convert_type(x, jnp.uint32), _random_bits(path, x.shape, step, row) >> 16
        # The lower 16 bits give the probability of rounding up. NaN and infinities stay.
        upper = jnp.where(jnp.isfinite(x), bits + drawn, bits) & jnp.uint32(0xFFFF0000)
        return lax.bitcast_convert_type(upper, jnp.float32).astype(jnp.bfloat16)
    if dtype == EIGHT_BITS:
        signed = is_signed(path)
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        level = _rounded_level(jnp.abs(x), scale, _random_bits(path, x.shape, step, row), signed)
        sign = jnp.where(jnp.signbit(x) & (level > 0), 128, 0) if signed else 0
        return Bytes((level + sign).astype(jnp.uint8), scale, signed)
    return x


def decode(x: jax.Array | Bytes) -> jax.Array:
    """Returns the float32 array for a result of `encode`; returns arrays of dtypes other than bfloat16 unchanged."""
    if not isinstance(x, Bytes):
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    codes = x.codes_8bit.astype(jnp.int32)
    value: jax.Array = _value(codes & 127 if x.signed else codes, signed=x.signed) * x.scale_8bit
    return jnp.where(codes > 127, -value, value) if x.signed else value


def _rounded_level(size: jax.Array, scale: jax.Array, drawn: jax.Array, signed: bool) -> jax.Array:
    """Returns the levels (int32 magnitude codes, without sign) of an array, rounded stochastically.

    The function computes no logarithms: compiled logarithms round the last elements of an array differently, so results would
    depend on the mesh. Signs and zeros are found in the bits: XLA would share an array of float32 zeros, even one in a
    comparison, with the initial sums of the minibatches' gradients, and keep it in memory until here.

    Args:
      size: float32 magnitudes.
      scale: float32, the largest magnitude of each row.
      drawn: uint32 random bits.
      signed: see `Bytes`.
    """
    share = size / jnp.where(scale > 0, scale, 1.0)
    bits = lax.bitcast_convert_type(share, jnp.int32)
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    eighths = sum((mantissa >= root).astype(jnp.int32) for root in _ROOTS[1:])
    most = _most(signed)
    low = jnp.clip(most + _PER_OCTAVE * ((bits >> 23) - 127) + eighths, 0, most)
    below, above = (_value(level, signed=signed) * scale for level in (low, low + 1))
    # For a value that is itself a level, exactly 0 or 1, even if the rounding of the division made `low` the level below.
    part = (size - below) / jnp.where(above > below, above - below, 1.0)
    level = low + ((drawn >> 8).astype(jnp.float32) * 2.0**-24 < part).astype(jnp.int32)
    # A second moment must not become zero: the step divides by its root.
    is_positive = lax.bitcast_convert_type(size, jnp.int32) > 0
    return jnp.minimum(level if signed else jnp.where(is_positive, jnp.maximum(level, 1), level), most)


def _value(level: jax.Array, *, signed: bool) -> jax.Array:
    """Returns a level's magnitude as a fraction of the row's largest magnitude: 0 for level 0, 1 for the highest level."""
    below = level - _most(signed)
    root = jnp.full(level.shape, _ROOTS[0], jnp.float32)
    for eighth in range(1, _PER_OCTAVE):
        root = jnp.where((below & (_PER_OCTAVE - 1)) == eighth, _ROOTS[eighth], root)
    power = lax.bitcast_convert_type(jnp.where(level > 0, ((below >> 3) + 127) << 23, 0), jnp.float32)
    return root * power


def _most(signed: bool) -> int:
    return 127 if signed else 255


def _random_bits(path: str, shape: tuple[int, ...], step: jax.Array | int, row: jax.Array | None = None) -> jax.Array:
    """Returns random bits, uint32 [*shape]: each element's hash (MurmurHash3's finalizer, twice) of path, step and index."""
    index = jnp.full(shape, 0 if row is None else row, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    seed = _mixed(jnp.asarray(step).astype(jnp.uint32) ^ jnp.uint32(zlib.crc32(path.encode())))
    return _mixed(_mixed(index ^ seed) + seed)


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def is_signed(path: str) -> bool:
    """Returns False for the path of a second moment (never negative), e.g. 'no_prefix/v/params/lm/w'; else True."""
    return _part_name(path) not in _SECOND_MOMENTS


def is_average(path: str) -> bool:
    """Returns True for the path of a moving average of a variable, which evaluation reads."""
    return _part_name(path) == _AVERAGES


def _part_name(path: str) -> str:
    """Returns the name just before the variable's path, such as 'v' in 'no_prefix/v/params/lm/w'; '' if there is none."""
    before, collection, _ = path.partition(f"/{base_layer.PARAMS}/")
    return before.rpartition("/")[2] if collection else ""


def _whole_path(keys: tuple[Any, ...], row: Row | None) -> str:
    return path_str(keys) if row is None else row.path(path_str(keys))


def _parts(init: Callable[[PyTree], PyTree], variables: PyTree) -> tuple[PyTree, dict[str, tuple[int, ...]]]:
    """Returns ShapeDtypeStructs of the optimizer state, and {path: shape} of its arrays that can be stored in fewer bits."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), variables)
    program, state = jax.make_jaxpr(init, return_shape=True)(shapes)
    parts = zip(masks.with_paths(state), _from_inputs(program.jaxpr, [True] * len(program.in_avals)), strict=True)
    return state, {
        path: x.shape
        for (path, x), is_variable in parts
        if x.shape and x.dtype == jnp.float32 and not is_variable and _part_name(path) not in _PRECONDITIONERS
    }


def _from_inputs(program: core.Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Returns a bool per output of a jaxpr: True if it depends on values (not only shapes) of inputs marked True in `given`."""
    inside = {var for var, is_given in zip(program.invars, given, strict=True) if is_given}

    def of(values: Sequence[Any]) -> list[bool]:
        return [not isinstance(value, core.Literal) and value in inside for value in values]

    for eqn in program.eqns:
        read = of(eqn.invars)
        whole = eqn.primitive.name in ("jit", "pjit")
        written = _from_inputs(eqn.params["jaxpr"].jaxpr, read) if whole else [any(read)] * len(eqn.outvars)
        inside |= {var for var, is_given in zip(eqn.outvars, written, strict=True) if is_given}
    return of(program.outvars)


def _asked(learner: Any, path: str, shape: tuple[int, ...]) -> str:
    for regex, dtype in learner.opt_state_dtype_rules:
        if re.search(regex, path):
            return str(dtype)
    return FLOAT32 if math.prod(shape) < LEAST_ELEMENTS else str(learner.opt_state_dtype)
