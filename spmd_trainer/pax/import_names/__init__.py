"""Modules under Pax's import names (`trainer_lib`, `tasks.lm.model_params`, ...), for users' code.

    from spmd_trainer import checkpoint_paths, trainer_lib  # pax/import_names/checkpoint_paths.py and trainer_lib.py
    from spmd_trainer.tasks.lm import model_params  # pax/import_names/tasks/lm/model_params.py

`spmd_trainer/__init__.py` adds this folder to the package's search path, so its modules are imported as `spmd_trainer.NAME`.
They can't be imported as `spmd_trainer.pax.import_names.NAME`, because Python would then load each module twice, with two
copies of its classes. The trainer itself doesn't import these modules. Pax modules without a file here are entries of
`pax/import_table.py`. docs/coming_from_pax.md lists every name of Pax and its counterpart here.
"""

__path__ = []  # type: ignore[assignment,unused-ignore]
