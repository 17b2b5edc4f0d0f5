"""Pax's `executors`: what runs the programs. Here these are the loops of `programs/`."""

from spmd_trainer.errors.absent_names import getter

ABSENT = {
    "DefaultExecutor": "this trainer has one loop for each mode; use callbacks (task.train.callbacks)",
}
__getattr__ = getter(__name__, ABSENT)
