"""Reads compiled attention programs: arrays over queries and keys, and calls of kernels."""

import re

# A shape such as bf16[2,8,4096,4096], without the layout that may follow it.
_SHAPE = re.compile(r"\b(?:pred|token|[suf]\d\w*|bf16|c64|c128)\[([\d,]+)\]")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# A kernel's attributes may contain line breaks.
_TPU_CALL = re.compile(r'custom_call_target="tpu_custom_call".*?op_name="([^"]+)"', re.DOTALL)
_SPLASH = re.compile(r"splash_m[hq]a_\w+")


def arrays_over_queries_and_keys(hlo_text: str, *lengths: int) -> list[str]:
    """Returns the shapes in a program that have both a query and a key dimension, also those inside of fusions.

    An array has both if two of its dimensions are in `lengths`, or if one dimension is a multiple of the product of two of them
    (such arrays may be reshaped to [..., queries * keys]).

    Args:
      hlo_text: `jax.stages.Compiled.as_text()`.
      lengths: row length T, and other lengths that T may have inside of the program: padded to a multiple of a kernel's blocks,
        or split over a mesh axis. Choose them so that no other dimension is equal to one of them.
    """
    products = {a * b for a in lengths for b in lengths}
    found = set()
    for match in _SHAPE.finditer(hlo_text):
        dims = [int(dim) for dim in match[1].split(",") if dim]
        if sum(dim in lengths for dim in dims) > 1 or any(dim >= p and dim % p == 0 for dim in dims for p in products):
            found.add(match[0])
    return sorted(found)


def custom_call_targets(hlo_text: str) -> list[str]:
    """Returns the target of each custom call of a program, e.g. '__cudnn$fmhaSoftmax' or 'tpu_custom_call'."""
    return _TARGET.findall(hlo_text)


def splash_kernels(hlo_text: str) -> set[str]:
    """Returns the names of the splash attention kernels that a TPU program calls, e.g. 'splash_mha_fwd_residuals'."""
    return {name for op_name in _TPU_CALL.findall(hlo_text) for name in _SPLASH.findall(op_name)}
