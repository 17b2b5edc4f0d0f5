"""Pax's `tuning_lib`: searches over settings. This trainer has no tuner."""

from spmd_trainer.errors.absent_names import getter

ABSENT = {
    "tune": "this trainer has no tuner; start each trial as a run of its own, with --fdl.set for what differs",
    "EarlyStoppingFn": "give task.early_stopping_fn",
}
__getattr__ = getter(__name__, ABSENT)
