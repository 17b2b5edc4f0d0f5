"""Scalars on their way from a step to a person: packing, averaging, writing, progress."""
