"""The adapters of a task: merged variables, the targets' dimensions, and the adapters' layout."""

from __future__ import annotations

from typing import Protocol

from spmd_trainer.decoder.lora import variables
from spmd_trainer.decoder.lora.adapted_weight import MatrixDims
from spmd_trainer.decoder.lora.model import LoraModel
from spmd_trainer.errors import UserError
from spmd_trainer.models.base import Model
from spmd_trainer.optim import masks
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree


class HasModel(Protocol):
    @property
    def model_for_steps(self) -> Model: ...


def merged(task: HasModel, mdl_vars: NestedJTensor) -> NestedJTensor:
    """Returns the variables of a task's base with the adapters added, W + scale * a b, as the base has them.

    Args:
      task: a task with `lora`.
      mdl_vars: its variables at logical shapes. Under jit.

    Returns:
      The variables without 'params/lora'; computed in float32, returned in the base's dtypes.

    Raises:
      UserError: the task has several adapters.
    """
    return _lora_model(task).merged(mdl_vars)


def matrix_dims(task: HasModel) -> dict[str, MatrixDims]:
    """Returns the adapters' targets, as paths such as 'params/lm/mlp/w', and the roles of each one's dimensions. `task`: a
    task with `lora`.

    The model must have been traced, e.g. by a partitioner's `setup`.
    """
    return dict(_lora_model(task).matrix_dims())


def split_like_base(
    task: HasModel, hparams: NestedWeightHParams, base: NestedWeightHParams, reasons: PyTree
) -> tuple[NestedWeightHParams, PyTree]:
    """Lays out each adapter like its weight. Returns the WeightHParams of all variables with their layout, and the reasons.

    Args:
      task: a task with `lora`.
      hparams: WeightHParams of all its variables.
      base: WeightHParams of the base, with their layout.
      reasons: the reason for each variable's layout, same structure as `base`.
    """
    model, weights = _lora_model(task), dict(masks.with_paths(base))
    found = {
        path: {
            name: variables.split_like_base(model.settings, roles, name, adapter, weights[path], path)
            for name, adapter in variables.adapters_of(hparams, path).items()
        }
        for path, roles in model.matrix_dims().items()
    }
    parts = ({path: {name: pair[i] for name, pair in own.items()} for path, own in found.items()} for i in range(2))
    return variables.with_adapters(base, next(parts)), variables.with_adapters(reasons, next(parts))


def _lora_model(task: HasModel) -> LoraModel:
    model = task.model_for_steps
    if not isinstance(model, LoraModel):
        raise UserError("task.lora is not set, so the task has no adapters")
    return model
