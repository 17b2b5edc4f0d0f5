"""spmd-trainer: a Pax-style SPMD trainer for JAX.

    import spmd_trainer as st
    result = st.train("lm.stdlib.StdlibBytesTiny", "runs/mine", overrides=["task.train.num_train_steps=200"])

Importing this package is cheap: it brings in neither JAX nor praxis nor TensorFlow. It only announces the praxis bridge,
which acts at the moment something imports praxis (see `praxis_bridge`); the functions below bring in the rest when they are
first asked for (see `api`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmd_trainer import praxis_bridge

if TYPE_CHECKING:
    from spmd_trainer.api import decode, evaluate, inspect, plan, train

    __version__: str

__all__ = ["__version__", "decode", "evaluate", "inspect", "plan", "train"]

praxis_bridge.install()


if not TYPE_CHECKING:  # a type checker would believe that any name is there

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            import importlib.metadata

            return importlib.metadata.version("spmd-trainer")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from spmd_trainer import api

        return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
