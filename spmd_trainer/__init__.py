"""spmd-trainer: a Pax-style SPMD trainer for JAX.

    import spmd_trainer as st
    result = st.train("lm.stdlib.StdlibBytesTiny", "runs/mine", overrides=["task.train.num_train_steps=200"])

Importing this package is cheap: it imports neither JAX, praxis nor TensorFlow. It installs an import hook that makes praxis run
on a current JAX (see `pax.bridge`). The functions in `__all__` are imported from `api` when they are first used. Pax's module
names, such as `spmd_trainer.trainer_lib`, can be imported too. Those with code of their own are in the folder
`pax/import_names`; those without are entries of the table in `pax/import_table.py`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import lazy_loader

from spmd_trainer.pax import bridge, import_table

if TYPE_CHECKING:
    from spmd_trainer.api import decode, evaluate, export, generate, inspect, load_variables, plan, sweep, train
    from spmd_trainer.errors.installation import __version__
    from spmd_trainer.step.muon import Muon
    from spmd_trainer.step.mup import Mup
    from spmd_trainer.step.soap import Soap

__all__ = [
    "Muon",
    "Mup",
    "Soap",
    "__version__",
    "decode",
    "evaluate",
    "export",
    "generate",
    "inspect",
    "load_variables",
    "plan",
    "sweep",
    "train",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "api": ["decode", "evaluate", "export", "generate", "inspect", "load_variables", "plan", "sweep", "train"],
        "errors.installation": ["__version__"],
        "step.muon": ["Muon"],
        "step.mup": ["Mup"],
        "step.soap": ["Soap"],
    },
)
__path__.append(os.path.join(__path__[0], "pax", "import_names"))
# Inserted first: a checkout may still have the folder of a removed package, with compiled files, and Python would import that.
sys.meta_path.insert(0, import_table.PaxModules())
bridge.install()
