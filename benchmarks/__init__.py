"""Measured ratios against hand-written JAX. Run by hand, never as tests."""
