"""Writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os

from absl import logging
from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.interop import hf
from spmd_trainer.programs import checkpoints
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.phases import Phase


def export(job: Job) -> int:
    """Writes the variables of one checkpoint to `--export_dir`. Called by every process.

    The configs and the tokenizer are those of the folder that the model came from, if it came from one.

    Args:
      job: the job; `--restore_checkpoint_dir` and `--restore_checkpoint_step` say which checkpoint.

    Returns:
      The step.

    Raises:
      UserError: there is no checkpoint, the directory is not empty, or transformers has no architecture for the model.
    """
    settings = job.config.export
    if settings is None:
        raise UserError("--mode=export needs --export_dir=DIR, the folder to write")
    step, state = checkpoints.restore_for_inference(job, use_ema=settings.use_ema)
    with Phase(f"writing step {step} to {settings.directory}"):
        hf.export(state, job, settings.directory, settings.dtype, imported_from=_imported_from(job))
    logging.info("transformers opens it: AutoModelForCausalLM.from_pretrained(%r)", os.fspath(settings.directory))
    return step


def _imported_from(job: Job) -> epath.Path | None:
    """Returns the Hugging Face folder that the run began with, or None."""
    rules = job.task.train.init_from_checkpoint_rules or {}
    candidates = [job.config.restore_checkpoint_dir, *map(epath.Path, rules)]
    return next((path for path in candidates if path is not None and hf.find_agreed(path)), None)
