"""A warm start by rules, of a state as it is."""

import jax

from spmd_trainer.checkpointing import loading_rules, records


def init_from_rules(state, variables, mesh, rules, **settings):
    """Returns the state with the variables that the rules load, and the report."""
    resolved = loading_rules.resolve_rules(variables, rules, check_contents=True, **settings)
    leaves = dict(zip(records.by_path(variables), jax.tree.leaves(state), strict=True))
    leaves.update(resolved.read(variables, mesh))
    return jax.tree.unflatten(jax.tree.structure(state), leaves.values()), resolved.report
