"""spmd-trainer: a Pax-style SPMD trainer for JAX.

Importing this package is cheap: it brings in neither JAX nor praxis nor TensorFlow. It only announces the praxis bridge,
which acts at the moment something imports praxis (see `praxis_bridge`).
"""

from spmd_trainer import praxis_bridge

praxis_bridge.install()
