"""Marks of tests that compile for devices that aren't here."""

import importlib.util

import pytest

from spmd_trainer.planner.topologies import has_gpu_compiler

HAS_CUDA = has_gpu_compiler()
NEEDS_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="the extra plan-gpu, with the compiler for GPUs, is not installed")
NEEDS_TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: uv sync --extra tpu"
)
