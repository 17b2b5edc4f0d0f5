"""Marks of tests that compile for devices that aren't here."""

import importlib.util

import pytest

HAS_CUDA = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.xla_{extra}") for extra in ("cuda12", "cuda13")
)
NEEDS_CUDA = pytest.mark.skipif(
    not HAS_CUDA, reason="the extra cuda12 (or cuda13), with the compiler for GPUs, is not installed"
)
NEEDS_TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: uv sync --extra tpu"
)
