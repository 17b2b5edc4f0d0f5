"""Presents PEFT folders as checkpoints of adapters, for `init_from_checkpoint_rules` and `--restore_checkpoint_dir`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import frozen_base, records, step_files
from spmd_trainer.checkpointing.agreement import agreed, decided_by_process_0
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.checkpointing.sources import CheckpointSource
from spmd_trainer.decoder import lora
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.hf import placing, text_part
from spmd_trainer.hf import tensor_names as hf_names
from spmd_trainer.hf.errors import HfError, HfMismatchError, HfNotFoundError
from spmd_trainer.hf.experiment import spec_of_task
from spmd_trainer.hf.peft import adapter_config, tensor_names
from spmd_trainer.hf.peft.adapter_config import CONFIG, PICKLED, WEIGHTS
from spmd_trainer.hf.peft.tensor_names import Slot
from spmd_trainer.hf.safetensors_file import Tensor, read_header
from spmd_trainer.hf.tensor_names import Variable
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.storage import reading
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState

_FLOATS = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class PeftSource(CheckpointSource):
    """PEFT adapters, presented as a checkpoint whose variables have the dtypes of the stored tensors.

    Attributes:
      variables: the adapter variables by path, each with the tensors that hold it.
      tensors: the stored tensors by name.
    """

    variables: Mapping[str, Variable]
    tensors: Mapping[str, Tensor]

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads adapters onto a mesh; see `CheckpointSource.read`."""
        variables = {path: self.variables[source[path]] for path in wanted}
        return agreed(lambda: placing.read_onto_mesh(wanted, variables, self.tensors, mesh))


def is_folder(directory: epath.PathLike) -> bool:
    """Returns True if a directory or a subdirectory holds PEFT adapters, and the directory is not a Hugging Face model folder.

    Raises:
      CheckpointReadError: storage does not answer, or refuses access.
    """
    path = os.fspath(directory)
    if hf_folder.is_folder(path):
        return False
    return hf_folder.read_json(path, CONFIG) is not None or bool(_folders_in(path))


def _folders_in(path: str) -> list[str]:
    try:
        names = step_files.read(f"listing {path}", lambda: reading.names(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        name
        for name in names
        # Skips the steps of a training run, whose names are numbers: most directories that are checked hold a run.
        if not name.isdigit() and hf_folder.read_json(os.path.join(path, name), CONFIG) is not None
    ]


def open_source(
    directory: epath.Path, step: int | None, variables: TrainState, task: SingleTask | None
) -> PeftSource | None:
    """Opens PEFT adapters as a checkpoint source. Called by every process.

    For a task with several adapters (`task.lora.adapters`), the directory must have a PEFT folder with the name of each.

    Args:
      directory: the PEFT folder, or a directory that contains several PEFT folders.
      step: must be None or 0, because a PEFT folder has no training steps.
      variables: a TrainState with the VariableSpecs of the model's variables.
      task: the task whose model gets the adapters. If it is None, a directory with adapters raises HfError.

    Returns:
      The source, or None if the directory holds no PEFT adapters.

    Raises:
      HfError: the adapters can't be opened, or differ from `task.lora`.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    if not decided_by_process_0(lambda: is_folder(directory)):
        return None
    if step:
        raise HfNotFoundError(f"step {step} was asked for, and a PEFT folder has no steps: {directory}")
    return agreed(lambda: _open(os.fspath(directory), variables, task))


def _open(directory: str, variables: TrainState, task: SingleTask | None) -> PeftSource:
    settings = None if task is None else task.lora
    if task is None or settings is None:
        raise HfMismatchError(_no_adapters(directory))
    specs = {path: s for path, s in records.by_path(variables).items() if lora.is_adapter(path)}
    spec = spec_of_task(task)
    if spec is None:
        raise HfError(
            f"{directory}: adapters of PEFT fit a DecoderLanguageModel; task.model is {type(task.model).__name__}"
        )
    dims = task.lora_model.matrix_dims()
    names = settings.adapters
    slots: list[tuple[str, Slot | None, str]] = [(directory, None, "")]
    if names is not None:
        slots = [(os.path.join(directory, n), Slot(i, len(names)), f"{n}/") for i, n in enumerate(names)]
    pieces: dict[str, list[Variable]] = {}
    tensors: dict[str, Tensor] = {}
    for folder, slot, prefix in slots:
        config = adapter_config.read(folder)
        frozen_base.require_settings(adapter_config.settings(config), settings, folder)
        # Skips base weights: if an output layer has adapters, PEFT also saves its unchanged weight.
        found = {name: x for name, x in _tensors(folder).items() if not name.endswith(".base_layer.weight")}
        family = adapter_config.family_of(spec, adapter_config.base_of(folder), otherwise="LlamaForCausalLM")
        base = hf_names.variables_of(spec, family)
        adapters = tensor_names.variables_of(specs, base, dims, settings.rank, slot=slot, prefix=prefix)
        named = {f"{prefix}{name}": tensor for name, tensor in found.items()}
        tensors.update(named)
        modules = sorted({tensor_names.module_of(name).rpartition(".")[2] for name in named if ".lora_" in name})
        head = f"PEFT folder {folder} does not hold the adapters that task.lora describes:"
        fix = f"Fix: choose task.lora.targets for the modules that it adapts: {', '.join(modules)}."
        hf_folder.check_tensors(adapters, named, _FLOATS, "task.lora and the model", head=head, fix=fix)
        for path, variable in adapters.items():
            pieces.setdefault(path, []).append(variable)
    merged = {
        path: Variable(path, parts[0].shape, tuple(piece for part in parts for piece in part.pieces))
        for path, parts in pieces.items()
    }
    saved = {
        path: SavedVariable(v.shape, records.dtype_name(tensors[v.pieces[0].name].dtype), v.shape, "")
        for path, v in merged.items()
    }
    return PeftSource(f"PEFT folder {directory}", 0, saved, {}, merged, tensors)


def _no_adapters(directory: str) -> str:
    folder = directory if hf_folder.read_json(directory, CONFIG) else os.path.join(directory, _folders_in(directory)[0])
    settings = adapter_config.settings(adapter_config.read(folder))
    given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return (
        f"{directory} holds adapters of PEFT, and this experiment's model has none (task.lora is None). Set task.lora to a "
        f"decoder.lora.Lora with {given} and its targets, or merge the adapters with PEFT (merge_and_unload)"
    )


def _tensors(folder: str) -> dict[str, Tensor]:
    names = step_files.read(f"listing {folder}", lambda: reading.names(folder))
    if WEIGHTS not in names:
        hint = f"; it has {PICKLED}, which is pickled: save it again with safetensors" if PICKLED in names else ""
        raise HfNotFoundError(f"{folder} has no {WEIGHTS}{hint}")
    found = read_header(os.path.join(folder, WEIGHTS))
    # Adapters of a multimodal model have the longer tensor names of that model.
    prefix = tensor_names.PREFIX
    return {
        prefix + text_part.name_in_text(name.removeprefix(prefix)) if name.startswith(prefix) else name: tensor
        for name, tensor in found.items()
    }
