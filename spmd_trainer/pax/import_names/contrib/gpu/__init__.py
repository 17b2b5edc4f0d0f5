"""Pax's configurations for GPUs, read from an installed paxml; see `tasks/published.py`."""
