"""Everything about Pax (paxml): its import names, its checkpoints, its experiment files, and praxis on today's JAX.

bridge.py       makes praxis 1.4.0 run on today's JAX
import_names/   modules under Pax's import names (`spmd_trainer.partitioning`, ...), which only users import; tasks/ in it has
                Pax's experiment classes, the praxis layers that compute them, and inputs
import_table.py  modules under Pax's import names that have no file here, and what to use instead of unsupported names
absent_names.py  placeholders for unsupported names, which raise an error when they are used
published.py    modules of an installed paxml, such as `spmd_trainer.tasks.lm.params.c4` and `spmd_trainer.automl`
task_fields.py  fields of Pax's tasks that are not supported
seqio_*.py      Pax's inputs over SeqIO tasks; bert_records.py: Pax's input over TFRecord files for BERT
port*.py        report what an experiment file written for paxml needs here (--mode=port)

These modules read Pax's checkpoints, and never write to them:

checkpoints.py  PaxSource: a step as a source of `checkpointing.restore` and `init_from_checkpoint_rules`; `convert`
steps.py        finds the steps in a checkpoint directory
contents.py     opens one step: its version, its kind and its arrays by their names on disk
flax_file.py    reads a step that is one msgpack file, with leaves by position and the printed structure of the state
arrays.py       one stored array, read on demand
shapes.py       checks which stored shapes a variable can have, and infers logical shapes without a model
placing.py      reads arrays onto a mesh and checks their padding
errors.py       the errors

Kinds of checkpoints, and the versions of Pax's checkpoint format that use them: one zarr directory per variable (0.0, 1.0,
1.1), one OCDBT database (1.2), one msgpack file (any version).
Pax pads variables whose dimensions its mesh does not divide evenly, and stores them padded.
"""

import lazy_loader

# `import spmd_trainer` loads the bridge from here, and nothing else.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
