"""Train and eval steps: the computation on logical (unpadded) shapes, and its execution on a mesh.

The computation does not depend on mesh, padding or devices. Start with `step_fns.py`: its `train_step` is the pure train step.
`minibatches.py` divides a batch into minibatches, and adds up their gradients and outputs.

For execution on a mesh, start with `partitioner.py`. Then read `layout.py`, the sharding of every variable and batch, and
`compiled_step.py`, which wraps a step for the mesh and jits it. There are two partitioners: in `pjit.py` the compiler chooses
the collectives, in `shard_map.py` they are written out (`shard_map_passes.py`, `collectives.py`, `gathered_on_use.py`).
`mesh_choice.py` chooses the mesh, `state_layout.py` makes the initial train state and the sharding of each variable, and
`moving.py` moves a live train state to another mesh.

For the optimizer, start with `learner.py`: clipping, skipped steps, the optimizer, moving averages. `masks.py` says which
variables are trained, `optax_bridge.py` gives praxis and optax optimizers one interface. Experiments import the learners from
`spmd_trainer.learners`, as in Pax. `packing.py` copies a step's scalars, such as loss and metrics, to the host.
"""
