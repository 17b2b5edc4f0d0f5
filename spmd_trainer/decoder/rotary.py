"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

Frequencies and their scalings are those of transformers' `modeling_rope_utils.py`, computed in float32 in the same order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from spmd_trainer.models.decoder_spec import DecoderSpec, RotaryScaling


def frequencies(spec: DecoderSpec, kind: str) -> tuple[np.ndarray, float]:
    """Returns the rotary frequencies for layers of kind `kind`, and the factor by which sine and cosine are multiplied.

    The frequencies, float32 [rotated dims / 2], are angles per position, one for each pair of rotated dimensions.
    """
    base, scaling = spec.rotary_base, spec.rotary_scaling
    if kind == "local" and spec.local_rotary_base is not None:
        base, scaling = spec.local_rotary_base, None
    dims = spec.rotary_dims or spec.heads_of(kind).head_dims
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    plain = np.float32(1) / np.float32(base) ** exponents
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor), 1.0
    if scaling.kind == "proportional":
        rotated = np.arange(len(plain)) < int(scaling.share * dims // 2)
        return np.where(rotated, plain / np.float32(scaling.factor), np.float32(0)), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, base, scaling)


def _llama3(plain: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """Scales frequencies as Llama 3: divides low ones by `scaling.factor`, keeps high ones, and interpolates between them."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rotations = scaling.original_max_positions * plain / np.float32(2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1) if low < high else rotations >= high
    return ((1 - kept) * plain / scaling.factor + kept * plain).astype(np.float32)


def _yarn(plain: np.ndarray, base: float, scaling: RotaryScaling) -> tuple[np.ndarray, float]:
    """Scales frequencies by YaRN: divides low ones by `scaling.factor`, keeps high ones, and interpolates between them. Also
    returns the factor for sine and cosine.
    """
    dims = 2 * len(plain)

    def dimension_of(rotations: float) -> float:
        return dims * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    divided = np.clip((np.arange(len(plain), dtype=np.float32) - low) / width, 0, 1)
    scaled = (plain / scaling.factor * divided + plain * (1 - divided)).astype(np.float32)
    return scaled, yarn_attention_factor(scaling)


def yarn_attention_factor(scaling: RotaryScaling) -> float:
    """Returns the factor by which YaRN multiplies sine and cosine."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.log_scale(scaling.mscale) / scaling.log_scale(scaling.mscale_all_dim)
    return scaling.log_scale(1.0)


def sine_and_cosine(spec: DecoderSpec, kind: str, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns sine and cosine of the rotary angles, times YaRN's factor, float32 [batch, time, rotated dims / 2] each.

    Args:
      spec: the model.
      kind: the kind of layer, e.g. 'local'; it must have rotary embeddings.
      positions: int32 [batch, time], position of each token in its text.
    """
    per_position, factor = frequencies(spec, kind)
    angles = positions[..., None].astype(jnp.float32) * per_position
    return jnp.sin(angles) * factor, jnp.cos(angles) * factor


def of_layers(spec: DecoderSpec, positions: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns {kind of layer: result of `sine_and_cosine`} for the kinds with rotary embeddings."""
    if spec.positions != "rotary":
        return {}
    kinds = sorted({*spec.layer_pattern} - {"linear", *spec.unrotated_kinds})
    return {kind: sine_and_cosine(spec, kind, positions) for kind in kinds}


def rotate(x: jax.Array, sine: jax.Array, cosine: jax.Array, *, pairs_adjacent: bool = False) -> jax.Array:
    """Applies a rotary embedding to the first dimensions of each head, in float32. Returns an array of x's shape and dtype.

    Args:
      x: [batch, time, heads, head_dims].
      sine, cosine: float32 [batch, time, rotated dims / 2].
      pairs_adjacent: True if dimensions 2i and 2i + 1 of x are a pair; False if dimensions i and i + n are, where 2n is the
        number of rotated dimensions. The result always has pair i at i and i + n, which doesn't change query-key products.
    """
    half = sine.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    if pairs_adjacent:
        pairs = jnp.concatenate([first, second], axis=-1)
        first, second = pairs[..., ::2], pairs[..., 1::2]
    sine, cosine = sine[:, :, None], cosine[:, :, None]
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
    return rotated.astype(x.dtype)
