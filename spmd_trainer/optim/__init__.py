"""Turns gradients into new variables. Start with `learner.py`: clipping, skipped steps, the optimizer, moving averages.

`masks.py` says which variables learn, `optax_bridge.py` gives praxis and optax optimizers one interface. Experiments import the
learners as `spmd_trainer.learners`, Pax's name.
"""
