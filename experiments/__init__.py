"""Experiments that ship with the trainer; `spmd-trainer --list` prints them."""
