"""Makes an experiment from a Hugging Face folder, and reads a folder onto a job's mesh as a train state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import fiddle as fdl
import jax
from absl import logging
from etils import epath

from spmd_trainer import storage
from spmd_trainer.checkpointing import frozen_base, records
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.errors import UserError
from spmd_trainer.hf import config_json
from spmd_trainer.hf import source as hf_source
from spmd_trainer.hf.errors import HfNotFoundError
from spmd_trainer.hf.folder import require_agreement
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState

if TYPE_CHECKING:
    from spmd_trainer.base_experiment import BaseExperiment
    from spmd_trainer.step.partitioner import Partitioner


class Job(Protocol):
    """The attributes of a `training.job.Job` that are needed to read and write folders."""

    @property
    def task(self) -> SingleTask:
        pass

    @property
    def partitioner(self) -> Partitioner:
        pass

    @property
    def prng_key(self) -> jax.Array:
        pass


def experiment_from_folder(directory: str | os.PathLike[str], **attributes: Any) -> type[BaseExperiment]:
    """Returns an experiment class that fine-tunes the model in a Hugging Face folder.

    Args:
      directory: the folder.
      **attributes: class attributes of `lm.hf.FromFolder` to change, e.g. FILES='corpus/*.txt', SEQ_LEN=4096.

    Raises:
      UserError: FromFolder has no such attribute.
    """
    from spmd_trainer.errors import did_you_mean
    from spmd_trainer.experiments.lm import hf

    for name in attributes:
        if not hasattr(hf.FromFolder, name):
            known = [known for known in dir(hf.FromFolder) if known.isupper()]
            raise UserError(f"lm.hf.FromFolder has no {name}{did_you_mean(name, known)}")
    experiment: type[BaseExperiment] = type(
        "FromFolder", (hf.FromFolder,), {"FOLDER": os.fspath(directory), "__module__": __name__, **attributes}
    )
    return experiment


def load(directory: str | os.PathLike[str], job: Job) -> TrainState:
    """Reads a Hugging Face folder onto a job's mesh.

    Args:
      directory: the folder.
      job: the job; its model must be the model in the folder.

    Returns:
      The train state at step 0, with the folder's variables, and newly initialized optimizer states and adapters. DoRA adapters
      must then be prepared with `LoraModel.prepare`.

    Raises:
      HfNotFoundError: the directory is not a Hugging Face folder.
      HfMismatchError: the folder contains a different model, or its tensors don't match its config.json.
      HfError: the architecture or an option is not supported.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    path: epath.Path = storage.directory("directory", directory)
    source = hf_source.open_source(path, None)
    if source is None:
        raise HfNotFoundError(f"{path} is not a Hugging Face folder: it lacks a config.json that names an architecture")
    require_model(path, job.task)
    metadata = job.partitioner.metadata
    specs = records.by_path(metadata.variables)
    wanted = frozen_base.base_specs(metadata.variables)
    source.require_fit(wanted)
    state = job.partitioner.initialize_train_state(job.prng_key)
    leaves = dict(zip(specs, jax.tree.leaves(state), strict=True))
    for name in wanted:
        # Free the initial values before reading the folder's values, which take as much memory.
        leaves[name].delete()
    leaves.update(source.read(wanted, job.partitioner.mesh, {name: name for name in wanted}))
    loaded: TrainState = jax.tree.unflatten(jax.tree.structure(state), leaves.values())
    return loaded


def require_model(directory: epath.Path, task: SingleTask) -> None:
    """Checks that a task's model is the model in a Hugging Face folder; see `folder.require_agreement`.

    Checks nothing if the task's model is not a decoder. Called by every process.

    Raises:
      HfMismatchError: the models differ; the message names the settings that differ.
      HfError, CheckpointReadError: the folder can't be read.
    """
    spec = spec_of_task(task)
    if spec is not None:
        agreed_problem(lambda: require_agreement(directory, spec))


def warn_of_differences(source: object, task: SingleTask) -> None:
    """Logs a warning if `source` is a Hugging Face folder, and its model's settings differ from those of the task's model."""
    spec = spec_of_task(task)
    if spec is None or not isinstance(source, hf_source.HfSource):
        return
    if differing := config_json.differing_fields(source.folder.spec, spec):
        logging.warning("the model differs from that of %s in %s", source.name, ", ".join(differing))


def spec_of_task(task: SingleTask) -> DecoderSpec | None:
    """Returns the DecoderSpec of a task's model; None if the model is not a decoder."""
    spec = getattr(getattr(task.model, "lm_tpl", None), "spec", None)
    built = fdl.build(spec) if isinstance(spec, fdl.Buildable) else spec
    return built if isinstance(built, DecoderSpec) else None
