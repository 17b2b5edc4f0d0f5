"""The experiments that ship with the trainer; `spmd-trainer --list` prints them.

A wheel holds them in this folder. A checkout holds them in its top-level folder `experiments/`, and this package looks there.
Either way they are imported as `spmd_trainer.experiments...`, so that a user's own package may be called `experiments`.
"""

import pathlib

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "experiments"
if not (pathlib.Path(__file__).parent / "lm").is_dir() and _CHECKOUT.is_dir():
    __path__ = [str(_CHECKOUT)]
