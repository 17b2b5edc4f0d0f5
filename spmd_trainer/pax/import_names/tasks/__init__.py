"""Modules under the paths from which Pax's experiment files import them."""
