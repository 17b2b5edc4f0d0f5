"""Pax's `base_task`: the base class of tasks."""

from spmd_trainer.tasks_lib import BaseTask

__all__ = ["BaseTask"]
