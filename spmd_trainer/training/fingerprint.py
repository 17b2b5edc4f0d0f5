"""Identifies what an evaluation or decode is made from, so that finished work is not done again."""

from __future__ import annotations

import json
from typing import Any

import jax

from spmd_trainer.checkpointing.checksums import checksum
from spmd_trainer.models import config_lines
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.train_states import TrainState
from spmd_trainer.training.run_config import RunConfig


def fingerprint(config: RunConfig, kind: str, index: int, data: Any, state: TrainState) -> str:
    """Returns a text that is equal only for equal variables, data and settings, on any mesh.

    Args:
      config: the run's.
      kind: 'eval' or 'decode'.
      index: which of the experiment's datasets of this kind.
      data: the built input, at its beginning; if it has a state, changed files change the fingerprint.
      state: has the variables, padded or not; all their bits count.
    """
    settings = "evaluate" if kind == "eval" else "decode"
    seeds = ("task.infer",) if config.mode == "infer" else ()
    wanted = ("task.model", "task.lora", "task.metrics", f"task.{settings}", f"{kind}_datasets[{index}]", *seeds)
    parts = [
        *config_lines.lines_of(config.experiment.lines(), wanted),
        _state_of(data),
        f"processes {jax.process_count()}",
        f"step {int(state.step)}",
        f"variables {checksum(state.mdl_vars)}",
    ]
    return short_hash(json.dumps(parts))


def _state_of(data: Any) -> str:
    try:
        return repr(data.get_state())
    except NotImplementedError:
        return ""
