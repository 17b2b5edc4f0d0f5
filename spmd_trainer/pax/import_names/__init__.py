"""Modules under import names that only users need: Pax's (`learners`, `base_task`, `trainer_lib`, ...),
`shard_map_partitioning`.

    from spmd_trainer import checkpoints, trainer_lib  # pax/import_names/checkpoints.py, pax/import_names/trainer_lib.py

`spmd_trainer/__init__.py` adds this folder to the package's search path, so its modules are imported as `spmd_trainer.NAME`.
They have only this name, because a second copy of a module would have a second copy of each of its classes. The trainer does
not import them. docs/coming_from_pax.md lists every name of Pax and its counterpart here.
"""

__path__ = []  # type: ignore[assignment,unused-ignore]
