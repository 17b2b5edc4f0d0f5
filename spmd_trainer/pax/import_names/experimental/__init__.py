"""Pax's `experimental`, read from an installed paxml; see `tasks/published.py`."""

from spmd_trainer.tasks import published

published.install()
