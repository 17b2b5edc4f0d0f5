"""A step: its maths on logical shapes, and how it runs on a mesh.

The maths knows no mesh, no padding and no devices. Start with `step_fns.py`: its `train_step` is the step. `minibatches.py`
computes the gradients of a batch in parts, and adds up gradients and outputs over the parts.

On a mesh: start with `partitioner.py`, then `layout.py`, where every variable and batch lives, and `compiled_step.py`, which
wraps a step for the mesh and jits it. There are two partitioners: `pjit.py`, whose collectives the compiler chooses, and
`shard_map.py`, whose collectives are written out (`shard_map_passes.py`, `collectives.py`, `gathered_on_use.py`).
`mesh_choice.py` chooses the mesh, `state_layout.py` makes the first state and decides where each variable lives, and
`moving.py` moves a live state to another mesh.

The optimizer: start with `learner.py`: clipping, skipped steps, the optimizer, moving averages. `masks.py` says which variables
learn, `optax_bridge.py` gives praxis and optax optimizers one interface. Experiments import the learners as
`spmd_trainer.learners`, Pax's name. `packing.py` brings the scalars of a step to the host.
"""
