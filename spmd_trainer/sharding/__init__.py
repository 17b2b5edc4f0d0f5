"""Makes meshes, chooses shardings for arrays, pads arrays and places them, and reports shardings. Needs only JAX and NumPy.

`create_device_mesh` makes a mesh. An input is sharded by a split mapping, which lists mesh axes for inputs of each rank. A
variable is sharded by its layer's declaration, by a path rule (`infer_sharding`), or by a shape rule (`MeshPartitionHelper`).
A `VariableSpec` records a variable's path, logical shape, spec, padding, and the reason for the spec; `sharding_report` shows it.

`public.py` lists the public names and imports JAX, so it is imported only when one of these names is first used. The command
line must start quickly, and imports only `sharding.messages`.
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
