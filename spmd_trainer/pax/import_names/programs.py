"""Pax's programs (`SingleTaskTrainProgram`, ...), placeholders for the loops of `training/`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    "spmd_trainer",
    submod_attrs={
        "base_experiment": [
            "BaseEvalProgram",
            "BaseTrainProgram",
            "Program",
            "SingleTaskEvalProgram",
            "SingleTaskTrainProgram",
        ]
    },
)
