"""Everything about Pax (paxml): its import names, its checkpoints, its experiment files, and praxis on today's JAX.

bridge.py       makes praxis 1.4.0 run on today's JAX
import_names/   modules under Pax's import names (`spmd_trainer.partitioning`, ...), which only users import; tasks/ in it has
                Pax's experiment classes, the praxis layers that compute them, and inputs
import_table.py  modules under Pax's import names that have no code here, and what to use instead of absent names
absent_names.py  placeholders for absent names, which raise an error when they are used
published.py    modules of an installed paxml, such as `spmd_trainer.tasks.lm.params.c4`
task_fields.py  fields of Pax's tasks that are not supported
seqio_*.py      Pax's inputs over SeqIO tasks; bert_records.py: its packed records of BERT
port*.py        report what an experiment file written for paxml needs here (--mode=port)

Checkpoints are opened, and never written to:

checkpoints.py  PaxSource: a step as a source of `checkpointing.restore` and `init_from_checkpoint_rules`; `convert`
steps.py        finds the steps of a directory
contents.py     opens one step: its version, its kind and its arrays by their names on disk
flax_file.py    reads a step that is one msgpack file, with leaves by position and the printed structure of the state
flax_msgpack.py finds the arrays in such a file
arrays.py       one stored array, read on demand
shapes.py       checks which stored shapes a variable can have, and infers logical shapes without a model
placing.py      reads arrays onto a mesh and checks their padding
errors.py       the errors

Kinds of checkpoints, and Pax's versions that have them: one zarr directory per variable (0.0, 1.0, 1.1), one OCDBT database
(1.2), one msgpack file (any version).
Pax pads variables that its mesh does not divide, and stores them padded.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from spmd_trainer.pax.arrays import PaxArray
    from spmd_trainer.pax.checkpoints import PaxSource, convert, open_source, read_checkpoint
    from spmd_trainer.pax.errors import PaxDamagedError, PaxError, PaxMismatchError, PaxNotFoundError
    from spmd_trainer.pax.steps import PaxDirectory, find, find_agreed, finished_steps

# `import spmd_trainer` loads the bridge from here, and nothing else.
__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "arrays": ["PaxArray"],
        "checkpoints": ["PaxSource", "convert", "open_source", "read_checkpoint"],
        "errors": ["PaxDamagedError", "PaxError", "PaxMismatchError", "PaxNotFoundError"],
        "steps": ["PaxDirectory", "find", "find_agreed", "finished_steps"],
    },
)
__all__ = [
    "PaxArray",
    "PaxDamagedError",
    "PaxDirectory",
    "PaxError",
    "PaxMismatchError",
    "PaxNotFoundError",
    "PaxSource",
    "convert",
    "find",
    "find_agreed",
    "finished_steps",
    "open_source",
    "read_checkpoint",
]
