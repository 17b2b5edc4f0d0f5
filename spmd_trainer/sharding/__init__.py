"""Where arrays live on a mesh: meshes, specs, padding, rules, placement and a report. Needs only JAX and NumPy.

`create_device_mesh` makes a mesh. One of four sources decides where an array lives: a split mapping (by rank, for inputs),
the layer's own declaration, a path rule (`infer_sharding`), or a shape rule (`MeshPartitionHelper`). The last three give a
`VariableSpec` for each variable: path, logical shape, spec, padding, and the reason. `sharding_report` shows them all.

`public.py` lists the public names. It imports JAX, so it is only imported when one of its names is first used: the command
line reads `sharding.messages` alone and must answer at once.
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
