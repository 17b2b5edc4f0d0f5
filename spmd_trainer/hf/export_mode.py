"""`--mode=export`: writes a checkpoint as a Hugging Face folder, its adapters as a PEFT folder, or its variables alone."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from etils import epath

from spmd_trainer import hf, storage
from spmd_trainer.checkpointing import Checkpointer, Restored, records
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.decoder import lora
from spmd_trainer.errors import UserError
from spmd_trainer.hf import peft
from spmd_trainer.hf.experiment import spec_of_task
from spmd_trainer.hf.folder import read_model
from spmd_trainer.inputs import tokenizer_field
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import averages, checkpoints
from spmd_trainer.training.adapter_checkpoints import FOLDER_KEY
from spmd_trainer.training.job import Job
from spmd_trainer.training.mode_configs import ExportConfig
from spmd_trainer.training.phases import Phase


def export(job: Job) -> int:
    """Writes the variables in a checkpoint, or their averages (`--eval_averages`), to `--export_dir`. Called by every process.

    With `--export_checkpoint`, which supports any model, writes a checkpoint with a single step and without optimizer states,
    for evaluation and for `init_from_checkpoint_rules`. Otherwise writes a Hugging Face folder. With `task.lora`, the adapters
    are merged into the base model; `--export_adapter` writes the adapters alone, as a PEFT folder. If the run started from a
    Hugging Face folder, that folder's configs and tokenizer are copied. As in fine-tuning, `--restore_checkpoint_dir` may name
    a Hugging Face folder. If the run has checkpoints of its own, they take precedence over that folder.

    Args:
      job: the job; `--restore_checkpoint_dir` and `--restore_checkpoint_step` select the checkpoint.

    Returns:
      The step of the exported checkpoint.

    Raises:
      UserError: there is no checkpoint, `--export_dir` is not empty, or transformers has no architecture for the model.
    """
    settings = job.config.of(ExportConfig)
    if settings.adapter and job.task.lora is None:
        raise UserError("--export_adapter: the experiment has no adapters (task.lora is None); leave the flag out")
    if settings.checkpoint and job.task.lora is not None:
        raise UserError(
            "--export_checkpoint: the experiment has adapters (task.lora); write them with --export_adapter"
        )
    # Process 0 decides for all processes.
    own = decided_by_process_0(lambda: checkpoints.prefers_own(job.config))
    config = dataclasses.replace(job.config, restore_checkpoint_dir=None) if own else job.config
    source = dataclasses.replace(job, config=config)
    taken = averages.of(source)
    restored = checkpoints.restore_for_inference(source, taken)
    imported_from = _imported_from(job, restored.metadata["metadata"])
    what = "" if taken == averages.NONE else f" ({taken})"
    logging.info("exporting step %d of %s%s", restored.step, source.config.checkpoint_dir, what)
    with Phase(f"writing step {restored.step} to {settings.directory}"):
        if settings.checkpoint:
            _save(restored, job, settings.directory, taken)
        elif settings.adapter:
            peft.export(restored.state, job, settings.directory, base=imported_from)
        else:
            state = restored.state if job.task.lora is None else _merged(restored.state, job)
            tokenizer, eos_id = (None, None) if imported_from else _tokenizer(job)
            hf.export(
                state,
                job,
                settings.directory,
                settings.dtype,
                imported_from=imported_from,
                tokenizer=tokenizer,
                eos_id=eos_id,
            )
    if settings.checkpoint:
        logging.info(
            "--restore_checkpoint_dir=%s evaluates it; rules of a warm start name this directory", settings.directory
        )
    elif not storage.is_remote(settings.directory):
        opener = "AutoPeftModelForCausalLM" if settings.adapter else "AutoModelForCausalLM"
        library = "peft" if settings.adapter else "transformers"
        logging.info("%s opens it: %s.from_pretrained(%r)", library, opener, os.fspath(settings.directory))
    return restored.step


def _save(restored: Restored, job: Job, directory: epath.Path, taken: str) -> None:
    """Saves the restored state, without optimizer states, at its step. `taken`: name of the averages in it, or 'none'."""
    variables = job.partitioner.layout.without_opt_states().variables
    noted = {**restored.metadata["metadata"], "averages": taken}
    with Checkpointer(directory, label="the variables of step") as written:
        written.save(restored.step, restored.state, variables, input_state=None, metadata=noted, force=True)


def _merged(state: TrainState, job: Job) -> TrainState:
    """Merges the adapters into the base model, whose arrays are donated (reused). Returns a state without adapters."""
    metadata = job.partitioner.layout.without_opt_states()
    variables = dataclasses.replace(metadata.variables, mdl_vars=lora.base_only(metadata.variables.mdl_vars))
    without = dataclasses.replace(metadata, variables=variables)
    order = list(records.by_path(metadata.variables))
    leaves = dict(zip(order, jax.tree.leaves(state), strict=True))
    adapters = {path: leaves.pop(path) for path in list(leaves) if lora.is_adapter(path)}

    def merge(rest: dict[str, jax.Array], adapters: dict[str, jax.Array]) -> TrainState:
        every = {**rest, **adapters}
        padded = jax.tree.unflatten(jax.tree.structure(metadata.variables), [every[path] for path in order])
        logical = metadata.slice(padded)
        return without.pad(dataclasses.replace(logical, mdl_vars=job.task.lora_model.merged(logical.mdl_vars)))

    result: TrainState = jax.jit(merge, out_shardings=without.shardings, donate_argnums=0)(leaves, adapters)
    return result


def _imported_from(job: Job, noted: Mapping[str, Any]) -> epath.Path | None:
    """Returns the Hugging Face folder that the run started from, if there is one with the model's vocabulary size.

    Args:
      job: the job.
      noted: the metadata of the checkpoint, which names the folder if the run started from one.
    """
    folder = noted.get(FOLDER_KEY, {}).get("path")
    rules = job.task.train.init_from_checkpoint_rules or {}
    candidates = [job.config.restore_checkpoint_dir, *map(epath.Path, filter(None, [folder])), *map(epath.Path, rules)]
    folders = [path for path in candidates if path is not None and hf.find_agreed(path)]
    return next((path for path in folders if decided_by_process_0(functools.partial(_fits, path, job))), None)


def _tokenizer(job: Job) -> tuple[str | None, int | None]:
    """Returns the path and the end-of-text id of the training data's tokenizer. Each is None if the tokenizer has none."""
    for dataset in job.config.experiment.config.train_datasets:
        if "tokenizer" in dir(dataset):
            given = dataset.tokenizer
            eos_id = tokenizer_field.make_tokenizer(given, getattr(dataset, "eos_id", None)).eos_id
            return os.fspath(given) if isinstance(given, str | os.PathLike) else None, eos_id
    return None, None


def _fits(folder: epath.Path, job: Job) -> bool:
    """Returns True if the folder and the job's model have the same vocabulary size."""
    spec = spec_of_task(job.task)
    _, _, there = read_model(folder)
    if spec is None or there.vocab_size == spec.vocab_size:
        return True
    logging.warning(
        "%s has a vocabulary of %d, and the model one of %d: its token ids and its tokenizer are not copied",
        folder,
        there.vocab_size,
        spec.vocab_size,
    )
    return False
