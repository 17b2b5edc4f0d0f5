"""Earlier import names of `spmd_trainer.pax` and `spmd_trainer.hf`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach("spmd_trainer", submodules=["hf", "pax"])
