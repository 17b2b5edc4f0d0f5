"""The language model that speed is measured on: small enough that what a trainer adds to a step shows."""

from __future__ import annotations

from typing import Any

from experiments.lm import stdlib
from spmd_trainer import experiment_registry


@experiment_registry.register
class SpeedLm(stdlib.StdlibBytes):
    """2 layers, width 128, sequence 128, batch 16, mesh (1, 4, 2); its floor is `floor_lm.SPEED`.

    What the floor has none of is switched off: segments within a row, norms of variables and gradients as summaries.
    """

    NUM_LAYERS = 2
    MODEL_DIMS = 128
    HIDDEN_DIMS = 512
    NUM_HEADS = 4
    MAX_SEQ_LEN = 128
    GLOBAL_BATCH_SIZE = 16

    def task(self) -> Any:
        task_p = super().task()
        task_p.train.variable_norm_summary = False
        task_p.train.learner.var_norm_summary = False
        task_p.train.learner.grad_norm_summary = False
        return task_p

    def _model(self) -> Any:
        model_p = super()._model()
        model_p.lm_tpl.packed_input = False
        return model_p
