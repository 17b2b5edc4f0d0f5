"""Compatibility with Pax (paxml): its import names, checkpoints and experiment files, and praxis on a current JAX.

bridge.py        makes praxis 1.4.0 run on a current JAX
import_names/    modules under Pax's import names (`spmd_trainer.partitioning`, ...), which only users' code imports. Its folder
                 tasks/ has Pax's experiment classes, replacements for praxis layers, and inputs
import_table.py  names of Pax's other modules: where each one is in this trainer, or what to use instead of it
absent_names.py  placeholders for unsupported names, which raise an error when they are used
published.py     modules of an installed paxml, such as `spmd_trainer.tasks.lm.params.c4` and `spmd_trainer.automl`
task_fields.py   fields of Pax's tasks that are not supported
seqio_*.py       Pax's inputs for SeqIO tasks; bert_records.py: Pax's input for BERT, which reads TFRecord files
port*.py         report the changes and packages that an experiment file written for paxml needs (--mode=port)

These modules read Pax's checkpoints, and never change them:

checkpoints.py   `PaxSource` restores variables from a step; `convert` writes a step as a checkpoint of this trainer
steps.py         finds the steps in a checkpoint directory
contents.py      opens one step: finds its version, its kind, and its arrays by their names on disk
flax_file.py     reads a step that is one msgpack file: the state's leaves in order, and the state's structure as text
arrays.py        one stored array, read on demand
shapes.py        checks which stored shapes a variable can have, and infers logical shapes without a model
placing.py       reads arrays onto a mesh and checks their padding
errors.py        the errors

Pax has three kinds of checkpoints (in parentheses, the versions of Pax's checkpoint format that use each kind): one zarr
directory per variable (0.0, 1.0, 1.1), one OCDBT database (1.2), and one msgpack file (any version).
If the number of shards doesn't divide a dimension of a variable, Pax pads that dimension, and stores the padded variable.
"""

import lazy_loader

# `import spmd_trainer` loads the bridge from here, and nothing else.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
