"""Writes adapters as a folder that the `peft` library can open."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import jax
import numpy as np
from absl import logging
from etils import epath

from spmd_trainer import storage
from spmd_trainer.checkpointing.agreement import agreed
from spmd_trainer.decoder import lora
from spmd_trainer.hf import tensor_names as hf_names
from spmd_trainer.hf import writing
from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.experiment import Job, spec_of_task
from spmd_trainer.hf.peft import adapter_config, tensor_names
from spmd_trainer.hf.peft.adapter_config import CONFIG, WEIGHTS
from spmd_trainer.hf.peft.tensor_names import Slot
from spmd_trainer.hf.tensor_names import Variable
from spmd_trainer.sharding.variables import VariableSpec, named_leaves
from spmd_trainer.train_states import TrainState

# The content of adapter_config.json, and the adapters by path with the tensors that hold them.
_Content: TypeAlias = tuple[dict[str, Any], dict[str, Variable]]


def export(
    state: TrainState, job: Job, directory: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None
) -> None:
    """Writes the adapters of a train state as a PEFT folder, in float32. Called by every process; process 0 writes.

    Several adapters (`task.lora.adapters`) get one subfolder each. The directory gets its final name once it is complete.

    Args:
      state: a state on the job's mesh, with or without the base model's variables and optimizer states.
      job: the job; its model must be a DecoderLanguageModel with adapters.
      directory: the folder to write; it must be missing or empty.
      base: the Hugging Face folder of the base model, to be named in adapter_config.json.

    Raises:
      UserError: the directory can't be written.
      HfError: the directory is not empty, the model has no adapters, or PEFT's format can't hold them.
      OSError: the folder can't be written.
    """
    path: epath.Path = storage.directory("export_dir", directory)
    folders = agreed(lambda: _plan(job, path, base))
    specs = _specs(job)
    with writing.atomically(path, last=CONFIG) as target:
        for name, (config, variables) in folders.items():
            inside = None if target is None else target / name if name else target
            if inside is not None and name and not storage.is_remote(inside):
                inside.mkdir()
            tensors = writing.tensors_of(variables, np.dtype(np.float32))
            writing.write_file(inside, WEIGHTS, tensors, specs, state)
            if inside is not None:
                writing.write_json(inside / CONFIG, config)
    logging.info("wrote %s adapters to %s", ", ".join(filter(None, folders)) or "the", path)


def _specs(job: Job) -> dict[str, VariableSpec]:
    leaves = named_leaves(job.partitioner.metadata.variables.mdl_vars)
    return {f"mdl_vars/{name}": spec for name, spec in leaves if lora.is_adapter(name)}


def _plan(job: Job, path: epath.Path, base: str | os.PathLike[str] | None) -> dict[str, _Content]:
    """Checks everything before writing. Returns {subfolder: (config, adapter variables)}; '' stands for the folder itself."""
    settings, spec = job.task.lora, spec_of_task(job.task)
    if settings is None:
        raise HfError("--export_adapter: the model has no adapters (task.lora is None); leave the flag out")
    if spec is None:
        raise HfError(f"task.model is a {type(job.task.model).__name__}; only a DecoderLanguageModel can be exported")
    if jax.process_index() == 0:
        writing.check_directory("export_dir", path)
    every = hf_names.variables_of(spec, adapter_config.family_of(spec, base))
    dims, specs = job.task.lora_model.matrix_dims(), _specs(job)
    slots: dict[str, Slot | None] = {"": None}
    if settings.adapters is not None:
        slots = {name: Slot(i, len(settings.adapters)) for i, name in enumerate(settings.adapters)}
    folders = {}
    for name, slot in slots.items():
        variables = tensor_names.variables_of(specs, every, dims, settings.rank, slot=slot)
        config = adapter_config.make(
            settings,
            tensor_names.modules_of(variables.values(), every.values()),
            base=base,
            fan_in_fan_out=tensor_names.is_transposed(variables.values(), every),
        )
        folders[name] = (config, variables)
    return folders
