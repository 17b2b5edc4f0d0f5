"""Adapters (LoRA, DoRA) for the experiments of decoder families, by class attributes."""

from __future__ import annotations

from collections.abc import Sequence

from praxis.pax_fiddle import Config

from spmd_trainer import tasks_lib
from spmd_trainer.decoder import experiment
from spmd_trainer.decoder.lora import Lora


class WithAdapters(experiment.DecoderExperiment):
    """Adds adapters to a decoder with frozen variables, if LORA_TARGETS is set. List it first among the base classes.

    Attributes:
      LORA_TARGETS: regexes of the variables that get adapters, or 'all-linear'; see `decoder.lora.Lora`. None: no
        adapters, all variables learn.
      LORA_RANK: the adapters' rank.
      LORA_ALPHA: the adapters' product is multiplied by LORA_ALPHA / LORA_RANK.
      LORA_DROPOUT: dropout of the adapters' input.
      LORA_RANK_AXIS: mesh axes that may split the rank dimension, where no other dimension uses them; None: not split.
      DORA: learn the norm of each output's weights separately from their direction (DoRA).
    """

    LORA_TARGETS: str | Sequence[str] | None = None
    LORA_RANK = 16
    LORA_ALPHA = 32.0
    LORA_DROPOUT = 0.0
    LORA_RANK_AXIS: str | Sequence[str] | None = None
    DORA = False

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = super().task()
        if self.LORA_TARGETS is not None:
            task_p.lora = Config(
                Lora,
                targets=self.LORA_TARGETS,
                rank=self.LORA_RANK,
                alpha=self.LORA_ALPHA,
                dropout=self.LORA_DROPOUT,
                rank_axis=self.LORA_RANK_AXIS,
                dora=self.DORA,
            )
        return task_p
