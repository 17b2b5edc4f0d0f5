"""Pax's `contrib`: scripts for GPUs, read from an installed paxml; see `tasks/published.py`."""
