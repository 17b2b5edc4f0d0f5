"""The experiments that ship with the trainer; `spmd-trainer --list` prints them.

A wheel has them in the folder `experiments/` beside this file, a checkout in its top-level folder `experiments/`. Both are
imported as `spmd_trainer.experiments...`, so that a user's own package may be called `experiments`.
"""

import pathlib

_FOLDER = pathlib.Path(__file__).resolve().with_suffix("")
__path__ = [str(_FOLDER if _FOLDER.is_dir() else _FOLDER.parents[1] / "experiments")]
