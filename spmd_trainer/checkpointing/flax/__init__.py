"""Opens checkpoints that programs in plain Flax wrote with Orbax, for warm starts. Never writes to them.

checkpoints.py  finds the trees of arrays in a directory
rule_source.py  such a checkpoint in `init_from_checkpoint_rules`: whose variables are the model's
"""

from spmd_trainer.checkpointing.flax.rule_source import FlaxSource, open_source

__all__ = ["FlaxSource", "open_source"]
