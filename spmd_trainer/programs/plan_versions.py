"""Versions of the libraries that a compiled program and its estimate depend on."""

from __future__ import annotations

import importlib.metadata

_LIBRARIES = ("spmd-trainer", "jax", "jaxlib", "praxis", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


def library_versions() -> dict[str, str]:
    """Returns the versions by name, without libraries that aren't installed."""
    return {name: version for name in _LIBRARIES if (version := _version(name))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
