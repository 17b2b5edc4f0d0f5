"""The experiments that ship with the trainer; `spmd-trainer --list` prints them.

In an installed wheel they are in the folder `experiments/` beside this file; in a checkout, in the top-level `experiments/`.
Both are imported as `spmd_trainer.experiments...`, so that a user's own package may be called `experiments`.
"""

import pathlib

_FOLDER = pathlib.Path(__file__).resolve().with_suffix("")
__path__ = [str(_FOLDER if _FOLDER.is_dir() else _FOLDER.parents[1] / "experiments")]
