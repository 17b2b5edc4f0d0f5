"""Modules under the import paths that Pax's experiment files use."""
