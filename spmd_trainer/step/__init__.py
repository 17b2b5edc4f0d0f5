"""Train and eval steps: the computation on logical (unpadded) shapes, and its execution on a mesh.

The computation does not depend on mesh, padding or devices. Start with `step_fns.py`, whose `train_step` is the pure train step.
`minibatches.py` divides a batch into minibatches, and adds up their gradients and outputs.

For the execution, start with `partitioner.py`. Then read `layout.py`, which describes the sharding of each variable and batch,
and `compiled_step.py`, which wraps a step for the mesh and jits it. There are two partitioners. With `pjit.py`, the compiler
chooses the collectives. `shard_map.py` writes them out, in `shard_map_passes.py`, `collectives.py` and `gathered_on_use.py`.
`mesh_choice.py` chooses the mesh. `state_layout.py` makes the initial train state and the sharding of each variable.
`moving.py` moves a live train state to a different mesh.

For the optimizer, start with `learner.py`, which clips gradients, skips invalid steps, runs the optimizer and keeps moving
averages. `masks.py` says which variables are trained. `optax_bridge.py` gives praxis and optax optimizers one interface.
Experiments import learners from `spmd_trainer.learners`, as in Pax. `packing.py` copies a step's loss and metrics to the host.
"""
