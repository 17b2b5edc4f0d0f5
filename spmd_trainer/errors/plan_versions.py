"""Versions of the libraries that a compiled program and its estimate depend on."""

from __future__ import annotations

import importlib.metadata

_LIBRARIES = (
    "spmd-trainer",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "praxis",
    "libtpu",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",  # of CUDA 13
    *(f"jax-cuda{cuda}-pjrt" for cuda in (12, 13)),
)


def library_versions() -> dict[str, str]:
    """Returns the versions by name, without libraries that aren't installed."""
    return {name: version for name in _LIBRARIES if (version := _version(name))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
