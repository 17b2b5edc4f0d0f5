"""Shardings of arrays on a mesh: meshes, PartitionSpecs, padding, rules, placement and a report. Needs only JAX and NumPy.

`create_device_mesh` makes a mesh. One of four sources decides the sharding of an array: a split mapping (by rank, for inputs),
the layer's own declaration, a path rule (`infer_sharding`), or a shape rule (`MeshPartitionHelper`). The last three give a
`VariableSpec` for each variable: path, logical shape, spec, padding, and the reason. `sharding_report` shows all of them.

`public.py` lists the public names. It imports JAX, so it is imported only at the first use of one of its names: the command
line imports only `sharding.messages`, and must start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_trainer.sharding.public import *  # noqa: F403


def __getattr__(name: str) -> object:
    public = importlib.import_module(f"{__name__}.public")
    if name not in ("__all__", *public.__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return list(importlib.import_module(f"{__name__}.public").__all__)
